"""The requests of an embedded service. All code here runs on the service's event loop.

Operations on one request run one after the other.
"""

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
    """The point at which a call that admits a new request returns to the engine."""

    LOADED = "loaded"  # every cached token is in the block table, or is named as failed
    ADMITTED = "admitted"  # the request has its blocks; the engine waits at `gate`, layer by layer


@dataclass(frozen=True, slots=True)
class Admitted:
    """The blocks of an admitted request: an immutable snapshot.

    Attributes:
        request_id: id of the request.
        block_table: int32, read-only: the device blocks for the prompt and `max_new_tokens` further
            tokens.
        cached_tokens: number of leading tokens whose KV is in these blocks; the engine computes the
            rest. If `admit` was called with `until=Until.ADMITTED`, the KV may still be on its way:
            the engine must wait for each layer at `gate`.
        matched: number of the prompt's tokens that were found on each tier.
        gate: waits, layer by layer, for cached KV that is still being loaded.
        ticket: the ticket of a claimed prompt; None without one.
        failed_blocks: numbers of the prompt's blocks that were found in the cache but could not be
            loaded. All of them come after `cached_tokens`, and the engine computes them.
        load_problem: reason why these blocks failed; None if there are none.
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
        """Return a snapshot of the session's blocks as they are now."""
        request = session.request
        table = request.block_table.copy()  # `extend` replaces the request's own
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
    """A running request of the engine.

    Attributes:
        turn: a lock that gives the request's operations their order: that of their calls.
        tasks: the request's operations that run or wait for the lock.
    """

    session: Session
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)


class Requests:
    """The running requests of a service, by id.

    The operations on a request run in the order of their calls.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    @asynccontextmanager
    async def new(self, service: Service, spec: RequestSpec) -> AsyncIterator[Session]:
        """Begin a request; the value of the context is the request's session.

        If the code inside the context fails or is cancelled, the request is aborted.

        Args:
            service: the service that the request runs in.
            spec: prompt and options of the request.

        Raises:
            DuplicateRequestError: a request of this id is running.
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
        except BaseException:  # a cancellation too: the request's blocks would have no owner
            if self._held.get(spec.request_id) is held:
                del self._held[spec.request_id]
            held.session.abort()
            raise

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[Session]:
        """Wait for earlier operations on the request, then yield its session.

        Later operations on the request wait until the `async with` block ends.

        Args:
            request_id: id of the request.

        Raises:
            OwnershipError: there is no such request, or it has ended.
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
        """End the request after all earlier operations on it. Committed tokens stay cached.

        Args:
            request_id: id of the request.
            after: events of the kernels that may still use the request's blocks.

        Raises:
            OwnershipError: there is no such request, or it has ended.
        """
        async with self.turn(request_id) as session:
            session.end(after=after)
            del self._held[request_id]

    async def abort(self, request_id: str, after: Sequence[Event]) -> bool:
        """Cancel the operations on a request, and end it.

        Args:
            request_id: id of the request.
            after: events of the kernels that may still use the request's blocks.

        Returns:
            True if there was such a request.
        """
        held = self._held.get(request_id)
        if held is None:
            return False
        tasks = set(held.tasks)
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
        """Abort all requests that have not ended, and return their ids.

        No operation may be running.
        """
        left = list(self._held)
        for name in left:
            self._held.pop(name).session.abort()
        return left


@contextmanager
def _listed(held: _Held) -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None, "operations run in tasks"
    held.tasks.add(task)
    try:
        yield
    finally:
        held.tasks.discard(task)
