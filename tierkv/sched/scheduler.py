"""Requests from their admission, in fair order, to their end: what they leave in the cache while
they run, and when they end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from time import monotonic

import msgspec

from tierkv import tracing
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Ids, Tier, TreeNode
from tierkv.errors import (
    DuplicateRequestError,
    OutOfBlocksError,
    OwnershipError,
    RequestAbortedError,
    ShuttingDownError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.sched.admission import (
    Admissions,
    Growth,
    HostLoads,
    SchedulerStats,
    Starts,
)
from tierkv.sched.events import Happening
from tierkv.sched.fair_queue import Waiting, WaitingLine
from tierkv.sched.fetch import Fetched
from tierkv.sched.request import Computing, Request, RequestSpec, RequestState, Running
from tierkv.sched.tenants import Limits, TenantLimits
from tierkv.sched.tiers import Tiers
from tierkv.sched.worth import PrefillSpeed

__all__ = ["Scheduler", "SchedulerStats"]


class Scheduler:
    """Requests wait in the order that `WaitingLine` says; the first is admitted as soon as it fits.

    None overtakes the first, and whoever waits is the first some day, so none starves. Blocks for
    the whole request are taken at admission; `extend` takes more later, before anybody is admitted.
    limits: of each tenant; "" is the service's own. Those of tenants not named are `default`.
    prefill: what computing takes; a request waits for blocks that another one is computing where
        that is estimated to be sooner (see Computing), while those behind it go on.
    """

    def __init__(
        self,
        tiers: Tiers,
        limits: Mapping[str, Limits] | None = None,
        default: Limits | None = None,
        *,
        prefill: PrefillSpeed | None = None,
    ) -> None:
        self.tiers = tiers
        self.index = tiers.index
        self._limits = TenantLimits(tiers.index, tiers.slots.pools[Tier.DEVICE], limits, default)
        self._waiting = WaitingLine()
        self._running = Running()
        self._is_draining = False
        self._preempted: set[Request] = set()  # until they are resumed or abandoned
        self.loads = HostLoads(tiers)
        self.computing = Computing(prefill or PrefillSpeed(), self._pump, tiers.decisions)
        self._starts = Starts(
            tiers,
            self._running,
            self.loads,
            self.computing,
            given=self._waiting.given,
            end=self.end,
        )
        self._growth = Growth(
            tiers,
            self._running,
            self._starts,
            limits=self._limits,
            line=self._waiting,
        )
        self._admissions = Admissions(
            tiers,
            self._waiting,
            self._running,
            starts=self._starts,
            growth=self._growth,
            limits=self._limits,
            computing=self.computing,
        )
        tiers.work.on_capacity(self._admissions.pump)

    def _pump(self) -> None:
        self._admissions.pump()

    @property
    def stats(self) -> SchedulerStats:
        return self._starts.counted()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_requests(self) -> Sequence[Request]:
        return tuple(self._running.by_id.values())

    @property
    def ending_requests(self) -> Sequence[Request]:
        """Requests that have ended, whose blocks kernels or copies may still touch."""
        return tuple(self._running.ending)

    async def until_idle(self) -> None:
        """Return when no request runs."""
        while self._running.by_id:
            await self.tiers.work.next_change()

    def drain(self) -> None:
        """Take no new requests; those waiting are refused, those running go on."""
        self._is_draining = True
        for waiting in list(self._waiting):
            self._waiting.leave(waiting)
            if not waiting.outcome.done():
                waiting.outcome.set_exception(ShuttingDownError("this node is shutting down"))

    def limit(self, tenant: str, limits: Limits) -> None:
        """What `tenant`, a fingerprint's short name, may have running from now on."""
        self._limits.set(tenant, limits)
        self.tiers.work.capacity_changed()  # those that run and want more may have it, too

    def has_limits_set(self, tenant: str) -> bool:
        return self._limits.are_set(tenant)

    def forget_turns(self, tenant: str) -> None:
        """A tenant without requests is no more, or is closed for a while."""
        self._waiting.forget(tenant)

    def forget_limits(self, tenant: str) -> None:
        """It has the default ones again."""
        self._limits.forget(tenant)

    def is_used_by(self, tenant: str) -> bool:
        """Whether requests of this tenant run, wait, end, or are to be resumed."""
        return (
            self._waiting.has_tenant(tenant)
            or self._running.has_tenant(tenant)
            or any(one.space == tenant for one in self._preempted)
        )

    @property
    def is_paused(self) -> bool:
        return self._admissions.is_paused

    def pause(self, *, why: str = "asked") -> None:
        """Admit nobody until `unpause` for the same reason; requests may come and wait, those
        running go on. What was fetched for those that wait is held no longer: a sleep or a shrink
        would wait for it, and they for the end of that."""
        self._admissions.pauses.add(why)
        for waiting in list(self._waiting):
            waiting.release_fetched()

    def unpause(self, *, why: str = "asked") -> None:
        self._admissions.pauses.discard(why)
        self._pump()

    def findings(self) -> list[str]:
        """What is wrong with the requests, in words, [] if nothing is."""
        running = self._running
        wrong = running.findings() + self._waiting.findings()
        wrong += self.computing.findings(sum(1 for _ in running))
        both = {one.spec.request_id for one in self._waiting} & running.by_id.keys()
        wrong += [f"request {name!r} waits and runs" for name in sorted(both)]
        for one in running.by_id.values():
            has_failed = any(load.is_failed for load in self.loads.used_by.get(one, ()))
            wrong += one.findings(self.index, has_failed=has_failed)
        for one in self.loads.used_by:
            if one not in running:
                wrong.append(f"request {one.request_id!r} has ended, but its loads are kept")
        return wrong + self._preempted_findings()

    def _preempted_findings(self) -> list[str]:
        """Of those that wait to be resumed, and of the soft pins, which are theirs or asked for."""
        state, ends = RequestState.PREEMPTED, self.tiers.pins.soft_ends
        wrong = [
            f"request {one.request_id!r} is listed as preempted, but {one.state.value}"
            for one in self._preempted
            if one.state is not state
        ]
        ends += [one.pinned for one in self._preempted if one.pinned is not None]
        lost = [one for one in self._running.ending if one.state is state]
        if not self._preempted.issuperset(lost):
            wrong.append("a request was preempted that is not listed")
        pins = Counter(part for end in ends for part in end.path())
        if any(node.soft_pins != pins[node] for node in self.index.spaces.nodes()):
            wrong.append(
                "blocks are softly pinned more or less often than pins end on or below them"
            )
        return wrong

    def check(self, spec: RequestSpec) -> None:
        """Raise what `admit` would raise at once, so that nothing is fetched for it in vain."""
        if self._is_draining:
            raise ShuttingDownError("this node is shutting down")
        if spec.request_id in self._running.by_id or self._waiting.find(spec.request_id):
            raise DuplicateRequestError(f"request {spec.request_id!r} is already running")
        self._limits.check(spec)

    async def admit(self, spec: RequestSpec, fetched: Fetched | None = None) -> Request:
        """Wait for the request's turn and blocks; then its loads are on the way.

        fetched: what was brought from storage for this request. It is released here, whatever
        happens: at the latest on return, and before that if requests that only wait hold each
        other up by what they had fetched. Raises DuplicateRequestError, RequestTooLargeError,
        ShuttingDownError, RequestAbortedError. Cancelling it leaves nothing behind.
        """
        try:
            self.check(spec)
            if tracing.is_on():
                return await self._traced(spec, fetched)
            request = self._admissions.admit_now(spec, fetched)
            return request if request is not None else await self._in_turn(spec, fetched)
        finally:
            if fetched is not None:
                fetched.release()

    async def _traced(self, spec: RequestSpec, fetched: Fetched | None) -> Request:
        with tracing.span("queue") as span:
            request = self._admissions.admit_now(spec, fetched)
            if request is None:
                request = await self._in_turn(spec, fetched)
            span.set_attributes(
                msgspec.structs.asdict(request.matched) | {"missed": request.missed}
            )
        return request

    async def _in_turn(self, spec: RequestSpec, fetched: Fetched | None) -> Request:
        outcome: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        waiting = Waiting(spec, fetched, outcome)
        try:
            self._admissions.join(waiting)
            return await outcome
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.leave(waiting)
            elif outcome.done() and not outcome.cancelled() and outcome.exception() is None:
                self.end(outcome.result())
            self._pump()  # the next in line may fit where this one did not
            raise

    async def load_ahead(self, prompt: Prompt) -> None:
        """Bring to the device what the host has of `prompt`, for a request that is to come; return
        when it is there. Nothing happens if there is no room, or somebody waits for it. Raises
        TransferError; cancelling the wait does not touch the copy."""
        if self.is_paused or self._is_draining or self._waiting or self._growth.extending:
            return
        try:
            movement = self._starts.load(prompt)
        except OutOfBlocksError:
            return
        if movement is not None:
            await movement.done()

    def take_device(self, prompt: Prompt, count: int) -> Ids:
        """Device slots for blocks of `prompt` that somebody else brings, within its tenant's quota.
        Raises OutOfBlocksError with none taken."""
        self.index.at(monotonic())
        return self._starts.take(self.index.spaces.root_of(prompt).space, count)

    def abort(self, request_id: str) -> bool:
        """Nobody wants this request any more; whether there was one.

        One that waits is refused with RequestAbortedError. One that runs may have kernels at work,
        of which only its engine knows: its next commit or extend raises RequestAbortedError, and
        its blocks go when the engine ends it. One that is preempted is abandoned.
        """
        waiting = self._waiting.find(request_id)
        if waiting is not None and not waiting.outcome.done():
            self._waiting.leave(waiting)
            message = f"request {request_id!r} was aborted"
            waiting.outcome.set_exception(RequestAbortedError(message))
            self._pump()
            return True
        request = self._running.by_id.get(request_id)
        if request is None:
            idle = [one for one in self._preempted if one.request_id == request_id]
            for one in idle:
                self.abandon(one)
            return bool(idle)
        request.is_aborted = True
        if request.promise is not None:
            self.computing.end(request.promise)
        self.tiers.work.capacity_changed()  # wakes it if it waits for more blocks
        return True

    # Growing and ending

    async def commit(self, request: Request, tokens: bytes, *, after: Sequence[Event] = ()) -> None:
        """Tell that KV of the first tokens is in the block table: `tokens`, packed, from the
        prompt's start on, at least those of the last commit. Full blocks can be matched by others
        as soon as `after`, the events of the kernels that write them, are done; that is not
        waited for.

        Raises TransferError if a load the request depends on failed, RequestAbortedError, and
        BadRequestError, with nothing changed, if the tokens are not the request's.
        """
        request.check_tokens(tokens)
        if request.loads:
            await self._all_arrived(request)
            request.check_tokens(tokens)
        prompt = request.spec.prompt
        if tokens is not prompt.tokens:
            prompt = Prompt(tokens, prompt.block_size, prompt.extras, prompt.space)
        request.prompt, request.computed_tokens = prompt, prompt.num_tokens
        if request.written or after:
            # Kernels of earlier commits may still write: what comes now is not there before them.
            request.written = tuple(one for one in (*request.written, *after) if not _is_done(one))
        if request.written:
            self.tiers.work.start(self._insert_later(request, prompt), "tierkv-commit")
        else:
            self._insert(request, prompt)

    async def brought(self, request: Request, num_tokens: int, *, num_direct: int) -> None:
        """Its first `num_tokens` prompt tokens are in the block table: those that it lacked came
        from storage after its start, `num_direct` of them from another node's memory. Raises what
        `commit` does."""
        prompt, lease = request.spec.prompt, request.lease
        start = lease.num_blocks
        if request.promise is not None:
            self.computing.brought(request.promise, num_tokens // prompt.block_size)
        width = prompt.block_token_bytes // prompt.block_size
        await self.commit(request, prompt.tokens[: num_tokens * width])
        self.index.mark_stored(lease.node, min(start, lease.num_blocks), lease.num_blocks)
        self._starts.brought(request, num_tokens, num_direct=num_direct)

    def brought_all(self, request: Request) -> None:
        """Nothing more of its prompt comes from storage: it computes the rest, or has ended."""
        self._starts.brought_all(request)

    async def _all_arrived(self, request: Request) -> None:
        """Return when what it matched is on the device, and the index knows it."""
        for movement in request.loads:
            await movement.done()
        # The movement is done a moment before its bookkeeping; both must be.
        for load in self.loads.used_by.get(request, ()):
            await asyncio.shield(load.settled)

    async def _insert_later(self, request: Request, prompt: Prompt) -> None:
        await self._written(request, request.written)
        if request in self._running:
            self._insert(request, prompt)

    async def _written(self, request: Request, events: Sequence[Event]) -> None:
        """Return when `events` are over. If one failed, nothing of the request is cached."""
        for event in events:
            try:
                await self.tiers.mover.poller.done(event)
            except TransferError:
                request.is_damaged = True

    def _insert(self, request: Request, prompt: Prompt) -> None:
        """Give the index the full blocks of `prompt` that it lacks, and copy down what the rules
        want. Blocks that others put there meanwhile stay private to the request."""
        lease, stop, tiers = request.lease, prompt.num_blocks, self.tiers
        first = lease.num_blocks
        is_computed = prompt.num_tokens <= request.computed_tokens and not request.is_damaged
        if not is_computed or stop <= first:
            return
        refused = self.index.insert(
            Tier.DEVICE, lease, prompt, stop, request.block_table[first:stop]
        )
        end = lease.num_blocks  # where it comes to a block that somebody loads, before `stop`
        request.use.num_private -= stop - first - len(refused)
        if refused:
            request.refused += tuple(first + at for at in refused if first + at < end)
        if tiers.events.has_listeners:
            tiers.events.tell(Happening.STORED, "device", lease.node, first, end)
        if request.promise is not None:
            self.computing.advance(request.promise, lease.node, end)
        tiers.copies.write_down(lease.node, end)

    def extend(self, request: Request, num_tokens: int) -> Coroutine[None, None, None]:
        """More room in the block table; see Growth.extend."""
        return self._growth.extend(request, num_tokens)

    def preempt(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """Give all blocks back for a while. What was committed goes to the host, if it has room,
        and is the last to be evicted until `resume` or `abandon`; so long its tenant stays open.
        `after` is as in `end`. Raises RequestAbortedError: `end` it then."""
        request.check_wanted()
        self._end(request, RequestState.PREEMPTED, after)
        self._preempted.add(request)

    async def resume(
        self,
        request: Request,
        *,
        max_new_tokens: int,
        fetch: Callable[[RequestSpec], Awaitable[Fetched]] | None = None,
    ) -> Request:
        """Wait for blocks again, for the whole prompt and `max_new_tokens` more, as the request of
        the same id, with all that is still cached; what is not, the engine computes. Raises what
        `admit` raises, and OwnershipError if it is not preempted, or is abandoned meanwhile.

        fetch: brings what storage has of it, once what it left is in the cache.
        """
        if request.state is not RequestState.PREEMPTED:
            raise OwnershipError(f"request {request.request_id!r} is not preempted")
        while request in self._running.ending:
            await self.tiers.work.next_change()
        prompt = request.whole_prompt
        is_computed = request.computed_tokens >= prompt.num_tokens  # so the next token is known
        spec = msgspec.structs.replace(
            request.spec,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            needs_logits=request.spec.needs_logits and not is_computed,
        )
        fetched = None
        if fetch is not None:
            self.check(spec)
            fetched = await fetch(spec)
        resumed = await self.admit(spec, fetched)
        try:
            self.abandon(request)
        except OwnershipError:  # it was abandoned, or ended, while it waited
            self.end(resumed)
            raise
        return resumed

    def abandon(self, request: Request) -> None:
        """A preempted request will not come back: its blocks are blocks like others."""
        if request.state is not RequestState.PREEMPTED:
            raise OwnershipError(f"request {request.request_id!r} is not preempted")
        request.state = RequestState.ENDED
        self._preempted.remove(request)
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
        self.brought_all(request)  # nobody may have asked for the rest
        request.state = state
        self._running.remove(request)
        events = (*request.written, *after)
        if events or request.loads:
            is_quiet = all(_is_done(event, failed=True) for event in events)
            if not (is_quiet and all(movement.has_ended for movement in request.loads)):
                self._running.ending.add(request)
                ending = self._end_later(request, events)
                self.tiers.work.start(ending, "tierkv-end", space=request.space)
                return
            request.is_damaged |= not all(_is_done(event) for event in events)
        self._finish(request)

    async def _end_later(self, request: Request, events: Sequence[Event]) -> None:
        await self._written(request, events)
        for movement in request.loads:
            with suppress(TransferError):  # ended is all that counts here
                await movement.done()
        self._running.ending.remove(request)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        try:
            self._insert(request, request.prompt)
            tail = self._keep_tail(request) if request.prompt.tail_tokens else None
            if request.state is RequestState.PREEMPTED:
                end = tail or request.lease.node
                request.pinned = self.index.pin_softly(end, end.end)
                self.tiers.copies.save(end, end.end)
        finally:  # whatever is not cached by a bug is given back
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        if request.promise is not None:
            self.computing.end(request.promise)
        num_private = request.num_private
        self.index.release(request.lease)
        if request.loads:
            for load in self.loads.used_by.pop(request, ()):
                self.loads.let_go(load)
        if num_private:
            self.tiers.slots.pools[Tier.DEVICE].release(request.private_slots())
        self._running.freed(request, num_private)
        self.tiers.work.capacity_changed()

    def _keep_tail(self, request: Request) -> TreeNode | None:
        """Cache the tail, if it is whole; where it is then."""
        prompt = request.prompt
        at = prompt.num_blocks
        is_whole = request.computed_tokens == prompt.num_tokens and not request.is_damaged
        if not is_whole or request.lease.num_blocks != at:
            return None  # it is not computed, or a block above it could not be inserted
        tail, is_new = self.index.insert_tail(
            Tier.DEVICE, request.lease, prompt, int(request.block_table[at])
        )
        if is_new:
            request.has_given_tail = True
            request.use.num_private -= 1
            self.tiers.events.tell(Happening.STORED, "device", tail, at, at + 1)
            self.tiers.copies.write_down(tail, tail.end)
        return tail


def _is_done(event: Event, *, failed: bool = False) -> bool:
    """failed: what to say of one that has failed."""
    try:
        return event.is_done
    except TransferError:
        return failed
