"""Room on a tier: quotas, eviction, and the copies that must come before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

import numpy as np

from tierkv.cache.eviction import WriteRule
from tierkv.cache.history import History
from tierkv.cache.index import Index, runs_of
from tierkv.cache.node import HOST, TICKS_PER_S, AgeCounts, CopyState, Ids, Space, Tier, TreeNode
from tierkv.errors import OutOfBlocksError, OverQuotaError
from tierkv.sched.events import CacheEventKind, CacheEvents
from tierkv.sched.planner import Step, plan_eviction
from tierkv.sched.slots import Slots, Work

_AT_ONCE = 1024  # blocks that go in one turn of the loop: 7 ms


class CopyDown(Enum):
    """The result of starting a copy that must come before an eviction."""

    STARTED = "started"
    LATER = "later"  # room below is being made
    IMPOSSIBLE = "impossible"


@dataclass(slots=True)
class TierStats:
    """Counts since the start.

    Attributes:
        lifetimes: ages of forgotten blocks since they were first cached.
    """

    evicted_device_blocks: int = 0
    evicted_host_blocks: int = 0
    forgotten_blocks: int = 0  # evicted from their last tier
    offloaded_blocks: int = 0
    skipped_offloads: int = 0  # no room on the host
    failed_transfers: int = 0
    lifetimes: AgeCounts = field(default_factory=AgeCounts)


class Eviction:
    """Evicts blocks, or starts the copies after which it can. Every call is synchronous.

    Attributes:
        on_the_way: slots of each tier that copies under way will free.
        copy_down: starts the copy that must come before a step's blocks may leave a tier; set by
            the owner of the copies.
    """

    def __init__(
        self,
        index: Index,
        slots: Slots,
        work: Work,
        rules: dict[Tier, WriteRule],
        *,
        events: CacheEvents,
    ) -> None:
        self.index = index
        self.rules = rules
        self.stats = TierStats()
        self.history = History()
        self.on_the_way = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.copy_down: Callable[[Tier, Step], CopyDown] = _nobody_copies
        self._slots = slots
        self._work = work
        self._pools = slots.pools
        self._events = events

    def is_making_room(self, tier: Tier) -> bool:
        """Return whether copies are under way that will free slots of `tier`."""
        return self.on_the_way[tier] > 0

    def acquire(
        self, tier: Tier, count: int, space: Space | None = None, *, reserved: int = 0
    ) -> Ids:
        """Return `count` slots of `tier`, after evicting blocks if necessary.

        Args:
            tier: the tier of the slots.
            count: number of slots to acquire.
            space: the space whose quota the slots count in. A space over its quota evicts its own
                blocks.
            reserved: number of slots of the space that are not in the index yet, but count too.

        Raises:
            OutOfBlocksError: there are not enough; none is taken. If copies that must come first
                were started, `on_capacity` listeners are called when a new attempt is worth it.
        """
        if tier is HOST:  # callers that take device slots have just set the time
            self.index.at(monotonic())
        pool = self._pools[tier]
        if space is None:
            enough = count <= pool.num_free
            slots = pool.allocate(count) if enough else self._take(tier, count)
        else:
            slots = self._take_within(tier, count, space, reserved)
        leaving = self._slots.leaving
        if not leaving or tier not in leaving:
            return slots
        while (goes := slots >= leaving[tier].first).any():
            self._slots.retire(tier, slots[goes])
            # The resize waits for this.
            asyncio.get_running_loop().call_soon(self._work.capacity_changed)
            slots = slots[~goes]
            more = count - len(slots)
            try:
                others = self._take_within(tier, more, space, reserved + len(slots))
            except OutOfBlocksError:
                pool.release(slots)
                raise
            slots = np.concatenate([slots, others])
        return slots

    def _take_within(self, tier: Tier, count: int, space: Space | None, reserved: int) -> Ids:
        if space is not None:
            self._stay_within_quota(tier, space, count, reserved)
        return self._take(tier, count)

    def _take(self, tier: Tier, count: int) -> Ids:
        pool, order, rule = self._pools[tier], self.index.spaces.order[tier], self.rules[tier]
        missing = self._missing(tier, count)
        freed: list[Ids] = []
        now, wanted = monotonic() if missing > 0 else 0.0, missing
        tick, lifetimes = int(now * TICKS_PER_S), self.stats.lifetimes
        while missing > 0 and (leaf := order.leaf_to_go(missing, rule)):
            node, start, stop = leaf  # as nearly all go: its last copies
            lifetimes.add(tick - node.born, stop - start)
            freed.append(self._release_copies(tier, node, start, stop, now))
            missing -= stop - start
        if freed:
            self._count(tier, wanted - missing, wanted - missing)
        if missing > 0:
            steps = plan_eviction(order, tier, missing, rule)
            if not any(step.must_copy for step in steps):
                freed += [self._drop(tier, *step.victim) for step in steps]
        if sum(map(len, freed)) + pool.num_free >= count:
            return pool.exchange(freed, count)
        for part in freed:
            pool.release(part)
        return self._take_by_plan(tier, count)

    def acquire_some(self, tier: Tier, count: int, space: Space, *, reserved: int = 0) -> Ids:
        """Return 1 to `count` slots, as many as `space` may have now; see `take`."""
        room = self.available(tier, space, reserved=reserved)
        return self.acquire(tier, min(count, max(room, 1)), space, reserved=reserved)

    def _take_by_plan(self, tier: Tier, count: int) -> Ids:
        pool, order = self._pools[tier], self.index.spaces.order[tier]
        while True:
            steps = plan_eviction(order, tier, self._missing(tier, count), self.rules[tier])
            if not steps or not self._make_room(tier, steps):
                return pool.allocate(count)

    def _missing(self, tier: Tier, count: int) -> int:
        """Return the number of copies to evict so that `count` slots are free; 0 or less for none.

        Raises:
            OutOfBlocksError: other requests hold too many blocks.
        """
        pool = self._pools[tier]
        coming = pool.num_free + self.on_the_way[tier]
        missing, can_go = count - coming, self._num_that_can_go(tier)
        if missing > can_go:
            raise OutOfBlocksError(pool.tier, needed=count, available=coming + can_go)
        return missing

    def _num_that_can_go(self, tier: Tier) -> int:
        """Return the number of copies that may be evicted and free their slots at once."""
        unheld = self.index.spaces.order[tier].num_unheld
        if tier is HOST:
            unheld -= self._slots.num_being_stored
        return max(0, unheld)

    def _stay_within_quota(self, tier: Tier, space: Space, count: int, reserved: int) -> None:
        """Evict blocks of one fingerprint until its quota allows `count` more slots of `tier`.

        Args:
            tier: the tier.
            space: the blocks of the fingerprint.
            count: slots wanted.
            reserved: slots that the fingerprint has taken and that are not in the index yet.

        Raises:
            OverQuotaError: held blocks prevent it.
            OutOfBlocksError: the tier lacks slots; nothing was evicted.
        """
        quota, order = space.quota[tier], self.index.spaces.own_order(space, tier)
        if quota is None or order is None:
            return
        while (excess := space.used[tier] + count + reserved - quota) > 0:
            is_possible = excess <= order.num_unheld
            if is_possible:
                self._missing(tier, count)
            steps = plan_eviction(order, tier, excess, self.rules[tier]) if is_possible else []
            if not steps or not self._make_room(tier, steps):
                available = max(quota - space.used[tier], 0) + order.num_unheld
                raise OverQuotaError(
                    tier.name.lower(), needed=count + reserved, available=available
                )

    def shrink_to_quota(self, tier: Tier, space: Space) -> bool:
        """Evict unheld blocks of `space` beyond its quota; return whether there are more.

        One call evicts no more than fits into one turn of the loop.
        """
        quota, order = space.quota[tier], self.index.spaces.own_order(space, tier)
        if quota is None or order is None:
            return False
        excess = min(space.used[tier] - quota, order.num_unheld)
        before = space.used[tier]
        steps = plan_eviction(order, tier, min(excess, _AT_ONCE), self.rules[tier])
        self._make_room(tier, steps)
        # If nothing went, copies come first, and `take` asks again.
        return before - excess < space.used[tier] < before

    def available(self, tier: Tier, space: Space | None = None, *, reserved: int = 0) -> int:
        """Return the number of free slots and of slots that eviction can free.

        Args:
            tier: the tier of the slots.
            space: the space whose quota limits the number; None for no quota.
            reserved: number of slots of the space that are not in the index yet, but count too.
        """
        room = self._pools[tier].num_free + self._num_that_can_go(tier)
        if space is None or (quota := space.quota[tier]) is None:
            return room
        own = self.index.spaces.own_order(space, tier)
        unheld = own.num_unheld if own is not None else 0
        return min(room, max(quota - space.used[tier] + unheld - reserved, 0))

    def _make_room(self, tier: Tier, steps: Sequence[Step]) -> int:
        """Evict the copies of `steps`.

        Return the number of slots that became free, or will after a store's read.
        """
        pool = self._pools[tier]
        before = pool.num_free + self._slots.num_gone
        # A copy that must go down first keeps everything above it where it is, since a match is
        # a run from the root: those steps come again in a later plan.
        waits_for_copy: set[int] = set()
        for step in steps:
            node = step.victim.node
            if step.must_copy:
                waits_for_copy.update(part.uid for part in node.path())
            elif node.uid not in waits_for_copy:
                self._evict(tier, node, step.victim.start, step.victim.stop)
        for step in steps:
            node = step.victim.node
            if step.must_copy and not node.copies[tier].num_present:
                continue  # forgotten by an earlier step, with the blocks above
            if not step.must_copy or self.copy_down(tier, step) is not CopyDown.IMPOSSIBLE:
                continue
            if not node.holders:
                self.forget(node, step.victim.start)
        return pool.num_free + self._slots.num_gone - before

    def _evict(self, tier: Tier, node: TreeNode, start: int, stop: int) -> None:
        self._pools[tier].release(self._drop(tier, node, start, stop))

    def _drop(self, tier: Tier, node: TreeNode, start: int, stop: int) -> Ids:
        """Evict these blocks and return the slots that are free now; see `free_of`."""
        now, count = monotonic(), stop - start
        other = node.device if tier is HOST else node.host
        kept = other.present_in(start, stop) if other is not None and other.num_present else 0
        if count > kept:
            self.stats.lifetimes.add(int(now * TICKS_PER_S) - node.born, count - kept)
        self._count(tier, count, count - kept)
        return self._release_copies(tier, node, start, stop, now)

    def _count(self, tier: Tier, evicted: int, gone: int) -> None:
        """Count `evicted` copies on `tier`; `gone` of them were the last copies of their blocks."""
        stats = self.stats
        stats.forgotten_blocks += gone
        if tier is HOST:
            stats.evicted_host_blocks += evicted
        else:
            stats.evicted_device_blocks += evicted

    def _release_copies(self, tier: Tier, node: TreeNode, start: int, stop: int, now: float) -> Ids:
        self.history.evicted(node, start, stop, tier, now)
        if self._events.has_listeners:
            name, first = tier.name.lower(), node.start
            self._events.publish(CacheEventKind.EVICTED, name, node, first + start, first + stop)
        return self._slots.free_of(tier, self.index.drop(tier, node, start, stop))

    def forget(self, node: TreeNode, start: int) -> None:
        """Evict an unheld node's run blocks from `start` on, and all below, from both tiers."""
        if not (start or node.children or node.host) and node.device.uniform is CopyState.READY:
            self._evict(Tier.DEVICE, node, 0, node.num_blocks)  # as nearly all
            return
        tier = Tier.DEVICE if node.copies[Tier.DEVICE].num_present else Tier.HOST
        now, pending = monotonic(), [node]
        while pending:
            part = pending.pop()
            first = start if part is node else 0
            self.history.evicted(part, first, part.num_blocks, tier, now)
            forgotten = part.num_blocks - first
            self.stats.forgotten_blocks += forgotten
            self.stats.lifetimes.add(int(now * TICKS_PER_S) - part.born, forgotten)
            pending += part.children.values()
        if self._events.has_listeners:
            self.tell_forgotten(node, start)
        device, host = self.index.forget_below(node, start)
        self.stats.evicted_device_blocks += len(device)
        self.stats.evicted_host_blocks += len(host)
        self._pools[Tier.DEVICE].release(device)
        self._pools[Tier.HOST].release(self._slots.free_of(Tier.HOST, host))

    def tell_forgotten(self, node: TreeNode, start: int) -> None:
        """Publish events that run blocks from `start` on, and all below, leave device and host."""
        pending = [(node, start)]
        while pending:
            part, first = pending.pop()
            pending.extend((child, 0) for child in part.children.values())
            for tier in Tier:
                for i, j in runs_of(
                    part.copies[tier].is_in(CopyState.READY, first, part.num_blocks)
                ):
                    at = part.start + first
                    self._events.publish(
                        CacheEventKind.EVICTED, tier.name.lower(), part, at + i, at + j
                    )

    def evict_below(self, tier: Tier, node: TreeNode, start: int) -> None:
        """Evict the copies on `tier` of run blocks from `start` on, and of all blocks below them.

        The node must be unheld, and all these blocks whole on the other tier.
        """
        pending, order = [(node, start)], []
        while pending:
            part, first = pending.pop()
            order.append((part, first))
            pending.extend((child, 0) for child in part.children.values())
        for part, first in reversed(order):
            stop = part.num_blocks
            for i, j in runs_of(part.copies[tier].is_in(CopyState.READY, first, stop)):
                self._evict(tier, part, first + i, first + j)


def _nobody_copies(tier: Tier, step: Step) -> CopyDown:
    raise AssertionError(f"{step} must be copied from {tier.name} first, and no copier is set")
