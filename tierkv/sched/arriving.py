"""Requests on their way to run, while what they need comes from storage or another node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from tierkv.errors import DuplicateRequestError, RequestAbortedError

T = TypeVar("T")


@dataclass(slots=True)
class _Arrival:
    space: str
    scope: asyncio.Timeout
    is_aborted: bool = False


@dataclass(slots=True)
class Arriving:
    """By id, so that one that arrives can be aborted, and a second of the same id is refused."""

    _by_id: dict[str, _Arrival] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_id)

    async def brought(
        self,
        request_id: str,
        space: str,
        work: Coroutine[None, None, T],
        let_go: Callable[[T], None],
    ) -> T:
        """What `work` brings. If the request is aborted, `work` is cancelled where it waits, and
        RequestAbortedError raised; also if it is in the moment in which `work` has ended, and what
        it brought is let go."""
        if request_id in self._by_id:
            work.close()
            raise DuplicateRequestError(f"request {request_id!r} is already on its way")
        arrival = _Arrival(space, asyncio.timeout(None))
        found: list[T] = []
        try:
            async with arrival.scope:
                self._by_id[request_id] = arrival
                try:
                    found.append(await work)
                finally:
                    del self._by_id[request_id]
        except TimeoutError:
            if not arrival.is_aborted:
                raise
        if not arrival.is_aborted:
            return found[0]
        for one in found:
            let_go(one)
        raise RequestAbortedError(f"request {request_id!r} was aborted")

    def abort(self, request_id: str) -> bool:
        """Whether there was one."""
        arrival = self._by_id.get(request_id)
        if arrival is None:
            return False
        arrival.is_aborted = True
        arrival.scope.reschedule(asyncio.get_running_loop().time())
        return True

    def is_used_by(self, space: str) -> bool:
        return any(arrival.space == space for arrival in self._by_id.values())
