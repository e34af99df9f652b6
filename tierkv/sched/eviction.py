"""Room on device and host: quotas, evictions, and the copies that must be made before them."""

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

_AT_ONCE = 1024  # blocks evicted in one turn of the loop: 7 ms


class CopyDown(Enum):
    """The result of an attempt to copy blocks to a lower tier before their eviction."""

    STARTED = "started"
    LATER = "later"  # slots of the lower tier will become free soon
    IMPOSSIBLE = "impossible"


@dataclass(slots=True)
class TierStats:
    """Counts of evictions and copies since the start of the node.

    Attributes:
        evicted_device_blocks: blocks evicted from the device.
        evicted_host_blocks: blocks evicted from the host.
        forgotten_blocks: blocks evicted from one of these tiers while the other did not have them.
        offloaded_blocks: blocks copied from the device to the host.
        skipped_offloads: blocks that were not copied to the host, because the host had no room.
        failed_transfers: failed copies between device and host.
        lifetimes: histogram of the seconds from a block's first caching to its eviction from the
            last of these tiers.
    """

    evicted_device_blocks: int = 0
    evicted_host_blocks: int = 0
    forgotten_blocks: int = 0  # evicted from their last tier
    offloaded_blocks: int = 0
    skipped_offloads: int = 0  # no room on the host
    failed_transfers: int = 0
    lifetimes: AgeCounts = field(default_factory=AgeCounts)


