"""Admits requests in fair order, gives them blocks, and takes the blocks back into the cache."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.match import Match
from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.cache.states import Change, CopyState
from tierkv.errors import (
    DuplicateRequestError,
    OutOfBlocksError,
    ShuttingDownError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.sched.fetcher import Fetched
from tierkv.sched.planner import AdmissionPlan, plan_admission
from tierkv.sched.request import Matched, Request, RequestSpec, RequestState
from tierkv.sched.tiers import Tiers
from tierkv.transfer.gate import Submission
from tierkv.transfer.mover import Movement


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    admitted_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A load of index blocks under way. settled: its bookkeeping is done, whatever the result."""

    movement: Movement
    settled: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Waiting:
    spec: RequestSpec
    fetched: Fetched | None
    outcome: asyncio.Future[Request]

    def let_go(self) -> None:
        if self.fetched is not None:
            self.fetched.release()


class Scheduler:
    """Requests wait in the order in which they came; the first is admitted as soon as it fits.

    None overtakes, so none starves. Blocks for the whole request are taken at admission.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.index = tiers.index
        self.stats = SchedulerStats()
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[str, Request] = {}
        self._loads: dict[int, _Load] = {}  # by device slot of the block that is being loaded
        self._is_draining = False
        self._is_pumping = False
        tiers.on_capacity(self._pump)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_requests(self) -> Sequence[Request]:
        return tuple(self._running.values())

    def drain(self) -> None:
        """Take no new requests; those waiting are refused, those running go on."""
        self._is_draining = True
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.outcome.done():
                waiting.outcome.set_exception(ShuttingDownError("this node is shutting down"))

    def check(self, spec: RequestSpec) -> None:
        """Raise what `admit` would raise at once, so that nothing is fetched for it in vain."""
        if self._is_draining:
            raise ShuttingDownError("this node is shutting down")
        taken = {waiting.spec.request_id for waiting in self._waiting}
        if spec.request_id in self._running or spec.request_id in taken:
            raise DuplicateRequestError(f"request {spec.request_id!r} is already running")
        plan_admission(self.index, self.tiers.pools[Tier.DEVICE], spec)  # raises if it never fits

    async def admit(self, spec: RequestSpec, fetched: Fetched | None = None) -> Request:
        """Wait for the request's turn and blocks; then its loads are on the way.

        fetched: what was brought from storage for this request. It is released here, whatever
        happens: at the latest on return, and before that if requests that only wait hold each
        other up by what they had fetched. Raises DuplicateRequestError, RequestTooLargeError,
        ShuttingDownError. Cancelling it leaves nothing behind.
        """
        outcome: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(spec, fetched, outcome)
        try:
            self.check(spec)
            self._waiting.append(waiting)
            self._pump()
            return await outcome
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif outcome.done() and not outcome.cancelled() and outcome.exception() is None:
                self.end(outcome.result())
            self._pump()  # the next in line may fit where this one did not
            raise
        finally:
            waiting.let_go()

    def _pump(self) -> None:
        if self._is_pumping:
            return  # called from within, by what the loop below lets go; it looks again anyway
        self._is_pumping = True
        try:
            self._admit_waiting()
        finally:
            self._is_pumping = False

    def _admit_waiting(self) -> None:
        while self._waiting:
            waiting = self._waiting[0]
            if waiting.outcome.done():  # cancelled; its task has not run yet
                self._waiting.popleft()
                continue
            try:
                request = self._try_admit(waiting)
            except OutOfBlocksError:
                if not self._unblock():
                    return
                continue
            except TierKVError as error:
                self._waiting.popleft()
                waiting.outcome.set_exception(error)
                continue
            self._waiting.popleft()
            waiting.outcome.set_result(request)

    def _unblock(self) -> bool:
        """Whether something was let go so that the first in line may fit now.

        While requests run or copies are under way, their end makes room. Without any, only what
        waiting requests had fetched can stand in the way: the last in line lets go first.
        """
        if self._running or self.tiers.num_tasks:
            return False
        for waiting in reversed(self._waiting):
            if waiting.fetched is not None and not waiting.fetched.is_released:
                fetched, waiting.fetched = waiting.fetched, None
                fetched.release()
                return True
        return False

    def _try_admit(self, waiting: _Waiting) -> Request:
        """Raises OutOfBlocksError, with nothing held, if it has to wait."""
        spec = waiting.spec
        plan = plan_admission(self.index, self.tiers.pools[Tier.DEVICE], spec)
        match = plan.match
        lease = self.index.hold(match.node, match.num_blocks)
        partial = match.partial
        source = self.index.hold(partial.node, partial.block + 1) if partial else None
        try:
            slots = self.tiers.take(Tier.DEVICE, plan.num_slots)
        except OutOfBlocksError:
            if source is not None:
                self.index.release(source)
            self.index.release(lease)
            raise
        return self._start(waiting, plan, lease, source, slots)

    def _start(
        self,
        waiting: _Waiting,
        plan: AdmissionPlan,
        lease: Lease,
        source: Lease | None,
        slots: Ids,
    ) -> Request:
        spec, match = waiting.spec, plan.match
        loading, private = slots[: plan.num_loads], slots[plan.num_loads :]
        first_load = match.num_blocks - plan.num_loads
        joined = self._joined(lease, match)
        submissions: list[Submission] = [load.movement.submission for load in joined]
        loads = [load.movement for load in joined]

        if source is not None:
            assert match.partial is not None, "a source is of a partial match"
            movement = self._copy_partial(source, match.partial.block, private[:1])
            submissions.append(movement.submission)
            loads.append(movement)
        if len(loading):
            load = self._load(lease, first_load, match.num_blocks, loading)
            submissions.append(load.movement.submission)
            loads.append(load.movement)

        self.index.count_hit(lease)
        table = np.concatenate(
            [self.index.slots(Tier.DEVICE, lease.node, 0, match.num_blocks), private]
        )
        fetched_tokens = waiting.fetched.tokens if waiting.fetched else range(0)
        matched = _matched(match, fetched_tokens, self.index.block_size, source)
        request = Request(
            spec=spec,
            prompt=spec.prompt,
            block_table=table,
            is_private=[False] * match.num_blocks + [True] * len(private),
            lease=lease,
            cached_tokens=matched.total_tokens,
            matched=matched,
            gate=self.tiers.mover.gate(submissions),
            loads=tuple(loads),
        )
        self._running[spec.request_id] = request
        self.tiers.write_down(lease.node, match.device_blocks)
        self.stats.admitted_requests += 1
        self.stats.prompt_tokens += spec.prompt.num_tokens
        self.stats.device_hit_tokens += matched.device_tokens
        self.stats.host_hit_tokens += matched.host_tokens
        self.stats.storage_hit_tokens += matched.storage_tokens
        return request

    # Loads

    def _joined(self, lease: Lease, match: Match) -> list[_Load]:
        """Loads of others that this request waits for too."""
        first = match.device_blocks
        slots = self.index.slots(
            Tier.DEVICE, lease.node, first, match.num_blocks - match.host_blocks
        )
        found = {id(load): load for s in slots.tolist() if (load := self._loads.get(s))}
        return list(found.values())

    def _load(self, lease: Lease, first: int, stop: int, slots: Ids) -> _Load:
        """Bring path blocks [first, stop) to device `slots`, under a lease of the load's own."""
        index = self.index
        own = index.hold_as_is(lease.node)
        host = index.slots(Tier.HOST, lease.node, first, stop)
        index.change(Tier.DEVICE, lease.node, first, stop, Change.RESERVE, slots=slots)
        movement = self.tiers.mover.load(host, slots)
        load = _Load(movement, asyncio.get_running_loop().create_future())
        self._loads |= dict.fromkeys(slots.tolist(), load)
        self.tiers.start(self._follow_load(load, own, first, stop, slots), "tierkv-load")
        return load

    async def _follow_load(
        self, load: _Load, own: Lease, first: int, stop: int, slots: Ids
    ) -> None:
        index, tiers = self.index, self.tiers
        try:
            await load.movement.done()
            arrived = all(
                state is CopyState.READY for state in index.states(Tier.DEVICE, own.node, 0, first)
            )
        except TransferError:
            arrived = False
        if arrived:
            index.change(Tier.DEVICE, own.node, first, stop, Change.ARRIVE)
        else:  # it failed, or a block above it did: a device copy without its path is no use
            tiers.stats.failed_transfers += 1
            index.change(Tier.DEVICE, own.node, first, stop, Change.FAIL)
            tiers.pools[Tier.DEVICE].release(slots)
        for slot in slots.tolist():
            del self._loads[slot]
        index.release(own)
        load.settled.set_result(None)
        tiers.capacity_changed()

    def _copy_partial(self, source: Lease, block: int, target: Ids) -> Movement:
        """Copy a cached block, of which the prompt shares the first tokens, to a private one."""
        index, mover = self.index, self.tiers.mover
        on_device = index.states(Tier.DEVICE, source.node, block, block + 1)[0]
        if on_device is CopyState.READY:
            movement = mover.copy_within(
                index.slots(Tier.DEVICE, source.node, block, block + 1), target
            )
        else:
            movement = mover.load(index.slots(Tier.HOST, source.node, block, block + 1), target)
        self.tiers.start(self._release_after(movement, source), "tierkv-copy-partial")
        return movement

    async def _release_after(self, movement: Movement, lease: Lease) -> None:
        try:
            await movement.done()
        except TransferError:
            self.tiers.stats.failed_transfers += 1
        self.index.release(lease)
        self.tiers.capacity_changed()

    # Growing and ending

    async def commit(self, request: Request, tokens: bytes, *, after: Sequence[Event] = ()) -> None:
        """Tell that KV of the first tokens is in the block table: `tokens`, packed, from the
        prompt's start on. Full blocks become matchable by others at once.

        after: events of the kernels that wrote them; copies of the blocks wait for these.
        Raises TransferError if a load the request depends on failed.
        """
        request.check_running()
        for movement in request.loads:
            await movement.done()
        # The movement is done a moment before its bookkeeping; both must be.
        slots = request.block_table.tolist()
        for load in {id(one): one for s in slots if (one := self._loads.get(s))}.values():
            await asyncio.shield(load.settled)
        request.check_running()
        self._commit(request, tokens, after)

    def _commit(self, request: Request, tokens: bytes, after: Sequence[Event]) -> None:
        prompt = Prompt(tokens, self.index.block_size, request.spec.prompt.extras)
        request.prompt = prompt
        request.computed_tokens = prompt.num_tokens
        first = request.lease.num_blocks
        if prompt.num_blocks > first:
            slots = request.block_table[first : prompt.num_blocks]
            request.lease, inserted = self.index.insert(
                Tier.DEVICE, request.lease, prompt, prompt.num_blocks, slots
            )
            for at, adopted in enumerate(inserted.adopted, start=first):
                if adopted:
                    request.is_private[at] = False
            self.tiers.write_down(request.lease.node, request.lease.num_blocks, after)

    def end(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """Give everything back. What was committed stays cached, the tail included.

        after: events of the kernels that may still use the blocks; until they are done, and until
        every copy into the request's blocks has ended, none of its slots is given to anybody.
        Raises OwnershipError if the request has ended already.
        """
        request.check_running()
        request.state = RequestState.ENDED
        del self._running[request.request_id]
        self._keep_tail(request, after)
        waits: list[Coroutine[None, None, None]] = [
            movement.done() for movement in request.loads if not movement.has_ended
        ]
        waits += [self._event_done(event) for event in after if not _is_over(event)]
        self.index.release(request.lease)
        self.tiers.give_after(Tier.DEVICE, request.private_slots(), waits)
        self.tiers.capacity_changed()

    def _keep_tail(self, request: Request, after: Sequence[Event]) -> None:
        prompt = request.prompt
        if request.computed_tokens != prompt.num_tokens or not prompt.tail_tokens:
            return
        if request.lease.num_blocks != prompt.num_blocks:
            return  # a block above it could not be inserted
        at = prompt.num_blocks
        inserted = self.index.insert_tail(
            Tier.DEVICE, request.lease, prompt, int(request.block_table[at])
        )
        if inserted.adopted[0]:
            request.is_private[at] = False
            self.tiers.write_down(inserted.node, inserted.num_blocks, after)

    async def _event_done(self, event: Event) -> None:
        await self.tiers.mover.poller.done(event)


def _is_over(event: Event) -> bool:
    try:
        return event.is_done
    except TransferError:
        return True


def _matched(match: Match, fetched_tokens: range, block_size: int, source: Lease | None) -> Matched:
    """Count the matched tokens by the tier they came from."""
    on_device = (match.device_blocks + match.loading_blocks) * block_size
    full = match.num_blocks * block_size
    partial = match.partial.num_tokens if match.partial else 0
    below = range(on_device, full)
    device, host = on_device, 0
    fetched = len(
        range(max(below.start, fetched_tokens.start), min(below.stop, fetched_tokens.stop))
    )
    host = len(below) - fetched
    if partial and source is not None:
        block = source.node.copies[Tier.DEVICE].states
        if full in fetched_tokens:
            fetched += partial
        elif block[source.num_blocks - 1 - source.node.start] == CopyState.READY:
            device += partial
        else:
            host += partial
    return Matched(device, host, fetched)
