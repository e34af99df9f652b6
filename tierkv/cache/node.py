"""Nodes of the radix tree, the slots and states of their blocks, and the pools of slots.

Each node belongs to the space (part of the index) of one fingerprint: tenants and adapters never
share a node.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from tierkv.cache.keys import DIGEST_BYTES, TOKEN_BYTES
from tierkv.errors import ConfigError, OutOfBlocksError, OwnershipError

Ids = npt.NDArray[np.int32]
_INT32: Final = np.dtype(np.int32)
_INTP: Final = np.dtype(np.intp)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The number of slots of one tier, and the number of free slots."""

    tier: str
    capacity: int
    free: int

    @property
    def used(self) -> int:
        return self.capacity - self.free


class BlockPool:
    """An allocator of the ids 0..capacity-1, such as the slots of a tier.

    `allocate` allocates all ids or none, in O(n) time for n ids. The id that was released last is
    allocated first, since its memory is most likely in a CPU cache. A second release of an id
    raises.

    Args:
        tier: name of the tier in error messages.
        capacity: number of ids.

    Attributes:
        num_free: number of ids that can be allocated.
    """

    def __init__(self, tier: str, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"{tier}: capacity {capacity} is negative")
        self.tier = tier
        self.capacity = 0
        self._free: Ids = np.zeros(0, np.int32)
        # One mark for each id, then as many marks that stay False: negative ids index these.
        self._is_allocated = np.zeros(0, np.bool_)
        self._mark: Ids = np.zeros(0, np.int32)  # scratch memory, written before each use
        self._count_up: Ids = np.zeros(0, np.int32)  # 0, 1, 2 ...: values for `_mark`
        self.num_free = 0
        self.grow(capacity)

    def stats(self) -> PoolStats:
        """Return the present numbers of ids and of free ids."""
        return PoolStats(self.tier, self.capacity, self.num_free)

    def allocate(self, count: int) -> Ids:
        """Allocate `count` ids.

        Returns:
            The ids, int32 [count].

        Raises:
            OutOfBlocksError: fewer than `count` ids are free; none was allocated.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"{self.tier}: cannot allocate {count} blocks")
        if count > self.num_free:
            raise OutOfBlocksError(self.tier, needed=count, available=self.num_free)
        start, stop = self.num_free - count, self.num_free
        self.num_free = start
        if count == 1:  # a fast path: requests mostly grow by one block
            self._is_allocated[self._free.item(start)] = True
            return self._free[start:stop].copy()
        ids = self._free[start:stop][::-1].copy()
        self._is_allocated[ids.astype(_INTP)] = True
        return ids

    def release(self, ids: Ids | Sequence[int]) -> None:
        """Free allocated ids.

        Raises:
            OwnershipError: an id is out of range, free, or passed twice; nothing changed.
        """
        count = len(ids)
        if not count:
            return
        given = ids if isinstance(ids, np.ndarray) and ids.dtype is _INT32 else self._narrow(ids)
        self._check_allocated(given)
        # As intp: indexing with another type takes five times as long (NumPy 2, 950 ids).
        where = given.astype(_INTP)
        start, stop = self.num_free, self.num_free + count
        marks = self._count_up[:count]
        self._mark[where] = marks
        if stop > self.capacity or self._mark[where].tobytes() != marks.tobytes():
            raise OwnershipError(f"{self.tier}: an id was released twice in one call")
        self._is_allocated[where] = False
        self._free[start:stop] = given
        self.num_free = stop

    def exchange(self, given: Sequence[Ids], count: int) -> Ids:
        """Exchange allocated ids for `count` allocated ids, among them the given ones if possible.

        The caller owns the ids in `given` before the call, and only the returned ids after the
        call.

        Args:
            given: int32 arrays of allocated ids, each id once. If there are more than `count`, all
                of these ids are released, and the returned ids may be different ones.
            count: number of ids to return.

        Returns:
            The ids, int32 [count].

        Raises:
            OwnershipError: an id in `given` is not allocated; nothing changed.
            OutOfBlocksError: too few ids are free; all ids in `given` were released.
        """
        if not given:
            return self.allocate(count)
        ids = given[0]
        if len(given) > 1:  # joining bytes takes a third of the time of numpy.concatenate
            ids = np.frombuffer(b"".join([part.tobytes() for part in given]), _INT32)
        more = count - len(ids)
        if more < 0 or more > self.num_free:
            self.release(ids)
            return self.allocate(count)
        self._check_allocated(ids)
        return np.concatenate([ids, self.allocate(more)]) if more else ids

    def _check_allocated(self, ids: Ids) -> None:
        try:
            taken = self._is_allocated[ids.astype(_INTP)]
        except IndexError:
            raise self._outside() from None
        if 0 in taken.tobytes():  # takes a quarter of the time of `taken.all()`
            free = int(ids[~taken][0])
            if not 0 <= free < self.capacity:
                raise self._outside()
            raise OwnershipError(f"{self.tier}: block {free} was released but is free")

    def _narrow(self, ids: Ids | Sequence[int]) -> Ids:
        given = np.asarray(ids, np.int64)
        if int(given.min()) < 0 or int(given.max()) >= self.capacity:
            raise self._outside()
        return given.astype(np.int32)

    def _outside(self) -> OwnershipError:
        return OwnershipError(f"{self.tier}: released an id outside 0..{self.capacity - 1}")

    # Resizing

    def grow(self, capacity: int) -> None:
        """Raise the number of ids to `capacity`; the new ids are free.

        Raises:
            ValueError: `capacity` is below the present number.
        """
        if capacity < self.capacity:
            raise ValueError(f"{self.tier}: {capacity} blocks are fewer than {self.capacity}")
        more = np.arange(capacity - 1, self.capacity - 1, -1, dtype=np.int32)
        self._reset(capacity, np.concatenate([more, self._free[: self.num_free]]))

    def shrink(self, capacity: int) -> None:
        """Reduce the pool to `capacity` ids: remove all ids that are `capacity` or higher.

        These ids must be free. First call `allocate_from(capacity)`, which allocates the free ones,
        so that nobody else gets them. When their other users have released the remaining ones,
        release the ids that `allocate_from` returned, and call `shrink`.

        Raises:
            OwnershipError: one of these ids is allocated; nothing changed.
            ValueError: `capacity` is negative or above the present capacity.
        """
        if not 0 <= capacity <= self.capacity:
            raise ValueError(f"{self.tier}: {capacity} blocks are not fewer than {self.capacity}")
        if len(taken := self.allocated_from(capacity)):
            raise OwnershipError(f"{self.tier}: {len(taken)} blocks from {capacity} on are taken")
        free = self._free[: self.num_free]
        self._reset(capacity, free[free < capacity])

    def allocated_from(self, first: int) -> Ids:
        """Return the allocated ids that are not below `first`, in ascending order, int32 [n]."""
        taken = np.flatnonzero(self._is_allocated[first : self.capacity])
        return (taken + first).astype(np.int32)

    def allocate_from(self, first: int) -> Ids:
        """Allocate every free id that is not below `first`, and return these ids, int32 [n].

        The ids can then be removed from the pool with `shrink`.
        """
        free = self._free[: self.num_free]
        given: Ids = free[free >= first].copy()
        rest = free[free < first].copy()
        self._free[: len(rest)] = rest
        self.num_free = len(rest)
        self._is_allocated[given] = True
        return given

    def _reset(self, capacity: int, free: Ids) -> None:
        stack = np.empty(capacity, dtype=np.int32)
        stack[: len(free)] = free
        self._count_up = np.arange(capacity, dtype=np.int32)
        self._mark = np.zeros(capacity, dtype=np.int32)
        self._is_allocated = np.zeros(2 * capacity, np.bool_)
        self._is_allocated[:capacity] = True
        self._is_allocated[free] = False
        self.capacity, self._free, self.num_free = capacity, stack, len(free)

    def findings(self, owned: Iterable[int]) -> list[str]:
        """Return violated invariants, one sentence each; `owned` are the ids that have an owner."""
        wrong: list[str] = []
        slots = np.fromiter(owned, np.int64)
        is_known = (slots >= 0) & (slots < self.capacity)
        wrong.extend(
            f"{self.tier}: an owner names block {slot}, which does not exist"
            for slot in slots[~is_known].tolist()
        )
        counts = np.bincount(slots[is_known], minlength=self.capacity)
        taken = self._is_allocated[: self.capacity]
        for mask, what in (
            (counts > 1, "has more than one owner"),
            ((counts > 0) & ~taken, "is owned but counted as free"),
            ((counts == 0) & taken, "is taken but has no owner"),
        ):
            wrong.extend(f"{self.tier}: block {block} {what}" for block in np.flatnonzero(mask))
        free = self._free[: self.num_free]
        if len(free) and not 0 <= free.min() <= free.max() < self.capacity:
            wrong.append(f"{self.tier}: the free list names blocks that do not exist")
        elif taken[free].any() or len(set(free.tolist())) != len(free):
            wrong.append(f"{self.tier}: the free list disagrees with the taken marks")
        elif int(np.count_nonzero(~taken)) != self.num_free:
            wrong.append(f"{self.tier}: blocks are marked as free but are not in the free list")
        if self._is_allocated[self.capacity :].any():
            wrong.append(f"{self.tier}: blocks are marked as taken that do not exist")
        return wrong


class CopyState(IntEnum):
    """The state of a block on one tier, which does not depend on the block's state on another tier.

    ABSENT: the block has no slot. INCOMING: the block has a slot, and its bytes are being copied
    there; requests cannot use them yet. READY: all bytes are in the slot.
    """

    ABSENT = 0
    INCOMING = 1
    READY = 2


class Change(IntEnum):
    """An event that changes the `CopyState` of a block on a tier."""

    RESERVE = 0  # a copy to this tier was submitted
    ARRIVE = 1  # the copy is complete, and its bytes are verified
    FAIL = 2  # the copy failed; the slot is free again
    PLACE = 3  # all bytes are in the slot already, computed or fetched
    EVICT = 4  # the block is removed from the tier


_TABLE = {
    (CopyState.ABSENT, Change.RESERVE): CopyState.INCOMING,
    (CopyState.ABSENT, Change.PLACE): CopyState.READY,
    (CopyState.INCOMING, Change.ARRIVE): CopyState.READY,
    (CopyState.INCOMING, Change.FAIL): CopyState.ABSENT,
    (CopyState.READY, Change.EVICT): CopyState.ABSENT,
}


def advance(current: CopyState, change: Change) -> CopyState:
    """Return the state of a block on a tier after a change.

    Args:
        current: state before the change.
        change: the change of the state.

    Returns:
        The state after the change.

    Raises:
        OwnershipError: the change is not possible in state `current`.
    """
    try:
        return _TABLE[current, change]
    except KeyError:
        message = f"a copy that is {current.name} cannot {change.name}"
        raise OwnershipError(message) from None


NO_SLOT: Final = -1  # in arrays of slots, for a block without a slot
# A node that is evicted block by block keeps its old bytes while they are at most MAX_KEPT times as
# long as needed. With 4, an eviction takes 2.7 us on a public trace, with 2 it takes 3.1 us.
MAX_KEPT: Final = 4
_SLOT_BYTES: Final = 4
_NO_SLOT_BYTES: Final = NO_SLOT.to_bytes(_SLOT_BYTES, "little", signed=True)
States = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
_ABSENT: Final = CopyState.ABSENT
_READY: Final = CopyState.READY
_REFUSED: Final = 255
_AFTER: dict[Change, States] = {
    change: np.array([_TABLE.get((state, change), _REFUSED) for state in CopyState], np.uint8)
    for change in Change
}


class TierCopies:
    """The slot and the state of each block of a tree node, on one tier.

    While all blocks have the same state, only one state is stored. Slots are stored as int32 bytes,
    which are faster to slice than small NumPy arrays. Arrays that were returned never change later.

    Args:
        num_blocks: number of blocks of the node.
        uniform: initial state of every block.
        slots: initial slots, int32 [num_blocks]; None if no block has one.

    Attributes:
        num_present: number of blocks with a slot, ready or incoming.
        uniform: state of every block; None if the states differ.
    """

    __slots__ = ("_slots", "_states", "num_blocks", "num_present", "uniform")

    def __init__(
        self, num_blocks: int, uniform: CopyState = _ABSENT, slots: Ids | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.num_present = num_blocks if uniform is not _ABSENT else 0
        self.uniform: CopyState | None = uniform
        self._slots = None if slots is None else _packed(slots)
        self._states: States | None = None

    @property
    def states(self) -> States:
        """`CopyState` value of each block, uint8 [num_blocks]; read-only."""
        if self._states is not None:
            return self._states
        return np.full(self.num_blocks, int(self.uniform or 0), np.uint8)

    @property
    def slots(self) -> Ids:
        """Slot of each block, int32 [num_blocks], NO_SLOT for a block without a slot; read-only."""
        packed = _NO_SLOT_BYTES * self.num_blocks if self._slots is None else self._slots
        return np.frombuffer(packed, _INT32, self.num_blocks)

    def fits(self, num_blocks: int) -> bool:
        """Return True if slots and states are consistent and describe exactly `num_blocks` blocks.

        The method also returns False if the object uses more memory than needed. Checks of the
        index's invariants call it.
        """
        slots, states = self._slots, self._states
        least = num_blocks * _SLOT_BYTES
        return (
            self.num_blocks == num_blocks
            and (slots is None or least <= len(slots) <= MAX_KEPT * least)
            and (self.uniform is None if states is not None else self.uniform is not None)
            and (states is None or (len(states) == num_blocks and len(set(states.tolist())) > 1))
        )

    def _packed_slots(self, start: int, stop: int) -> bytes:
        if self._slots is None:
            return _NO_SLOT_BYTES * (stop - start)
        return self._slots[start * _SLOT_BYTES : stop * _SLOT_BYTES]

    def is_in(self, state: CopyState, start: int, stop: int) -> Mask:
        """Return which of blocks [start, stop) are in `state`.

        Args:
            state: the state.
            start: index of the first block within the node.
            stop: index after the last block.

        Returns:
            A mask, bool [stop - start].
        """
        if self._states is None:
            return np.full(stop - start, self.uniform is state, np.bool_)
        found: Mask = self._states[start:stop] == state
        return found

    def leading(self, state: CopyState, start: int, stop: int) -> int:
        """Return the number of consecutive blocks from `start` on that are in `state`.

        Args:
            state: the state.
            start: index of the first block within the node.
            stop: index of the block to stop before.
        """
        if self._states is None:
            return stop - start if self.uniform is state else 0
        other = np.flatnonzero(self._states[start:stop] != state)
        return int(other[0]) if len(other) else stop - start

    def present_in(self, start: int, stop: int) -> int:
        """Return the number of blocks in [start, stop) with a slot, ready or incoming.

        Args:
            start: index of the first block within the node.
            stop: index after the last block.
        """
        if self._states is None:
            return stop - start if self.uniform is not _ABSENT else 0
        return int(np.count_nonzero(self._states[start:stop]))

    def ready_runs(self, count: int) -> list[tuple[int, int]]:
        """Return the last `count` ready blocks as ranges (start, stop), the last range first.

        All ready blocks are returned if there are fewer.
        """
        if self._states is None:
            if self.uniform is not _READY:
                return []
            return [(max(self.num_blocks - count, 0), self.num_blocks)]
        ready = np.flatnonzero(self._states == CopyState.READY)
        ready = ready[max(len(ready) - count, 0) :]
        if not len(ready):
            return []
        breaks = np.flatnonzero(np.diff(ready) != 1) + 1
        parts = np.split(ready, breaks)
        return [(int(part[0]), int(part[-1]) + 1) for part in reversed(parts)]

    def change(self, start: int, stop: int, change: Change, slots: Ids | None = None) -> Ids:
        """Change the state of blocks [start, stop), and add or remove their slots.

        Args:
            start: index of the first block within the node.
            stop: index after the last block.
            change: the change of the state. FAIL and EVICT remove the slots.
            slots: slots that RESERVE and PLACE add, int32 [stop - start]; None for other changes.

        Returns:
            The slots that the blocks had before, int32 [stop - start], NO_SLOT for none.

        Raises:
            OwnershipError: the change is not possible for one of the blocks; nothing changed.
        """
        is_whole = start == 0 and stop == self.num_blocks
        had = self.slots[start:stop]
        if self._states is None:
            assert self.uniform is not None, "without an array of states, all blocks have one state"
            after = advance(self.uniform, change)
            if is_whole:
                self.uniform = after
            else:
                self._states = self.states
                self._states[start:stop] = after
                self._settle()
        else:
            states = _AFTER[change][self._states[start:stop]]
            if (states == _REFUSED).any():
                for state in set(self._states[start:stop].tolist()):
                    advance(CopyState(state), change)
            self._states[start:stop] = states
            self._settle()
        if slots is not None:
            self._put(start, stop, _packed(slots))
            self.num_present += stop - start
        elif change in (Change.FAIL, Change.EVICT):
            self._put(start, stop, _NO_SLOT_BYTES * (stop - start))
            self.num_present -= stop - start
            if not self.num_present:
                self._slots = None
        return had

    def _put(self, start: int, stop: int, packed: bytes) -> None:
        above, below = self._packed_slots(0, start), self._packed_slots(stop, self.num_blocks)
        self._slots = above + packed + below

    def split_head(self, at: int) -> TierCopies:
        """Remove the first `at` blocks; return their slots and states as a new object."""
        upper = TierCopies(at)
        upper.uniform = self.uniform
        slots = states = None
        if self.num_present:
            upper.num_present = self.present_in(0, at)
            self.num_present -= upper.num_present
            slots = self._packed_slots(0, at) if upper.num_present else None
            self._slots = self._packed_slots(at, self.num_blocks) if self.num_present else None
        self.num_blocks -= at
        if self._states is not None:
            states, self._states = self._states[:at].copy(), self._states[at:].copy()
            self._settle()
        upper.adopt(slots, states)
        return upper

    def adopt(self, slots: bytes | None, states: States | None) -> None:
        """Replace the slots and states of all blocks of the node.

        Args:
            slots: int32 slots on this tier as bytes, one for each block; None if no block has one.
            states: one state for each block, uint8 [num_blocks]; None if the state `uniform`
                applies to all blocks.
        """
        self._slots, self._states = slots, states
        if states is not None:
            self._settle()

    def extend(self, num_blocks: int, slots: Ids | None) -> None:
        """Append new blocks after the last block of the tree node.

        Args:
            num_blocks: number of new blocks.
            slots: slots of the new blocks, which are then READY, int32 [num_blocks]; None to add
                ABSENT blocks.
        """
        state = CopyState.ABSENT if slots is None else CopyState.READY
        total = self.num_blocks + num_blocks
        if self._states is not None or self.uniform is not state:
            self._states = np.concatenate([self.states, np.full(num_blocks, state, np.uint8)])
        if slots is not None or self._slots is not None:
            added = _NO_SLOT_BYTES * num_blocks if slots is None else _packed(slots)
            self._slots = self._packed_slots(0, self.num_blocks) + added
        self.num_blocks = total
        self.num_present += 0 if slots is None else num_blocks
        self._settle()

    def drop_ready(self, num_blocks: int) -> Ids:
        """Remove the node's blocks from index `num_blocks` on; every block must be READY.

        With `num_blocks` = 0, the node is leaving the tree. Its blocks then become ABSENT instead,
        because running copies may still refer to the node.

        Returns:
            The slots of the removed blocks, int32 [n].
        """
        slots, kept = self._slots, num_blocks * _SLOT_BYTES
        assert slots is not None, "ready blocks have slots"
        had = np.frombuffer(slots, _INT32, self.num_blocks - num_blocks, kept)
        self.num_present = num_blocks
        if not num_blocks:
            self.uniform, self._slots = _ABSENT, None
            return had
        self.num_blocks = num_blocks
        # The bytes of removed slots stay in memory until there are too many of these bytes.
        if len(slots) > MAX_KEPT * kept:
            self._slots = slots[:kept]
        return had

    def truncate(self, num_blocks: int) -> None:
        """Remove all blocks from `num_blocks` on."""
        if self.uniform is _ABSENT:
            self.num_blocks = num_blocks
            return
        self.num_present = self.present_in(0, num_blocks)
        self.num_blocks = num_blocks
        if self._states is not None:
            self._states = self._states[:num_blocks].copy()
            self._settle()
        slots, kept = self._slots, num_blocks * _SLOT_BYTES
        if slots is not None and len(slots) > MAX_KEPT * kept:
            self._slots = slots[:kept]

    def _settle(self) -> None:
        states = self._states
        if states is None:
            return
        first = states[0]
        if (states == first).all():
            self.uniform, self._states = CopyState(first), None
        else:
            self.uniform = None


def _packed(slots: Ids) -> bytes:
    return slots.tobytes() if slots.dtype is _INT32 else slots.astype(_INT32).tobytes()


DEFAULT: Final = ""  # name of the space of the service's own fingerprint
# Largest numbers of device and host blocks, None for no limit.
Quota = tuple[int | None, int | None]
Segment = tuple["TreeNode", int, int]  # blocks [i, j) of a node, counted from its first block
_NO_TOKEN: Final = b"\xff" * 4  # before extra keys: -1, which is no token
# The children of a node without children; most nodes share this dict, which never changes.
_NOBODY: Final[dict[bytes, TreeNode]] = {}
_NO_ORDER: Final[list[bytes]] = []
_BY_BLOCK: Final = b"\xff"  # at the end of the key of a whole block: no token ends with this byte


class Tier(IntEnum):
    """A tier with slots: device or host.

    Storage is no member, since its values have names, not slots.
    """

    DEVICE = 0
    HOST = 1


# Iterating over a tuple takes a tenth of the time of iterating over an enum.
TIERS: Final = tuple(Tier)
HOST: Final = Tier.HOST  # a module's name, since looking up `Tier.HOST` takes 0.1 us


# Bounds of ages in seconds, each about three times the one before, up to a day.
BOUNDS_S: Final = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1_800, 3_600, 10_800, 36_000, 86_400)
TICKS_PER_S: Final = 1_000_000  # ticks of the LRU clock (`born`, `last_used`) per second, at least
_BOUNDS: Final = tuple(int(bound * TICKS_PER_S) for bound in BOUNDS_S)


@dataclass(slots=True)
class AgeCounts:
    """A histogram of ages, for example of the time since a block was used before.

    Attributes:
        counts: number of ages for each bound of BOUNDS_S: those up to the bound and above the bound
            before it. The last number counts the ages above all bounds.
        total_ticks: sum of all ages, in ticks of the LRU clock (TICKS_PER_S per second).
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_ticks: int = 0

    def add(self, ticks: int, count: int = 1) -> None:
        """Add one age, once or several times.

        Args:
            ticks: the age, in ticks of the LRU clock (TICKS_PER_S per second); a negative age
                counts as 0.
            count: number of times to add the age.
        """
        self.counts[bisect_left(_BOUNDS, ticks)] += count
        if ticks > 0:
            self.total_ticks += ticks * count


