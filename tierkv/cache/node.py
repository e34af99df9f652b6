"""A node of the radix tree (a run of blocks and their copies), and the free slots of a tier.

Each node belongs to the space of one fingerprint: tenants and adapters never meet in one tree.
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
    """Capacity and free ids of one tier's pool."""

    tier: str
    capacity: int
    free: int

    @property
    def used(self) -> int:
        return self.capacity - self.free


class BlockPool:
    """A pool of the ids 0..capacity-1, each free or taken.

    Allocation is all or nothing and takes O(n) time for n ids. Free ids form a stack, so the id
    that was released last is given first: its memory is warmest. A mark per id catches a double
    release.

    Attributes:
        num_free: ids that can be allocated.
    """

    def __init__(self, tier: str, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"{tier}: capacity {capacity} is negative")
        self.tier = tier
        self.capacity = 0
        self._free: Ids = np.zeros(0, np.int32)
        # Of every id, and then as many that never are: where negative ids end up.
        self._is_taken = np.zeros(0, np.bool_)
        self._mark: Ids = np.zeros(0, np.int32)  # scratch: written before each use
        self._count_up: Ids = np.zeros(0, np.int32)  # 0, 1, 2 ...: marks, without making them
        self.num_free = 0
        self.grow(capacity)

    def stats(self) -> PoolStats:
        """Return capacity and free ids now."""
        return PoolStats(self.tier, self.capacity, self.num_free)

    def allocate(self, count: int) -> Ids:
        """Take `count` ids; return an empty array for 0.

        Raises:
            OutOfBlocksError: fewer than `count` ids are free; none was taken.
        """
        if count < 0:
            raise ValueError(f"{self.tier}: cannot allocate {count} blocks")
        if count > self.num_free:
            raise OutOfBlocksError(self.tier, needed=count, available=self.num_free)
        start, stop = self.num_free - count, self.num_free
        self.num_free = start
        if count == 1:  # as a request grows; half the time
            self._is_taken[self._free.item(start)] = True
            return self._free[start:stop].copy()
        ids = self._free[start:stop][::-1].copy()
        self._is_taken[ids.astype(_INTP)] = True
        return ids

    def release(self, ids: Ids | Sequence[int]) -> None:
        """Give ids back.

        Raises:
            OwnershipError: an id is out of range, not taken, or given twice; nothing changed.
        """
        count = len(ids)
        if not count:
            return
        given = ids if isinstance(ids, np.ndarray) and ids.dtype is _INT32 else self._narrow(ids)
        self._check_taken(given)
        # As intp: an index of another type costs five times as much (NumPy 2, 950 ids).
        where = given.astype(_INTP)
        start, stop = self.num_free, self.num_free + count
        marks = self._count_up[:count]
        self._mark[where] = marks
        if stop > self.capacity or self._mark[where].tobytes() != marks.tobytes():
            raise OwnershipError(f"{self.tier}: an id was released twice in one call")
        self._is_taken[where] = False
        self._free[start:stop] = given
        self.num_free = stop

    def exchange(self, given: Sequence[Ids], count: int) -> Ids:
        """Take `count` ids and pass `given` on to the new owner without a stop on the free stack.

        Args:
            given: int32 arrays of ids that are taken now, each id once.
            count: number of ids to return, those of `given` included.

        Raises:
            OwnershipError: an id of `given` is not taken; nothing changed.
            OutOfBlocksError: too few ids are free; `given` was released.
        """
        if not given:
            return self.allocate(count)
        ids = given[0]
        if len(given) > 1:  # joined as bytes: in a third of the time of numpy.concatenate
            ids = np.frombuffer(b"".join([part.tobytes() for part in given]), _INT32)
        more = count - len(ids)
        if more < 0 or more > self.num_free:
            self.release(ids)
            return self.allocate(count)
        self._check_taken(ids)
        return np.concatenate([ids, self.allocate(more)]) if more else ids

    def _check_taken(self, ids: Ids) -> None:
        """Raise OwnershipError if an id of `ids` is out of range or not taken."""
        try:
            taken = self._is_taken[ids.astype(_INTP)]
        except IndexError:
            raise self._outside() from None
        if 0 in taken.tobytes():  # a quarter of what `taken.all()` takes
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
        """Add the ids from the present capacity up to `capacity`, all free."""
        if capacity < self.capacity:
            raise ValueError(f"{self.tier}: {capacity} blocks are fewer than {self.capacity}")
        more = np.arange(capacity - 1, self.capacity - 1, -1, dtype=np.int32)
        self._reset(capacity, np.concatenate([more, self._free[: self.num_free]]))

    def shrink(self, capacity: int) -> None:
        """Remove all ids from `capacity` on.

        Call `take_from` first and free the ids that `taken_from(capacity)` returns.

        Raises:
            OwnershipError: an id from `capacity` on is taken; nothing changed.
        """
        if not 0 <= capacity <= self.capacity:
            raise ValueError(f"{self.tier}: {capacity} blocks are not fewer than {self.capacity}")
        if len(taken := self.taken_from(capacity)):
            raise OwnershipError(f"{self.tier}: {len(taken)} blocks from {capacity} on are taken")
        free = self._free[: self.num_free]
        self._reset(capacity, free[free < capacity])

    def taken_from(self, first: int) -> Ids:
        """Return the taken ids from `first` on."""
        taken = np.flatnonzero(self._is_taken[first : self.capacity])
        return (taken + first).astype(np.int32)

    def take_from(self, first: int) -> Ids:
        """Allocate every free id from `first` on, so that no request gets one before a shrink."""
        free = self._free[: self.num_free]
        given: Ids = free[free >= first].copy()
        rest = free[free < first].copy()
        self._free[: len(rest)] = rest
        self.num_free = len(rest)
        self._is_taken[given] = True
        return given

    def _reset(self, capacity: int, free: Ids) -> None:
        stack = np.empty(capacity, dtype=np.int32)
        stack[: len(free)] = free
        self._count_up = np.arange(capacity, dtype=np.int32)
        self._mark = np.zeros(capacity, dtype=np.int32)
        self._is_taken = np.zeros(2 * capacity, np.bool_)
        self._is_taken[:capacity] = True
        self._is_taken[free] = False
        self.capacity, self._free, self.num_free = capacity, stack, len(free)

    def findings(self, owned: Iterable[int]) -> list[str]:
        """Return what is wrong, in words, if exactly the ids `owned` should be taken."""
        wrong: list[str] = []
        slots = np.fromiter(owned, np.int64)
        is_known = (slots >= 0) & (slots < self.capacity)
        wrong.extend(
            f"{self.tier}: an owner names block {slot}, which does not exist"
            for slot in slots[~is_known].tolist()
        )
        counts = np.bincount(slots[is_known], minlength=self.capacity)
        taken = self._is_taken[: self.capacity]
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
        if self._is_taken[self.capacity :].any():
            wrong.append(f"{self.tier}: blocks are marked as taken that do not exist")
        return wrong


