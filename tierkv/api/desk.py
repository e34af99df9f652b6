"""Requests of engines that compute by themselves, kept between the calls that drive them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from tierkv.api.held import Held, Key, Publishing
from tierkv.api.idempotency import Once
from tierkv.api.refusals import UnknownIdError, WrongStateError
from tierkv.api.types_requests import State, Wait
from tierkv.cache.node import Tier
from tierkv.errors import GateTimeoutError, OutOfBlocksError, OwnershipError, TierKVError
from tierkv.pd.handoff import Published
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Request, RequestState
from tierkv.service import Service
from tierkv.tasks import task_group

log = logging.getLogger("tierkv.desk")

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
        self.num_expired = 0
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._now = asyncio.get_running_loop().time
        self._once: Once[Held] = Once(most=MOST_ENDED, ttl_s=ENDED_TTL_S, now=self._now)
        async with task_group() as self._tasks:
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
            self._renew(held)
            if wait is Wait.LOADED:
                try:
                    with self.called(held), suppress(GateTimeoutError):
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
            self._renew(held)
        return held

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
            self._renew(held)

    # Driving

    async def commit(self, held: Held, tokens: bytes) -> None:
        request = held.running()
        with self.called(held):
            await self._service.commit(request, tokens)
            held.computed(request.computed_tokens)

    async def extend(self, held: Held, num_tokens: int, *, deadline_s: float) -> None:
        request = held.running()
        with self.called(held):
            async with self.room(num_tokens, deadline_s=deadline_s):
                await self._service.extend(request, num_tokens)

    async def preempt(self, held: Held) -> None:
        request = held.running()
        if held.streams:
            raise WrongStateError(f"request {held.key[1]!r} is being published as it is computed")
        await self._published(held)
        with self.called(held):
            held.running()
            self._service.preempt(request)
            held.state = State.PREEMPTED

    async def resume(self, held: Held, *, max_new_tokens: int, deadline_s: float) -> None:
        request = held.preempted()
        tokens = request.prompt.num_tokens + max_new_tokens
        with self.called(held):
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

    @asynccontextmanager
    async def room(self, num_tokens: int, *, deadline_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Wait in it for room for `num_tokens`, no longer than `deadline_s` seconds; then it
        raises OutOfBlocksError."""
        scope = asyncio.timeout(deadline_s)
        try:
            async with scope:
                yield scope
        except TimeoutError as error:
            if not scope.expired():
                raise
            needed = -(-num_tokens // self._service.settings.block_size)
            available = self._service.tiers.available(Tier.DEVICE)
            raise OutOfBlocksError("device", needed=needed, available=available) from error

    def stream(self, held: Held, ticket_id: str) -> bool:
        """Publish what is committed of the prompt from now on, under a ticket that `publish`
        completes; whether it does, which the settings say. Raises HandoffError."""
        if ticket_id in held.publishes:
            return True
        stream = self._service.stream(held.running(), ticket_id)
        if stream is None:
            return False
        stream.advance(min(held.computed_tokens, held.prompt_tokens))
        assert self._tasks is not None, "the desk is running"
        # No call of the request's: while it is computed, its lease may end.
        task = self._tasks.create_task(_outcome(stream.run()), name="tierkv-publish")
        held.streams[ticket_id], held.publishes[ticket_id] = stream, task
        return True

    async def publish(self, held: Held, ticket_id: str, first_tokens: list[int]) -> Published:
        """Publish once per ticket id; who goes away does not stop it. Raises HandoffError."""
        held.finish_stream(ticket_id, first_tokens)
        task = held.publishes.get(ticket_id)
        if task is None:
            request = held.running()
            assert self._tasks is not None, "the desk is running"
            task = self._tasks.create_task(
                self._publish(held, request, ticket_id, first_tokens), name="tierkv-publish"
            )
            held.publishes[ticket_id] = task
        with self.called(held):
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
        return outcome

    async def _publish(
        self, held: Held, request: Request, ticket_id: str, first_tokens: list[int]
    ) -> Published | TierKVError:
        with self.called(held):
            return await _outcome(self._service.publish(request, ticket_id, first_tokens))

    async def _published(self, held: Held) -> None:
        """Return when nothing of it is being published: its blocks are read until then."""
        while tasks := held.busy_publishes():
            with self.called(held):
                await asyncio.wait(tasks)

    # Ending

    async def end(self, held: Held, state: State) -> None:
        """Give everything back; no error if that has happened. To finish waits for what is being
        published, anything else gives it up; a cancel ends only the wait."""
        streaming = {held.publishes[name] for name in held.streams}
        held.fail_streams(f"the request is {state.value}, and its prompt was not published")
        tasks = held.busy_publishes()
        if not tasks:
            self._end(held, state)
            return
        if state is not State.FINISHED:
            for task in tasks - streaming:  # those end by themselves, when they have said so
                task.cancel()
        assert self._tasks is not None, "the desk is running"
        ending = self._tasks.create_task(self._end_later(held, state), name="tierkv-desk-end")
        await asyncio.wait([ending])

    async def _end_later(self, held: Held, state: State) -> None:
        await self._published(held)
        self._end(held, state)

    def abort_all(self) -> None:
        """Publishes are given up; each request ends as soon as its own have."""
        for held in list(self._held.values()):
            streaming = {held.publishes[name] for name in held.streams}
            held.fail_streams("the node was stopped")
            tasks: set[Publishing] = held.busy_publishes()
            for task in tasks - streaming:  # those end by themselves, when they have said so
                task.cancel()
            if tasks:
                assert self._tasks is not None, "the desk is running"
                ending = self._end_later(held, State.ABORTED)
                self._tasks.create_task(ending, name="tierkv-desk-end")
            else:
                self._end(held, State.ABORTED)

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

    def _renew(self, held: Held) -> None:
        held.expires_at = self._now() + held.ttl_s
        if held.timer is None:
            self._look_again(held)

    def _look_again(self, held: Held) -> None:
        """Look at the lease when it would end; that it was renewed meanwhile costs nothing."""
        loop = asyncio.get_running_loop()
        held.timer = loop.call_at(held.expires_at, self._look, held)

    def _look(self, held: Held) -> None:
        if held.num_calls:
            held.expires_at = self._now() + held.ttl_s
        if self._now() < held.expires_at:
            self._look_again(held)
            return
        log.warning("request %s was not heard of for %g s: ended", held.key[1], held.ttl_s)
        self.num_expired += 1
        held.fail_streams("the engine that computed it was not heard of any more")
        if not held.busy_publishes():
            self._end(held, State.EXPIRED)
            return
        assert self._tasks is not None, "the desk is running"
        ending = self._end_later(held, State.EXPIRED)
        self._tasks.create_task(ending, name="tierkv-desk-end")


async def _outcome(work: Awaitable[Published]) -> Published | TierKVError:
    """An expected failure is for who waits; a task that raises would stop the node."""
    try:
        return await work
    except TierKVError as error:
        return error
