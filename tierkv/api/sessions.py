"""Requests of engines that compute by themselves, kept between the calls that drive them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from tierkv.api.idempotency import Once
from tierkv.api.types import Loads, State, Wait
from tierkv.cache.node import Tier
from tierkv.errors import (
    DuplicateRequestError,
    GateTimeoutError,
    OutOfBlocksError,
    OwnershipError,
    TierKVError,
    TransferError,
)
from tierkv.http.problems import UnknownIdError, WrongStateError
from tierkv.pd.handoff import Published
from tierkv.pd.stream import Stream
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Matched, Request, RequestState
from tierkv.service import Service
from tierkv.tasks import deadline, task_group

log = logging.getLogger("tierkv.desk")

Key = tuple[str, str]  # tenant, request id
Publishing = asyncio.Task[Published | TierKVError]


@dataclass(slots=True, eq=False)
class Held:
    """request: None once it has ended. ticket: what it claimed, if it did.

    expires_at: on the loop's clock. num_calls: under way; the lease does not end under them.
    publishes: by ticket id, under way or done. streams: those of them that go out while the prompt
    is computed, until all of it is. resuming: what a resume waits in.
    """

    key: Key
    request: Request | None
    ttl_s: float
    ticket: Ticket | None = None
    expires_at: float = 0.0
    state: State = State.RUNNING
    num_calls: int = 0
    timer: asyncio.TimerHandle | None = None
    publishes: dict[str, Publishing] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    resuming: asyncio.Timeout | None = None
    prompt_tokens: int = 0
    block_size: int = 0
    matched: Matched = field(default_factory=Matched)
    computed_tokens: int = 0

    @classmethod
    def of(cls, key: Key, request: Request, ttl_s: float, ticket: Ticket | None) -> Held:
        prompt = request.spec.prompt
        return cls(
            key,
            request,
            ttl_s,
            ticket,
            prompt_tokens=prompt.num_tokens,
            block_size=prompt.block_size,
            matched=request.matched,
        )

    def running(self) -> Request:
        """Raises WrongStateError if it has ended or is preempted."""
        if self.request is None or self.state is not State.RUNNING:
            raise self.wrong_state()
        return self.request

    def preempted(self) -> Request:
        """Raises WrongStateError unless it is preempted and nobody brings it back yet."""
        if self.request is None or self.state is not State.PREEMPTED or self.resuming is not None:
            raise self.wrong_state()
        return self.request

    def wrong_state(self) -> WrongStateError:
        how = "being resumed" if self.resuming is not None else self.state.value
        return WrongStateError(f"request {self.key[1]!r} is {how}")

    def computed(self, num_tokens: int) -> None:
        """So many first tokens are committed."""
        self.computed_tokens = num_tokens
        for stream in self.streams.values():
            stream.advance(min(num_tokens, self.prompt_tokens))

    def finish_stream(
        self, ticket_id: str, first_tokens: Sequence[int], sampling: Mapping[str, str]
    ) -> None:
        """The prompt is computed, if it goes out under this ticket. Raises WrongStateError."""
        if ticket_id not in self.streams:
            return
        if self.computed_tokens < self.prompt_tokens:
            raise WrongStateError(
                f"only {self.computed_tokens} of {self.prompt_tokens} prompt tokens are committed"
            )
        self.streams.pop(ticket_id).finish(first_tokens, sampling=sampling)

    def fail_streams(self, reason: str) -> None:
        """No more of the prompt will be computed; who waits for its tickets is told why."""
        while self.streams:
            self.streams.popitem()[1].fail(reason)

    def busy_publishes(self) -> set[Publishing]:
        return {task for task in self.publishes.values() if not task.done()}

    @property
    def loads(self) -> Loads:
        if self.request is None or self.state is not State.RUNNING:
            return Loads.NONE
        gate = self.request.gate
        try:
            return Loads.LOADED if gate.is_open(gate.num_layers - 1) else Loads.LOADING
        except TransferError:
            return Loads.FAILED


class Leases:
    """on_expired: called with a request that was not heard of for its `ttl_s`."""

    def __init__(self, on_expired: Callable[[Held], None]) -> None:
        self._on_expired = on_expired

    def renew(self, held: Held) -> None:
        held.expires_at = asyncio.get_running_loop().time() + held.ttl_s
        if held.timer is None:
            self._look_again(held)

    @contextmanager
    def called(self, held: Held) -> Iterator[None]:
        """A call that takes time: the lease does not end under it."""
        held.num_calls += 1
        try:
            yield
        except OwnershipError as error:  # it ended, or was preempted, while the call waited
            raise held.wrong_state() from error
        finally:
            held.num_calls -= 1
            self.renew(held)

    def _look_again(self, held: Held) -> None:
        """Look at the lease when it would end; that it was renewed meanwhile costs nothing."""
        loop = asyncio.get_running_loop()
        held.timer = loop.call_at(held.expires_at, self._look, held)

    def _look(self, held: Held) -> None:
        now = asyncio.get_running_loop().time()
        if held.num_calls:
            held.expires_at = now + held.ttl_s
        if now < held.expires_at:
            self._look_again(held)
            return
        log.warning("request %s was not heard of for %g s: ended", held.key[1], held.ttl_s)
        self._on_expired(held)


class Outgoing:
    """tasks: whose they are."""

    def __init__(self, service: Service, leases: Leases, tasks: asyncio.TaskGroup) -> None:
        self._service = service
        self._leases = leases
        self._tasks = tasks

    async def stream(self, held: Held, ticket_id: str) -> bool:
        """Publish what is committed of the prompt from now on, under a ticket that `publish`
        completes; whether it does, which the settings say. Raises HandoffError, and
        DuplicateRequestError if another prompt's ticket of this id can still be claimed."""
        if ticket_id not in held.publishes:
            with self._leases.called(held):
                await self._service.check_ticket_is_free(ticket_id, held.running().spec.prompt)
        if ticket_id in held.publishes:  # another call may have come first meanwhile
            return True
        stream = self._service.stream(held.running(), ticket_id)
        if stream is None:
            return False
        stream.advance(min(held.computed_tokens, held.prompt_tokens))
        # No call of the request's: while it is computed, its lease may end.
        task = self._tasks.create_task(_outcome(stream.run()), name="tierkv-publish")
        held.streams[ticket_id], held.publishes[ticket_id] = stream, task
        return True

    async def publish(
        self, held: Held, ticket_id: str, first_tokens: Sequence[int], sampling: Mapping[str, str]
    ) -> Published:
        """Publish once per ticket id; who goes away does not stop it. Raises as `stream` does, and
        DuplicateRequestError too if the ticket says something else about the first tokens."""
        held.finish_stream(ticket_id, first_tokens, sampling)
        task = held.publishes.get(ticket_id)
        if task is None:
            work = self._publish(held, held.running(), ticket_id, first_tokens, sampling)
            task = self._tasks.create_task(work, name="tierkv-publish")
            held.publishes[ticket_id] = task
        with self._leases.called(held):
            await asyncio.wait([task])
        if task.cancelled():
            raise WrongStateError(f"request {held.key[1]!r} was ended before it was published")
        outcome = task.result()
        if isinstance(outcome, TierKVError):
            if held.publishes.get(ticket_id) is task:
                del held.publishes[ticket_id]  # the next call tries again
            if isinstance(outcome, OwnershipError):  # it is not computed, or has ended meanwhile
                raise WrongStateError(str(outcome)) from outcome
            raise outcome
        said = outcome.ticket
        if (said.first_tokens, said.sampling) != (tuple(first_tokens), sampling):
            raise DuplicateRequestError(
                f"the prompt was published under {ticket_id!r} with other first tokens or sampling"
            )
        return outcome

    async def _publish(
        self,
        held: Held,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        sampling: Mapping[str, str],
    ) -> Published | TierKVError:
        async def work() -> Published:
            await self._service.check_ticket_is_free(ticket_id, request.spec.prompt)
            return await self._service.publish(request, ticket_id, first_tokens, sampling=sampling)

        with self._leases.called(held):
            return await _outcome(work())

    async def all_out(self, held: Held) -> None:
        """Return when nothing of it is being published: its blocks are read until then."""
        while tasks := held.busy_publishes():
            with self._leases.called(held):
                await asyncio.wait(tasks)


