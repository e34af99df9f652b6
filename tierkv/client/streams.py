"""Answers that arrive in pieces: server-sent events, and streams of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import msgspec
from aiohttp import ClientResponse

from tierkv.api.types import TokensEvent
from tierkv.client.errors import BrokenOffError, DeadlineError, NotANodeError, remote_error
from tierkv.client.http import translated
from tierkv.http.problems import Problem
from tierkv.tasks import deadline

_MAX_EVENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event.

    Attributes:
        name: Name of the event; "message" if the server gives none.
        data: Data of the event.
    """

    name: str
    data: bytes


class EventReader:
    """A parser that turns bytes of an answer into server-sent events. Comments are skipped."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Add bytes of the answer, and yield the events that are complete now.

        Raises:
            ValueError: An event has more than 64 MiB, which no node sends.
        """
        for line in self._lines(chunk):
            if line:
                self._parse_line(line)
            elif self._data:
                yield ServerEvent(self._name or "message", b"\n".join(self._data))
                self._name, self._data, self._size = "", [], 0
            else:
                self._name = ""

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Append `chunk` to the buffered bytes, and yield the lines that are now complete."""
        self._line += chunk
        if len(self._line) + self._size > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES >> 20} MiB")
        if b"\n" not in chunk:
            return  # or a long line would be searched again with each of its pieces
        *lines, rest = bytes(self._line).replace(b"\r\n", b"\n").split(b"\n")
        self._line = bytearray(rest)
        yield from lines

    def _parse_line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._size += len(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")


A = TypeVar("A")
T = TypeVar("T")

_TOKENS, _DONE, _ERROR = "tokens", "done", "error"


class Events:
    """The server-sent events of an answer that is still arriving.

    Args:
        where: The node's address, for error messages.
        response: The answer.
        gap_s: Seconds to wait for the next bytes; None for no limit.
    """

    def __init__(self, where: str, response: ClientResponse, gap_s: float | None) -> None:
        self._where = where
        self._content = response.content
        self._gap_s = gap_s
        self._reader = EventReader()
        self._ready: deque[ServerEvent] = deque()

    async def next(self) -> ServerEvent | None:
        """Wait for the next event, and return it; None at the end of the answer.

        Raises:
            DeadlineError: No bytes came for `gap_s` seconds.
            BrokenOffError: The connection was lost.
            NotANodeError: The bytes are no events.
        """
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
                    f"{self._where} did not answer with an event stream: {error}", status=200
                ) from error
        return self._ready.popleft()

    def _late(self) -> DeadlineError:
        return DeadlineError(f"{self._where} sent nothing for {self._gap_s} s")

    def decoded(self, event: ServerEvent, kind: type[T]) -> T:
        """Decode the data of an event from JSON.

        Args:
            event: An event of this answer.
            kind: Type to decode to.

        Raises:
            NotANodeError: The data does not fit `kind`.
        """
        try:
            return msgspec.json.decode(event.data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotANodeError(
                f"an event of {self._where} cannot be read: {error}", status=200
            ) from error


class TokenStream(Generic[A]):
    """An async iterator over the tokens of one answer; at its end, `answer` is available.

    Leaving the `async with` of the stream, also by a break, an error or a cancel, closes the
    connection, and the node stops computing. The time that the caller spends between two tokens
    does not count for the timeout.

    Args:
        where: The node's address, for error messages.
        events: The events of the answer.
        kind: Type of the final answer.
    """

    def __init__(self, where: str, events: Events, kind: type[A]) -> None:
        self._where = where
        self._events = events
        self._kind = kind
        self._answer: A | None = None

    @property
    def answer(self) -> A:
        """The whole answer, of the type that the call without a stream returns.

        Raises:
            BrokenOffError: The stream has not been read to its end.
        """
        if self._answer is None:
            raise BrokenOffError("the stream has not been read to its end")
        return self._answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokensEvent:
        """Return the next tokens.

        Raises:
            RemoteError: The node has failed during the work.
            BrokenOffError: The connection ended before the answer was complete.
        """
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
        raise BrokenOffError(f"the stream of {self._where} ended before the answer was complete")

    async def finished(self) -> A:
        """Read the rest of the stream, and return the whole answer."""
        async for _ in self:
            pass
        return self.answer
