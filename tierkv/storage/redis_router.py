"""Who sends a command to the server that has its name; and the one who knows one server only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis_bulk import finished
from tierkv.storage.redis_exchange import Failure, Request
from tierkv.storage.redis_node import NAMES_PER_COMMAND, Lane, RedisNode, cut, expect, understood
from tierkv.storage.redis_requests import pipeline, question_each
from tierkv.storage.resp import Reply, pack_all

# Names are counted in so many parts at once: a gap among 1,000 is found in three exchanges, whose
# names are 1,110 together. Halving takes ten exchanges and 2,000 names.
_PARTS = 10


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

    async def ping(self) -> None:
        """Raises StoreUnavailableError unless all of them answer."""

    async def carry_out(self, calls: Sequence[Call], lane: Lane) -> list[Reply | Failure]:
        """One reply per call. A cancel is raised when none of their buffers is in use any more."""

    async def count_leading(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, have a value. Raises StoreUnavailableError."""

    async def each(self, verb: str, names: Sequence[str], *more: int) -> list[int]:
        """What `verb name more` says of each name, a number. Raises StoreUnavailableError."""


class OneNode:
    """`Router` where all values are on one server."""

    def __init__(self, node: RedisNode) -> None:
        self._node = node

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._node.running()

    def nodes(self) -> Sequence[RedisNode]:
        return (self._node,)

    async def ping(self) -> None:
        await self._node.ask("PING")

    async def carry_out(self, calls: Sequence[Call], lane: Lane) -> list[Reply | Failure]:
        lanes = self._node.lanes[lane]
        outcomes = await finished(lanes.begin(call.make() for call in calls))
        return [outcome if isinstance(outcome, Failure) else outcome[-1] for outcome in outcomes]

    async def count_leading(self, names: Sequence[str]) -> int:
        found = 0
        for part in cut(names, NAMES_PER_COMMAND):
            leading = await self._count_leading(part)
            found += leading
            if leading < len(part):
                break
        return found

    async def each(self, verb: str, names: Sequence[str], *more: int) -> list[int]:
        if not names:
            return []
        request = question_each(verb, names, *more)
        [outcome] = await self._node.lanes[Lane.QUESTION].ask([request])
        if isinstance(outcome, Failure):
            raise StoreUnavailableError(outcome.reason)
        return [expect(int, understood(reply, (verb,))) for reply in outcome]

    async def _count_leading(self, names: Sequence[str]) -> int:
        """Counts per part, in one exchange; then the same within the first part with a gap."""
        present = 0
        while True:
            parts = list(cut(names, -(-len(names) // _PARTS)))
            for part, count in zip(parts, await self._counts(parts), strict=True):
                if count < len(part):
                    break
                present += len(part)
            else:
                return present
            if len(part) == 1:
                return present
            names = part

    async def _counts(self, parts: Sequence[Sequence[str]]) -> list[int]:
        """How many names of each part have a value."""
        wire = b"".join([pack_all("EXISTS", part) for part in parts])
        [outcome] = await self._node.lanes[Lane.QUESTION].ask([pipeline(wire, len(parts))])
        if isinstance(outcome, Failure):
            raise StoreUnavailableError(outcome.reason)
        return [expect(int, understood(reply, ("EXISTS",))) for reply in outcome]
