"""Bodies and answers about the node as a whole: tickets, tiers, quotas, blocks, life cycle."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec

from tierkv.api.types_requests import WaitSeconds
from tierkv.transfer.tier import StoreState

_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"  # what reads URLs drops line ends without a word
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TicketState(Enum):
    """OPEN: blocks are on their way, the ticket is not written yet. WHOLE: all can be claimed."""

    OPEN = "open"
    FAILED = "failed"  # its producer gave up
    LOST = "lost"  # its producer says no more that it lives
    WHOLE = "whole"
    INCOMPLETE = "incomplete"  # a block of it is gone
    CLAIMED = "claimed"
    EXPIRED = "expired"
    INCOMPATIBLE = "incompatible"  # made by a node whose KV cannot be used here
    DAMAGED = "damaged"  # the ticket is not what was written


class TicketAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """present_blocks: of num_blocks, the first so many are in storage; null where nobody looked.
    expires_at: Unix seconds. detail: the reason, in words, "" if there is none."""

    ticket_id: str
    state: TicketState
    detail: str = ""
    num_tokens: int | None = None
    num_blocks: int | None = None
    present_blocks: int | None = None
    producer: str | None = None
    claimer: str | None = None
    expires_at: float | None = None


class TierName(Enum):
    DEVICE = "device"
    HOST = "host"


class TierAnswer(msgspec.Struct, frozen=True, kw_only=True):
    capacity_blocks: int
    used_blocks: int
    block_bytes: int


class TiersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """storage: each attached store; none is a node without a storage tier."""

    device: TierAnswer
    host: TierAnswer
    storage: list[StoreState]


class StorageBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """url: of the store, as in the setting storage.url."""

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=_ONE_LINE)]


class QuotaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most blocks a tenant may have cached or in use on each tier; null for any number. Over
    it, the tenant evicts its own."""

    device_blocks: Count | None = None
    host_blocks: Count | None = None


class QuotaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """stored_under: what the names of the tenant's stored blocks begin with."""

    tenant: str
    stored_under: str
    device_blocks: int | None
    host_blocks: int | None


class ResizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """blocks: the tier's capacity from now on, within the memory there is. Shrinking waits for
    what is held, at most deadline_s."""

    tier: TierName
    blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    deadline_s: WaitSeconds = 30.0


class LifeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How the node is now. open_requests: of engines that compute by themselves."""

    is_draining: bool
    is_paused: bool
    is_asleep: bool
    running_requests: int
    waiting_requests: int
    open_requests: int


class ResetAnswer(msgspec.Struct, frozen=True):
    """held_copies: what requests and pins hold was not forgotten. removed_values: in storage."""

    held_copies: int
    removed_values: int = 0


class SleepBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """keep_blocks: move what is only on the device to the host, as far as it has room.
    deadline_s: how long to wait for requests that run; then nothing has changed."""

    keep_blocks: bool = True
    deadline_s: WaitSeconds = 60.0


class WakeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """device_blocks: how many to take memory for; as many as before without it."""

    device_blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class BlockAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One cached block. space: its fingerprint, "" for the node's own. index: in its prompts.

    device, host: absent, incoming or ready. is_held: by a request or pin, so it cannot be evicted.
    is_stored: storage was told of it.
    """

    digest: str
    space: str
    index: int
    is_tail: bool
    device: str
    host: str
    is_stored: bool
    is_held: bool
    hits: int


class BlocksAnswer(msgspec.Struct, frozen=True):
    """cursor: of the next page, null if this is the last."""

    blocks: list[BlockAnswer]
    cursor: str | None


class ConfigAnswer(msgspec.Struct, frozen=True):
    """settings: by table; secrets are masked.

    roots: by space, what the first block of a prompt has for its parent, in hexadecimal: with it
    whoever reads events knows the digests of a prompt's blocks. "" is the node's own space.
    """

    settings: dict[str, dict[str, Any]]
    roots: dict[str, str]
