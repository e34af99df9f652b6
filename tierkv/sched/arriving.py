"""Requests on their way to the scheduler, while what they need comes from storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tierkv.errors import DuplicateRequestError, RequestAbortedError


@dataclass(frozen=True, slots=True)
class _Arrival:
    space: str
    scope: asyncio.Timeout


@dataclass(slots=True)
class Arriving:
    """By id, so that one that arrives can be aborted, and a second of the same id is refused."""

    _by_id: dict[str, _Arrival] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_id)

    @asynccontextmanager
    async def arrival(self, request_id: str, space: str) -> AsyncIterator[None]:
        """If it is aborted, the body is cancelled where it waits; RequestAbortedError then."""
        if request_id in self._by_id:
            raise DuplicateRequestError(f"request {request_id!r} is already on its way")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._by_id[request_id] = _Arrival(space, scope)
                try:
                    yield
                finally:
                    del self._by_id[request_id]
        except TimeoutError:
            if not scope.expired():
                raise
            raise RequestAbortedError(f"request {request_id!r} was aborted") from None

    def abort(self, request_id: str) -> bool:
        """Whether there was one."""
        arrival = self._by_id.get(request_id)
        if arrival is None:
            return False
        arrival.scope.reschedule(asyncio.get_running_loop().time())
        return True

    def is_used_by(self, space: str) -> bool:
        return any(arrival.space == space for arrival in self._by_id.values())
