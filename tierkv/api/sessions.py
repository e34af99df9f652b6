"""What callers keep on a node by name, between their calls: sessions of engines that compute by
themselves, pins, and movements of prompts; and answers, so that an id's work is done once."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

import msgspec
import xxhash

from tierkv.api.types import Loads, PrefetchState, PromptBody, State, Wait
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier
from tierkv.errors import (
    DuplicateRequestError,
    GateTimeoutError,
    OutOfBlocksError,
    OwnershipError,
    StoreUnavailableError,
    TierKVError,
    TransferError,
)
from tierkv.http.problems import TooManyError, UnknownIdError, WrongStateError
from tierkv.pd.handoff import Published
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Matched, Request, RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.tasks import deadline, task_group

T = TypeVar("T")


def content_of(body: PromptBody, tokens: bytes) -> bytes:
    """A digest of what a body asks for. The form of its tokens and its id make no difference."""
    rest = msgspec.structs.replace(body, prompt=None, tokens=None, request_id=None)
    digest = xxhash.xxh3_128(tokens)
    digest.update(repr(rest).encode())  # no encoder: a seed may be an integer of any size
    return digest.digest()


@dataclass(slots=True)
class _Entry(Generic[T]):
    content: bytes
    outcome: asyncio.Future[T]
    forgotten_at: float = 0.0


@dataclass(slots=True)
class OnceCall(Generic[T]):
    """made: the result of an earlier call, to be answered as it is; where it is None, the body
    makes the result and sets it."""

    made: T | None = None


class Once(Generic[T]):
    """Results by key. One is kept while it is open, and for `ttl_s` seconds after `let_go`, unless
    `most` newer ones have been let go since.

    A failure is not kept: the next call tries again. now: a clock that does not go back.
    """

    def __init__(self, *, most: int, ttl_s: float, now: Callable[[], float]) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._now = now
        self._open: dict[Hashable, _Entry[T]] = {}
        self._past: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self.num_repeats = 0  # that were answered with what another call had brought about

    def __len__(self) -> int:
        return len(self._open) + len(self._past)

    @asynccontextmanager
    async def call(
        self, key: Hashable, content: bytes, *, stays_open: bool = True
    ) -> AsyncIterator[OnceCall[T]]:
        """One call for the work of `key`. Yields the result of an earlier call, or None: then the
        body does the work, and sets the result.

        content: a digest of what is asked for. stays_open: the result stands for something that
        ends with `let_go`. Raises DuplicateRequestError if the key was used for something else, and
        what an earlier call that it waits for raises. If that is cancelled, one that waits for it
        does the work instead.
        """
        while (known := self._find(key)) is not None:
            if known.content != content:
                raise DuplicateRequestError("another request with other content has this id")
            if not known.outcome.done():
                await asyncio.wait([known.outcome])
            if not known.outcome.cancelled():
                result = known.outcome.result()
                self.num_repeats += 1
                yield OnceCall(result)
                return
        entry: _Entry[T] = _Entry(content, asyncio.get_running_loop().create_future())
        self._open[key] = entry
        call: OnceCall[T] = OnceCall()
        try:
            yield call
            assert call.made is not None, "the body sets it"
        except TierKVError as error:
            self._drop(key)
            entry.outcome.set_exception(error)
            entry.outcome.exception()  # seen: it is raised here too
            raise
        except BaseException:  # the first caller has gone: one of those who wait does it
            self._drop(key)
            entry.outcome.cancel()
            raise
        entry.outcome.set_result(call.made)
        if not stays_open:
            self.let_go(key)

    def let_go(self, key: Hashable) -> None:
        """Keep the result of `key` for `ttl_s` seconds more, at most."""
        entry = self._open.pop(key, None)
        if entry is None:
            return
        entry.forgotten_at = self._now() + self._ttl_s
        self._past[key] = entry
        self._forget()

    def find(self, key: Hashable) -> T | None:
        """The result of `key`, None if there is none, or none yet."""
        known = self._find(key)
        if known is None or not known.outcome.done() or known.outcome.cancelled():
            return None
        return known.outcome.result()

    def _drop(self, key: Hashable) -> None:
        self._open.pop(key, None)
        self._past.pop(key, None)

    def _find(self, key: Hashable) -> _Entry[T] | None:
        self._forget()
        return self._open.get(key) or self._past.get(key)

    def _forget(self) -> None:
        past, now = self._past, self._now()
        while past:
            oldest = next(iter(past))  # all live equally long, so the first is the first to go
            if len(past) <= self._most and past[oldest].forgotten_at > now:
                return
            del past[oldest]


log = logging.getLogger(__name__)

Key = tuple[str, str]  # tenant, request id


@dataclass(slots=True, eq=False)
class HeldSession:
    """A request as callers know it. session: None once it has ended.

    expires_at: of the lease, on the loop's clock. num_calls: calls under way, during which the
    lease does not end. ends_as: its state once it has ended."""

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
        if self.session is None or self.session.is_preempted:
            return Loads.NONE
        gate = self.session.request.gate
        try:
            return Loads.LOADED if gate.is_open(gate.num_layers - 1) else Loads.LOADING
        except TransferError:
            return Loads.FAILED


class Leases:
    """Leases of requests. on_expired: called with one that no call has named for its `ttl_s`."""

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
        """Look at the lease when it would end: so renewing it costs no timer."""
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
    """The requests of engines, by tenant and id. Those left at the end of `running` are aborted.

    on_end: called when a request has ended.
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

        async with self._once.call(key, content) as call:
            if call.made is None:
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
                call.made = held
        return call.made

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
        """See Session.stream."""
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
        """Publish once per ticket id; a cancel ends only the wait. See Session.publish."""
        session = held.open()
        try:
            publishing = session.publish(ticket_id, first_tokens, sampling=sampling)
            return await session.published(publishing, first_tokens, sampling)
        except OwnershipError as error:  # it is not computed, or has ended meanwhile
            raise WrongStateError(str(error)) from error
        finally:
            if held.session is not None:
                self._leases.renew(held)

    def room(self, num_tokens: int, *, deadline_s: float) -> deadline:
        """A deadline for a wait for room for `num_tokens`: raises OutOfBlocksError after
        `deadline_s` seconds."""

        def late() -> OutOfBlocksError:
            needed = -(-num_tokens // self._service.settings.block_size)
            available = self._service.tiers.eviction.available(Tier.DEVICE)
            return OutOfBlocksError("device", needed=needed, available=available)

        return deadline(deadline_s, late)

    # Ending

    async def end(self, held: HeldSession, state: State) -> None:
        """Give everything back; no error if that has happened. FINISHED waits until the prompt is
        published, other states give that up. A cancel ends only the wait."""
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


MOST_PINS = 10_000  # of one tenant


@dataclass(frozen=True, slots=True)
class Pin:
    """num_blocks: whole blocks of the prompt that it keeps. ends_at: on the clock of `now`."""

    pin_id: str
    num_blocks: int
    prompt_tokens: int
    is_soft: bool
    ends_at: float


class PinBook:
    """The pins of callers, by tenant and id. now: a clock that does not go back."""

    def __init__(self, service: Service, now: Callable[[], float]) -> None:
        self._service = service
        self._now = now
        self._pins: dict[str, dict[str, Pin]] = {}

    def put(self, key: Key, prompt: Prompt, ttl_s: float, *, is_soft: bool) -> Pin:
        """Pin what is cached of `prompt`, in place of a pin of the same key. Raises
        TooManyError."""
        tenant, pin_id = key
        pins = self._pins.setdefault(tenant, {})
        if len(pins) >= MOST_PINS and pin_id not in pins and len(self.all_of(tenant)) >= MOST_PINS:
            raise TooManyError(f"{MOST_PINS} pins are set")
        num_blocks = self._service.pin(_name(key), prompt, ttl_s, is_soft=is_soft)
        pin = Pin(pin_id, num_blocks, prompt.num_tokens, is_soft, self._now() + ttl_s)
        pins[pin_id] = pin
        return pin

    def get(self, key: Key) -> Pin:
        """Raises UnknownIdError."""
        pin = self._pins.get(key[0], {}).get(key[1])
        if pin is None or pin.ends_at <= self._now():
            raise UnknownIdError(f"there is no pin {key[1]!r}")
        return pin

    def remove(self, key: Key) -> Pin:
        """Raises UnknownIdError."""
        pin = self.get(key)
        del self._pins[key[0]][key[1]]
        self._service.unpin(_name(key))
        return pin

    def all_of(self, tenant: str) -> list[Pin]:
        """The tenant's pins whose time is not over; the others are forgotten."""
        now, pins = self._now(), self._pins.get(tenant, {})
        for pin_id in [pin_id for pin_id, pin in pins.items() if pin.ends_at <= now]:
            del pins[pin_id]
        return list(pins.values())


def _name(key: Key) -> str:
    return f"{len(key[0])}:{key[0]}:{key[1]}"  # no two keys have the same


# Movements that a caller asks for by a prompt, each a task with a name: prefetches bring what
# storage has to the host; backups bring what is cached here to storage.

MOST_RUNNING = 256
MOST_DONE = 4096
DONE_TTL_S = 300.0


Move = Callable[[Prompt, float], Awaitable[tuple[range, str | None]]]


@dataclass(slots=True, eq=False)
class PromptMovement:
    """tokens: of the prompt, those that were moved. problem: why no more."""

    key: Key
    prompt_tokens: int
    task: asyncio.Task[None] | None = None
    state: PrefetchState = PrefetchState.RUNNING
    tokens: range = range(0)
    problem: str | None = None


class PromptMovements:
    """Movements of one kind, by name. Those under way at the end of `running` are given up.

    kind: its name. move: moves a prompt within so many seconds; returns which tokens it moved, and
    why not more, None if that is all.
    """

    def __init__(self, service: Service, kind: str, move: Move) -> None:
        self._service = service
        self._kind = kind
        self._move = move
        self._running: set[PromptMovement] = set()
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        now = asyncio.get_running_loop().time
        self._once: Once[PromptMovement] = Once(most=MOST_DONE, ttl_s=DONE_TTL_S, now=now)
        async with task_group() as self._tasks:
            try:
                yield
            finally:
                for movement in list(self._running):
                    self._cancel(movement)

    async def begin(
        self, key: Key, content: bytes, prompt: Prompt, *, deadline_s: float
    ) -> PromptMovement:
        """The movement of this key, begun now or before. Raises StoreUnavailableError without a
        storage tier, TooManyError, and DuplicateRequestError."""

        async with self._once.call(key, content) as call:
            if call.made is None:
                if self._service.tiers.copies.storage is None:
                    raise StoreUnavailableError("this node has no storage tier")
                if len(self._running) >= MOST_RUNNING:
                    raise TooManyError(f"{MOST_RUNNING} such are under way")
                movement = PromptMovement(key, prompt.num_tokens)
                self._running.add(movement)
                assert self._tasks is not None, "movements are running"
                movement.task = self._tasks.create_task(
                    self._run(movement, prompt, deadline_s), name=f"tierkv-{self._kind}"
                )
                call.made = movement
        return call.made

    def find(self, key: Key) -> PromptMovement:
        """Raises UnknownIdError."""
        movement = self._once.find(key)
        if movement is None:
            raise UnknownIdError(f"there is no {self._kind} {key[1]!r}")
        return movement

    def cancel(self, key: Key) -> PromptMovement:
        """Give it up; what is on its way still arrives. No error if it is over. Raises
        UnknownIdError."""
        movement = self.find(key)
        self._cancel(movement)
        return movement

    def _cancel(self, movement: PromptMovement) -> None:
        if movement.task is not None and movement in self._running:
            movement.task.cancel()
            self._end(movement, PrefetchState.CANCELLED)

    async def _run(self, movement: PromptMovement, prompt: Prompt, deadline_s: float) -> None:
        try:
            movement.tokens, movement.problem = await self._move(prompt, deadline_s)
        except TierKVError as error:
            movement.problem = str(error)
        is_whole = movement.problem is None
        self._end(movement, PrefetchState.DONE if is_whole else PrefetchState.PARTIAL)

    def _end(self, movement: PromptMovement, state: PrefetchState) -> None:
        movement.state = state
        self._running.discard(movement)
        self._once.let_go(movement.key)


def prefetching(service: Service) -> Move:
    """Brings what storage has of a prompt to the host."""

    async def fetch(prompt: Prompt, deadline_s: float) -> tuple[range, str | None]:
        fetched = await service.fetcher.fetch(prompt, deadline_s=deadline_s)
        fetched.release()  # the cache decides from here on what stays
        problem = fetched.first_problem
        return fetched.tokens, None if problem is None else problem.reason

    return fetch


def backing_up(service: Service) -> Move:
    """Stores what is cached here of a prompt, in whole blocks: admits them as a request that
    computes nothing, and stores them as a publish does, without a ticket."""
    numbers = count(1)

    async def store(prompt: Prompt, deadline_s: float) -> tuple[range, str | None]:
        size, width = prompt.block_size, prompt.block_token_bytes
        cached = service.index.match(prompt).num_blocks
        if not cached:
            return range(0), "nothing of it is cached here"
        head = Prompt(prompt.tokens[: cached * width], size, prompt.extras, prompt.space)
        handoff = service.handoff
        if handoff is None:
            return range(0), "this node has no storage tier"
        try:
            async with asyncio.timeout(deadline_s):
                spec = RequestSpec(f"backup {next(numbers)}", head, 0, needs_logits=False)
                request = await service.admit_as(spec)
                try:
                    await request.gate.all_layers(deadline_s)
                    stop = request.matched.total_tokens // size
                    keys = handoff.tickets.keys_of(head)
                    present = await handoff.count_present(keys[:stop])
                    await handoff.store(request, keys, present, stop, ())
                finally:
                    service.end(request)
        except TimeoutError:
            return range(0), f"it was not stored within {deadline_s:g} s"
        is_all = stop * size >= prompt.num_blocks * size
        return range(stop * size), None if is_all else "no more of it is cached here"

    return store
