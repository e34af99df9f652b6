"""Starts a request: holds what it matched, takes its slots, and sets its loads going."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tierkv.cache.copies import CopyState
from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.match import Match
from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.errors import OutOfBlocksError, TransferError
from tierkv.sched.computing import Computing
from tierkv.sched.loads import Load, Loads
from tierkv.sched.planner import AdmissionPlan
from tierkv.sched.request import Matched, Request
from tierkv.sched.running import Running
from tierkv.sched.tiers import Tiers
from tierkv.sched.waiting import Waiting
from tierkv.transfer.mover import Movement


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start. shared_waits: requests that waited for another one's blocks instead
    of computing them; lost_waits: those of them for whom they did not come in time."""

    admitted_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    shared_waits: int = 0
    lost_waits: int = 0


@dataclass(frozen=True, slots=True)
class _Partial:
    """A cached block, of which the prompt shares the first tokens, and the private block that gets
    a copy of it. block: counted from the prompt's start."""

    source: Lease
    block: int
    target: Ids


class Starting:
    """All or nothing: a start that fails has changed nothing."""

    def __init__(self, tiers: Tiers, running: Running, loads: Loads, computing: Computing) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._running = running
        self._loads = loads
        self._computing = computing
        self.stats = SchedulerStats()

    def try_start(self, waiting: Waiting, plan: AdmissionPlan) -> Request:
        """Raises OutOfBlocksError, with nothing held, if it has to wait."""
        spec = waiting.spec
        if not waiting.uses_partial:
            plan = replace(plan, match=replace(plan.match, partial=None))
        match = plan.match
        lease = self._index.hold(match.node, match.num_blocks)
        partial = match.partial
        source = self._index.hold(partial.node, partial.block + 1) if partial else None
        try:
            slots = self.take(spec.prompt, plan.num_slots)
        except OutOfBlocksError:
            if source is not None:
                self._index.release(source)
            self._index.release(lease)
            raise
        return self._start(waiting, plan, lease, source, slots)

    def load(self, prompt: Prompt) -> Movement | None:
        """Bring to the device what the host has of `prompt`, for nobody yet; None if that is
        nothing. Raises OutOfBlocksError, with nothing held."""
        match = self._index.match(prompt)
        count, stop = match.host_blocks, match.num_blocks
        if not count:
            return None
        lease = self._index.hold(match.node, stop)
        try:
            load = self._load(lease, stop - count, stop, self.take(prompt, count))
        finally:
            self._index.release(lease)
        self._loads.let_go(load)
        return load.movement

    def _load(
        self, lease: Lease, first: int, stop: int, slots: Ids, partial: _Partial | None = None
    ) -> Load:
        """partial: every layer's gate waits for it too, so it goes with the others."""
        self._tiers.decisions.load_host += 1
        if partial is None:
            return self._loads.start(lease, first, stop, slots)
        source = partial.source
        beside = (self._host_slot(partial), partial.target)
        load = self._loads.start(lease, first, stop, slots, beside=beside)
        load.movement.when_ended(lambda: self._index.release(source))
        return load

    def take(self, prompt: Prompt, count: int) -> Ids:
        """Device slots within the tenant's quota, of which private blocks are a part too."""
        space = self._index.root_of(prompt).space
        if not space.has_quota:
            return self._tiers.take(Tier.DEVICE, count)
        reserved = self._running.private_blocks(space.name)
        return self._tiers.take(Tier.DEVICE, count, space, reserved=reserved)

    def _start(
        self,
        waiting: Waiting,
        plan: AdmissionPlan,
        lease: Lease,
        source: Lease | None,
        slots: Ids,
    ) -> Request:
        spec, match, index = waiting.spec, plan.match, self._index
        loading, private = slots[: plan.num_loads], slots[plan.num_loads :]
        first_load = match.num_blocks - plan.num_loads
        movements = []
        partial = None
        if source is not None:
            assert match.partial is not None, "a source is of a partial match"
            partial = _Partial(source, match.partial.block, private[:1])
            if self._is_on_device(partial) or not len(loading):
                movements.append(self._copy_partial(partial))
                partial = None  # else it goes with the load
        loads = []
        if match.device_blocks < first_load:
            arriving = index.slots(Tier.DEVICE, lease.node, match.device_blocks, first_load)
            loads = self._loads.of(arriving)
        for joined in loads:
            joined.num_users += 1
        if len(loading):
            loads.append(self._load(lease, first_load, match.num_blocks, loading, partial))
        movements += [load.movement for load in loads]

        self._index.count_hit(lease)
        # A table of its own: the pool may hand on a view of another array.
        cached = index.slots(Tier.DEVICE, lease.node, 0, match.num_blocks)
        table = np.concatenate([cached, private])
        is_private = np.zeros(len(table), np.bool_)
        is_private[match.num_blocks :] = True
        fetched = waiting.fetched
        came = _joined([fetched.tokens, *fetched.earlier]) if fetched else []
        matched = _matched(match, came, self._index.block_size, source)
        request = Request(
            spec=spec,
            prompt=spec.prompt,
            block_table=table,
            is_private=is_private,
            lease=lease,
            cached_tokens=matched.total_tokens,
            matched=matched,
            gate=self._tiers.mover.gate([movement.submission for movement in movements]),
            loads=tuple(movements),
        )
        self._running.add(request, plan.num_private)
        self._running.loads_of[request] = loads
        if spec.uses_cache:
            now = asyncio.get_running_loop().time()
            request.promise = self._computing.begin(
                request.lease.node, match.num_blocks, spec.prompt, now
            )
        self._tiers.write_down(lease.node, match.device_blocks)
        self.stats.admitted_requests += 1
        self.stats.prompt_tokens += spec.prompt.num_tokens
        self.stats.device_hit_tokens += matched.device_tokens
        self.stats.host_hit_tokens += matched.host_tokens
        self.stats.storage_hit_tokens += matched.storage_tokens
        return request

    def _is_on_device(self, partial: _Partial) -> bool:
        node, block = partial.source.node, partial.block
        return self._index.states(Tier.DEVICE, node, block, block + 1)[0] is CopyState.READY

    def _host_slot(self, partial: _Partial) -> Ids:
        block = partial.block
        return self._index.slots(Tier.HOST, partial.source.node, block, block + 1)

    def _copy_partial(self, partial: _Partial) -> Movement:
        source, block, mover = partial.source, partial.block, self._tiers.mover
        if self._is_on_device(partial):
            slot = self._index.slots(Tier.DEVICE, source.node, block, block + 1)
            movement = mover.copy_within(slot, partial.target)
        else:
            movement = mover.load(self._host_slot(partial), partial.target)
        work = self._release_after(movement, source)
        self._tiers.start(work, "tierkv-copy-partial", space=source.node.space.name)
        return movement

    async def _release_after(self, movement: Movement, lease: Lease) -> None:
        try:
            await movement.done()
        except TransferError:
            self._tiers.stats.failed_transfers += 1
        self._index.release(lease)
        self._tiers.capacity_changed()


def _joined(ranges: Sequence[range]) -> list[range]:
    """The same tokens, each once, in order."""
    joined: list[range] = []
    for one in sorted(ranges, key=lambda tokens: tokens.start):
        if joined and one.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, one.stop))
        else:
            joined.append(one)
    return joined


def _matched(match: Match, came: Sequence[range], block_size: int, source: Lease | None) -> Matched:
    """Count the matched tokens by the tier they came from. came: those that were brought for this
    request; some of them may be on the device by now, but they came from storage all the same."""
    full = match.num_blocks * block_size
    partial = match.partial.num_tokens if match.partial else 0
    on_device = (match.device_blocks + match.loading_blocks) * block_size
    storage = _count_below(full, came)
    device = on_device - _count_below(on_device, came)
    host = full - device - storage
    if partial and source is not None:
        block = source.node.copies[Tier.DEVICE].states
        if any(full in tokens for tokens in came):
            storage += partial
        elif block[source.num_blocks - 1 - source.node.start] == CopyState.READY:
            device += partial
        else:
            host += partial
    return Matched(device, host, storage)


def _count_below(stop: int, ranges: Sequence[range]) -> int:
    return sum(len(range(one.start, min(one.stop, stop))) for one in ranges)
