"""Copies that must come before an eviction, and the two steps that every copy down is made of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.cache.copies import Change
from tierkv.cache.index import Lease
from tierkv.cache.keys import StoredKey
from tierkv.cache.node import Node, Tier
from tierkv.cache.pool import Ids
from tierkv.errors import OutOfBlocksError, TransferError
from tierkv.sched.events import Happening
from tierkv.sched.planner import Step
from tierkv.sched.room import CopyDown, Room
from tierkv.storage.protocol import PutStatus
from tierkv.transfer.mover import Movement

log = logging.getLogger("tierkv.tiers")


@dataclass(slots=True, eq=False)
class Flush:
    """Path blocks from `first` on that a store is given, out of host slots; see `begin_reading`."""

    space: str
    first: int
    keys: list[StoredKey]
    slots: Ids
    worth: list[float]


class WriteBack(Room):
    """A slot is reused only after the copy of its block is done."""

    def _copy_down(self, tier: Tier, step: Step) -> CopyDown:
        node = step.victim.node
        first, stop = node.start + step.victim.start, node.start + step.victim.stop
        if tier is Tier.HOST:
            if self.storage is None:
                return CopyDown.IMPOSSIBLE
            # Stored or not, it is tried, and may go then: the slots are needed, and the store must
            # not hold up inference. Without the mark the next plan would try again for ever.
            self.index.mark_stored(node, first, stop)
            self._on_the_way[tier] += stop - first
            end = self.begin_storing(node.space.name)
            self.start(
                self._flush_for_room(self._begin_flush(node, first, stop), end), "tierkv-flush"
            )
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
            is_soon = self._on_the_way[Tier.HOST] and not self.num_late and self._may_wait()
            return CopyDown.LATER if is_soon else CopyDown.IMPOSSIBLE
        self._on_the_way[tier] += stop - first
        movement = self._begin_offload(node, first, stop, slots)
        work = self._offload_for_room(lease, first, stop, movement)
        self.start(work, "tierkv-write-back", space=node.space.name)
        return CopyDown.STARTED

    def _may_wait(self) -> bool:
        """Whether who needs room may wait for a store; if so, they do from now on."""
        may = self.allowance.look(asyncio.get_running_loop().time())
        self.allowance.is_waiting = may
        return may

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

    async def _flush_for_room(self, flush: Flush, end: Callable[[], None]) -> None:
        try:
            await self._end_flush(flush)
        finally:
            end()
            self.allowance.look(asyncio.get_running_loop().time())
            self.allowance.is_waiting = False  # who waits asks again now
            self._on_the_way[Tier.HOST] -= len(flush.slots)
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

    def _begin_flush(self, node: Node, first: int, stop: int) -> Flush:
        """Path blocks [first, stop), ready on the host, which a store is given in `_end_flush`."""
        # A block is of no use without those before it, so of equal hits the first is worth most.
        worth = [node.hits + 1 / (1 + at) for at in range(first, stop)]
        slots = self.index.slots(Tier.HOST, node, first, stop)
        self.begin_reading(slots)
        return Flush(node.space.name, first, self.keys_of(node, first, stop), slots, worth)

    async def _end_flush(self, flush: Flush) -> list[bool]:
        """Store them; which of them are stored. The index may have other blocks there by now."""
        try:
            storage = self.storage
            if storage is None:  # detached meanwhile
                return [False] * len(flush.keys)
            outcomes = await storage.flush(flush.keys, flush.slots, flush.worth)
        finally:
            self.end_reading(flush.slots)
        for at, (key, outcome) in enumerate(zip(flush.keys, outcomes, strict=True), flush.first):
            if outcome.status is PutStatus.STORED:
                self.events.tell_stored(flush.space, at, key.digest)
            elif outcome.status is not PutStatus.EXISTED:
                self._not_stored.warn(outcome.reason)
        return [outcome.status in (PutStatus.STORED, PutStatus.EXISTED) for outcome in outcomes]