async def _outcome(work: Awaitable[Published]) -> Published | TierKVError:
    """An expected failure is for who waits; a task that raises would stop the node."""
    try:
        return await work
    except TierKVError as error:
        return error


Begin = Callable[[], Awaitable[tuple[Request, Ticket | None]]]

MOST_ENDED = 4096  # of which the outcome is remembered, some 500 bytes each
ENDED_TTL_S = 300.0
LOADS_S = 60.0  # how long `wait=loaded` waits; then the answer says that they are on their way


class Desk:
    """Begins, finds, renews and ends; what is left at the end of `running` is aborted.

    Requests of one tenant cannot be seen by another. on_end: called when a request has ended.
    """

    def __init__(self, service: Service, on_end: Callable[[], None]) -> None:
        self._service = service
        self._on_end = on_end
        self._held: dict[Key, Held] = {}
        self._leases = Leases(self._expired)
        self.num_expired = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._now = asyncio.get_running_loop().time
        self._once: Once[Held] = Once(most=MOST_ENDED, ttl_s=ENDED_TTL_S, now=self._now)
        async with task_group() as self._tasks:
            self.outgoing = Outgoing(self._service, self._leases, self._tasks)
            try:
                yield
            finally:
                self.abort_all()

    @property
    def num_repeats(self) -> int:
        return self._once.num_repeats

    @property
    def num_open(self) -> int:
        return len(self._held)

    async def begin(
        self, key: Key, content: bytes, begin: Begin, *, ttl_s: float, wait: Wait
    ) -> Held:
        """The request of this key, which `begin` admits or claims unless that was done before.

        content: a digest of what is asked for; see Once. Raises what `begin` raises and, if the
        loads fail while it waits for them, TransferError; nothing is held then. Cancelling it
        leaves nothing behind.
        """

        async def first() -> Held:
            request, ticket = await begin()
            held = Held.of(key, request, ttl_s, ticket)
            self._held[key] = held
            self._leases.renew(held)
            if wait is Wait.LOADED:
                try:
                    with self._leases.called(held), suppress(GateTimeoutError):
                        await request.gate.all_layers(LOADS_S)
                except BaseException:  # a cancel too: nobody has been told its name yet
                    self._end(held, State.ABORTED)
                    raise
            return held

        return await self._once.do(key, content, first)

    def has(self, key: Key) -> bool:
        """Whether `find` finds it."""
        return key in self._held or self._once.find(key) is not None

    def find(self, key: Key) -> Held:
        """The request of this key, open or ended lately; its lease is renewed. Raises
        UnknownIdError."""
        held = self._held.get(key) or self._once.find(key)
        if held is None:
            raise UnknownIdError(f"there is no request {key[1]!r}")
        if held.key in self._held:
            self._leases.renew(held)
        return held

    # Driving

    async def commit(self, held: Held, tokens: bytes) -> None:
        request = held.running()
        with self._leases.called(held):
            await self._service.commit(request, tokens)
            held.computed(request.computed_tokens)

    async def extend(self, held: Held, num_tokens: int, *, deadline_s: float) -> None:
        request = held.running()
        with self._leases.called(held):
            async with self.room(num_tokens, deadline_s=deadline_s):
                await self._service.extend(request, num_tokens)

    async def preempt(self, held: Held) -> None:
        request = held.running()
        if held.streams:
            raise WrongStateError(f"request {held.key[1]!r} is being published as it is computed")
        await self.outgoing.all_out(held)
        with self._leases.called(held):
            held.running()
            self._service.preempt(request)
            held.state = State.PREEMPTED

    async def resume(self, held: Held, *, max_new_tokens: int, deadline_s: float) -> None:
        request = held.preempted()
        tokens = request.whole_prompt.num_tokens + max_new_tokens
        with self._leases.called(held):
            async with self.room(tokens, deadline_s=deadline_s) as held.resuming:
                try:
                    resumed = await self._service.resume(request, max_new_tokens=max_new_tokens)
                except BaseException:  # a cancel too: nobody else gives its blocks back
                    if held.request is None and request.state is RequestState.PREEMPTED:
                        self._service.scheduler.abandon(request)
                    raise
                finally:
                    held.resuming = None  # noqa: PLW2901 - it names the wait while there is one
                if held.request is None:  # ended in the moment that it came back
                    self._service.end(resumed)
                    raise held.wrong_state()
                held.request, held.state = resumed, State.RUNNING
                held.matched = resumed.matched

    def room(
        self, num_tokens: int, *, deadline_s: float
    ) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Wait in it for room for `num_tokens`, no longer than `deadline_s` seconds; then it
        raises OutOfBlocksError."""

        def late() -> OutOfBlocksError:
            needed = -(-num_tokens // self._service.settings.block_size)
            available = self._service.tiers.available(Tier.DEVICE)
            return OutOfBlocksError("device", needed=needed, available=available)

        return deadline(deadline_s, late)

    # Ending

    async def end(self, held: Held, state: State) -> None:
        """Give everything back; no error if that has happened. To finish waits for what is being
        published, anything else gives it up; a cancel ends only the wait."""
        why = f"the request is {state.value}, and its prompt was not published"
        if ended := self._begin_end(held, state, why, gives_up=state is not State.FINISHED):
            await asyncio.wait([ended])

    def abort_all(self) -> None:
        """Publishes are given up; each request ends as soon as its own have."""
        for held in list(self._held.values()):
            self._begin_end(held, State.ABORTED, "the node was stopped", gives_up=True)

    def _begin_end(
        self, held: Held, state: State, why: str, *, gives_up: bool
    ) -> asyncio.Task[None] | None:
        """End it now, or in the task that is returned, when nothing of it is being published any
        more. why: for who waits for its streams. gives_up: what else is being published."""
        streaming = {held.publishes[name] for name in held.streams}
        held.fail_streams(why)
        tasks = held.busy_publishes()
        if not tasks:
            self._end(held, state)
            return None
        if gives_up:
            for task in tasks - streaming:  # those end by themselves, when they have said so
                task.cancel()

        async def end_later() -> None:
            await self.outgoing.all_out(held)
            self._end(held, state)

        return self._tasks.create_task(end_later(), name="tierkv-desk-end")

    def _end(self, held: Held, state: State) -> None:
        request = held.request
        if request is None:
            return
        if held.resuming is not None:
            held.resuming.reschedule(self._now())
        elif held.state is State.PREEMPTED:
            self._service.scheduler.abandon(request)
        else:
            self._service.end(request)
        held.request, held.state = None, state
        if held.timer is not None:
            held.timer.cancel()
        held.publishes.clear()
        del self._held[held.key]
        self._once.let_go(held.key)
        self._on_end()

    def _expired(self, held: Held) -> None:
        self.num_expired += 1
        why = "the engine that computed it was not heard of any more"
        self._begin_end(held, State.EXPIRED, why, gives_up=False)
