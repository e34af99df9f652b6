"""Bodies and answers about what is cached: explain, prefetches, pins."""

from __future__ import annotations

from enum import Enum

import msgspec

from tierkv.api.types import PromptBody
from tierkv.api.types_requests import LeaseSeconds, WaitSeconds


class PrefetchBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """request_id: names the prefetch; asked again with the same body, it is not done twice.

    deadline_s: then what has arrived is the result.
    """

    request_id: str | None = None
    deadline_s: WaitSeconds = 30.0


class PrefetchState(Enum):
    RUNNING = "running"
    DONE = "done"  # all that storage has of the prompt is on the host, or was above it
    PARTIAL = "partial"  # a part is; `problem` says why no more
    CANCELLED = "cancelled"


class PrefetchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """fetched_tokens: so many came from storage to the host, from token `first_token` on."""

    prefetch_id: str
    state: PrefetchState
    prompt_tokens: int
    first_token: int
    fetched_tokens: int
    problem: str | None


class PinBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps what is cached of the prompt. ttl_s: for so long. soft: it may go, after all others."""

    ttl_s: LeaseSeconds = 600.0
    soft: bool = False


class PinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """num_tokens: so many first tokens of the prompt are pinned, whole blocks of them."""

    pin_id: str
    num_tokens: int
    prompt_tokens: int
    soft: bool
    expires_in_s: float


class PinsAnswer(msgspec.Struct, frozen=True):
    pins: list[PinAnswer]