class CopyState(IntEnum):
    """The state of a block's copy on one tier; the copies of a block on two tiers are independent.

    ABSENT: no slot is assigned. INCOMING: a slot is assigned and bytes are on their way; no match
    sees the copy. READY: all bytes are there.
    """

    ABSENT = 0
    INCOMING = 1
    READY = 2


class Change(IntEnum):
    """A transition of a copy's state."""

    RESERVE = 0  # a movement towards this tier is submitted
    ARRIVE = 1  # its completion event is done, or its acknowledged read verified
    FAIL = 2  # the movement failed; the slot goes back
    PLACE = 3  # whole bytes were in a slot before the index learnt of it: computed, or fetched
    EVICT = 4  # the copy is forgotten


_TABLE = {
    (CopyState.ABSENT, Change.RESERVE): CopyState.INCOMING,
    (CopyState.ABSENT, Change.PLACE): CopyState.READY,
    (CopyState.INCOMING, Change.ARRIVE): CopyState.READY,
    (CopyState.INCOMING, Change.FAIL): CopyState.ABSENT,
    (CopyState.READY, Change.EVICT): CopyState.ABSENT,
}


def is_allowed(current: CopyState, change: Change) -> bool:
    """Return True if the transition table allows a change.

    Args:
        current: State of the copy.
        change: The change.
    """
    return (current, change) in _TABLE


