"""The answer of a node that comes in pieces."""

from __future__ import annotations

from collections import deque
from typing import Generic, Self, TypeVar

import msgspec
from aiohttp import ClientResponse

from tierkv.api.routes_work import TokensEvent
from tierkv.client.errors import BrokenOffError, DeadlineError, NotANodeError, remote_error
from tierkv.client.http import translated
from tierkv.client.sse import EventReader, ServerEvent
from tierkv.http.problems import Problem
from tierkv.tasks import deadline

A = TypeVar("A")
T = TypeVar("T")

_TOKENS, _DONE, _ERROR = "tokens", "done", "error"


class Events:
    """The events of an open answer. gap_s: how long to wait for the next bytes."""

    def __init__(self, where: str, response: ClientResponse, gap_s: float) -> None:
        self._where = where
        self._content = response.content
        self._gap_s = gap_s
        self._reader = EventReader()
        self._ready: deque[ServerEvent] = deque()

    async def next(self) -> ServerEvent | None:
        """None at the end. Raises DeadlineError, BrokenOffError, or NotANodeError for what is no
        event."""
        while not self._ready:
            with translated(self._where):
                async with deadline(self._gap_s, self._late):
                    chunk = await self._content.readany()
            if not chunk:
                return None
            try:
                self._ready.extend(self._reader.feed(chunk))
            except ValueError as error:
                raise NotANodeError(
                    f"{self._where} sends no events: {error}", status=200
                ) from error
        return self._ready.popleft()

    def _late(self) -> DeadlineError:
        return DeadlineError(f"{self._where} told nothing for {self._gap_s:g} s")

    def decoded(self, event: ServerEvent, kind: type[T]) -> T:
        """The data of `event`. Raises NotANodeError."""
        try:
            return msgspec.json.decode(event.data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotANodeError(
                f"an event of {self._where} cannot be read: {error}", status=200
            ) from error


class Stream(Generic[A]):
    """Iterate over it for tokens as they come; after the last of them, `answer` is there.

    Leaving its `async with`, by a break, an error or a cancel, closes the connection, and the node
    ends the work. How long you take between two tokens does not count.
    """

    def __init__(self, where: str, events: Events, kind: type[A]) -> None:
        self._where = where
        self._events = events
        self._kind = kind
        self._answer: A | None = None

    @property
    def answer(self) -> A:
        """What the call answers without a stream. Raises BrokenOffError before the end."""
        if self._answer is None:
            raise BrokenOffError("the stream has not been read to its end")
        return self._answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokensEvent:
        """Raises RemoteError if the node fails on the way, BrokenOffError if it breaks off."""
        if self._answer is not None:
            raise StopAsyncIteration
        while (event := await self._events.next()) is not None:
            if event.name == _TOKENS:
                return self._events.decoded(event, TokensEvent)
            if event.name == _ERROR:
                raise remote_error(self._events.decoded(event, Problem))
            if event.name == _DONE:
                self._answer = self._events.decoded(event, self._kind)
                raise StopAsyncIteration
        raise BrokenOffError(f"the stream of {self._where} ended before its work did")

    async def finished(self) -> A:
        """Read to the end, and return the answer."""
        async for _ in self:
            pass
        return self.answer
