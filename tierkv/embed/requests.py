"""The requests of an embedded service, on its loop: for each, one operation after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum

from tierkv.cache.keys import pack
from tierkv.cache.node import Ids
from tierkv.embed.exchange import AbortedError
from tierkv.errors import DuplicateRequestError, OwnershipError
from tierkv.gpu.protocol import Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Matched, RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.transfer.mover import LayerGate


class Until(Enum):
    """When an admission is READY."""

    LOADED = "loaded"  # every cached token is in the block table, or is named as failed
    ADMITTED = "admitted"  # it has its blocks; the engine waits at `gate`, layer by layer


@dataclass(frozen=True, slots=True)
class Admitted:
    """What an engine holds of an admitted request: a snapshot that nobody changes.

    block_table: int32, read-only: the device blocks for the prompt and max_new_tokens more.
    cached_tokens: the first so many tokens have KV there (once `gate` is open, with
        Until.ADMITTED); the engine computes from there on.
    failed_blocks: blocks of the prompt, counted from 0, that were found in the cache but could not
        be loaded. They lie behind cached_tokens: the engine computes them with the rest.
    load_problem: why, None if there are none.
    """

    request_id: str
    block_table: Ids
    cached_tokens: int
    matched: Matched
    gate: LayerGate
    ticket: Ticket | None = None
    failed_blocks: tuple[int, ...] = ()
    load_problem: str | None = None

    @classmethod
    def of(cls, session: Session) -> Admitted:
        request = session.request
        table = request.block_table.copy()  # `extend` makes another one
        table.flags.writeable = False
        return cls(
            request.request_id,
            table,
            request.cached_tokens,
            request.matched,
            request.gate,
            session.ticket,
            tuple(session.failed_blocks),
            session.load_problem,
        )


@dataclass(slots=True, eq=False)
class _Held:
    """A request from the call that asks for it to the one that ends it.

    turn: first come, first served, so that a commit and the end after it stay in this order.
    tasks: operations that run or wait for their turn.
    """

    session: Session
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)


class Requests:
    """load_timeout_s: after so long, cached blocks that have not arrived count as failed."""

    def __init__(self, service: Service, *, load_timeout_s: float) -> None:
        self.service = service
        self._load_timeout_s = load_timeout_s
        self._held: dict[str, _Held] = {}

    # Admission

    async def admit(self, spec: RequestSpec, until: Until) -> Admitted:
        async with self._new(spec) as session:
            self.service.scheduler.check(spec)
            await session.admit()
            return await self._ready(session, until)

    async def claim(
        self,
        spec: RequestSpec,
        ticket_id: str,
        policy: ClaimPolicy,
        deadline_s: float | None,
        sampling: Mapping[str, str],
    ) -> Admitted:
        async with self._new(spec) as session:
            await session.claim(ticket_id, policy, deadline_s, sampling)
            return await self._ready(session, Until.LOADED)

    async def resume(self, request_id: str, max_new_tokens: int, until: Until) -> Admitted:
        async with self._turn(request_id) as session:
            # Cancelled, the request stays preempted, and can be resumed again or aborted.
            await session.resume(max_new_tokens=max_new_tokens)
            return await self._ready(session, until)

    async def recover(self, request_id: str, after: Sequence[Event]) -> Admitted:
        async with self._turn(request_id) as session:
            why = "the engine could not use what was loaded"
            await session.recover(why, timeout_s=self._load_timeout_s, after=after)
            return Admitted.of(session)

    async def _ready(self, session: Session, until: Until) -> Admitted:
        if until is Until.LOADED:
            await session.loaded_or_recovered(self._load_timeout_s)
        return Admitted.of(session)

    # Running requests

    async def commit(self, request_id: str, tokens: bytes, after: Sequence[Event]) -> None:
        async with self._turn(request_id) as session:
            await session.commit(pack(tokens), after=after)

    async def extend(self, request_id: str, num_tokens: int) -> Admitted:
        async with self._turn(request_id) as session:
            await session.extend(num_tokens)
            return Admitted.of(session)

    async def publish(
        self,
        request_id: str,
        ticket_id: str,
        first_tokens: Sequence[int],
        after: Sequence[Event],
        sampling: Mapping[str, str],
    ) -> Published:
        async with self._turn(request_id) as session:
            publishing = session.publish(ticket_id, first_tokens, after=after, sampling=sampling)
            try:
                return await session.published(publishing, first_tokens, sampling)
            except asyncio.CancelledError:  # who asked for it does not want it any more
                publishing.give_up(AbortedError(f"publish of {request_id!r} was cancelled"))
                raise

    async def preempt(self, request_id: str, after: Sequence[Event]) -> None:
        async with self._turn(request_id) as session:
            await session.preempt(after=after)

    # Ending

    async def end(self, request_id: str, after: Sequence[Event]) -> None:
        async with self._turn(request_id) as session:
            session.end(after=after)
            del self._held[request_id]

    async def abort(self, request_id: str, after: Sequence[Event]) -> bool:
        """End it whatever it is doing; whether there was such a request."""
        held = self._held.get(request_id)
        if held is None:
            return False
        tasks = held.tasks - {_current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._held.get(request_id) is held:
            del self._held[request_id]
            held.session.abort(after=after)
            await asyncio.wait([held.session.over])
        return True

    def end_all(self) -> list[str]:
        """End what is left when no operation runs any more; the names."""
        left = list(self._held)
        for name in left:
            self._held.pop(name).session.abort()
        return left

    # Order

    @asynccontextmanager
    async def _new(self, spec: RequestSpec) -> AsyncIterator[Session]:
        """A request that is not known yet. If the body fails nothing of it is left."""
        if spec.request_id in self._held:
            raise DuplicateRequestError(f"request {spec.request_id!r} is already running")
        held = self._held[spec.request_id] = _Held(Session(self.service, spec))
        try:
            with _listed(held):
                async with held.turn:
                    yield held.session
        except BaseException:  # a cancel too: what it has got would have no owner
            if self._held.get(spec.request_id) is held:
                del self._held[spec.request_id]
            held.session.abort()
            raise

    @asynccontextmanager
    async def _turn(self, request_id: str) -> AsyncIterator[Session]:
        held = self._held.get(request_id)
        if held is None:
            raise OwnershipError(f"there is no request {request_id!r}, or it has ended")
        with _listed(held):
            async with held.turn:
                if self._held.get(request_id) is not held:
                    raise OwnershipError(f"request {request_id!r} has ended")
                yield held.session


@contextmanager
def _listed(held: _Held) -> Iterator[None]:
    """While the body runs, `abort` finds its task."""
    task = _current_task()
    held.tasks.add(task)
    try:
        yield
    finally:
        held.tasks.discard(task)


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None, "operations run in tasks"
    return task
