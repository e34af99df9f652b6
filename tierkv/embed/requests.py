"""The requests of an embedded service, on its loop: for each, one operation after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tierkv.cache.tokens import pack
from tierkv.embed.admitted import Admitted, LimitedSpec, Until, admitted
from tierkv.errors import (
    DeviceFailedError,
    DuplicateRequestError,
    GateTimeoutError,
    HandoffError,
    OwnershipError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Request, RequestSpec, RequestState
from tierkv.service import Service

log = logging.getLogger("tierkv.embed")

LOAD_FAILED = "load_failed"  # a claim's reason beside those of ClaimProblem


@dataclass(slots=True, eq=False)
class _Held:
    """A request from the call that asks for it to the one that ends it.

    turn: first come, first served, so that a commit and the end after it stay in this order.
    tasks: operations that run or wait for their turn.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: set[asyncio.Task[object]] = field(default_factory=set)
    request: Request | None = None
    ticket: Ticket | None = None


class Requests:
    """load_timeout_s: after so long, cached blocks that have not arrived count as failed."""

    def __init__(self, service: Service, *, load_timeout_s: float) -> None:
        self.service = service
        self._load_timeout_s = load_timeout_s
        self._held: dict[str, _Held] = {}

    # Admission

    async def admit(self, spec: RequestSpec, until: Until) -> Admitted:
        async with self._new(spec.request_id) as held:
            service = self.service
            service.scheduler.check(spec)
            held.request = await service.admit(
                spec.request_id,
                spec.prompt,
                max_new_tokens=spec.max_new_tokens,
                uses_cache=spec.uses_cache,
                priority=spec.priority,
            )
            return await self._ready(held, until)

    async def claim(
        self,
        spec: RequestSpec,
        ticket_id: str,
        policy: ClaimPolicy,
        deadline_s: float | None,
        sampling: Mapping[str, str],
    ) -> Admitted:
        async with self._new(spec.request_id) as held:
            held.request, held.ticket = await self.service.claim(
                spec.request_id,
                ticket_id,
                spec.prompt,
                max_new_tokens=spec.max_new_tokens,
                policy=policy,
                deadline_s=deadline_s,
                sampling=sampling,
            )
            return await self._ready(
                held, Until.LOADED, may_recompute=policy is not ClaimPolicy.WHOLE
            )

    async def resume(self, request_id: str, max_new_tokens: int, until: Until) -> Admitted:
        async with self._turn(request_id) as held:
            preempted = self._request(held, request_id)
            # Cancelled, the request stays preempted, and can be resumed again or aborted.
            held.request = await self.service.resume(preempted, max_new_tokens=max_new_tokens)
            return await self._ready(held, until)

    async def recover(self, request_id: str) -> Admitted:
        """Get the request's blocks anew, without those that do not load; see Embedded.recover."""
        async with self._turn(request_id) as held:
            return await self._recover(held, "the engine could not use what was loaded")

    async def _ready(self, held: _Held, until: Until, *, may_recompute: bool = True) -> Admitted:
        assert held.request is not None, "the caller has just got it"
        if until is Until.ADMITTED:
            return admitted(held.request, ticket=held.ticket)
        try:
            await self._loaded(held.request)
        except DeviceFailedError:
            raise
        except TransferError as error:
            if not may_recompute:
                text = f"the claimed prompt did not load: {error}"
                raise HandoffError(LOAD_FAILED, text) from error
            return await self._recover(held, str(error))
        return admitted(held.request, ticket=held.ticket)

    async def _loaded(self, request: Request) -> None:
        """Return when every cached token is in the block table, and the index knows it. Raises
        TransferError."""
        loads = self.service.scheduler.loads.of(request.block_table)
        problem: TransferError | None = None
        try:
            async with asyncio.timeout(self._load_timeout_s):
                for movement in request.loads:
                    try:
                        await movement.done()
                    except DeviceFailedError:
                        raise
                    except TransferError as error:  # the others may still bring what they carry
                        problem = problem or error
                for load in loads:
                    await asyncio.shield(load.settled)
        except TimeoutError as error:
            text = f"cached blocks did not arrive within {self._load_timeout_s:g} s"
            raise GateTimeoutError(text) from error
        if problem is not None:
            raise problem
        if any(load.is_failed for load in loads):
            raise TransferError("cached blocks above these did not arrive")

    async def _recover(self, held: _Held, problem: str) -> Admitted:
        """Admit the request again with those cached tokens alone that are on the device now."""
        request = held.request
        assert request is not None, "there is a request to recover"
        request.check_running()
        service, spec = self.service, request.spec
        size = spec.prompt.block_size
        promised = -(-request.cached_tokens // size)
        intact = service.index.match(spec.prompt).device_blocks
        log.warning("request %s computes what did not load: %s", spec.request_id, problem)
        service.end(request)
        held.request = None
        held.request = await service.scheduler.admit(LimitedSpec.of(spec, intact * size))
        await self._loaded(held.request)
        first = held.request.cached_tokens // size
        return admitted(
            held.request,
            ticket=held.ticket,
            failed_blocks=range(first, promised),
            load_problem=problem,
        )

    # Running requests

    async def commit(self, request_id: str, tokens: bytes, after: Sequence[Event]) -> None:
        async with self._turn(request_id) as held:
            request = self._request(held, request_id)
            await self.service.commit(request, pack(tokens), after=after)

    async def extend(self, request_id: str, num_tokens: int) -> Admitted:
        async with self._turn(request_id) as held:
            request = self._request(held, request_id)
            await self.service.extend(request, num_tokens)
            return admitted(request, ticket=held.ticket)

    async def publish(
        self,
        request_id: str,
        ticket_id: str,
        first_tokens: Sequence[int],
        after: Sequence[Event],
        sampling: Mapping[str, str],
    ) -> Published:
        async with self._turn(request_id) as held:
            request = self._request(held, request_id)
            await self.service.check_ticket_is_free(ticket_id, request.spec.prompt)
            return await self.service.publish(
                request, ticket_id, first_tokens, after=after, sampling=sampling
            )

    async def preempt(self, request_id: str, after: Sequence[Event]) -> None:
        async with self._turn(request_id) as held:
            self.service.preempt(self._request(held, request_id), after=after)

    # Ending

    async def end(self, request_id: str, after: Sequence[Event]) -> None:
        async with self._turn(request_id) as held:
            self._finish(held, self._request(held, request_id), after)
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
            if held.request is not None:
                self._finish(held, held.request, after)
        return True

    def end_all(self) -> list[str]:
        """End what is left when no operation runs any more; the names."""
        left = list(self._held)
        for name in left:
            held = self._held.pop(name)
            if held.request is not None:
                self._finish(held, held.request, ())
        return left

    def _finish(self, held: _Held, request: Request, after: Sequence[Event]) -> None:
        held.request = None
        if request.state is RequestState.PREEMPTED:
            self.service.scheduler.abandon(request)
        elif request.state is RequestState.RUNNING:
            self.service.end(request, after=after)

    # Order

    @asynccontextmanager
    async def _new(self, request_id: str) -> AsyncIterator[_Held]:
        """A request that is not known yet. If the body fails nothing of it is left."""
        if request_id in self._held:
            raise DuplicateRequestError(f"request {request_id!r} is already running")
        held = _Held()
        self._held[request_id] = held
        try:
            with _listed(held):
                async with held.turn:
                    yield held
        except BaseException:  # a cancel too: what it has got would have no owner
            if self._held.get(request_id) is held:
                del self._held[request_id]
                if held.request is not None:
                    self._finish(held, held.request, ())
            raise

    @asynccontextmanager
    async def _turn(self, request_id: str) -> AsyncIterator[_Held]:
        held = self._known(request_id)
        with _listed(held):
            async with held.turn:
                if self._held.get(request_id) is not held:
                    raise OwnershipError(f"request {request_id!r} has ended")
                yield held

    def _known(self, request_id: str) -> _Held:
        held = self._held.get(request_id)
        if held is None:
            raise OwnershipError(f"there is no request {request_id!r}, or it has ended")
        return held

    def _request(self, held: _Held, request_id: str) -> Request:
        if held.request is None:
            raise OwnershipError(f"request {request_id!r} has no blocks: its admission failed")
        return held.request


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
