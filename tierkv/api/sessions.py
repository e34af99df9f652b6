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
from tierkv.errors import GateTimeoutError, OutOfBlocksError, OwnershipError, TransferError
from tierkv.http.problems import UnknownIdError, WrongStateError
from tierkv.pd.handoff import Published
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Matched, Request, RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.tasks import deadline

log = logging.getLogger("tierkv.desk")

Key = tuple[str, str]  # tenant, request id


@dataclass(slots=True, eq=False)
class HeldSession:
    """A request as callers know it. session: None once it has ended.

    expires_at: on the loop's clock. num_calls: under way; the lease does not end under them.
    ends_as: what to tell of it once it has ended.
    """

    key: Key
    session: Session | None
    ttl_s: float
    ticket: Ticket | None = None
    expires_at: float = 0.0
    ends_as: State | None = None
    num_calls: int = 0
    timer: asyncio.TimerHandle | None = None
    prompt_tokens: int = 0
    block_size: int = 0
    matched: Matched = field(default_factory=Matched)
    computed_tokens: int = 0

    @classmethod
    def of(cls, key: Key, session: Session, ttl_s: float) -> HeldSession:
        prompt = session.spec.prompt
        return cls(
            key,
            session,
            ttl_s,
            session.ticket,
            prompt_tokens=prompt.num_tokens,
            block_size=prompt.block_size,
            matched=session.matched,
        )

    @property
    def state(self) -> State:
        if self.session is None:
            return self.ends_as or State.ABORTED
        return State.PREEMPTED if self.session.is_preempted else State.RUNNING

    @property
    def request(self) -> Request | None:
        """None once it has ended."""
        return None if self.session is None else self.session.request

    def open(self) -> Session:
        """Raises WrongStateError if it has ended."""
        if self.session is None:
            raise self.wrong_state()
        return self.session

    def running(self) -> Request:
        """Raises WrongStateError if it has ended or is preempted."""
        try:
            return self.open().running()
        except OwnershipError as error:
            raise self.wrong_state() from error

    def wrong_state(self) -> WrongStateError:
        how = self.state.value
        if self.session is not None and self.session.is_resuming:
            how = "being resumed"
        elif self.session is not None and self.session.is_ending:
            how = "ending"
        return WrongStateError(f"request {self.key[1]!r} is {how}")

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

    def __init__(self, on_expired: Callable[[HeldSession], None]) -> None:
        self._on_expired = on_expired

    def renew(self, held: HeldSession) -> None:
        held.expires_at = asyncio.get_running_loop().time() + held.ttl_s
        if held.timer is None:
            self._look_again(held)

    @contextmanager
    def called(self, held: HeldSession) -> Iterator[None]:
        """A call that takes time: the lease does not end under it."""
        held.num_calls += 1
        try:
            yield
        except OwnershipError as error:  # it ended, or was preempted, while the call waited
            raise held.wrong_state() from error
        finally:
            held.num_calls -= 1
            self.renew(held)

    def _look_again(self, held: HeldSession) -> None:
        """Look at the lease when it would end; that it was renewed meanwhile costs nothing."""
        loop = asyncio.get_running_loop()
        held.timer = loop.call_at(held.expires_at, self._look, held)

    def _look(self, held: HeldSession) -> None:
        now = asyncio.get_running_loop().time()
        if held.num_calls or (held.session is not None and held.session.is_publishing):
            held.expires_at = now + held.ttl_s
        if now < held.expires_at:
            self._look_again(held)
            return
        log.warning("request %s was not heard of for %g s: ended", held.key[1], held.ttl_s)
        self._on_expired(held)


Begin = Callable[[Session], Awaitable[object]]

MOST_ENDED = 4096  # of which the outcome is remembered, some 500 bytes each
ENDED_TTL_S = 300.0
LOADS_S = 60.0  # how long `wait=loaded` waits; then the answer says that they are on their way


