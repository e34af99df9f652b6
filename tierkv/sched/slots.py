"""Slots of the tiers, and who holds those that the index does not have."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tierkv.cache.node import Tier
from tierkv.cache.pool import BlockPool, Ids
from tierkv.sched.work import Work

_NO_SLOTS: Ids = np.zeros(0, np.int32)


@dataclass(slots=True)
class Leaving:
    """Slots of a tier that go, those from `first` on: who takes some gets others, so that those who
    wait for room cannot keep them in use for ever. slots: those that are out of use by now.
    stores_first: whether blocks are still stored before they go, where the rule says so."""

    first: int
    slots: list[Ids] = field(default_factory=list)
    stores_first: bool = True

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.slots))


class Slots:
    """pools: by tier. leaving: slots of tiers that shrink, or are being emptied."""

    def __init__(self, device_pool: BlockPool, host_pool: BlockPool, work: Work) -> None:
        self.pools = {Tier.DEVICE: device_pool, Tier.HOST: host_pool}
        self.leaving: dict[Tier, Leaving] = {}
        self._work = work
        self._in_flight: dict[Tier, list[Ids]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._reads = _NO_SLOTS  # by host slot, how many stores read it, see `begin_reading`
        self._num_reads = 0
        self._gone = _NO_SLOTS  # host slots that the index gave up while they were being read

    def give(self, tier: Tier, slots: Ids) -> None:
        if len(slots):
            self.pools[tier].release(slots)
            self._work.capacity_changed()

    def lend(self, tier: Tier, slots: Ids) -> None:
        """Note slots that a movement holds outside the index, so that `verify` finds an owner."""
        self._in_flight[tier].append(slots)

    def unlend(self, tier: Tier, slots: Ids) -> None:
        lent = self._in_flight[tier]
        del lent[next(i for i, other in enumerate(lent) if other is slots)]

    def retire(self, tier: Tier, slots: Ids) -> None:
        """Taken slots, of those that leave, go out of use."""
        self.lend(tier, slots)
        self.leaving[tier].slots.append(slots)

    def num_lent(self) -> tuple[int, int]:
        """Of the device, of the host."""
        return len(self.lent(Tier.DEVICE)), len(self.lent(Tier.HOST))

    def lent(self, tier: Tier) -> Ids:
        gone = self._gone if tier is Tier.HOST else _NO_SLOTS
        return np.concatenate([gone, *self._in_flight[tier]])

    # Slots that a store reads. Their blocks are not held, or a store that hangs would keep whole
    # prompts on the device: they may go, but their host slots are free only when it is done.

    @property
    def num_gone(self) -> int:
        """Host slots that are nobody's as soon as a store is done with them."""
        return len(self._gone)

    def num_being_stored(self, tier: Tier) -> int:
        """How many of the index's slots a store reads."""
        return self._num_reads - len(self._gone) if tier is Tier.HOST else 0

    def begin_reading(self, slots: Ids) -> None:
        """A store reads these host slots until `end_reading`."""
        self._readers()[slots] += 1
        self._num_reads += len(slots)

    def end_reading(self, slots: Ids) -> None:
        self._reads[slots] -= 1
        self._num_reads -= len(slots)
        if len(self._gone):
            is_read = self._reads[self._gone] > 0
            freed, self._gone = self._gone[~is_read], self._gone[is_read]
            self.pools[Tier.HOST].release(freed)
        self._work.capacity_changed()  # also where they are the index's still: now they may go

    def free_of(self, tier: Tier, slots: Ids) -> Ids:
        """Which of `slots`, that the index has given up, are nobody's now; the others will be."""
        if tier is Tier.DEVICE or not self._num_reads:
            return slots
        is_read = self._readers()[slots] > 0
        self._gone = np.concatenate([self._gone, slots[is_read]])
        return slots[~is_read]

    def _readers(self) -> Ids:
        """How many read each host slot; the tier may have grown."""
        more = self.pools[Tier.HOST].capacity - len(self._reads)
        if more > 0:
            self._reads = np.concatenate([self._reads, np.zeros(more, np.int32)])
        return self._reads
