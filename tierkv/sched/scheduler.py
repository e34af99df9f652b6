"""The scheduler: admits requests in fair order, and records their commits and their end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
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
    check_fits,
)
from tierkv.sched.events import CacheEventKind
from tierkv.sched.fair_queue import Waiting, WaitingLine
from tierkv.sched.fetch import Fetched
from tierkv.sched.request import Computing, Request, RequestSpec, RequestState, Running
from tierkv.sched.tiers import Tiers
from tierkv.sched.worth import PrefillSpeed

__all__ = ["Scheduler", "SchedulerStats"]


class Scheduler:
    """Admits requests when the device has free blocks for them, in the order of `WaitingLine`.

    No request overtakes the first in the queue, so none starves. Blocks for the prompt and
    `max_new_tokens` are reserved at admission. A running request that needs more blocks gets them
    from `growth`, before any waiting request is admitted.

    Args:
        tiers: the tiers whose device blocks the requests use.
        prefill: estimate of the time to compute a prompt. A request waits for blocks that another
            request computes if the wait is estimated to be shorter.

    Attributes:
        growth: gives running requests more blocks.
        loads: the loads from the host that have not ended.
        computing: the blocks that running requests will compute.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        prefill: PrefillSpeed | None = None,
    ) -> None:
        self.tiers = tiers
        self.index = tiers.index
        self._waiting = WaitingLine()
        self._running = Running()
        self._is_draining = False
        self._preempted: set[Request] = set()  # until they are resumed or abandoned
        self.loads = HostLoads(tiers)
        self.computing = Computing(prefill or PrefillSpeed(), self._pump)
        self._starts = Starts(
            tiers,
            self._running,
            self.loads,
            self.computing,
            given=self._waiting.given,
            end=self.end,
        )
        self.growth = Growth(
            tiers,
            self._running,
            self._starts,
            line=self._waiting,
        )
        self._admissions = Admissions(
            tiers,
            self._waiting,
            self._running,
            starts=self._starts,
            growth=self.growth,
            computing=self.computing,
        )
        tiers.work.on_capacity(self._admissions.pump)

    def _pump(self) -> None:
        self._admissions.pump()

    @property
    def stats(self) -> SchedulerStats:
        """The counts since the node's start."""
        return self._starts.counted()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_requests(self) -> Sequence[Request]:
        return tuple(self._running.by_id.values())

    @property
    def ending_requests(self) -> Sequence[Request]:
        """Ended requests with blocks that kernels or copies may still use."""
        return tuple(self._running.ending)

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        while self._running.by_id:
            await self.tiers.work.next_change()

    def drain(self) -> None:
        """Refuse new and waiting requests with ShuttingDownError; running requests continue."""
        self._is_draining = True
        for waiting in list(self._waiting):
            self._waiting.leave(waiting)
            if not waiting.outcome.done():
                waiting.outcome.set_exception(ShuttingDownError("this node is shutting down"))

    def forget_turns(self, space: str) -> None:
        """Delete the number of blocks that were given to the requests of a closed space.

        While a space (the part of the index for one fingerprint) is open, the queue counts these
        blocks, and next admits a request of the space with the fewest.
        """
        self._waiting.forget(space)

    def is_used_by(self, space: str) -> bool:
        """Return True if any request of the space named `space` runs, waits, ends or is preempted.

        A space is the part of the index for one fingerprint.
        """
        return (
            self._waiting.has_space(space)
            or self._running.has_space(space)
            or any(one.space == space for one in self._preempted)
        )

    @property
    def is_paused(self) -> bool:
        return bool(self._admissions.pauses)

    def pause(self, *, why: str = "asked") -> None:
        """Stop admissions until `unpause` is called with the same reason `why`.

        New requests join the queue, and running ones continue. Fetched blocks of waiting requests
        are released, so that the caller can empty or shrink a tier.
        """
        self._admissions.pauses.add(why)
        for waiting in list(self._waiting):
            waiting.release_fetched()

    def unpause(self, *, why: str = "asked") -> None:
        self._admissions.pauses.discard(why)
        self._pump()

    def findings(self) -> list[str]:
        """Return violated invariants of the requests, one sentence each; [] if there are none."""
        running = self._running
        wrong = running.findings() + self._waiting.findings()
        wrong += self.computing.findings(sum(1 for _ in running))
        both = {one.spec.request_id for one in self._waiting} & running.by_id.keys()
        wrong += [f"request {name!r} is listed as waiting and as running" for name in sorted(both)]
        for one in running.by_id.values():
            has_failed = any(load.is_failed for load in self.loads.used_by.get(one, ()))
            wrong += one.findings(self.index, has_failed=has_failed)
        for one in self.loads.used_by:
            if one not in running:
                wrong.append(
                    f"request {one.request_id!r} has ended, but its loads are still listed"
                )
        return wrong + self._preempted_findings()

    def _preempted_findings(self) -> list[str]:
        state, ends = RequestState.PREEMPTED, self.tiers.pins.soft_ends
        wrong = [
            f"request {one.request_id!r} is listed as preempted, but {one.state.value}"
            for one in self._preempted
            if one.state is not state
        ]
        ends += [one.pinned for one in self._preempted if one.pinned is not None]
        lost = [one for one in self._running.ending if one.state is state]
        if not self._preempted.issuperset(lost):
            wrong.append("a preempted request is not listed as preempted")
        pins = Counter(part for end in ends for part in end.path())
        if any(node.soft_pins != pins[node] for node in self.index.spaces.nodes()):
            wrong.append(
                "the number of soft pins on blocks differs from the number of pins "
                "that end on or below them"
            )
        return wrong

    def check(self, spec: RequestSpec) -> None:
        """Check that a request may be admitted, before blocks are fetched for it.

        Raises:
            ShuttingDownError: the node is shutting down.
            DuplicateRequestError: a request with this id is running or waiting.
            RequestTooLargeError: the request needs more blocks than the device, or the quota of its
                space, has.
        """
        if self._is_draining:
            raise ShuttingDownError("this node is shutting down")
        if spec.request_id in self._running.by_id or self._waiting.find(spec.request_id):
            raise DuplicateRequestError(
                f"request {spec.request_id!r} is already running: use another id, or wait "
                "for its end"
            )
        check_fits(self.tiers, spec)

    async def admit(self, spec: RequestSpec, fetched: Fetched | None = None) -> Request:
        """Wait for a request's turn and for free device blocks, then admit the request.

        On return, loads of its cached blocks to the device may still run. A cancelled call releases
        everything that it has acquired.

        Args:
            spec: the request.
            fetched: blocks fetched from storage for the request; None for none. The call releases
                their lease when it ends, or earlier if another waiting request needs their memory
                or admission is paused.

        Returns:
            The running request.

        Raises:
            DuplicateRequestError: a request with this id runs or waits already.
            RequestTooLargeError: the request needs more blocks than the device or its tenant's
                quota has.
            ShuttingDownError: the node is shutting down.
            RequestAbortedError: the request was aborted while it waited.
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
            self._pump()  # the next request in the queue may fit
            raise

    async def load_ahead(self, prompt: Prompt) -> None:
        """Load the blocks of `prompt` from the host to the device before a request needs them.

        The call returns when the blocks have arrived. If the device has no room, a request waits,
        or admissions are paused, the call does nothing. Cancelling the call does not stop the copy.

        Raises:
            TransferError: the copy failed.
        """
        if self.is_paused or self._is_draining or self._waiting or self.growth.extending:
            return
        try:
            movement = self._starts.load(prompt)
        except OutOfBlocksError:
            return
        if movement is not None:
            await movement.done()

    def acquire_device(self, prompt: Prompt, count: int) -> Ids:
        """Acquire device slots, within the quota of the prompt's space, for the caller to write.

        Args:
            prompt: the prompt of the blocks.
            count: number of slots.

        Returns:
            The slots, int32 [count].

        Raises:
            OutOfBlocksError: there are not `count` slots; none is acquired.
        """
        self.index.at(monotonic())
        return self._starts.acquire(self.index.spaces.root_of(prompt).space, count)

    def abort(self, request_id: str) -> bool:
        """Abort the request with this id; return whether there was one.

        A waiting request is refused with RequestAbortedError. A preempted request ends at once. A
        running request continues until its next commit or extend, which raises RequestAbortedError;
        its blocks are freed when the engine calls `end`.
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
        self.tiers.work.capacity_changed()  # wakes the request if it waits for more blocks
        return True

    # Growing and ending

    async def commit(self, request: Request, tokens: bytes, *, after: Sequence[Event] = ()) -> None:
        """Record that the KV of `tokens` is in the request's device blocks, or soon will be.

        The KV is complete when the events in `after` are done. Other requests can match the full
        blocks from that moment on. The call does not wait for the events.

        Args:
            request: the running request.
            tokens: token ids as int32 bytes, from the start of the prompt. They begin with all
                tokens that were committed before.
            after: events of the kernels that write the blocks; () if these kernels have ended.

        Raises:
            TransferError: a load that the request depends on failed.
            RequestAbortedError: the request was aborted.
            OwnershipError: the request has ended or is preempted.
            BadRequestError: the tokens differ from the prompt or from the tokens committed before,
                or are more than the block table has room for; nothing has changed.
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
            # Kernels of earlier commits may still write: these tokens are not ready before those.
            request.written = tuple(one for one in (*request.written, *after) if not _is_done(one))
        if request.written:
            self.tiers.work.start(self._insert_later(request, prompt), "tierkv-commit")
        else:
            self._insert(request, prompt)

    async def commit_fetched(self, request: Request, num_tokens: int, *, num_direct: int) -> None:
        """Commit prompt tokens that came from storage after the start of the request.

        Args:
            request: the running request.
            num_tokens: number of first prompt tokens whose KV is in the block table now.
            num_direct: number of the newly arrived tokens that came from another node's memory.

        Raises:
            TransferError: a load that the request depends on failed.
            RequestAbortedError: the request was aborted.
            OwnershipError: the request has ended or is preempted.
            BadRequestError: fewer tokens were passed than were committed before.
        """
        prompt, lease = request.spec.prompt, request.lease
        start = lease.num_blocks
        if request.promise is not None:
            self.computing.note_fetched(request.promise, num_tokens // prompt.block_size)
        width, began = prompt.block_token_bytes // prompt.block_size, self.tiers.events.now()
        await self.commit(request, prompt.tokens[: num_tokens * width])
        first = min(start, lease.num_blocks)
        self.tiers.copies.note_stored(lease.node, first, lease.num_blocks, began)
        self._starts.count_fetched(request, num_tokens, num_direct=num_direct)

    def note_fetch_ended(self, request: Request) -> None:
        """Record that no more of the prompt's tokens will come from storage."""
        self._starts.note_fetch_ended(request)

    async def _all_arrived(self, request: Request) -> None:
        for movement in request.loads:
            await movement.done()
        # A movement is done slightly before the index is updated; wait for both.
        for load in self.loads.used_by.get(request, ()):
            await asyncio.shield(load.settled)

    async def _insert_later(self, request: Request, prompt: Prompt) -> None:
        await self._written(request, request.written)
        if request in self._running:
            self._insert(request, prompt)

    async def _written(self, request: Request, events: Sequence[Event]) -> None:
        """Wait for the device work that writes the request's KV, whose end `events` mark."""
        for event in events:
            try:
                await self.tiers.mover.poller.done(event)
            except TransferError:
                request.is_damaged = True

    def _insert(self, request: Request, prompt: Prompt) -> None:
        """Insert computed full blocks into the index, and start their copies to lower tiers.

        Blocks that the index already has from other requests stay private to this request.
        """
        lease, stop, tiers = request.lease, prompt.num_blocks, self.tiers
        first = lease.num_blocks
        is_computed = prompt.num_tokens <= request.computed_tokens and not request.is_damaged
        if not is_computed or stop <= first:
            return
        refused = self.index.insert(
            Tier.DEVICE, lease, prompt, stop, request.block_table[first:stop]
        )
        end = lease.num_blocks  # smaller than `stop` if a block is being loaded
        request.use.num_private -= stop - first - len(refused)
        if refused:
            request.refused += tuple(first + at for at in refused if first + at < end)
        if tiers.events.has_listeners:
            session_id = request.spec.session_id
            tiers.events.publish(
                CacheEventKind.STORED, "device", lease.node, first, end, session_id=session_id
            )
        if request.promise is not None:
            self.computing.advance(request.promise, lease.node, end)
        tiers.copies.write_down(lease.node, end)

    def preempt(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """Release all blocks of a running request until it is resumed.

        The committed blocks are copied to the host if it has room. Until `resume` or `abandon` is
        called, they are evicted only after all other blocks, and the request's space (part of the
        index) is not closed.

        Args:
            request: the running request.
            after: events of the kernels that may still use the blocks.

        Raises:
            OwnershipError: the request has ended.
            RequestAbortedError: the request was aborted: call `end` instead.
        """
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
        """Admit a preempted request again, under the same id.

        Blocks that are still cached are used; the engine computes the remaining tokens.

        Args:
            request: the preempted request.
            max_new_tokens: number of generated tokens for which blocks are reserved.
            fetch: fetches the missing blocks from storage; called once the preempted request's own
                blocks are cached. None to fetch nothing.

        Returns:
            A new running request.

        Raises:
            OwnershipError: the request is not preempted, or was ended during the wait.
            RequestTooLargeError: the request needs more blocks than the device or its tenant's
                quota has.
            ShuttingDownError: the node is shutting down.
            RequestAbortedError: the request was aborted while it waited.
        """
        if request.state is not RequestState.PREEMPTED:
            raise OwnershipError(
                f"request {request.request_id!r} is not preempted, so it cannot be resumed"
            )
        while request in self._running.ending:
            await self.tiers.work.next_change()
        prompt = request.whole_prompt
        is_computed = request.computed_tokens >= prompt.num_tokens  # then the next token is known
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
        except OwnershipError:  # it was abandoned or ended during the wait
            self.end(resumed)
            raise
        return resumed

    def abandon(self, request: Request) -> None:
        """End a preempted request that will not continue, and release its soft pin.

        Its cached blocks stay until they are evicted in the usual order.

        Raises:
            OwnershipError: the request is not preempted.
        """
        if request.state is not RequestState.PREEMPTED:
            raise OwnershipError(
                f"request {request.request_id!r} is not preempted, so it cannot be abandoned"
            )
        request.state = RequestState.ENDED
        self._preempted.remove(request)
        if request.pinned is not None:
            self.index.unpin_softly(request.pinned)
            request.pinned = None

    def end(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """End a running request and release all of its blocks.

        Committed blocks stay cached, the tail (partial last block) included.

        Args:
            request: the running request.
            after: events of the kernels that may still use the blocks. No block is reused before
                these events are done and every copy into the request's blocks has ended.

        Raises:
            OwnershipError: the request has ended already.
        """
        self._end(request, RequestState.ENDED, after)

    def _end(self, request: Request, state: RequestState, after: Sequence[Event]) -> None:
        request.check_running()
        self.note_fetch_ended(request)  # tokens that were never fetched count as missed
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
            with suppress(TransferError):  # a failed copy has ended too
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
        finally:  # release all blocks that a bug left uncached
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        if request.promise is not None:
            self.computing.end(request.promise)
        num_private = request.num_private
        self.index.release(request.lease)
        if request.loads:
            for load in self.loads.used_by.pop(request, ()):
                self.loads.release(load)
        if num_private:
            self.tiers.slots.pools[Tier.DEVICE].release(request.private_slots())
        self._running.freed(request, num_private)
        self.tiers.work.capacity_changed()

    def _keep_tail(self, request: Request) -> TreeNode | None:
        prompt = request.prompt
        at = prompt.num_blocks
        is_whole = request.computed_tokens == prompt.num_tokens and not request.is_damaged
        if not is_whole or request.lease.num_blocks != at:
            return None  # the tail is not computed, or a block above it is not in the index
        tail, is_new = self.index.insert_tail(
            Tier.DEVICE, request.lease, prompt, int(request.block_table[at])
        )
        if is_new:
            request.has_given_tail = True
            request.use.num_private -= 1
            session_id = request.spec.session_id
            self.tiers.events.publish(
                CacheEventKind.STORED, "device", tail, at, at + 1, session_id=session_id
            )
            self.tiers.copies.write_down(tail, tail.end)
        return tail


def _is_done(event: Event, *, failed: bool = False) -> bool:
    try:
        return event.is_done
    except TransferError:
        return failed
