"""Copies that must come before an eviction, and the two steps that every copy down is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierkv.cache.index import Lease
from tierkv.cache.node import Node, Tier
from tierkv.cache.pool import Ids
from tierkv.cache.states import Change
from tierkv.errors import OutOfBlocksError, TransferError
from tierkv.sched.events import Happening
from tierkv.sched.planner import Step
from tierkv.sched.room import CopyDown, Room
from tierkv.storage.protocol import PutStatus
from tierkv.transfer.mover import Movement

log = logging.getLogger("tierkv.tiers")


class WriteBack(Room):
    """A slot is reused only after the copy of its block is done."""

    def _copy_down(self, tier: Tier, step: Step) -> CopyDown:
        node = step.victim.node
        first, stop = node.start + step.victim.start, node.start + step.victim.stop
        if tier is Tier.HOST:
            if self.storage is None:
                return CopyDown.IMPOSSIBLE
            lease = self.index.hold_as_is(node)
            self._on_the_way[tier] += stop - first
            end = self.begin_storing(node.space.name)
            self.start(self._flush_for_room(lease, first, stop, end), "tierkv-flush")
            return CopyDown.STARTED
        # What the host cannot take of a run is forgotten from its end, so that the rest is kept.
        room = self.available(Tier.HOST, node.space)
        if 0 < room < stop - first and not node.holders and not self.is_making_room(Tier.HOST):
            self.forget(node, step.victim.start + room)
            stop = first + room
        lease = self.index.hold_as_is(node)
        try:
            slots = self.take(Tier.HOST, stop - first, node.space)
        except OutOfBlocksError:
            self.index.release(lease)
            is_soon = self._on_the_way[Tier.HOST] and not self.num_late
            return CopyDown.LATER if is_soon else CopyDown.IMPOSSIBLE
        self._on_the_way[tier] += stop - first
        movement = self._begin_offload(node, first, stop, slots)
        work = self._offload_for_room(lease, first, stop, movement)
        self.start(work, "tierkv-write-back", space=node.space.name)
        return CopyDown.STARTED

    async def _offload_for_room(
        self, lease: Lease, first: int, stop: int, movement: Movement
    ) -> None:
        has_copy = False
        try:
            has_copy = await self._end_offload(lease.node, first, stop, movement)
        finally:
            self._on_the_way[Tier.DEVICE] -= stop - first
            self.index.release(lease)
            node = lease.node
            if not has_copy and not node.holders and node.copies[Tier.DEVICE].num_present:
                self.forget(node, max(first - node.start, 0))  # or it would be tried for ever
            self.capacity_changed()
        self._free_ahead(Tier.DEVICE)  # what was copied ahead of need goes now

    async def _flush_for_room(
        self, lease: Lease, first: int, stop: int, end: Callable[[], None]
    ) -> None:
        try:
            await self._flush(lease.node, first, stop)
            # Stored or not, it was tried: the slots are needed, and the store must not hold
            # up inference. Without the mark the next plan would try again for ever.
            self.index.mark_stored(lease.node, first, stop)
        finally:
            end()
            self._on_the_way[Tier.HOST] -= stop - first
            self.index.release(lease)
            self.capacity_changed()
        self._free_ahead(Tier.HOST)

    def _begin_offload(self, node: Node, first: int, stop: int, slots: Ids) -> Movement:
        """Start to copy path blocks [first, stop), held and without a host copy, to `slots`."""
        index = self.index
        index.change(Tier.HOST, node, first, stop, Change.RESERVE, slots=slots)
        self.num_offloads += 1
        return self.mover.offload(slots, index.slots(Tier.DEVICE, node, first, stop))

    async def _end_offload(self, node: Node, first: int, stop: int, movement: Movement) -> bool:
        """Wait for the copy and note its result; whether the blocks have a host copy now."""
        index = self.index
        try:
            try:
                await movement.done()
            finally:
                self.num_offloads -= 1
        except TransferError as error:
            log.warning("offload of %d blocks failed: %s", stop - first, error)
            self.stats.failed_transfers += 1
            self.give(Tier.HOST, index.change(Tier.HOST, node, first, stop, Change.FAIL))
            return False
        index.change(Tier.HOST, node, first, stop, Change.ARRIVE)
        self.stats.offloaded_blocks += stop - first
        self.events.tell(Happening.STORED, "host", node, first, stop)
        self.capacity_changed()  # who waits for these blocks on the host, too
        return True

    async def _flush(self, node: Node, first: int, stop: int) -> bool:
        """Store path blocks [first, stop), held and ready on the host; whether all are stored."""
        storage = self.storage
        if storage is None:  # detached meanwhile
            self.index.unmark_stored(node, first, stop)
            return False
        keys = self.keys_of(node, first, stop)
        # A block is of no use without those before it, so of equal hits the first is worth most.
        worth = [node.hits + 1 / (1 + at) for at in range(first, stop)]
        slots = self.index.slots(Tier.HOST, node, first, stop)
        outcomes = await storage.flush(keys, slots, worth)
        fine = (PutStatus.STORED, PutStatus.EXISTED)
        for at, outcome in enumerate(outcomes, start=first):
            if outcome.status not in fine:
                self._not_stored.warn(outcome.reason)
                self.index.unmark_stored(node, at, at + 1)
            elif outcome.status is PutStatus.STORED:
                self.events.tell(Happening.STORED, "storage", node, at, at + 1)
        return all(outcome.status in fine for outcome in outcomes)
