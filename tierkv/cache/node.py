"""One node of the radix tree: a run of blocks, and where each of their copies is."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tierkv.cache.pool import Ids
from tierkv.cache.states import Change, CopyState, advance

NO_SLOT = -1  # the filler inside slot arrays; never leaves this room


class Tier(IntEnum):
    """The tiers that have slots. Storage has names instead and is asked, never assumed."""

    DEVICE = 0
    HOST = 1


class TierCopies:
    """One tier's copies of a run: a slot and a state per block."""

    __slots__ = ("num_present", "slots", "states")

    def __init__(self, slots: Ids, states: npt.NDArray[np.uint8]) -> None:
        self.slots = slots
        self.states = states
        self.num_present = int(np.count_nonzero(states))

    @classmethod
    def absent(cls, num_blocks: int) -> TierCopies:
        return cls(np.full(num_blocks, NO_SLOT, np.int32), np.zeros(num_blocks, np.uint8))

    def change(self, start: int, stop: int, change: Change, slots: Ids | None = None) -> Ids:
        """Advance blocks [start, stop), all of one state, and return the slots they had.

        slots: what RESERVE and PLACE assign. FAIL and EVICT take the slots away.
        """
        had = self.slots[start:stop].copy()
        for current in np.unique(self.states[start:stop]):
            after = advance(CopyState(current), change)
            chosen = slice(start, stop)
            where = self.states[chosen] == current
            self.states[chosen][where] = after
        if slots is not None:
            self.slots[start:stop] = slots
            self.num_present += stop - start
        elif change in (Change.FAIL, Change.EVICT):
            self.slots[start:stop] = NO_SLOT
            self.num_present -= stop - start
        return had

    def split(self, at: int) -> tuple[TierCopies, TierCopies]:
        return (
            TierCopies(self.slots[:at].copy(), self.states[:at].copy()),
            TierCopies(self.slots[at:].copy(), self.states[at:].copy()),
        )

    def extend(self, num_blocks: int) -> None:
        more = TierCopies.absent(num_blocks)
        self.slots = np.concatenate([self.slots, more.slots])
        self.states = np.concatenate([self.states, more.states])

    def truncate(self, num_blocks: int) -> None:
        self.slots = self.slots[:num_blocks].copy()
        self.states = self.states[:num_blocks].copy()


class Node:
    """Blocks [start, end) of every prompt that runs through here.

    tokens: packed tokens of the run. extras: extra keys by block, where media overlap.
    is_tail: a partial block; it has no children, and its tokens are fewer than a block's.
    holders: leases on this node or below it. While there is one, no copy in this node is evicted.
    stored: blocks that Storage has been told of; a belief that saves writes, never a match.
    present_children[tier]: children, tails included, with a copy on that tier.
    order: (extra, tokens) of the first block of every child and tail, sorted, so that the child
        sharing the most leading tokens with a prompt is a neighbour of where it would stand.
    """

    __slots__ = (
        "children",
        "copies",
        "extras",
        "hits",
        "holders",
        "is_tail",
        "last_used",
        "num_blocks",
        "order",
        "parent",
        "present_children",
        "start",
        "stored",
        "tokens",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        parent: Node | None,
        tokens: bytes,
        *,
        num_blocks: int,
        is_tail: bool = False,
    ) -> None:
        self.uid = uid
        self.parent = parent
        self.start = parent.end if parent is not None else 0
        self.tokens = tokens
        self.num_blocks = num_blocks
        self.is_tail = is_tail
        self.extras: dict[int, bytes] = {}
        self.copies = (TierCopies.absent(num_blocks), TierCopies.absent(num_blocks))
        self.stored = np.zeros(num_blocks, np.bool_)
        self.children: dict[tuple[bytes, bytes], Node] = {}
        self.order: list[tuple[bytes, bytes]] = []
        self.present_children = [0, 0]
        self.holders = 0
        self.hits = 0
        self.last_used = 0

    @property
    def end(self) -> int:
        return self.start + self.num_blocks

    def first_key(self, block_token_bytes: int) -> tuple[bytes, bytes]:
        """How the parent finds this node: extra keys and tokens of its first block."""
        return self.extras.get(self.start, b""), self.tokens[:block_token_bytes]

    def path(self) -> Iterator[Node]:
        """This node, its parent, and so on, up to but without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
