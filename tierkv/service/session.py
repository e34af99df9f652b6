"""The life of one request: states and steps. Engines in this process and engines of a node use it.

                     .-- commit, extend, stream, publish, recover --.
                     v                                              |
    admit, claim -> RUNNING ----------------------------------------'
                     |    ^
             preempt |    | resume           end, abort -> ENDED
                     v    |                  (blocks are released once no publish reads them)
                   PREEMPTED

The caller decides when a session takes a step, chooses request ids, and limits the time of calls.
The session refuses steps that are not possible in its state, and ends the publishes and waits that
it has started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from tierkv.errors import (
    DeviceFailedError,
    DuplicateRequestError,
    GateTimeoutError,
    HandoffError,
    OwnershipError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.observe import Moment, Timeline
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published, PublishStream
from tierkv.pd.tickets import HandoffProblem, Ticket
from tierkv.sched.budget import Budget
from tierkv.sched.request import Matched, Request, RequestSpec, RequestState
from tierkv.service.service import Publishing, Service

log = logging.getLogger(__name__)


class Session:
    """One request of `service`. Use it from the service's event loop.

    One method runs at a time, except `end`, `abort` and `published`, which may be called at any
    time.

    Args:
        service: the cache service.
        spec: the request.

    Attributes:
        spec: the request; after `recover` or `resume`, the changed one.
        ticket: the claimed ticket; None without a claim, and if no ticket came.
        failed_blocks: indices of the prompt's blocks that were cached but could not be loaded. The
            engine computes these.
        load_problem: the reason why blocks could not be loaded; None if all were loaded.
        over: future that is resolved once the session has released everything that it had acquired.
    """

    def __init__(self, service: Service, spec: RequestSpec) -> None:
        self.spec = spec
        self.ticket: Ticket | None = None
        self.failed_blocks: range = range(0)
        self.load_problem: str | None = None
        self._service = service
        self._timeline: Timeline | None = None
        self._request: Request | None = None
        self._publishes: dict[str, Publishing] = {}
        self._free_tickets: set[str] = set()
        self._policy: ClaimPolicy | None = None
        self._resuming: asyncio.Timeout | None = None
        self._last_use: tuple[Event, ...] | None = (
            None  # events of an `end` that waits for publishes
        )
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # State

    @property
    def request(self) -> Request:
        """The admitted request with its blocks.

        Raises:
            OwnershipError: the session has no blocks: it still waits for them, or has ended.
        """
        if self._request is None:
            raise OwnershipError(
                f"request {self.spec.request_id!r} has no blocks: it still waits for them, "
                "or has ended"
            )
        return self._request

    @property
    def has_ended(self) -> bool:
        """True if the session has released everything that it had acquired."""
        return self.over.done()

    @property
    def is_ending(self) -> bool:
        """True if `end` or `abort` was called, even if blocks are not released yet."""
        return self._last_use is not None or self.has_ended

    @property
    def is_preempted(self) -> bool:
        return self._request is not None and self._request.state is RequestState.PREEMPTED

    @property
    def is_streaming(self) -> bool:
        """True if the prompt is being published while it is computed."""
        return any(one.stream is not None for one in self._publishes.values())

    @property
    def matched(self) -> Matched:
        return self.request.matched

    def running(self) -> Request:
        """Return the request, if the engine may use its blocks now.

        Raises:
            OwnershipError: the session has no blocks, is preempted, or is ending.
        """
        request = self.request
        request.check_running()
        if self.is_ending:
            raise OwnershipError(f"request {self.spec.request_id!r} is ending")
        return request

    # Start

    async def admit(self) -> Request:
        """Wait for device blocks, and start to load the cached part of the prompt into them.

        A cancelled call releases everything that it acquired.

        Returns:
            The running request. Its loads may not have ended; `loaded` waits for them.

        Raises:
            DuplicateRequestError: a request with this id runs or waits already.
            RequestTooLargeError: the request needs more blocks than the device or its tenant's
                quota has.
            ShuttingDownError: the node is shutting down.
            RequestAbortedError: the request was aborted while it waited.
            TransferError: a block that was fetched from storage could not be loaded.
        """
        with self._timed():
            fetched, budget = None, self._service.budget()
            if self._service.fetches(self.spec):
                fetched = await self._service.fetched(self.spec, budget)
                try:
                    self._mark(Moment.MATCHED, fetched.matched_at)
                    self._mark(Moment.FETCHED, fetched.ended_at)
                except BaseException:  # a bug: no other code would release `fetched`
                    fetched.release()
                    raise
            request = await self._service.scheduler.admit(self.spec, fetched)
            if fetched is not None and fetched.lacked_room:
                request = await self._with_rest(request, budget)
            return self._adopt(request)

    async def _with_rest(self, request: Request, budget: Budget) -> Request:
        """Fetch the blocks for which the host had no room, unless computing them is faster.

        Return `request`, or after a failed load a new request that computes the whole prompt.
        """
        scheduler = self._service.scheduler
        missing = request.spec.prompt.num_tokens - request.cached_tokens
        if not budget.restrict(missing, is_answered=True).is_asked:
            scheduler.note_fetch_ended(request)
            return request
        try:
            await self._service.portions.fetch_or_end(request, budget)
        except DeviceFailedError:
            raise
        except TransferError as error:
            return await self._admit_alone(error)
        return request

    async def _admit_alone(self, error: TransferError) -> Request:
        log.warning(
            "request %s computes its whole prompt, since cached blocks did not load: %s",
            self.spec.request_id,
            error,
        )
        alone = msgspec.structs.replace(self.spec, needs_logits=True, uses_cache=False)
        return await self._service.scheduler.admit(alone)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._timeline = self._service.timelines.begin(self.spec)
        try:
            yield
        except BaseException as error:
            self._timeline.problem = str(error) or "the caller disconnected"
            self._mark(Moment.ENDED)
            raise

    def _mark(self, moment: Moment, at: float | None = None) -> None:
        if self._timeline is not None:
            self._service.timelines.mark(self._timeline, moment, at)

    async def claim(
        self,
        ticket_id: str,
        policy: ClaimPolicy,
        deadline_s: float | None = None,
        sampling: Mapping[str, str] | None = None,
    ) -> Request:
        """Wait until another node has published the prompt, admit the request, and start to load.

        Afterwards `ticket` is set. If no ticket came and `policy` lets the engine compute, `ticket`
        stays None and the request has fewer `cached_tokens`.

        Args:
            ticket_id: id of the ticket.
            policy: how much of the prompt the engine may compute if it cannot be fetched.
            deadline_s: seconds to wait for the ticket and then for free device blocks, in total;
                None for the setting `claim_deadline_s`.
            sampling: names and values of the engine's sampling parameters. A ticket with other
                parameters is refused; None to accept any.

        Returns:
            The running request. Its loads may not have ended; `loaded` waits for them.

        Raises:
            HandoffError: the prompt cannot be claimed; its reason is a HandoffProblem.
            TierKVError: the request was not admitted, for example because its id is in use or it
                needs more blocks than the device has.
        """
        self._policy = policy
        self._service.require_handoff()
        if deadline_s is None:
            deadline_s = self._service.handoff_settings.claim_deadline_s
        with self._timed():
            try:
                request, self.ticket = await self._service.claims.claim(
                    self.spec,
                    ticket_id,
                    policy=policy,
                    deadline_s=deadline_s,
                    sampling=sampling or {},
                )
            except DeviceFailedError:
                raise
            except TransferError as error:  # a prompt that came in portions did not all load
                self.check_may_compute(error)
                self.load_problem = str(error)
                request = await self._admit_alone(error)
            return self._adopt(request)

    def _adopt(self, request: Request) -> Request:
        try:
            self._set_request(request)
        except BaseException:  # the caller does not know that the request has blocks
            if self._request is request:
                self.end()
            else:
                self._service.scheduler.end(request)
            raise
        return request

    def _set_request(self, request: Request) -> None:
        if self.has_ended:  # while it was being admitted
            raise OwnershipError(f"request {self.spec.request_id!r} has ended")
        self._request, self.spec = request, request.spec
        if self._timeline is not None:
            self._service.timelines.admitted(self._timeline, request)

    async def loaded(self, timeout_s: float) -> None:
        """Wait until the KV of every cached token is in the request's device blocks.

        Raises:
            TransferError: a load failed.
            GateTimeoutError: a load did not end within `timeout_s` seconds.
        """
        request = self.request
        loads = self._service.scheduler.loads.of(request.block_table)
        problem: TransferError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                for movement in request.loads:
                    try:
                        await movement.done()
                    except DeviceFailedError:
                        raise
                    except TransferError as error:  # other loads may still succeed
                        problem = problem or error
                for load in loads:
                    await asyncio.shield(load.settled)
        except TimeoutError as error:
            text = f"cached blocks were not on the device within {timeout_s:g} s"
            raise GateTimeoutError(text) from error
        if problem is not None:
            raise problem
        if any(load.is_failed for load in loads):
            raise TransferError("earlier cached blocks of the prompt did not load")

    async def loaded_or_recovered(self, timeout_s: float) -> None:
        """Wait until the KV of every cached token is on the device.

        If a load fails, or takes longer than `timeout_s`, the request gets new device blocks into
        which the intact cached blocks are loaded; the engine computes the others, which
        `failed_blocks` names.

        Args:
            timeout_s: seconds to wait for the loads, and again for the loads into new blocks.

        Raises:
            HandoffError: a load failed, and the claim's policy does not allow computing (reason
                load_failed).
            DeviceFailedError: the device has failed.
            TierKVError: the request got no new blocks, or their loads failed too; the request has
                ended.
        """
        try:
            await self.loaded(timeout_s)
        except DeviceFailedError:
            raise
        except TransferError as error:
            self.check_may_compute(error)
            await self.recover(str(error), timeout_s=timeout_s)

    def check_may_compute(self, error: TransferError) -> None:
        """Check that a request with a failed load may compute the blocks that were not loaded.

        Args:
            error: the failure of the load, for the message.

        Raises:
            HandoffError: the request is a claim with the policy WHOLE, which must not compute
                prompt tokens. The error's reason is load_failed.
        """
        if self._policy is ClaimPolicy.WHOLE:
            text = f"the claimed prompt did not load to the device: {error}"
            raise HandoffError(HandoffProblem.LOAD_FAILED.value, text) from error

    async def recover(self, problem: str, *, timeout_s: float, after: Sequence[Event] = ()) -> None:
        """After a failed load, admit the request again, with the blocks that the device still has.

        Afterwards, `failed_blocks` names the blocks that the engine has to compute. Tokens that
        were not committed are lost. A publish that stores blocks while the prompt is computed
        fails; it may be started again.

        Args:
            problem: the reason why the load failed.
            timeout_s: seconds to wait for the new loads.
            after: events of kernels that may still use the old blocks.

        Raises:
            OwnershipError: the session has no blocks, is preempted, or is ending.
            TierKVError: the request was not admitted again, or a new load failed or took too long;
                the request has ended.
        """
        request = self.running()
        size = self.spec.prompt.block_size
        promised = -(-request.cached_tokens // size)
        intact = self._service.index.match(self.spec.prompt).device_blocks
        log.warning(
            "request %s computes the blocks that did not load: %s", self.spec.request_id, problem
        )
        await self._give_up_streams(problem)
        # Raises if the request has ended or was preempted during the wait.
        self._service.scheduler.end(request, after=after)
        self._request = None
        try:
            spec = msgspec.structs.replace(self.spec, cached_tokens_limit=intact * size)
            recovered = self._adopt(await self._service.scheduler.admit(spec))
            await self.loaded(timeout_s)
        except BaseException:  # a cancel too
            self.end()
            raise
        self.failed_blocks = range(recovered.cached_tokens // size, promised)
        self.load_problem = problem

    # While it runs

    async def commit(self, tokens: bytes, *, after: Sequence[Event] = ()) -> None:
        """Record that kernels have written the KV of `tokens` into the request's blocks.

        The kernels may still be running; `after` then has their events. If the prompt is published
        while it is computed, the new blocks are stored now.

        Args:
            tokens: all tokens from the prompt's start on, packed as little-endian int32.
            after: events of the kernels that write the KV; () if the kernels have ended.

        Raises:
            TransferError: cached blocks of the request could not be loaded.
            RequestAbortedError: the request was aborted.
            OwnershipError: the request has ended.
            BadRequestError: the tokens are not the request's; nothing has changed.
        """
        request = self.running()
        await self._service.scheduler.commit(request, tokens, after=after)
        prompt_tokens = min(request.computed_tokens, self.spec.prompt.num_tokens)
        if prompt_tokens == self.spec.prompt.num_tokens:
            self.has_first_token()
        for publishing in self._publishes.values():
            if publishing.stream is not None:
                publishing.stream.advance(prompt_tokens, after)

    def has_first_token(self) -> None:
        """Record in the request's timeline that the whole prompt is computed.

        A `commit` of the whole prompt records it, too.
        """
        self._mark(Moment.COMPUTED)

    async def extend(self, num_tokens: int) -> None:
        """Make room in the request's blocks for `num_tokens` tokens after the committed tokens.

        Before the prompt is committed, the room is for tokens after the prompt. The call waits
        until enough blocks are free.

        Raises:
            OutOfBlocksError: all running requests wait for more blocks, and this one is chosen to
                release its own: call `preempt`.
            RequestTooLargeError: the device, or the quota of the request's space, is too small.
            BadRequestError: `num_tokens` is negative.
            OwnershipError: the request does not run.
            RequestAbortedError: the request was aborted.
        """
        await self._service.scheduler.growth.extend(self.running(), num_tokens)

    async def preempt(self, *, after: Sequence[Event] = ()) -> None:
        """Release the request's device blocks to other requests, once no publish reads them.

        A later call of `resume` continues the request.

        Args:
            after: events of kernels that may still use the blocks.

        Raises:
            OwnershipError: the prompt is being published while it is computed.
        """
        self.running()
        if self.is_streaming:
            text = (
                f"request {self.spec.request_id!r} cannot be preempted: its prompt is "
                "being published while it is computed"
            )
            raise OwnershipError(text)
        await self._published()
        self._service.scheduler.preempt(self.running(), after=after)

    async def resume(self, *, max_new_tokens: int) -> Request:
        """Admit the preempted request again, with the blocks that are still cached.

        A cancelled call leaves the request preempted.

        Args:
            max_new_tokens: number of tokens after the prompt for which blocks are reserved.

        Returns:
            The running request.

        Raises:
            OwnershipError: the request is not preempted, or ended during the wait.
        """
        request = self.request
        if not self.is_preempted or self._resuming is not None:
            raise OwnershipError(
                f"request {self.spec.request_id!r} is not preempted, so it cannot be resumed"
            )
        service = self._service
        fetch = service.fetched if service.fetches(request.spec) else None
        try:
            async with asyncio.timeout(None) as self._resuming:
                resumed = await service.scheduler.resume(
                    request, max_new_tokens=max_new_tokens, fetch=fetch
                )
        except TimeoutError:
            if not self.is_ending:
                raise
            raise OwnershipError(f"request {self.spec.request_id!r} has ended") from None
        finally:
            self._resuming = None
        return self._adopt(resumed)

    # Publishing

    async def check_ticket(self, ticket_id: str) -> None:
        """Check that no ticket of another prompt has this id.

        Raises:
            DuplicateRequestError: the id names a ticket of another prompt that decode nodes can
                claim.
        """
        await self._service.check_ticket_is_free(ticket_id, self.spec.prompt)
        self._free_tickets.add(ticket_id)

    async def stream(self, ticket_id: str) -> bool:
        """Start to store the prompt's blocks for another node while the prompt is computed.

        A later call of `publish` with the same id stores the last blocks and the ticket.

        Args:
            ticket_id: id of the ticket by which the other node finds the prompt.

        Returns:
            True if blocks are being stored, also if an earlier call has started that; False if the
                setting handoff.streams is false.

        Raises:
            HandoffError: this node has no storage tier.
            DuplicateRequestError: the id names a ticket of another prompt that decode nodes can
                claim.
        """
        if ticket_id not in self._publishes and ticket_id not in self._free_tickets:
            await self.check_ticket(ticket_id)
        if ticket_id in self._publishes:  # another call was faster during the wait
            return True
        request = self.running()
        handoff, settings = self._service.require_handoff(), self._service.handoff_settings
        if not settings.streams:
            return False
        blocks = handoff.blocks_of(request)
        stream = PublishStream(handoff, blocks, ticket_id, deadline_s=settings.publish_deadline_s)
        stream.advance(min(request.computed_tokens, self.spec.prompt.num_tokens))
        self._publishes[ticket_id] = self._start(stream.run(), stream)
        return True

    def publish(
        self,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> Publishing:
        """Start a task that stores the committed prompt and then its ticket.

        A repeated call with the same id returns the earlier publish, if that has not failed. `end`
        waits for the task.

        Args:
            ticket_id: id of the ticket.
            first_tokens: ids of the generated tokens that follow the prompt.
            after: events of the kernels that write the last blocks.
            sampling: names and values of the sampling parameters of `first_tokens`; None to state
                none.

        Returns:
            The publish; its `published` waits for the outcome.

        Raises:
            OwnershipError: the prompt is not computed yet.
        """
        sampling = dict(sampling or {})
        found = self._publishes.get(ticket_id)
        if found is not None and found.stream is not None:
            computed, whole = self.running().computed_tokens, self.spec.prompt.num_tokens
            if computed < whole:
                raise OwnershipError(
                    f"only {computed} of {whole} prompt tokens are committed: commit the "
                    "whole prompt before it is published"
                )
            found.stream.finish(first_tokens, after, sampling)
            found.stream = None
        elif found is None or found.has_failed:
            work = self._publish(self.running(), ticket_id, first_tokens, after, sampling)
            found = self._publishes[ticket_id] = self._start(work)
        return found

    async def published(
        self, publishing: Publishing, first_tokens: Sequence[int], sampling: Mapping[str, str]
    ) -> Published:
        """Wait until the ticket is published, and check its first tokens and sampling parameters.

        An earlier call of `publish` may have started the publish with other values.

        Args:
            publishing: the publish that `publish` returned.
            first_tokens: ids of the first tokens that the ticket must have.
            sampling: names and values of the sampling parameters that the ticket must have.

        Returns:
            The ticket and counts.

        Raises:
            DuplicateRequestError: the published ticket has other first tokens or sampling
                parameters, or the publish failed because the id is in use.
            TierKVError: the publish failed or was cancelled.
        """
        published = await publishing.published()
        said = published.ticket
        if (said.first_tokens, said.sampling) != (tuple(first_tokens), dict(sampling)):
            raise DuplicateRequestError(
                f"the ticket {said.ticket_id!r} was already published with other first "
                "tokens or sampling: use another ticket id"
            )
        return published

    async def _publish(
        self,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        after: Sequence[Event],
        sampling: Mapping[str, str],
    ) -> Published:
        if ticket_id not in self._free_tickets:
            await self.check_ticket(ticket_id)
        handoff = self._service.require_handoff()
        return await handoff.publish(
            handoff.blocks_of(request),
            ticket_id,
            first_tokens,
            after=after,
            sampling=sampling,
            deadline_s=self._service.handoff_settings.publish_deadline_s,
        )

    def _start(
        self, work: Coroutine[None, None, Published], stream: PublishStream | None = None
    ) -> Publishing:
        publishing = self._service.publishings.start(work, stream)
        publishing.task.add_done_callback(lambda _: self._publish_over())
        return publishing

    def _busy(self) -> list[Publishing]:
        return [one for one in self._publishes.values() if not one.task.done()]

    async def _published(self) -> None:
        while busy := self._busy():
            await asyncio.wait([one.task for one in busy])

    def _fail_streams(self, reason: str) -> None:
        for publishing in self._publishes.values():
            if publishing.stream is not None:
                publishing.stream.fail(reason)
                publishing.stream = None

    async def _give_up_streams(self, reason: str) -> None:
        given_up = [name for name, one in self._publishes.items() if one.stream is not None]
        self._fail_streams(reason)
        await self._published()
        for name in given_up:
            self._publishes.pop(name, None)

    # End

    def end(self, *, after: Sequence[Event] = (), reason: str = "the request has ended") -> None:
        """End the request, and release its blocks as soon as no publish reads them.

        Committed tokens stay cached. A repeated call does nothing.

        Args:
            after: events of kernels that may still use the blocks.
            reason: a sentence for decode nodes that wait for the prompt, if its publish is
                unfinished.
        """
        if self.is_ending:
            return
        self._last_use = tuple(after)
        try:
            self._fail_streams(f"{reason}, and its prompt was not published")
            if self._timeline is not None and self._request is not None:
                computed = self._request.computed_tokens - self.spec.prompt.num_tokens
                self._timeline.new_tokens = max(computed, 0)
            self._mark(Moment.ENDED)
        finally:  # a bug in the records above must not keep blocks
            self._publish_over()

    def abort(
        self, *, after: Sequence[Event] = (), reason: str = "the request was aborted"
    ) -> None:
        """End the request, cancel its publishes, and release its blocks.

        Committed tokens stay cached. A repeated call does nothing.

        Args:
            after: events of kernels that may still use the blocks.
            reason: a sentence for callers and decode nodes that wait for the publishes.
        """
        streaming = [one for one in self._publishes.values() if one.stream is not None]
        self.end(after=after, reason=reason)
        for publishing in self._busy():
            if (
                publishing not in streaming
            ):  # streams end by themselves, after they have published the reason
                publishing.give_up(OwnershipError(f"{reason} before it was published"))

    def _publish_over(self) -> None:
        if self._last_use is None or self.has_ended or self._busy():
            return
        request, self._request = self._request, None
        if self._resuming is not None:
            self._resuming.reschedule(asyncio.get_running_loop().time())
        if request is not None and request.state is RequestState.PREEMPTED:
            self._service.scheduler.abandon(request)
        elif request is not None and request.state is RequestState.RUNNING:
            self._service.scheduler.end(request, after=self._last_use)
        self.over.set_result(None)