@dataclass(slots=True, eq=False)
class Space:
    """The part of the index for one fingerprint (model, layout, tenant, adapter ...).

    Attributes:
        name: short name of the fingerprint; "" for the service's own.
        root_digest: the fingerprint's root, from which the keys of all blocks are computed.
        used: number of blocks with a slot on the device, and on the host, incoming ones included.
        quota: largest number of blocks on the device, and on the host; None for no limit.
    """

    name: str
    root_digest: bytes
    used: list[int] = field(default_factory=lambda: [0, 0])
    quota: Quota = (None, None)

    def __post_init__(self) -> None:
        check_quota(self.quota)

    @property
    def has_quota(self) -> bool:
        return self.quota != (None, None)


def check_quota(quota: Quota) -> None:
    """Check that no number of a quota is negative.

    Raises:
        ConfigError: a number is negative.
    """
    if any(most is not None and most < 0 for most in quota):
        raise ConfigError("a quota is a number of blocks, at least 0")


class TreeNode:
    """A node of the radix tree: consecutive blocks of all prompts that begin with the node's path.

    The path consists of the node's blocks [start, end) and of the blocks of all nodes above it.

    Attributes:
        uid: number that no other node of the tree has.
        start: index of the first block, from the start of the prompt.
        end: index after the last block.
        hits: number of requests that have reused the node's blocks.
        packed: memory with packed tokens; those of this node are at bytes [packed_at, packed_at +
            token_bytes). Nodes of one path share this memory, and it may still contain tokens of
            removed nodes.
        key: key of this node in the dict `children` of its parent: the node's first token, or the
            tokens of its first block if another child begins with the same token.
        extras: extra keys (identity of media) by block index; None if no media overlap the blocks.
        is_tail: True if the node is one partial block (a tail) without children.
        holders: number of leases whose path ends at this node, plus number of children with
            holders. If it is above 0, no block of the node is evicted.
        last_used: LRU tick of the last use. The start of a lease sets it for the node where the
            lease's path ends, the end of a lease for the nodes above.
        born: LRU tick of the first use of the node's first block.
        soft_pins: number of soft pins on this node and on nodes below it.
        digests: keys of the node's first blocks, 32 bytes each, for as many blocks as keys were
            computed.
        children_on_device, children_on_host: number of children (tails included) with at least one
            block on that tier.
        device, host: slots and states of the blocks on that tier; `host` is None while no block has
            a host slot.
        order: those keys in `children` that consist of the tokens of a block, sorted.
    """

    __slots__ = (
        "_stored",
        "born",
        "children",
        "children_on_device",
        "children_on_host",
        "device",
        "digests",
        "end",
        "extras",
        "hits",
        "holders",
        "host",
        "is_tail",
        "key",
        "last_used",
        "num_blocks",
        "order",
        "packed",
        "packed_at",
        "parent",
        "soft_pins",
        "space",
        "start",
        "token_bytes",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        parent: TreeNode | None,
        space: Space,
        device: TierCopies,
    ) -> None:
        """Create a node without tokens, key and host slots; other methods set these.

        Args:
            uid: number of the node, unique in the index; 0 for roots.
            parent: the node whose blocks come before; None for the root of a space.
            space: the space of the node.
            device: the node's blocks on the device; the node has as many blocks.
        """
        num_blocks = device.num_blocks
        start = parent.end if parent is not None else 0
        self.uid = uid
        self.parent = parent
        self.space = space
        self.key = b""
        self.start = start
        self.end: int = start + num_blocks
        self.num_blocks = num_blocks
        self.is_tail = False
        self.extras: dict[int, bytes] | None = None
        self.device = device
        self.host: TierCopies | None = None
        self.children = _NOBODY
        self.order = _NO_ORDER
        self.children_on_device = 0
        self.children_on_host = 0
        self.holders = 0
        self.hits = 0
        self.last_used = 0
        self.born = 0
        self.soft_pins = 0
        self.digests: bytes = b""
        self.packed = b""
        self.packed_at = 0
        self.token_bytes = 0
        self._stored: Mask | None = None

    def extra(self, block: int) -> bytes:
        """Return the extra keys of `block`, an index from the start of the prompt; b"" for none."""
        return self.extras.get(block, b"") if self.extras else b""

    def path(self) -> Iterator[TreeNode]:
        """Yield this node, then each node above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def tokens(self) -> bytes:
        """Packed tokens of the node's blocks."""
        return self.packed[self.packed_at : self.packed_at + self.token_bytes]

    def tokens_of(self, start: int, stop: int) -> bytes:
        """Return the packed tokens of blocks [start, stop) of the node.

        Args:
            start: index of the first block within the node.
            stop: index after the last block.
        """
        width = self.token_bytes // self.num_blocks
        return self.packed[self.packed_at + start * width : self.packed_at + stop * width]

    def put_tokens(self, packed: bytes, start: int, stop: int) -> None:
        """Set the node's tokens to packed[start:stop].

        The tokens are copied if they are less than 8/9 of `packed`. Otherwise the node refers to
        `packed`, which must not change.

        Args:
            packed: packed tokens, for example of a whole prompt.
            start: offset of the node's first token in `packed`, in bytes.
            stop: offset after the node's last token, in bytes.
        """
        self.token_bytes = num_bytes = stop - start
        if 8 * len(packed) <= 9 * num_bytes:
            self.packed, self.packed_at = packed, start
        else:
            self.packed, self.packed_at = packed[start:stop], 0

    def keep_less(self, packed: bytes) -> None:
        """Stop using the memory `packed` for tokens if less than a quarter of it is still needed.

        Several nodes of one path can share `packed`, the tokens of a prompt. This node and the
        nodes above it that share `packed` get copies of their own tokens instead. Call this method
        on the lowest node that uses `packed`, after nodes below it were removed.
        """
        part, needed = self, 0
        while part.packed is packed and part.parent is not None:
            needed += part.token_bytes
            part = part.parent
        if len(packed) > MAX_KEPT * needed:
            part = self
            while part.packed is packed and part.parent is not None:
                part.packed, part.packed_at = part.tokens, 0
                part = part.parent

    # Copies

    @property
    def copies(self) -> tuple[TierCopies, TierCopies]:
        """Slots and states of the blocks on device and host; callers must not change them."""
        return self.device, self.host or TierCopies(self.num_blocks)

    def copies_on(self, tier: Tier) -> TierCopies:
        """Return slots and states of the blocks on `tier`; callers must not change them."""
        return (self.host or TierCopies(self.num_blocks)) if tier is HOST else self.device

    def on(self, tier: Tier) -> TierCopies:
        """Return the slots and states of the node's blocks on `tier`, so that they can be changed.

        For a node without host slots, first create the object for the host tier, with all blocks
        ABSENT.
        """
        if tier is not HOST:
            return self.device
        if self.host is None:
            self.host = TierCopies(self.num_blocks)
        return self.host

    def num_present(self, tier: Tier) -> int:
        """Return the number of blocks with a slot on `tier`, ready or incoming."""
        copies = self.host if tier is HOST else self.device
        return copies.num_present if copies else 0

    # Children

    def adopt(self, child: TreeNode) -> None:
        """Add `child` to the children of this node, and set the dictionary key `child.key`.

        The key is the child's first token with its extra keys. If another child has that key
        already, the tokens of the child's whole first block are used instead of the first token.
        The child's tokens must be set before the call.
        """
        at, extra = child.packed_at, b""
        key = child.packed[at : at + TOKEN_BYTES]
        if child.extras:
            extra = child.extra(child.start)
            key = child_key(key, extra)
        if not self.children:
            self.children = {}
        elif key in self.children:
            key = child_key(child.tokens_of(0, 1), extra) + _BY_BLOCK
            if not self.order:
                self.order = []
            insort(self.order, key)
        child.key = key
        self.children[key] = child

    def disown(self, child: TreeNode) -> None:
        """Remove `child` from the children of this node."""
        key, order = child.key, self.order
        del self.children[key]
        if not order:
            return
        at = bisect_left(order, key)
        if key.endswith(_BY_BLOCK):
            del order[at]
        elif at < len(order) and order[at].startswith(key):  # a sibling with the same first token
            heir = self.children.pop(order.pop(at))
            heir.key = key
            self.children[key] = heir

    def child_with(self, tokens: bytes, extra: bytes) -> TreeNode | None:
        """Return the child whose first block, or whose tail, has exactly these tokens.

        Args:
            tokens: packed tokens of the block or tail.
            extra: extra keys (identity of media) of the block or tail; b"" for none.

        Returns:
            The child; None if there is none.
        """
        child = self.children.get(child_key(tokens[:TOKEN_BYTES], extra))
        if child is not None and child.tokens_of(0, 1) != tokens:
            child = self.children.get(child_key(tokens, extra) + _BY_BLOCK)
        return child

    @property
    def present_children(self) -> tuple[int, int]:
        """Numbers of children (tails included) with a block on the device and on the host."""
        return self.children_on_device, self.children_on_host

    def count_present(self, tier: Tier, step: int) -> None:
        """Add `step` to this node's count of children that have a block on `tier`.

        Args:
            tier: the tier.
            step: 1 if a child now has its first block on the tier, -1 if a child has lost its last
                one; 0 changes nothing.
        """
        if tier is HOST:
            self.children_on_host += step
        else:
            self.children_on_device += step

    # Marks of blocks that were written to storage: they save a second write and match nothing.

    def stored_in(self, start: int, stop: int) -> Mask:
        """Return which of blocks [start, stop) were written to storage.

        Storage may have deleted them since.

        Args:
            start: index of the first block within the node.
            stop: index after the last block.

        Returns:
            A mask, bool [stop - start].
        """
        if self._stored is None:
            return np.zeros(stop - start, np.bool_)
        return self._stored[start:stop]

    def believe_stored(self, start: int, stop: int, believed: Mask) -> None:
        """Record for each of the blocks [start, stop) if storage has it.

        Blocks that storage has are not written again.

        Args:
            start: index of the first block within the node.
            stop: index after the last block.
            believed: bool [stop - start], True for each block that storage has. Storage may have
                deleted the block since.
        """
        if self._stored is None:
            if not believed.any():
                return
            self._stored = np.zeros(self.num_blocks, np.bool_)
        self._stored[start:stop] = believed

    def believe_nothing_stored(self) -> None:
        """Record that no block of the node is known to be in storage."""
        self._stored = None

    # Blocks at the end and at the start

    def append(self, tier: Tier, slots: Ids) -> None:
        """Append blocks to this node of the index. The blocks are READY on `tier`.

        The node's tokens are not changed: the caller must set them to include the tokens of the new
        blocks.

        Args:
            tier: the tier that has the blocks.
            slots: slots of the blocks on `tier`, int32 [number of new blocks].
        """
        ready, num_blocks = self.on(tier), len(slots)
        self.num_blocks += num_blocks
        self.end += num_blocks
        for copies in (self.device, self.host):
            if copies:
                copies.extend(num_blocks, slots if copies is ready else None)
        if self._stored is not None:
            self._stored = np.append(self._stored, np.zeros(num_blocks, np.bool_))

    def truncate(self, num_blocks: int) -> None:
        """Remove all blocks from `num_blocks` on, with their slots and states on both tiers."""
        self._shorten(num_blocks)
        self.device.truncate(num_blocks)
        if self.host:
            self.host.truncate(num_blocks)

    def cut(self, tier: Tier, num_blocks: int) -> None:
        """Shorten a node that has blocks on one tier only to its first `num_blocks` blocks.

        The caller must remove the slots and states of the removed blocks on `tier`.

        Args:
            tier: the only tier with blocks of the node.
            num_blocks: number of blocks that stay, at least 1.
        """
        self._shorten(num_blocks)
        if tier is HOST:
            self.device.num_blocks = num_blocks
        else:
            self.host = None

    def _shorten(self, num_blocks: int) -> None:
        self.token_bytes = self.token_bytes // self.num_blocks * num_blocks
        if len(self.packed) > MAX_KEPT * self.token_bytes:
            self.keep_less(self.packed)
        before, self.end = self.end, self.start + num_blocks
        self.num_blocks = num_blocks
        if self.extras:
            for block in range(self.end, before):
                self.extras.pop(block, None)
        if self.digests:
            self.digests = self.digests[: num_blocks * DIGEST_BYTES]
        if self._stored is not None:
            self._stored = self._stored[:num_blocks].copy()

    def split_head(self, uid: int, at: int) -> TreeNode:
        """Move the first `at` blocks into a new node above this one.

        This node keeps its other blocks, its children and its leases. The caller must add the new
        node to its parent's children, and this node to the new node's children.

        Args:
            uid: number of the new node.
            at: number of blocks to move.

        Returns:
            The new node.
        """
        cut = self.token_bytes // self.num_blocks * at
        upper = TreeNode(uid, self.parent, self.space, self.device.split_head(at))
        upper.key = self.key
        if self.host:
            upper.host = self.host.split_head(at)
        upper.packed, upper.packed_at, upper.token_bytes = self.packed, self.packed_at, cut
        upper.hits, upper.last_used, upper.soft_pins = self.hits, self.last_used, self.soft_pins
        upper.born = self.born
        if self.digests:
            known = at * DIGEST_BYTES
            upper.digests, self.digests = self.digests[:known], self.digests[known:]
        self.packed_at += cut
        self.token_bytes -= cut
        self.start += at
        self.num_blocks -= at
        if self.extras:
            upper.extras = {b: e for b, e in self.extras.items() if b < self.start}
            self.extras = {b: e for b, e in self.extras.items() if b >= self.start}
        if self._stored is not None:
            upper.believe_stored(0, at, self._stored[:at])
            self._stored = self._stored[at:].copy()
        self.parent = upper
        return upper


def child_key(tokens: bytes, extra: bytes) -> bytes:
    """Return the bytes under which `TreeNode.children` stores a child: its tokens and extra keys.

    In a sorted list of such keys, children with the same extra keys and many common leading tokens
    are neighbours.

    Args:
        tokens: packed tokens: only the child's first token, or all tokens of its first block if
            another child begins with the same token.
        extra: extra keys of the child's first block; b"" for none.
    """
    return _NO_TOKEN + len(extra).to_bytes(4, "little") + extra + tokens if extra else tokens
