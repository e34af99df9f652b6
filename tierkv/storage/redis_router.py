"""Who sends a command to the server that has its name; and the one who knows one server only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tierkv.storage.redis_node import NAMES_PER_COMMAND, Lane, RedisNode, cut, expect
from tierkv.storage.redis_wire import Failure, Request
from tierkv.storage.resp import Reply


@dataclass(frozen=True, slots=True)
class Call:
    """A command about one name. make: a new request for it, each time it has to be sent."""

    name: str
    make: Callable[[], Request]


class Router(Protocol):
    """Sends what concerns a name to the server that has it."""

    def running(self) -> AbstractAsyncContextManager[None]: ...

    def nodes(self) -> Sequence[RedisNode]:
        """The servers that hold values, always in the same order."""

    async def carry_out(self, calls: Sequence[Call], lane: Lane) -> list[Reply | Failure]:
        """One reply per call. A cancel is raised when none of their buffers is in use any more."""

    async def count_leading(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, have a value. Raises StoreUnavailableError."""


class OneNode:
    """`Router` where all values are on one server."""

    def __init__(self, node: RedisNode) -> None:
        self._node = node

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._node.running()

    def nodes(self) -> Sequence[RedisNode]:
        return (self._node,)

    async def carry_out(self, calls: Sequence[Call], lane: Lane) -> list[Reply | Failure]:
        outcomes = await self._node.lanes[lane].ask([call.make() for call in calls])
        return [outcome if isinstance(outcome, Failure) else outcome[-1] for outcome in outcomes]

    async def count_leading(self, names: Sequence[str]) -> int:
        found = 0
        for part in cut(names, NAMES_PER_COMMAND):
            leading = await self._count_leading(part)
            found += leading
            if leading < len(part):
                break
        return found

    async def _count_leading(self, names: Sequence[str]) -> int:
        """Bisection: as many questions as `names` has binary digits."""
        if await self._count(names) == len(names):
            return len(names)
        present, gap = 0, len(names)  # names[:present] are all there, names[present:gap] are not
        while gap - present > 1:
            middle = (present + gap) // 2
            if await self._count(names[present:middle]) == middle - present:
                present = middle
            else:
                gap = middle
        return present

    async def _count(self, names: Sequence[str]) -> int:
        return expect(int, await self._node.ask("EXISTS", *names))
