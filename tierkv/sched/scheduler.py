"""Admits requests in fair order, gives them blocks, and takes the blocks back into the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.match import Match
from tierkv.cache.node import Node, Tier
from tierkv.cache.pool import Ids
from tierkv.cache.states import CopyState
from tierkv.errors import (
    DuplicateRequestError,
    OutOfBlocksError,
    OwnershipError,
    RequestTooLargeError,
    ShuttingDownError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.sched.fetcher import Fetched
from tierkv.sched.loads import Load, Loads
from tierkv.sched.planner import AdmissionPlan, plan_admission
from tierkv.sched.request import Matched, Request, RequestSpec, RequestState
from tierkv.sched.tiers import Tiers
from tierkv.sched.waiting import Limits, Waiting, WaitingLine
from tierkv.transfer.mover import Movement


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    admitted_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0


class Scheduler:
    """Requests wait in the order that `WaitingLine` says; the first is admitted as soon as it fits.

    None overtakes the first, and whoever waits is the first some day, so none starves. Blocks for
    the whole request are taken at admission; `extend` takes more later, before anybody is admitted.
    limits: of each tenant; "" is the service's own. Those of tenants not named are `default`.
    """

    def __init__(
        self,
        tiers: Tiers,
        limits: Mapping[str, Limits] | None = None,
        default: Limits | None = None,
    ) -> None:
        self.tiers = tiers
        self.index = tiers.index
        self.stats = SchedulerStats()
        self._limits = dict(limits or {})
        self._default_limits = default or Limits()
        self._waiting = WaitingLine()
        self._extending: list[Request] = []
        self._is_paused = False
        self._running: dict[str, Request] = {}
        self._ending: set[Request] = set()  # ended, with kernels or copies still at work
        self._loads_of: dict[Request, list[Load]] = {}
        self.loads = Loads(tiers)
        self._is_draining = False
        self._is_pumping = False
        tiers.on_capacity(self._pump)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_requests(self) -> Sequence[Request]:
        return tuple(self._running.values())

    @property
    def ending_requests(self) -> Sequence[Request]:
        """Requests that have ended, whose blocks kernels or copies may still touch."""
        return tuple(self._ending)

    async def until_idle(self) -> None:
        """Return when no request runs."""
        while self._running:
            await self.tiers.next_change()

    def drain(self) -> None:
        """Take no new requests; those waiting are refused, those running go on."""
        self._is_draining = True
        for waiting in list(self._waiting):
            self._waiting.leave(waiting)
            if not waiting.outcome.done():
                waiting.outcome.set_exception(ShuttingDownError("this node is shutting down"))

    def limit(self, tenant: str, limits: Limits) -> None:
        """What `tenant`, a fingerprint's short name, may have running from now on."""
        self._limits[tenant] = limits
        self._pump()

    def pause(self) -> None:
        """Admit nobody until `unpause`; requests may come and wait, those running go on."""
        self._is_paused = True

    def unpause(self) -> None:
        self._is_paused = False
        self._pump()

    def check(self, spec: RequestSpec) -> None:
        """Raise what `admit` would raise at once, so that nothing is fetched for it in vain."""
        if self._is_draining:
            raise ShuttingDownError("this node is shutting down")
        taken = {waiting.spec.request_id for waiting in self._waiting}
        if spec.request_id in self._running or spec.request_id in taken:
            raise DuplicateRequestError(f"request {spec.request_id!r} is already running")
        plan_admission(self.index, self.tiers.pools[Tier.DEVICE], spec)  # raises if it never fits
        quota = self.index.root_of(spec.prompt).space.quota[Tier.DEVICE]
        if quota is not None and spec.num_blocks > quota:
            raise RequestTooLargeError(
                f"the request needs {spec.num_blocks} blocks, its tenant's quota is {quota}"
            )
        if not self._limits_of(spec).allow(1, spec.num_blocks):
            raise RequestTooLargeError(
                f"the request needs {spec.num_blocks} blocks, more than its tenant's limit"
            )

    async def admit(self, spec: RequestSpec, fetched: Fetched | None = None) -> Request:
        """Wait for the request's turn and blocks; then its loads are on the way.

        fetched: what was brought from storage for this request. It is released here, whatever
        happens: at the latest on return, and before that if requests that only wait hold each
        other up by what they had fetched. Raises DuplicateRequestError, RequestTooLargeError,
        ShuttingDownError. Cancelling it leaves nothing behind.
        """
        outcome: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        waiting = Waiting(spec, fetched, outcome)
        try:
            self.check(spec)
            self._waiting.join(waiting)
            self._pump()
            return await outcome
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.leave(waiting)
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
        while not self._extending and not self._is_paused:
            waiting = self._next()
            if waiting is None:
                return
            try:
                request = self._try_admit(waiting)
            except OutOfBlocksError:
                if self._is_busy or not self._unblock(waiting):
                    return
                continue
            except TierKVError as error:
                self._waiting.leave(waiting)
                waiting.outcome.set_exception(error)
                continue
            self._waiting.admitted(waiting, waiting.spec.num_blocks)
            waiting.outcome.set_result(request)

    def _next(self) -> Waiting | None:
        """The first in line whose tenant may have one more running."""
        for waiting in self._waiting.ordered():
            if waiting.outcome.done():  # cancelled; its task has not run yet
                self._waiting.leave(waiting)
                continue
            spec = waiting.spec
            tables = [
                len(request.block_table)
                for request in self._running.values()
                if request.spec.prompt.space == spec.prompt.space
            ]
            if self._limits_of(spec).allow(len(tables) + 1, sum(tables) + spec.num_blocks):
                return waiting
        return None

    def _limits_of(self, spec: RequestSpec) -> Limits:
        return self._limits.get(spec.prompt.space, self._default_limits)

    @property
    def _is_busy(self) -> bool:
        """Whether something is under way whose end makes room."""
        return bool(self._running or self.tiers.num_tasks)

    def _unblock(self, first: Waiting) -> bool:
        """Whether something was let go so that the first in line may fit now.

        Called when nothing runs. Then only what waiting requests hold stands in the way: what
        they had fetched, the last in line lets go first; and then the block of which the first
        would have copied a part.
        """
        for waiting in reversed(self._waiting.ordered()):
            if waiting.fetched is not None and not waiting.fetched.is_released:
                fetched, waiting.fetched = waiting.fetched, None
                fetched.release()
                return True
        if first.uses_partial:
            first.uses_partial = False
            return True
        return False

    def _try_admit(self, waiting: Waiting) -> Request:
        """Raises OutOfBlocksError, with nothing held, if it has to wait."""
        spec = waiting.spec
        plan = plan_admission(self.index, self.tiers.pools[Tier.DEVICE], spec)
        if not waiting.uses_partial:
            plan = replace(plan, match=replace(plan.match, partial=None))
        match = plan.match
        lease = self.index.hold(match.node, match.num_blocks)
        partial = match.partial
        source = self.index.hold(partial.node, partial.block + 1) if partial else None
        try:
            slots = self._take(spec, plan.num_slots)
        except OutOfBlocksError:
            if source is not None:
                self.index.release(source)
            self.index.release(lease)
            raise
        return self._start(waiting, plan, lease, source, slots)

    def _take(self, spec: RequestSpec, count: int) -> Ids:
        """Device slots within the tenant's quota, of which private blocks are a part too."""
        space = self.index.root_of(spec.prompt).space
        if not space.has_quota:
            return self.tiers.take(Tier.DEVICE, count)
        reserved = sum(
            sum(request.is_private)
            for request in (*self._running.values(), *self._ending)
            if request.spec.prompt.space == space.name
        )
        return self.tiers.take(Tier.DEVICE, count, space, reserved=reserved)

    def _start(
        self,
        waiting: Waiting,
        plan: AdmissionPlan,
        lease: Lease,
        source: Lease | None,
        slots: Ids,
    ) -> Request:
        spec, match, index = waiting.spec, plan.match, self.index
        loading, private = slots[: plan.num_loads], slots[plan.num_loads :]
        first_load = match.num_blocks - plan.num_loads
        arriving = index.slots(Tier.DEVICE, lease.node, match.device_blocks, first_load)
        loads = self.loads.of(arriving)
        for joined in loads:
            joined.num_users += 1
        if len(loading):
            loads.append(self.loads.start(lease, first_load, match.num_blocks, loading))
        movements = [load.movement for load in loads]
        if source is not None:
            assert match.partial is not None, "a source is of a partial match"
            movements.append(self._copy_partial(source, match.partial.block, private[:1]))

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
            gate=self.tiers.mover.gate([movement.submission for movement in movements]),
            loads=tuple(movements),
        )
        self._running[spec.request_id] = request
        self._loads_of[request] = loads
        self.tiers.write_down(lease.node, match.device_blocks)
        self.stats.admitted_requests += 1
        self.stats.prompt_tokens += spec.prompt.num_tokens
        self.stats.device_hit_tokens += matched.device_tokens
        self.stats.host_hit_tokens += matched.host_tokens
        self.stats.storage_hit_tokens += matched.storage_tokens
        return request

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
        prompt's start on, at least those of the last commit. Full blocks can be matched by others
        as soon as `after`, the events of the kernels that write them, are done; that is not
        waited for.

        Raises TransferError if a load the request depends on failed, and BadRequestError, with
        nothing changed, if the tokens are not the request's.
        """
        request.check_tokens(tokens)
        for movement in request.loads:
            await movement.done()
        # The movement is done a moment before its bookkeeping; both must be.
        for load in self._loads_of.get(request, ()):
            await asyncio.shield(load.settled)
            if load.is_failed:
                raise TransferError("blocks that this request waited for did not arrive")
        request.check_tokens(tokens)
        known = request.spec.prompt
        request.prompt = Prompt(tokens, self.index.block_size, known.extras, known.space)
        request.computed_tokens = request.prompt.num_tokens
        request.written = tuple(after)
        if all(event.is_done for event in after):
            self._insert(request, request.prompt)
        else:
            self.tiers.start(self._insert_later(request, request.prompt), "tierkv-commit")

    async def _insert_later(self, request: Request, prompt: Prompt) -> None:
        await self._written(request, request.written)
        if request in self._running_or_ending():
            self._insert(request, prompt)

    def _insert(self, request: Request, prompt: Prompt) -> None:
        """Give the index the full blocks of `prompt` that it lacks, and copy down what the rules
        want. Blocks that others put there meanwhile stay private to the request."""
        first = request.lease.num_blocks
        is_computed = prompt.num_tokens <= request.computed_tokens and not request.is_damaged
        if not is_computed or prompt.num_blocks <= first:
            return
        slots = request.block_table[first : prompt.num_blocks]
        request.lease, inserted = self.index.insert(
            Tier.DEVICE, request.lease, prompt, prompt.num_blocks, slots
        )
        for at, adopted in enumerate(inserted.adopted, start=first):
            if adopted:
                request.is_private[at] = False
        self.tiers.write_down(request.lease.node, request.lease.num_blocks)

    async def extend(self, request: Request, num_tokens: int) -> None:
        """Make room in the block table for `num_tokens` beyond the prompt's and the committed ones.

        All the blocks or none. It waits for them before anybody is admitted. Raises
        OutOfBlocksError if all that run wait for one another and this one is the least of them:
        `preempt` it then. Raises RequestTooLargeError if the device is too small for it.
        """
        request.check_running()
        size = self.index.block_size
        tokens = request.prompt.num_tokens + num_tokens
        count = -(-tokens // size) - len(request.block_table)
        if count <= 0:
            return
        if len(request.block_table) + count > self.tiers.pools[Tier.DEVICE].capacity:
            raise RequestTooLargeError(f"{tokens} tokens are more than the device holds")
        self._extending.append(request)
        try:
            while (slots := self._try_extend(request, count)) is None:
                await self.tiers.next_change()
                request.check_running()
        finally:
            self._extending.remove(request)
            self.tiers.capacity_changed()
        request.block_table = np.concatenate([request.block_table, slots])
        request.is_private += [True] * count

    def _try_extend(self, request: Request, count: int) -> Ids | None:
        try:
            return self._take(request.spec, count)
        except OutOfBlocksError:
            if self._must_yield(request):
                raise
            return None

    def _must_yield(self, request: Request) -> bool:
        """Whether nothing will make room unless one of those that extend gives up, and it is its
        turn to: the lowest priority, and among equals the last that came."""
        if self.tiers.num_tasks or len(self._extending) < len(self._running):
            return False
        order = list(self._running.values())
        return request is min(order, key=lambda one: (one.spec.priority, -order.index(one)))

    def preempt(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """Give all blocks back for a while. What was committed goes to the host, if it has room,
        and is the last to be evicted until `resume` or `abandon`. `after` is as in `end`."""
        self._end(request, RequestState.PREEMPTED, after)

    async def resume(self, request: Request, *, max_new_tokens: int) -> Request:
        """Wait for blocks again, as the request of the same id, with all that is still cached of
        the committed tokens; what is not, the engine computes. Raises what `admit` raises."""
        if request.state is not RequestState.PREEMPTED:
            raise OwnershipError(f"request {request.request_id!r} is not preempted")
        while request in self._ending:
            await self.tiers.next_change()
        spec = replace(
            request.spec, prompt=request.prompt, max_new_tokens=max_new_tokens, needs_logits=False
        )
        resumed = await self.admit(spec)
        self.abandon(request)
        return resumed

    def abandon(self, request: Request) -> None:
        """A preempted request will not come back: its blocks are blocks like others."""
        if request.state is not RequestState.PREEMPTED:
            raise OwnershipError(f"request {request.request_id!r} is not preempted")
        request.state = RequestState.ENDED
        if request.pinned is not None:
            self.index.unpin_softly(request.pinned)
            request.pinned = None

    def end(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """Give everything back. What was committed stays cached, the tail included.

        after: events of the kernels that may still use the blocks. Until they are done, and until
        every copy into the request's blocks has ended, none of its blocks can go to anybody.
        Raises OwnershipError if the request has ended already.
        """
        self._end(request, RequestState.ENDED, after)

    def _end(self, request: Request, state: RequestState, after: Sequence[Event]) -> None:
        request.check_running()
        request.state = state
        del self._running[request.request_id]
        events = (*request.written, *after)
        is_quiet = all(_is_over(event) for event in events)
        if is_quiet and all(movement.has_ended for movement in request.loads):
            request.is_damaged |= not all(_is_done(event) for event in events)
            self._finish(request)
        else:
            self._ending.add(request)
            self.tiers.start(self._end_later(request, events), "tierkv-end")

    async def _end_later(self, request: Request, events: Sequence[Event]) -> None:
        await self._written(request, events)
        for movement in request.loads:
            with suppress(TransferError):  # ended is all that counts here
                await movement.done()
        self._ending.remove(request)
        self._finish(request)

    async def _written(self, request: Request, events: Sequence[Event]) -> None:
        """Return when `events` are over. If one failed, nothing of the request is cached."""
        for event in events:
            try:
                await self.tiers.mover.poller.done(event)
            except TransferError:
                request.is_damaged = True

    def _finish(self, request: Request) -> None:
        self._insert(request, request.prompt)
        tail = self._keep_tail(request)
        if request.state is RequestState.PREEMPTED:
            end = tail or request.lease.node
            request.pinned = self.index.pin_softly(end, end.end)
            self.tiers.save(end, end.end)
        self.index.release(request.lease)
        for load in self._loads_of.pop(request, ()):
            self.loads.let_go(load)
        self.tiers.pools[Tier.DEVICE].release(request.private_slots())
        self.tiers.capacity_changed()

    def _keep_tail(self, request: Request) -> Node | None:
        """Cache the tail, if it is whole; where it is then."""
        prompt = request.prompt
        is_whole = request.computed_tokens == prompt.num_tokens and not request.is_damaged
        if not is_whole or not prompt.tail_tokens:
            return None
        if request.lease.num_blocks != prompt.num_blocks:
            return None  # a block above it could not be inserted
        at = prompt.num_blocks
        inserted = self.index.insert_tail(
            Tier.DEVICE, request.lease, prompt, int(request.block_table[at])
        )
        if inserted.adopted[0]:
            request.is_private[at] = False
            self.tiers.write_down(inserted.node, inserted.num_blocks)
        return inserted.node

    def _running_or_ending(self) -> set[Request]:
        return {*self._running.values(), *self._ending}


def _is_done(event: Event) -> bool:
    try:
        return event.is_done
    except TransferError:
        return False


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