def advance(current: CopyState, change: Change) -> CopyState:
    """Return the state of a copy after a change.

    Args:
        current: State of the copy.
        change: The change.

    Raises:
        OwnershipError: a copy in state `current` cannot go through `change`.
    """
    try:
        return _TABLE[current, change]
    except KeyError:
        message = f"a copy that is {current.name} cannot {change.name}"
        raise OwnershipError(message) from None


NO_SLOT: Final = -1  # the filler inside slot arrays; never leaves this room
# A run that is evicted piece by piece, from its end, is copied to shorter bytes when it would keep
# more than MOST_KEPT times its own. With 4 a piece takes 2.7 us on a public trace, with 2 3.1 us.
MOST_KEPT: Final = 4
_SLOT_BYTES: Final = 4
_NO_SLOT_BYTES: Final = NO_SLOT.to_bytes(_SLOT_BYTES, "little", signed=True)
States = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
_ABSENT: Final = CopyState.ABSENT
_READY: Final = CopyState.READY
_REFUSED: Final = 255
_AFTER: dict[Change, States] = {
    change: np.array(
        [advance(s, change) if is_allowed(s, change) else _REFUSED for s in CopyState], np.uint8
    )
    for change in Change
}


class TierCopies:
    """The copies of a run's blocks on one tier: a slot and a state for each block.

    Nearly all runs have one state throughout, so that state is kept as one value, and an array of
    states exists only while blocks differ. Slots are packed int32 bytes, or None while no block has
    one: bytes are cut in a quarter of the time of small NumPy arrays, and slices that were returned
    earlier stay as they were.

    Attributes:
        num_present: blocks with a slot, ready or incoming.
        uniform: the state of every block, None if states differ.
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
        """The CopyState values, uint8 [num_blocks]; read-only."""
        if self._states is not None:
            return self._states
        return np.full(self.num_blocks, int(self.uniform or 0), np.uint8)

    @property
    def slots(self) -> Ids:
        """The slots, int32 [num_blocks], NO_SLOT where a block has none; read-only."""
        packed = _NO_SLOT_BYTES * self.num_blocks if self._slots is None else self._slots
        return np.frombuffer(packed, _INT32, self.num_blocks)

    def fits(self, num_blocks: int) -> bool:
        """Return whether slots and states fit `num_blocks` blocks, in the most compact form."""
        slots, states = self._slots, self._states
        least = num_blocks * _SLOT_BYTES
        return (
            self.num_blocks == num_blocks
            and (slots is None or least <= len(slots) <= MOST_KEPT * least)
            and (self.uniform is None if states is not None else self.uniform is not None)
            and (states is None or (len(states) == num_blocks and len(set(states.tolist())) > 1))
        )

    def _packed_slots(self, start: int, stop: int) -> bytes:
        if self._slots is None:
            return _NO_SLOT_BYTES * (stop - start)
        return self._slots[start * _SLOT_BYTES : stop * _SLOT_BYTES]

    def is_in(self, state: CopyState, start: int, stop: int) -> Mask:
        """Return a mask of the blocks [start, stop) that are in `state`."""
        if self._states is None:
            return np.full(stop - start, self.uniform is state, np.bool_)
        found: Mask = self._states[start:stop] == state
        return found

    def leading(self, state: CopyState, start: int, stop: int) -> int:
        """Return the number of leading blocks of [start, stop) that are in `state`."""
        if self._states is None:
            return stop - start if self.uniform is state else 0
        other = np.flatnonzero(self._states[start:stop] != state)
        return int(other[0]) if len(other) else stop - start

    def present_in(self, start: int, stop: int) -> int:
        """Return how many of blocks [start, stop) have a slot."""
        if self._states is None:
            return stop - start if self.uniform is not _ABSENT else 0
        return int(np.count_nonzero(self._states[start:stop]))

    def ready_runs(self, count: int) -> list[tuple[int, int]]:
        """Return the last `count` ready blocks as (start, stop) pairs, the last pair first."""
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
        """Advance blocks [start, stop) of the run and return the slots they had.

        Args:
            start: First block.
            stop: Block after the last one.
            change: The change. FAIL and EVICT remove the slots.
            slots: Slots that RESERVE and PLACE assign; None for other changes.

        Raises:
            OwnershipError: One of the blocks cannot go through the change; nothing has changed.
        """
        is_whole = start == 0 and stop == self.num_blocks
        had = self.slots[start:stop]
        if self._states is None:
            assert self.uniform is not None, "it is, where no states are kept"
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

    def behead(self, at: int) -> TierCopies:
        """Give up the first `at` blocks; returns their copies."""
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
        """Keep packed `slots` and `states`; `num_blocks` fits them already."""
        self._slots, self._states = slots, states
        if states is not None:
            self._settle()

    def extend(self, num_blocks: int, slots: Ids | None) -> None:
        """Add blocks at the end, ready in `slots`, or on no slot."""
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
        """Truncate a run that is ready throughout to `num_blocks`.

        Return the slots of the removed blocks.

        With 0 the copies become absent throughout instead, since a movement may still refer to a
        node that has left the tree.
        """
        slots, kept = self._slots, num_blocks * _SLOT_BYTES
        assert slots is not None, "ready blocks have slots"
        had = np.frombuffer(slots, _INT32, self.num_blocks - num_blocks, kept)
        self.num_present = num_blocks
        if not num_blocks:
            self.uniform, self._slots = _ABSENT, None
            return had
        self.num_blocks = num_blocks
        if len(slots) > MOST_KEPT * kept:  # else those that went stay for a while
            self._slots = slots[:kept]
        return had

    def truncate(self, num_blocks: int) -> None:
        """Drop all blocks from `num_blocks` on."""
        if self.uniform is _ABSENT:
            self.num_blocks = num_blocks
            return
        self.num_present = self.present_in(0, num_blocks)
        self.num_blocks = num_blocks
        if self._states is not None:
            self._states = self._states[:num_blocks].copy()
            self._settle()
        slots, kept = self._slots, num_blocks * _SLOT_BYTES
        if slots is not None and len(slots) > MOST_KEPT * kept:
            self._slots = slots[:kept]

    def _settle(self) -> None:
        """Keep one value for all states if they are equal."""
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


DEFAULT: Final = ""  # the space of an index with a single fingerprint
Quota = tuple[int | None, int | None]  # the most device and host blocks, None for any
Segment = tuple["TreeNode", int, int]  # blocks [i, j) of a node's run, counted from the run's start
_NO_TOKEN: Final = b"\xff" * 4  # a negative number: what comes before extra keys can't be tokens
# Of no children, as most runs have none: never changed.
_NOBODY: Final[dict[bytes, TreeNode]] = {}
_NO_ORDER: Final[list[bytes]] = []
_BY_BLOCK: Final = b"\xff"  # at the end of a key of a whole block: no token ends so


class Tier(IntEnum):
    """A tier that has slots. Storage has names instead and is asked, never assumed."""

    DEVICE = 0
    HOST = 1


TIERS: Final = tuple(Tier)  # going over these takes a tenth of what going over the enum takes
# Compared with, as `Tier.HOST` takes 0.1 us.
HOST: Final = Tier.HOST


# Seconds, each some three times the one before: from a request to a day.
BOUNDS_S: Final = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1_800, 3_600, 10_800, 36_000, 86_400)
TICKS_PER_S: Final = 1_000_000  # of `TreeNode.born` and `last_used`, at the least
_BOUNDS: Final = tuple(int(bound * TICKS_PER_S) for bound in BOUNDS_S)


@dataclass(slots=True)
class AgeCounts:
    """A histogram of ages.

    Attributes:
        counts: for each of BOUNDS_S the ages up to that bound and above the one before; last, all
            older ages.
        total_ticks: sum of the ages.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_ticks: int = 0

    def add(self, ticks: int, count: int = 1) -> None:
        """Count `count` ages of `ticks`.

        A negative age, of an LRU clock ahead of time, counts as 0.
        """
        self.counts[bisect_left(_BOUNDS, ticks)] += count
        if ticks > 0:
            self.total_ticks += ticks * count


