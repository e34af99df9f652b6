"""What a prefill node leaves for a decode node: written last, so that it vouches for the rest."""

from __future__ import annotations

from enum import Enum

import msgspec

from tierkv import wire
from tierkv.cache.keys import StoredKey

_MAGIC = b"TKVT"
_VERSION = 1
MAX_TICKET_BYTES = 16 << 20  # about 300,000 blocks


class ClaimProblem(Enum):
    """Why a claim cannot be served whole. The value is what HTTP clients see."""

    NOT_YET = "not_yet"  # no ticket came before the deadline
    EXPIRED = "expired"  # there is one, but its time is over
    DAMAGED = "damaged"  # the ticket or a block is not what was written
    INCOMPLETE = "incomplete"  # a block it lists is gone, or does not fit here
    INCOMPATIBLE = "incompatible"  # made by a node whose KV cannot be used here
    OTHER_PROMPT = "other_prompt"  # it is for other tokens than the caller's
    UNAVAILABLE = "storage_unavailable"  # the store does not answer


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-off of one prompt.

    digests: one per block of the prompt in order, the tail's last. A block's checksum lies in its
        own header, not here: two producers may store different bytes under one key, both right.
    num_tokens: of the prompt. first_tokens: what the prefill node has generated already.
    fingerprint: readable form, so that a node that cannot use it can say why.
    created_at, expires_at: Unix seconds. producer: the node's name, for people.
    """

    ticket_id: str
    fingerprint: dict[str, str]
    block_size: int
    num_tokens: int
    digests: tuple[bytes, ...]
    first_tokens: tuple[int, ...]
    created_at: float
    expires_at: float
    producer: str

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_tokens < 1:
            raise ValueError("a ticket is for at least one token in blocks of at least one")
        if len(self.digests) != -(-self.num_tokens // self.block_size):
            raise ValueError("a ticket lists one digest per block")

    def keys(self) -> list[StoredKey]:
        tail = self.num_tokens % self.block_size
        return [
            StoredKey(digest, tail, is_tail=True)
            if tail and i == len(self.digests) - 1
            else StoredKey(digest, self.block_size, is_tail=False)
            for i, digest in enumerate(self.digests)
        ]

    def encode(self) -> bytes:
        return wire.seal(_MAGIC, _VERSION, self)

    @classmethod
    def decode(cls, value: bytes) -> Ticket:
        """Raises StoreCorruptError."""
        return wire.unseal(_MAGIC, _VERSION, value, cls)
