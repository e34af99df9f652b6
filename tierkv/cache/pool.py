"""Which slots of one tier are free: numbers only, no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.errors import OutOfBlocksError, OwnershipError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PoolStats:
    tier: str
    capacity: int
    free: int

    @property
    def used(self) -> int:
        return self.capacity - self.free


class BlockPool:
    """Ids 0..capacity-1, each free or taken. Allocation is all or nothing, O(n) in what it gives.

    A stack of free ids (the last released is the next given, whose memory is warmest) and one
    byte per id that catches a double release.
    """

    def __init__(self, tier: str, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"{tier}: capacity {capacity} is negative")
        self.tier = tier
        self.capacity = capacity
        self._free: Ids = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._taken = np.zeros(capacity, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return self._num_free

    def stats(self) -> PoolStats:
        return PoolStats(self.tier, self.capacity, self._num_free)

    def allocate(self, count: int) -> Ids:
        """Take `count` ids; none for 0. Raises OutOfBlocksError with nothing taken."""
        if count < 0:
            raise ValueError(f"{self.tier}: cannot allocate {count} blocks")
        if count > self._num_free:
            raise OutOfBlocksError(self.tier, needed=count, available=self._num_free)
        start = self._num_free - count
        ids = self._free[start : self._num_free][::-1].copy()
        self._num_free = start
        self._taken[ids] = True
        return ids

    def release(self, ids: Ids | Sequence[int]) -> None:
        """Give ids back. Raises OwnershipError, with nothing changed, if one is out of range,
        not taken, or given twice."""
        given = np.asarray(ids, dtype=np.int64)
        if not len(given):
            return
        if int(given.min()) < 0 or int(given.max()) >= self.capacity:
            raise OwnershipError(f"{self.tier}: released an id outside 0..{self.capacity - 1}")
        if len(given) > 1 and len(np.unique(given)) != len(given):
            raise OwnershipError(f"{self.tier}: an id was released twice in one call")
        if not self._taken[given].all():
            free = given[~self._taken[given]]
            raise OwnershipError(f"{self.tier}: block {int(free[0])} was released but is free")
        self._taken[given] = False
        self._free[self._num_free : self._num_free + len(given)] = given
        self._num_free += len(given)

    def findings(self, owned: Iterable[int]) -> list[str]:
        """What is wrong, in words, if exactly the ids `owned` should be taken."""
        wrong = []
        counts = np.zeros(self.capacity, dtype=np.int64)
        for slot in owned:
            if not 0 <= slot < self.capacity:
                wrong.append(f"{self.tier}: an owner names block {slot}, which does not exist")
            else:
                counts[slot] += 1
        for mask, what in (
            (counts > 1, "has more than one owner"),
            ((counts > 0) & ~self._taken, "is owned but counted as free"),
            ((counts == 0) & self._taken, "is taken but nobody owns it"),
        ):
            wrong.extend(f"{self.tier}: block {block} {what}" for block in np.flatnonzero(mask))
        free = self._free[: self._num_free]
        if len(np.unique(free)) != self._num_free or self._taken[free].any():
            wrong.append(f"{self.tier}: the free list disagrees with the taken marks")
        return wrong
