"""Streams for programs without an event loop: a task of the client's loop reads, a thread waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from tierkv.api.routes_work import TokensEvent
from tierkv.client.errors import BrokenOffError
from tierkv.client.events import EventStream, NodeEvent
from tierkv.client.streams import Stream

A = TypeVar("A")
T = TypeVar("T")
S = TypeVar("S", bound=AsyncIterable[object])

_AHEAD = 16  # so many items are read before they are asked for


class Runner(Protocol):
    """Runs coroutines on a loop in another thread."""

    def begin(self, work: Coroutine[Any, Any, A]) -> Future[A]: ...

    def wait_for(self, work: Coroutine[Any, Any, A]) -> A: ...


@dataclass(frozen=True, slots=True)
class _News(Generic[T]):
    """An item, or else that the stream is open, or at its end, or why it failed."""

    item: T | None = None
    is_end: bool = False
    error: Exception | None = None


class _Reading(Generic[T, S]):
    """Use it with `with`, in one thread at a time; leaving it closes the connection."""

    def __init__(self, runner: Runner, opening: AbstractAsyncContextManager[S]) -> None:
        self._runner = runner
        self._opening = opening
        self._stream: S | None = None
        self._over: _News[T] | None = None  # the last of the news: there will be no others

    def __enter__(self) -> Self:
        # One task reads it all: a deadline must end in the task where it began.
        self._news: asyncio.Queue[_News[T]] = asyncio.Queue(_AHEAD)
        self._task = self._runner.begin(self._read())
        try:
            self._next()  # that it is open
        except BaseException:  # Ctrl-C too: `__exit__` is not called
            self._task.cancel()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        left = BrokenOffError("this stream was left, and is closed")
        self._over = self._over or _News(error=left)

    def __iter__(self) -> Iterator[T]:
        """Raises what the stream of AsyncClient raises."""
        while not (news := self._next()).is_end:
            assert news.item is not None, "there are no other news after the first"
            yield news.item

    def _next(self) -> _News[T]:
        news = self._over or self._runner.wait_for(self._news.get())
        if news.is_end or news.error is not None:
            self._over = news
        if news.error is not None:
            raise news.error
        return news

    async def _read(self) -> None:
        try:
            async with self._opening as self._stream:
                await self._news.put(_News())
                async for item in self._stream:
                    await self._news.put(_News(item))  # type: ignore[arg-type]
                await self._news.put(_News(is_end=True))
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that reads
            await self._news.put(_News(error=error))


class SyncStream(_Reading[TokensEvent, Stream[A]]):
    """As Stream: `with client.stream_generate(body) as stream: for tokens in stream: ...`"""

    @property
    def answer(self) -> A:
        """What the call answers without a stream. Raises BrokenOffError before the end."""
        if self._stream is None:
            raise BrokenOffError("the stream has not been read to its end")
        return self._stream.answer


class SyncEvents(_Reading[NodeEvent, EventStream]):
    """As EventStream: `with client.events() as events: for event in events: ...`"""
