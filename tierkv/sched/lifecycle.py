"""Emptying and resizing of the tiers while requests run, and emptying of the device for sleep.

A sleeping device has no memory for blocks, until it is woken.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

from tierkv.cache.node import CopyState, Ids, Tier, TreeNode
from tierkv.errors import ConfigError, OwnershipError
from tierkv.sched.slots import Leaving
from tierkv.sched.tiers import Tiers

# Advice for more slots than there is memory for. Host memory cannot be replaced at run time: it is
# pinned once, and lanes, stores and other nodes know its address.
_MORE = {
    Tier.DEVICE: "put the device to sleep and wake it with that number",
    Tier.HOST: "raise cache.host_max_blocks and restart",
}

_SLICE = 128  # nodes examined or removed in one turn of the loop: 5 ms


class Lifecycle:
    """Changes the tiers' sizes and contents at run time.

    Args:
        tiers: the tiers whose size or content changes.
        slots: numbers of device and host slots for which memory is allocated.
    """

    def __init__(self, tiers: Tiers, slots: tuple[int, int]) -> None:
        self._tiers = tiers
        self._slots = list(slots)
        self._changing: set[Tier] = set()  # tiers with leaving slots
        self._asleep: Ids | None = None  # the device slots, out of use during sleep

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    def reset(self) -> int:
        """Remove all blocks that are not in use from device and host.

        Stored values stay, but no block counts as stored until storage is asked again. The call
        does all of the work in one turn of the event loop; `forget` does it in many short ones.

        Returns:
            The number of copies of blocks that stay, because they are in use.
        """
        for _ in self._forgetting():
            pass
        return self._num_copies()

    async def forget(self) -> int:
        """Remove all blocks that are not in use from device and host, while other tasks run.

        Stored values stay, but no block counts as stored until storage is asked again. Blocks that
        come into use during the call may stay.

        Returns:
            The number of blocks left on the device plus the number left on the host.
        """
        for _ in self._forgetting():
            await asyncio.sleep(0)
        return self._num_copies()

    def _num_copies(self) -> int:
        return sum(space.used[tier] for space in self._tiers.index.spaces.all() for tier in Tier)

    def _forgetting(self) -> Iterator[None]:
        spaces = self._tiers.index.spaces
        return forgetting(self._tiers, [*spaces.roots(), *spaces.retired()])

    async def resize(self, tier: Tier, capacity: int) -> None:
        """Change the number of slots of the device or host tier; no memory is allocated or freed.

        A tier becomes smaller by losing its last slots. The call waits until the blocks in these
        slots are unused, and evicts them. Before that, device blocks are copied to the host if the
        host has room, and host blocks are written to storage if the policy for writing includes
        them and the store accepts them. Cancelling the call leaves the number of slots unchanged.

        Args:
            tier: the tier to resize: device or host.
            capacity: number of slots that the tier will have; from 1 to the number allocated at the
                start.

        Raises:
            ConfigError: there is no memory for `capacity` slots.
            OwnershipError: the device sleeps, or another resize or sleep of the same tier has not
                ended.
        """
        if self._asleep is not None and tier is Tier.DEVICE:
            raise OwnershipError(
                "the device sleeps and cannot be resized: wake it with the new number of blocks"
            )
        if not 1 <= capacity <= self._slots[tier]:
            raise ConfigError(
                f"the {tier.name.lower()} tier can have 1 to {self._slots[tier]} "
                f"blocks, not {capacity}: for more, {_MORE[tier]}"
            )
        capacity = operator.index(capacity)  # a NumPy integer becomes an int
        tiers, pool = self._tiers, self._tiers.slots.pools[tier]
        with self.alone(tier):
            if capacity >= pool.capacity:
                pool.grow(capacity)
            else:
                with self._retiring(tier, capacity) as leaving:
                    await self._retire(tier, leaving, keeps_blocks=True)
                pool.shrink(capacity)
            tiers.index.spaces.order[tier].resized(capacity)
            tiers.copies.resized()
        tiers.work.capacity_changed()

    @contextmanager
    def alone(self, tier: Tier) -> Iterator[None]:
        """Refuse other calls that resize, empty or refill the tier, while this context is entered.

        Raises:
            OwnershipError: such a call is running already.
        """
        if tier in self._changing:
            raise OwnershipError(
                f"the {tier.name.lower()} tier is being resized, emptied or refilled "
                "by another call: wait for its end, or cancel that call"
            )
        self._changing.add(tier)
        try:
            yield
        finally:
            self._changing.remove(tier)

    @contextmanager
    def _retiring(self, tier: Tier, first: int) -> Iterator[Leaving]:
        """Keep slots from `first` on out of use while the `with` block moves blocks elsewhere.

        Afterwards the slots are free. If the `with` block ended without an error, the caller can
        shrink the tier by these slots, and must then wake waiting requests.
        """
        leaving = self._tiers.slots.leaving[tier] = Leaving(first)
        try:
            yield leaving
        except BaseException:
            self._give_back(tier)
            self._tiers.work.capacity_changed()
            raise
        self._give_back(tier)

    def _give_back(self, tier: Tier) -> None:
        leaving = self._tiers.slots.leaving.pop(tier)
        leaving.stores_first = False
        for slots in leaving.slots:
            self._tiers.slots.unlend(tier, slots)
            self._tiers.slots.pools[tier].release(slots)

    async def _retire(self, tier: Tier, leaving: Leaving, *, keeps_blocks: bool) -> None:
        tiers, pool, first = self._tiers, self._tiers.slots.pools[tier], leaving.first
        tried: set[int] = set()  # uids of nodes with a copy started; it may have failed
        while True:
            seen = tiers.work.num_changes
            nodes, is_last = tiers.index.spaces.nodes(), False
            while not is_last:
                part = list(islice(nodes, _SLICE))
                is_last = len(part) < _SLICE
                self._clear(tier, first, part, tried, keeps_blocks=keeps_blocks)
                if len(slots := pool.allocate_from(first)):
                    tiers.slots.retire(tier, slots)
                if leaving.num_slots == pool.capacity - first:
                    return
                if not is_last:
                    await asyncio.sleep(0)
            # After a change, nodes examined before may be evictable.
            if tiers.work.num_changes == seen:
                await tiers.work.next_change()

    def _clear(
        self,
        tier: Tier,
        first: int,
        nodes: Sequence[TreeNode],
        tried: set[int],
        *,
        keeps_blocks: bool,
    ) -> None:
        """Evict unused copies in slots from `first` on, and forget unreachable blocks.

        With `keeps_blocks`, a device block that only the device has is first copied to the host,
        and is evicted by a later call. `tried` collects the uids of the nodes for which such a copy
        was started, so that none is started twice.
        """
        for node in nodes:
            in_the_way = np.flatnonzero(node.copies[tier].slots >= first)
            is_gone = not (node.copies[0].num_present or node.copies[1].num_present)
            if not len(in_the_way) or node.holders or is_gone:
                continue
            start = int(in_the_way[0])
            if tier is Tier.DEVICE and keeps_blocks and self._copy_first(node, tried):
                continue
            if tier is Tier.HOST and self._tiers.copies.store_first(node, start):
                continue
            self._forget_lacking(tier, node, start)
            if start < node.num_blocks and node.copies[tier].num_present:
                self._tiers.eviction.evict_below(tier, node, start)

    def _forget_lacking(self, tier: Tier, node: TreeNode, start: int) -> None:
        """Remove blocks without a ready copy on the other tier, and all blocks after them.

        The search begins at index `start` of `node` and includes all nodes below; copies on `tier`
        (device or host) do not count.
        """
        pending = [(node, start)]
        while pending:
            part, first = pending.pop()
            other = part.copies[1 - tier]
            whole = first + other.leading(CopyState.READY, first, part.num_blocks)
            if whole < part.num_blocks:
                self._tiers.eviction.forget(part, whole)
            else:
                pending.extend((child, 0) for child in part.children.values())

    def _copy_first(self, node: TreeNode, tried: set[int]) -> bool:
        """Start to copy the node's blocks and all blocks below to the host.

        Nodes whose uid is in `tried` are skipped. Return False if no block lacks a host copy, or
        if the host has no slot.
        """
        tiers = self._tiers
        parts, pending = [], [node]
        while pending:
            part = pending.pop()
            parts.append(part)
            pending.extend(part.children.values())
        lacking = [part for part in parts if part.uid not in tried and _lacks_host(part)]
        if not lacking or not tiers.eviction.available(Tier.HOST):
            return False
        for part in lacking:
            tried.add(part.uid)
            tiers.copies.save(part, part.end)
        return True

    # Sleep

    async def empty_device(self, *, keeps_blocks: bool) -> None:
        """Take every device slot out of use; return when the device is empty and no copy runs.

        The call waits until requests and pins release their blocks. The caller must have paused
        admissions, and must have entered `alone(Tier.DEVICE)`, so that no other call changes the
        tier. Cancelling the call restores the slots.

        Args:
            keeps_blocks: True to copy blocks that only the device has to the host, if the host has
                room.

        Raises:
            OwnershipError: an earlier call has emptied the device, and the device was not refilled
                since.
        """
        if self._asleep is not None:
            raise OwnershipError("the device already sleeps")
        with self._retiring(Tier.DEVICE, 0) as leaving:
            await self._retire(Tier.DEVICE, leaving, keeps_blocks=keeps_blocks)
            while self._tiers.mover.num_in_flight:  # copies between stores and host slots may run
                await self._tiers.work.next_change()
        self._asleep = self._tiers.slots.pools[Tier.DEVICE].allocate_from(0)
        self._tiers.slots.lend(Tier.DEVICE, self._asleep)

    def refill_device(self, num_blocks: int) -> None:
        """Use the device tier again after a sleep, with `num_blocks` free slots.

        Call this when memory for the slots has been allocated. Requests that wait for slots
        continue.
        """
        assert self._asleep is not None, "only a sleeping device is woken"
        slots, self._asleep = self._asleep, None
        pool = self._tiers.slots.pools[Tier.DEVICE]
        self._tiers.slots.unlend(Tier.DEVICE, slots)
        pool.release(slots)
        if num_blocks < pool.capacity:
            pool.shrink(num_blocks)
        else:
            pool.grow(num_blocks)
        self._tiers.index.spaces.order[Tier.DEVICE].resized(num_blocks)
        self._slots[Tier.DEVICE] = num_blocks
        self._tiers.work.capacity_changed()


def forgetting(tiers: Tiers, roots: Sequence[TreeNode]) -> Iterator[None]:
    """Remove all unused blocks below `roots` from device and host, in small steps.

    Blocks in use stay on device and host, but are recorded as not in storage.

    Args:
        tiers: the tiers to remove the blocks from.
        roots: root nodes of trees in the index.

    Yields:
        None, after each 128 nodes, so that the caller can let other tasks run. Nodes that leave the
            index or are split during such a pause are skipped.
    """
    pending = [(node, False) for root in roots for node in root.children.values()]
    num_left = _SLICE
    while pending:
        node, is_last = pending.pop()
        if node.parent is None or node.parent.children.get(node.key) is not node:
            continue
        if node.children and not is_last:
            pending.append((node, True))
            pending.extend((child, False) for child in node.children.values())
            continue
        if node.holders:
            tiers.copies.note_not_stored(node, node.start, node.end)
        else:
            tiers.eviction.forget(node, 0)
        num_left -= 1
        if not num_left:
            tiers.work.capacity_changed()
            yield
            num_left = _SLICE
    tiers.work.capacity_changed()


def _lacks_host(node: TreeNode) -> bool:
    return bool(node.copies[Tier.HOST].is_in(CopyState.ABSENT, 0, node.num_blocks).any())