@dataclass(slots=True, eq=False)
class Space:
    """The part of the index that belongs to one fingerprint.

    Attributes:
        name: the fingerprint's short form, "" for the service's own.
        root_digest: the parent digest of every first block's key.
        used: copies per tier, incoming ones included.
        quota: the most device and host blocks, None for no limit.
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
    """Check a quota.

    Raises:
        ConfigError: A number of blocks is below 0.
    """
    if any(most is not None and most < 0 for most in quota):
        raise ConfigError("a quota is a number of blocks, at least 0")


class TreeNode:
    """A run: blocks [start, end) of every prompt that passes here.

    Attributes:
        packed: bytes with the run's tokens at `packed_at`, `token_bytes` long. Tokens of the path
            above lie before that part; tokens of runs that were split off or removed lie behind it.
        key: the parent finds this node by it, see `adopt`.
        extras: extra keys by block, where media overlap.
        is_tail: the run is one partial block; a tail has no children.
        holders: leases that end here, and children that have holders. While there is one, no copy
            in this node is evicted, so a lease protects its whole path.
        last_used: the newest tick at which a lease was taken that has ended or ends here.
        born: tick of the first use, of the first blocks if blocks were added since.
        digests: block keys of the run's first blocks, 32 bytes each, as far as they were needed.
        children_on_device, children_on_host: children, tails included, with a copy on that tier.
        device, host: copies on that tier; host is None where there is none, the common case.
        order: sorted keys of the children that are found by their whole first block. The child that
            shares the most leading tokens with a prompt stands next to the prompt's place in this
            order.
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
        """Make a node without tokens, key and host copies: see `put_tokens`, `adopt` and `on`."""
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
        """Return the extra keys of `block`, counted from the prompt's start."""
        return self.extras.get(block, b"") if self.extras else b""

    def path(self) -> Iterator[TreeNode]:
        """Yield this node, its parent, and so on up to the root's child."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def tokens(self) -> bytes:
        """Packed tokens of the run; a copy unless `packed` holds nothing else."""
        return self.packed[self.packed_at : self.packed_at + self.token_bytes]

    def tokens_of(self, start: int, stop: int) -> bytes:
        """Return the packed tokens of run blocks [start, stop)."""
        width = self.token_bytes // self.num_blocks
        return self.packed[self.packed_at + start * width : self.packed_at + stop * width]

    def put_tokens(self, packed: bytes, start: int, stop: int) -> None:
        """Keep bytes [start, stop) of `packed` as the run's tokens.

        Copy unless `packed` is hardly longer.
        """
        self.token_bytes = num_bytes = stop - start
        if 8 * len(packed) <= 9 * num_bytes:
            self.packed, self.packed_at = packed, start
        else:
            self.packed, self.packed_at = packed[start:stop], 0

    def keep_less(self, packed: bytes) -> None:
        """Copy the tokens of the runs that share `packed`, if it is much longer than they need.

        Called when blocks below, which needed the rest of `packed`, have been removed. This run and
        the runs above it share the bytes when a run was split.
        """
        part, needed = self, 0
        while part.packed is packed and part.parent is not None:
            needed += part.token_bytes
            part = part.parent
        if len(packed) > MOST_KEPT * needed:
            part = self
            while part.packed is packed and part.parent is not None:
                part.packed, part.packed_at = part.tokens, 0
                part = part.parent

    # Copies

    @property
    def copies(self) -> tuple[TierCopies, TierCopies]:
        """Copies by tier; read-only."""
        return self.device, self.host or TierCopies(self.num_blocks)

    def copies_on(self, tier: Tier) -> TierCopies:
        """Return one of `copies`; read-only."""
        return (self.host or TierCopies(self.num_blocks)) if tier is HOST else self.device

    def on(self, tier: Tier) -> TierCopies:
        """Return the copies on `tier`, to be changed."""
        if tier is not HOST:
            return self.device
        if self.host is None:
            self.host = TierCopies(self.num_blocks)
        return self.host

    def num_present(self, tier: Tier) -> int:
        """Return the number of copies on `tier`, ready or incoming."""
        copies = self.host if tier is HOST else self.device
        return copies.num_present if copies else 0

    # Children

    def adopt(self, child: TreeNode) -> None:
        """Make `child`, which has its tokens, findable below this node.

        The key is the child's first token. If another child has that key, the key is the whole
        first block, or the tail. Most children need neither a long key nor a place in `order`, and
        where all children begin alike a search takes O(log n).
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
        elif at < len(order) and order[at].startswith(key):  # one that begins with that token, too
            heir = self.children.pop(order.pop(at))
            heir.key = key
            self.children[key] = heir

    def child_with(self, tokens: bytes, extra: bytes) -> TreeNode | None:
        """Return the child that begins with this block or is this tail, None if there is none."""
        child = self.children.get(child_key(tokens[:TOKEN_BYTES], extra))
        if child is not None and child.tokens_of(0, 1) != tokens:
            child = self.children.get(child_key(tokens, extra) + _BY_BLOCK)
        return child

    @property
    def present_children(self) -> tuple[int, int]:
        """The number of children, tails included, with a copy on each tier."""
        return self.children_on_device, self.children_on_host

    def count_present(self, tier: Tier, step: int) -> None:
        """Add `step` to the number of children with a copy on `tier`."""
        if tier is HOST:
            self.children_on_host += step
        else:
            self.children_on_device += step

    # What was written to storage: a belief that saves writes, never a match.

    def stored_in(self, start: int, stop: int) -> Mask:
        """Return a mask of the run blocks [start, stop) that are believed to be in storage."""
        if self._stored is None:
            return np.zeros(stop - start, np.bool_)
        return self._stored[start:stop]

    def believe_stored(self, start: int, stop: int, believed: Mask) -> None:
        if self._stored is None:
            if not believed.any():
                return
            self._stored = np.zeros(self.num_blocks, np.bool_)
        self._stored[start:stop] = believed

    def believe_nothing_stored(self) -> None:
        self._stored = None

    # The shape of the run

    def append(self, tier: Tier, slots: Ids) -> None:
        """Append blocks to this node's run, ready in `slots` of `tier`.

        The caller must append the tokens of these blocks to the node.
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
        """Remove blocks from `num_blocks` on.

        Their tokens stay in memory for a while, see `keep_less`.
        """
        self._shorten(num_blocks)
        self.device.truncate(num_blocks)
        if self.host:
            self.host.truncate(num_blocks)

    def cut(self, tier: Tier, num_blocks: int) -> None:
        """Truncate a run that has all its copies on `tier` and no others.

        The caller truncates the copies on `tier`.
        """
        self._shorten(num_blocks)
        if tier is HOST:
            self.device.num_blocks = num_blocks
        else:
            self.host = None

    def _shorten(self, num_blocks: int) -> None:
        self.token_bytes = self.token_bytes // self.num_blocks * num_blocks
        if len(self.packed) > MOST_KEPT * self.token_bytes:
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

    def behead(self, uid: int, at: int) -> TreeNode:
        """Cut the run in two and return a new node with the first `at` blocks.

        This node keeps the rest, its children and its leases. The caller mends the links between
        the two and their parent.
        """
        cut = self.token_bytes // self.num_blocks * at
        upper = TreeNode(uid, self.parent, self.space, self.device.behead(at))
        upper.key = self.key
        if self.host:
            upper.host = self.host.behead(at)
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
    """Return the key by which a run that begins with `tokens` is found.

    The extra keys of the first block come first if media overlap that block. Different runs have
    different keys, and sorted keys put runs with equal extra keys and the most common leading
    tokens side by side.
    """
    return _NO_TOKEN + len(extra).to_bytes(4, "little") + extra + tokens if extra else tokens
