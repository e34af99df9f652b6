"""What a prefill node leaves for a decode node: written last, so that it vouches for the rest.

open ticket        "a ticket will come": its keys are known, its blocks are on their way
ticket             every block is stored; the first tokens
acknowledgement    somebody claimed it
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated

import msgspec

from tierkv import wire
from tierkv.cache.keys import StoredKey
from tierkv.pd.direct.address import DirectAddress

_VERSION = 1
_TICKET, _OPEN, _ACKNOWLEDGED = b"TKVT", b"TKVO", b"TKVA"
_DIGEST_BYTES = 32
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MAX_TICKET_BYTES = 16 << 20  # about 300,000 blocks


class ClaimProblem(Enum):
    """Why a claim cannot be served whole. The value is what HTTP clients see."""

    NOT_YET = "not_yet"  # no ticket came before the deadline
    EXPIRED = "expired"  # there is one, but its time is over
    CLAIMED = "already_claimed"  # there was one; it was claimed and its time after that is over
    DAMAGED = "damaged"  # the ticket or a block is not what was written
    INCOMPLETE = "incomplete"  # a block it lists is gone
    NO_ROOM = "no_room"  # this node had none for it before the deadline
    INCOMPATIBLE = "incompatible"  # made by a node whose KV cannot be used here
    OTHER_PROMPT = "other_prompt"  # it is for other tokens than the caller's
    PRODUCER_FAILED = "producer_failed"  # the prefill gave up, and said why
    PRODUCER_LOST = "producer_lost"  # the prefill began, and its node says no more that it lives
    UNAVAILABLE = "storage_unavailable"  # the store does not answer
    LOAD_FAILED = "load_failed"  # it came to this node's host memory, but not to its device


class _Handed(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-off of one prompt.

    digests: one per block of the prompt in order, the tail's last. A block's checksum lies in its
        own header, not here: two producers may store different bytes under one key, both right.
    num_tokens: of the prompt.
    fingerprint: readable form, so that a node that cannot use it can say why.
    created_at, expires_at: Unix seconds. producer: the node's name, for people.
    direct: where its host tier can be read, too; None if it cannot.
    """

    ticket_id: str
    fingerprint: dict[str, str]
    block_size: int
    num_tokens: int
    digests: tuple[bytes, ...]
    created_at: float
    expires_at: float
    producer: str
    direct: DirectAddress | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_tokens < 1:
            raise ValueError("a ticket is for at least one token in blocks of at least one")
        if len(self.digests) != -(-self.num_tokens // self.block_size):
            raise ValueError("a ticket lists one digest per block")
        if any(len(digest) != _DIGEST_BYTES for digest in self.digests):
            raise ValueError("a digest is of another length")
        if not (math.isfinite(self.created_at) and math.isfinite(self.expires_at)):
            raise ValueError("a ticket's times are numbers")  # it would never expire

    def keys(self) -> list[StoredKey]:
        tail = self.num_tokens % self.block_size
        return [
            StoredKey(digest, tail, is_tail=True)
            if tail and i == len(self.digests) - 1
            else StoredKey(digest, self.block_size, is_tail=False)
            for i, digest in enumerate(self.digests)
        ]


class Ticket(_Handed, frozen=True, kw_only=True):
    """Every block it lists was stored before it was. first_tokens: what the prefill node has
    generated already. sampling: how, in the words of its engine, for an engine that goes on; empty
    if it does not say. incarnation: where the producer hears that it was claimed; "" if it does
    not want to."""

    first_tokens: tuple[_Token, ...]
    sampling: dict[str, str] = {}
    incarnation: str = ""

    def encode(self) -> bytes:
        return wire.seal(_TICKET, _VERSION, self)

    @classmethod
    def decode(cls, value: bytes) -> Ticket:
        """Raises StoreCorruptError."""
        return wire.unseal(_TICKET, _VERSION, value, cls)


class OpenTicket(_Handed, frozen=True, kw_only=True):
    """Its ticket will come while the producer says that it lives, under `incarnation`.

    failure: why none will come after all, "" while one may.
    """

    incarnation: str
    failure: str = ""

    def encode(self) -> bytes:
        return wire.seal(_OPEN, _VERSION, self)

    @classmethod
    def decode(cls, value: bytes) -> OpenTicket:
        """Raises StoreCorruptError."""
        return wire.unseal(_OPEN, _VERSION, value, cls)


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """claimer: the name of the node that got every block it wanted. claimed_at: Unix seconds.
    created_at: of the ticket, since an id can come again."""

    ticket_id: str
    created_at: float
    claimer: str
    claimed_at: float

    def encode(self) -> bytes:
        return wire.seal(_ACKNOWLEDGED, _VERSION, self)

    @classmethod
    def decode(cls, value: bytes) -> Acknowledgement:
        """Raises StoreCorruptError."""
        return wire.unseal(_ACKNOWLEDGED, _VERSION, value, cls)
