"""Requests on their way to run, while what they need comes from storage or another node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from tierkv.errors import (
    DuplicateRequestError,
    RequestAbortedError,
    ShuttingDownError,
    TierKVError,
)

T = TypeVar("T")


@dataclass(slots=True)
class _Arrival:
    space: str
    scope: asyncio.Timeout
    refused: TierKVError | None = None

    def refuse(self, error: TierKVError) -> None:
        """Nothing more comes of it; the first reason counts."""
        if self.refused is None:
            self.refused = error
            self.scope.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class Arrivals:
    """Requests that wait for storage or for another node, by id. Each can be aborted; a second one
    with the same id is refused."""

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
        """What `work` brings. If the request is aborted, or the node drains, `work` is cancelled
        where it waits, and RequestAbortedError or ShuttingDownError raised; also if that is in the
        moment in which `work` has ended, and what it brought is let go."""
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
            if arrival.refused is None:
                raise
        if arrival.refused is None:
            return found[0]
        for one in found:
            let_go(one)
        raise arrival.refused

    def abort(self, request_id: str) -> bool:
        """Whether there was one."""
        arrival = self._by_id.get(request_id)
        if arrival is None:
            return False
        arrival.refuse(RequestAbortedError(f"request {request_id!r} was aborted"))
        return True

    def drain(self) -> None:
        """They would be refused when they came to wait for room: they hear of it now."""
        for arrival in self._by_id.values():
            arrival.refuse(ShuttingDownError("this node is shutting down"))

    def is_used_by(self, space: str) -> bool:
        return any(arrival.space == space for arrival in self._by_id.values())
