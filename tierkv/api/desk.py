"""Requests of engines that compute by themselves, kept between the calls that drive them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from tierkv.api.held import Held, Key
from tierkv.api.idempotency import Once
from tierkv.api.leases import Leases
from tierkv.api.outgoing import Outgoing
from tierkv.api.refusals import UnknownIdError, WrongStateError
from tierkv.api.types_requests import State, Wait
from tierkv.cache.node import Tier
from tierkv.errors import GateTimeoutError, OutOfBlocksError
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Request, RequestState
from tierkv.service import Service
from tierkv.tasks import deadline, task_group

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
