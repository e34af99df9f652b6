"""One tier's copies of a run of blocks: a slot and a state each, held as compactly as they allow.

Nearly all runs have one state throughout, so that is kept as one value, `uniform`, and an array of
states only while blocks differ. Slots are packed int32, or none while nothing is there: bytes are
cut in a quarter of the time that small NumPy arrays take, and what is given out stays as it was.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from tierkv.cache.pool import Ids
from tierkv.errors import OwnershipError


class CopyState(IntEnum):
    """Independent per tier: a block's device copy knows nothing of its host copy.

    ABSENT    no slot is assigned.
    INCOMING  a slot is assigned and bytes are on their way; invisible to every match.
    READY     all bytes are there.
    """

    ABSENT = 0
    INCOMING = 1
    READY = 2


class Change(IntEnum):
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
    return (current, change) in _TABLE


def advance(current: CopyState, change: Change) -> CopyState:
    """The state after `change`. Raises OwnershipError for a transition that cannot happen."""
    try:
        return _TABLE[current, change]
    except KeyError:
        message = f"a copy that is {current.name} cannot {change.name}"
        raise OwnershipError(message) from None


NO_SLOT: Final = -1  # the filler inside slot arrays; never leaves this room
# A run that goes piece by piece, from its end, is copied to shorter bytes when it would keep more
# than so many times its own. With 2, a piece took 3.1 us in the mean on a public trace, with 4 2.7
# (blocks of 16 tokens, 2-core x86-64 VM, 2026-11-21).
MOST_KEPT: Final = 4
_SLOT_BYTES: Final = 4
_NO_SLOT_BYTES: Final = NO_SLOT.to_bytes(_SLOT_BYTES, "little", signed=True)
_INT32: Final = np.dtype(np.int32)
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
    """num_present: blocks with a slot, whole or incoming. uniform: the state of every block, None
    if they differ."""

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
        """uint8 [num_blocks], CopyState values; to be read only."""
        if self._states is not None:
            return self._states
        return np.full(self.num_blocks, self.uniform, np.uint8)

    @property
    def slots(self) -> Ids:
        """int32 [num_blocks], NO_SLOT where there is none; to be read only."""
        packed = _NO_SLOT_BYTES * self.num_blocks if self._slots is None else self._slots
        return np.frombuffer(packed, _INT32, self.num_blocks)

    def fits(self, num_blocks: int) -> bool:
        """Whether these are the slots and states of `num_blocks` blocks, kept as compactly as they
        allow; `verify` asks."""
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
        """Which of blocks [start, stop) are in `state`."""
        if self._states is None:
            return np.full(stop - start, self.uniform is state, np.bool_)
        found: Mask = self._states[start:stop] == state
        return found

    def leading(self, state: CopyState, start: int, stop: int) -> int:
        """How many blocks from `start` on are in `state`, at most up to `stop`."""
        if self._states is None:
            return stop - start if self.uniform is state else 0
        other = np.flatnonzero(self._states[start:stop] != state)
        return int(other[0]) if len(other) else stop - start

    def present_in(self, start: int, stop: int) -> int:
        """How many of blocks [start, stop) have a slot."""
        if self._states is None:
            return stop - start if self.uniform is not _ABSENT else 0
        return int(np.count_nonzero(self._states[start:stop]))

    def ready_runs(self, count: int) -> list[tuple[int, int]]:
        """The last `count` ready blocks as (start, stop), the last ones first."""
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
        """Advance blocks [start, stop) and return the slots they had.

        slots: what RESERVE and PLACE assign. FAIL and EVICT take the slots away. Raises
        OwnershipError, with nothing changed, if one of the blocks cannot change so.
        """
        is_whole = start == 0 and stop == self.num_blocks
        had = self.slots[start:stop]
        if self._states is None:
            after = advance(CopyState(self.uniform or 0), change)
            if is_whole:
                self.uniform = after
            else:
                self._states = self.states
                self._states[start:stop] = after
                self._settle()
        else:
            states = _AFTER[change][self._states[start:stop]]
            if (states == _REFUSED).any():
                for state in np.unique(self._states[start:stop]):
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
        """Hold `slots`, packed, and `states` of blocks whose number is right already."""
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
        """Truncate a run that is ready throughout; the slots of the blocks that go. With 0 it is
        absent throughout instead, for who still holds on to a node that has left the tree."""
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
