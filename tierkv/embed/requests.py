"""The requests of an embedded service, on its loop: for each request one operation at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum

from tierkv.cache.node import Ids
from tierkv.errors import DuplicateRequestError, OwnershipError
from tierkv.gpu.protocol import Event
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Matched, RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.transfer.mover import LayerGate


class Until(Enum):
    """The moment at which an admission is READY."""

    LOADED = "loaded"  # every cached token is in the block table, or is named as failed
    ADMITTED = "admitted"  # the request has its blocks; the engine waits at `gate`, layer by layer


@dataclass(frozen=True, slots=True)
class Admitted:
    """The blocks of an admitted request: an immutable snapshot.

    Attributes:
        block_table: int32, read-only: the device blocks for the prompt and max_new_tokens more.
        cached_tokens: number of leading tokens with KV in these blocks (once `gate` is open, with
            Until.ADMITTED); the engine computes from there on.
        failed_blocks: blocks of the prompt, counted from 0, that were found in the cache but could
            not be loaded. All lie behind cached_tokens: the engine computes them with the rest.
        load_problem: why these blocks failed; None if there are none.
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
        """Return the session's blocks as they are now."""
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
    """A request from the call that begins it to the call that ends it.

    turn: First come, first served, so that a commit and the end after it stay in this order.
    tasks: Operations that run or wait for their turn.
    """

    session: Session
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)


class Requests:
    """The sessions of a service by request id, and the order of operations on each."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    @asynccontextmanager
    async def new(self, service: Service, spec: RequestSpec) -> AsyncIterator[Session]:
        """Begin a request in the body; if the body fails, nothing of the request is left.

        Raises:
            DuplicateRequestError: A request of this id is running.
        """
        if spec.request_id in self._held:
            raise DuplicateRequestError(
                f"request {spec.request_id!r} is already running: use another id, or wait "
                "for its end"
            )
        held = self._held[spec.request_id] = _Held(Session(service, spec))
        try:
            with _listed(held):
                async with held.turn:
                    yield held.session
        except BaseException:  # a cancel too: the request's blocks would have no owner
            if self._held.get(spec.request_id) is held:
                del self._held[spec.request_id]
            held.session.abort()
            raise

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[Session]:
        """Wait for the operations that were asked before, and run the body alone.

        Raises:
            OwnershipError: There is no such request, or it has ended.
        """
        held = self._held.get(request_id)
        if held is None:
            raise OwnershipError(f"there is no request {request_id!r}, or it has ended")
        with _listed(held):
            async with held.turn:
                if self._held.get(request_id) is not held:
                    raise OwnershipError(f"request {request_id!r} has ended")
                yield held.session

    async def end(self, request_id: str, after: Sequence[Event]) -> None:
        """End the request in its turn; what was committed stays cached."""
        async with self.turn(request_id) as session:
            session.end(after=after)
            del self._held[request_id]

    async def abort(self, request_id: str, after: Sequence[Event]) -> bool:
        """End the request whatever it is doing.

        Returns:
            Whether there was such a request.
        """
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
        """End the requests that are left when no operation runs any more; return their names."""
        left = list(self._held)
        for name in left:
            self._held.pop(name).session.abort()
        return left


@contextmanager
def _listed(held: _Held) -> Iterator[None]:
    """List the request's task for `abort` during the body."""
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