class Sessions:
    """Begins, finds, renews and ends; what is left at the end of `running` is aborted.

    Requests of one tenant cannot be seen by another. on_end: called when a request has ended.
    """

    def __init__(self, service: Service, on_end: Callable[[], None]) -> None:
        self._service = service
        self._on_end = on_end
        self._held: dict[Key, HeldSession] = {}
        self._leases = Leases(self._expired)
        self.num_expired = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._now = asyncio.get_running_loop().time
        self._once: Once[HeldSession] = Once(most=MOST_ENDED, ttl_s=ENDED_TTL_S, now=self._now)
        try:
            yield
        finally:
            left = self._abort_all()
        while left:
            await asyncio.wait([left.pop().over])

    @property
    def num_repeats(self) -> int:
        return self._once.num_repeats

    @property
    def num_open(self) -> int:
        return len(self._held)

    async def begin(
        self,
        key: Key,
        content: bytes,
        spec: RequestSpec,
        begin: Begin,
        *,
        ttl_s: float,
        wait: Wait,
    ) -> HeldSession:
        """The request of this key, which `begin` admits or claims unless that was done before.

        content: a digest of what is asked for; see Once. Raises what `begin` raises and, if the
        loads fail while it waits for them, TransferError; nothing is held then. Cancelling it
        leaves nothing behind.
        """

        async def first() -> HeldSession:
            session = Session(self._service, spec, on_end=lambda: self._ended(held))
            await begin(session)
            held = HeldSession.of(key, session, ttl_s)
            self._held[key] = held
            self._leases.renew(held)
            if wait is Wait.LOADED:
                try:
                    with self._leases.called(held), suppress(GateTimeoutError):
                        await session.request.gate.all_layers(LOADS_S)
                except BaseException:  # a cancel too: nobody has been told its name yet
                    session.end()
                    raise
            return held

        return await self._once.do(key, content, first)

    def has(self, key: Key) -> bool:
        """Whether `find` finds it."""
        return key in self._held or self._once.find(key) is not None

    def find(self, key: Key) -> HeldSession:
        """The request of this key, open or ended lately; its lease is renewed. Raises
        UnknownIdError."""
        held = self._held.get(key) or self._once.find(key)
        if held is None:
            raise UnknownIdError(f"there is no request {key[1]!r}")
        if held.key in self._held:
            self._leases.renew(held)
        return held

    # Driving

    async def commit(self, held: HeldSession, tokens: bytes) -> None:
        session, request = held.open(), held.running()
        with self._leases.called(held):
            await session.commit(tokens)
            held.computed_tokens = request.computed_tokens

    async def extend(self, held: HeldSession, num_tokens: int, *, deadline_s: float) -> None:
        held.running()
        with self._leases.called(held):
            async with self.room(num_tokens, deadline_s=deadline_s):
                await held.open().extend(num_tokens)

    async def preempt(self, held: HeldSession) -> None:
        held.running()
        if held.open().is_streaming:
            raise WrongStateError(f"request {held.key[1]!r} is being published as it is computed")
        with self._leases.called(held):
            await held.open().preempt()

    async def resume(self, held: HeldSession, *, max_new_tokens: int, deadline_s: float) -> None:
        session = held.open()
        with self._leases.called(held):
            tokens = session.request.whole_prompt.num_tokens + max_new_tokens
            async with self.room(tokens, deadline_s=deadline_s):
                await session.resume(max_new_tokens=max_new_tokens)
            held.matched = session.matched

    async def stream(self, held: HeldSession, ticket_id: str) -> bool:
        """See Session.stream. No call of the request's: while it is computed, its lease may end."""
        held.running()
        with self._leases.called(held):
            return await held.open().stream(ticket_id)

    async def publish(
        self,
        held: HeldSession,
        ticket_id: str,
        first_tokens: Sequence[int],
        sampling: Mapping[str, str],
    ) -> Published:
        """Publish once per ticket id; who goes away does not stop it. See Session.publish."""
        session = held.open()
        try:
            publishing = session.publish(ticket_id, first_tokens, sampling=sampling)
            return await session.published(publishing, first_tokens, sampling)
        except OwnershipError as error:  # it is not computed, or has ended meanwhile
            raise WrongStateError(str(error)) from error
        finally:
            if held.session is not None:
                self._leases.renew(held)

    def room(
        self, num_tokens: int, *, deadline_s: float
    ) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Wait in it for room for `num_tokens`, no longer than `deadline_s` seconds; then it
        raises OutOfBlocksError."""

        def late() -> OutOfBlocksError:
            needed = -(-num_tokens // self._service.settings.block_size)
            available = self._service.tiers.eviction.available(Tier.DEVICE)
            return OutOfBlocksError("device", needed=needed, available=available)

        return deadline(deadline_s, late)

    # Ending

    async def end(self, held: HeldSession, state: State) -> None:
        """Give everything back; no error if that has happened. To finish waits for what is being
        published, anything else gives it up; a cancel ends only the wait."""
        if held.session is None:
            return
        over = held.session.over
        held.ends_as = held.ends_as or state
        if state is State.FINISHED:
            held.session.end(reason=f"the request is {state.value}")
        else:
            held.session.abort(reason=f"the request is {state.value}")
        if not over.done():
            await asyncio.wait([over])

    def _abort_all(self) -> list[Session]:
        """Publishes are given up; each request ends as soon as its own have. Those still open."""
        left = [held.open() for held in self._held.values()]
        for session in left:
            session.abort(reason="the node was stopped")
        return [session for session in left if not session.has_ended]

    def _ended(self, held: HeldSession) -> None:
        held.session = None
        if held.timer is not None:
            held.timer.cancel()
        del self._held[held.key]
        self._once.let_go(held.key)
        self._on_end()

    def _expired(self, held: HeldSession) -> None:
        self.num_expired += 1
        held.ends_as = held.ends_as or State.EXPIRED
        held.open().end(reason="the engine that computed it was not heard of any more")