class Eviction:
    """Frees slots by evicting blocks.

    Blocks that must be kept are first copied to the tier below. No call waits for such a copy.

    Args:
        index: the index of all blocks.
        slots: slots of device and host.
        work: wakes waiting callers when slots may have become free.
        rules: for device and for host, when blocks are copied to the tier below.
        events: publishes evictions.

    Attributes:
        on_the_way: by tier, the number of slots that running copies to the tier below will free.
        copy_down: function that starts the copy of blocks to the tier below, before they are
            evicted; set by `Copies`.
        history: the latest evictions and failures, for explanations of misses.
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
        self.copy_down: Callable[[Tier, Step], CopyDown]  # set by `Copies`
        self._slots = slots
        self._work = work
        self._pools = slots.pools
        self._events = events

    def is_making_room(self, tier: Tier) -> bool:
        """Return whether running copies to the tier below will free slots of `tier`."""
        return self.on_the_way[tier] > 0

    def acquire(
        self, tier: Tier, count: int, space: Space | None = None, *, reserved: int = 0
    ) -> Ids:
        """Acquire `count` slots of `tier`, after evicting blocks if necessary.

        Args:
            tier: the tier of the slots: device or host.
            count: number of slots to acquire.
            space: the space (part of the index for one fingerprint) that will use the slots. They
                count towards its quota; beyond the quota, blocks of this space are evicted. None
                for no quota.
            reserved: number of slots that were acquired for the space and are not in the index yet;
                they count towards its quota too.

        Returns:
            The slots, int32 [count].

        Raises:
            OutOfBlocksError: there are not enough slots; none is acquired. Copies to a lower tier
                that will free slots may have been started; at their end, the listeners of
                `Work.on_capacity` are called.
            OverQuotaError: the quota of `space` does not allow them.
        """
        if tier is HOST:  # callers that acquire device slots have just set the time
            self.index.at(monotonic())
        pool = self._pools[tier]
        if space is None:
            enough = count <= pool.num_free
            slots = pool.allocate(count) if enough else self._allocate(tier, count)
        else:
            slots = self._allocate_within(tier, count, space, reserved)
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
                others = self._allocate_within(tier, more, space, reserved + len(slots))
            except OutOfBlocksError:
                pool.release(slots)
                raise
            slots = np.concatenate([slots, others])
        return slots

    def _allocate_within(self, tier: Tier, count: int, space: Space | None, reserved: int) -> Ids:
        if space is not None:
            self._stay_within_quota(tier, space, count, reserved)
        return self._allocate(tier, count)

    def _allocate(self, tier: Tier, count: int) -> Ids:
        pool, order, rule = self._pools[tier], self.index.spaces.order[tier], self.rules[tier]
        missing = self._missing(tier, count)
        freed: list[Ids] = []
        now, wanted = monotonic() if missing > 0 else 0.0, missing
        tick, lifetimes = int(now * TICKS_PER_S), self.stats.lifetimes
        while missing > 0 and (leaf := order.leaf_to_go(missing, rule)):
            node, start, stop = leaf  # the usual case: the last copies of its blocks
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
        return self._allocate_by_plan(tier, count)

    def acquire_some(self, tier: Tier, count: int, space: Space, *, reserved: int = 0) -> Ids:
        """Acquire as many slots as tier and quota allow now, at most `count`.

        Args:
            tier: the tier of the slots.
            count: upper limit of the number of slots, at least 1.
            space: the space (part of the index for one fingerprint) that will use the slots, and
                whose quota limits their number.
            reserved: number of slots that were acquired for the space and are not in the index yet;
                they count towards its quota too.

        Returns:
            The slots, int32 [n], 1 <= n <= count.

        Raises:
            OutOfBlocksError: there is not even one slot.
        """
        room = self.available(tier, space, reserved=reserved)
        return self.acquire(tier, min(count, max(room, 1)), space, reserved=reserved)

    def _allocate_by_plan(self, tier: Tier, count: int) -> Ids:
        pool, order = self._pools[tier], self.index.spaces.order[tier]
        while True:
            steps = plan_eviction(order, tier, self._missing(tier, count), self.rules[tier])
            if not steps or not self._make_room(tier, steps):
                return pool.allocate(count)

    def _missing(self, tier: Tier, count: int) -> int:
        """Return how many copies must be evicted for `count` free slots, 0 or less for none."""
        pool = self._pools[tier]
        coming = pool.num_free + self.on_the_way[tier]
        missing, can_go = count - coming, self._num_that_can_go(tier)
        if missing > can_go:
            raise OutOfBlocksError(pool.tier, needed=count, available=coming + can_go)
        return missing

    def _num_that_can_go(self, tier: Tier) -> int:
        """Count the blocks of `tier` whose eviction frees their slots at once."""
        unheld = self.index.spaces.order[tier].num_unheld
        if tier is HOST:
            unheld -= self._slots.num_being_stored
        return max(0, unheld)

    def _stay_within_quota(self, tier: Tier, space: Space, count: int, reserved: int) -> None:
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
        """Evict unused blocks of `space` that exceed its quota.

        One call evicts a limited number of blocks, because the event loop cannot run meanwhile.

        Args:
            tier: the tier to evict from.
            space: the space (part of the index for one fingerprint) with the quota.

        Returns:
            True if some blocks were evicted and another call can evict more.
        """
        quota, order = space.quota[tier], self.index.spaces.own_order(space, tier)
        if quota is None or order is None:
            return False
        excess = min(space.used[tier] - quota, order.num_unheld)
        before = space.used[tier]
        steps = plan_eviction(order, tier, min(excess, _AT_ONCE), self.rules[tier])
        self._make_room(tier, steps)
        # If nothing was evicted, copies must end first, and their end causes another call.
        return before - excess < space.used[tier] < before

    def available(self, tier: Tier, space: Space | None = None, *, reserved: int = 0) -> int:
        """Return how many slots can be acquired: free ones, and those that eviction can free.

        Args:
            tier: the tier of the slots.
            space: the space (part of the index for one fingerprint) whose quota limits the number;
                None for no quota.
            reserved: number of slots that were acquired for the space and are not in the index yet;
                they count towards its quota too.
        """
        room = self._pools[tier].num_free + self._num_that_can_go(tier)
        if space is None or (quota := space.quota[tier]) is None:
            return room
        own = self.index.spaces.own_order(space, tier)
        unheld = own.num_unheld if own is not None else 0
        return min(room, max(quota - space.used[tier] + unheld - reserved, 0))

    def _make_room(self, tier: Tier, steps: Sequence[Step]) -> int:
        """Evict the blocks of `steps`, and start copies to a lower tier that must come first.

        Return the number of evicted slots. Slots that a store is still reading are included.
        Blocks whose copy was started stay until a later call.
        """
        pool = self._pools[tier]
        before = pool.num_free + self._slots.num_still_read
        # Blocks with an unfinished copy stay, and so do all blocks above them, since a match is
        # unbroken from the root. A later plan has these steps again.
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
        return pool.num_free + self._slots.num_still_read - before

    def _evict(self, tier: Tier, node: TreeNode, start: int, stop: int) -> None:
        self._pools[tier].release(self._drop(tier, node, start, stop))

    def _drop(self, tier: Tier, node: TreeNode, start: int, stop: int) -> Ids:
        """Evict blocks [start, stop) of `node`, and return only the slots that are free now."""
        now, count = monotonic(), stop - start
        other = node.device if tier is HOST else node.host
        kept = other.present_in(start, stop) if other is not None and other.num_present else 0
        if count > kept:
            self.stats.lifetimes.add(int(now * TICKS_PER_S) - node.born, count - kept)
        self._count(tier, count, count - kept)
        return self._release_copies(tier, node, start, stop, now)

    def _count(self, tier: Tier, evicted: int, gone: int) -> None:
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
        """Remove a node's blocks from `start` on, and all nodes below it, from device and host.

        Args:
            node: a node of the index. No lease may protect its blocks or those of a node below it.
            start: index of the first block within the node.
        """
        if not (start or node.children or node.host) and node.device.uniform is CopyState.READY:
            self._evict(Tier.DEVICE, node, 0, node.num_blocks)  # the usual case
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
            self.publish_forgotten(node, start)
        device, host = self.index.forget_below(node, start)
        self.stats.evicted_device_blocks += len(device)
        self.stats.evicted_host_blocks += len(host)
        self._pools[Tier.DEVICE].release(device)
        self._pools[Tier.HOST].release(self._slots.free_of(Tier.HOST, host))

    def publish_forgotten(self, node: TreeNode, start: int) -> None:
        """Report the blocks that `forget` is about to evict to the subscribers of cache events.

        Call this immediately before `forget`, with the same arguments.

        Args:
            node: a node of the index; all blocks of the nodes below it are reported, too.
            start: index of the first reported block within `node`.
        """
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
        """Evict a node's blocks from `start` on, and all blocks of nodes below it, from one tier.

        The other tier must have ready copies of all of these blocks.

        Args:
            tier: the tier to evict from: device or host.
            node: a node of the index. No lease may protect its blocks or those of a node below it.
            start: index of the first block within the node.
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
