"""A call of the client: deadline, attempts, bodies out, answers and errors back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from tierkv.api.types import PromptBody
from tierkv.cache.tokens import pack
from tierkv.client.errors import (
    CallError,
    DeadlineError,
    NotANodeError,
    read_problem,
    remote_error,
)
from tierkv.client.events import EventStream
from tierkv.client.http import Http, Reply
from tierkv.client.retries import Retries
from tierkv.client.routes import Call, Repeat
from tierkv.client.streams import Events, Stream
from tierkv.errors import TierKVError
from tierkv.http.bodies import EVENT_STREAM, JSON, MSGPACK
from tierkv.tasks import deadline

A = TypeVar("A")
B = TypeVar("B", bound=msgspec.Struct)

_FIRST_ERROR = 300  # redirects are no answers of a node either
_MOST_RETRY_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Question:
    """What goes into one call besides its route."""

    name: str | None = None  # what {id} stands for
    body: msgspec.Struct | None = None
    query: str = ""
    headers: Mapping[str, str] | None = None


class Calls:
    """What the methods of the client are made of. Use it with `async with`.

    url: http://host:port, https://..., or unix:/path of the node's socket.
    token: a bearer token. tls: see `client_tls`. uds: the node's socket; url is then only a name.
    timeout_s: of a whole call, its repetitions included; of a stream, see Stream.
    max_connections: more calls at a time wait for one.
    """

    def __init__(  # noqa: PLR0913 - of one node, all with a default
        self,
        url: str = "http://127.0.0.1:8100",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        uds: str | Path | None = None,
        timeout_s: float = 60.0,
        retries: Retries | None = None,
        max_connections: int = 100,
    ) -> None:
        self._http = Http(url, token=token, tls=tls, uds=uds, max_connections=max_connections)
        self._timeout_s = timeout_s
        self._retries = retries or Retries()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._http.running())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _call(
        self, call: Call[A], question: Question = Question(), *, timeout_s: float | None = None
    ) -> A:
        """Raises RemoteError for an answer that is an error, else CallError."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        async with deadline(limit_s, lambda: self._late(call, limit_s)) as scope:
            return await self._attempts(call, question, scope)

    async def _attempts(self, call: Call[A], question: Question, scope: asyncio.Timeout) -> A:
        path, body, headers = self._prepared(call, question)
        attempt = 0
        while True:
            attempt += 1
            try:
                reply = await self._http.ask(call.method, path, body, headers)
                return self._read(call, reply)
            except TierKVError as error:
                is_repeatable = call.repeat is Repeat.ALWAYS
                if not self._retries.allows(error, attempt, is_repeatable=is_repeatable):
                    raise
                pause_s = self._retries.pause_s(error, attempt)
                until, now = scope.when(), asyncio.get_running_loop().time()
                if until is not None and now + pause_s >= until:
                    raise  # what is known now says more than a deadline later
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _stream(self, call: Call[A], body: B) -> AsyncIterator[Stream[A]]:
        """The tokens of one call. The head must come within the client's timeout, and each event
        as long after the one before."""
        async with self._opened(call, Question(body=body)) as events:
            yield Stream(self._http.where, events, call.answer)

    @asynccontextmanager
    async def _events(
        self, call: Call[bytes], headers: Mapping[str, str]
    ) -> AsyncIterator[EventStream]:
        async with self._opened(call, Question(headers=headers)) as events:
            yield EventStream(events)

    @asynccontextmanager
    async def _opened(self, call: Call[A], question: Question) -> AsyncIterator[Events]:
        path, raw, headers = self._prepared(call, question)
        headers["Accept"] = EVENT_STREAM
        limit_s = self._timeout_s
        async with AsyncExitStack() as stack:
            async with deadline(limit_s, lambda: self._late(call, limit_s)):
                response = await stack.enter_async_context(
                    self._http.opened(call.method, path, raw, headers)
                )
                if response.content_type != EVENT_STREAM:
                    self._refuse(await self._http.whole(response))
            yield Events(self._http.where, response, limit_s)

    def _late(self, call: Call[A], limit_s: float) -> DeadlineError:
        return DeadlineError(f"{self._http.where} did not answer {call.path} within {limit_s:g} s")

    def _prepared(
        self, call: Call[A], question: Question
    ) -> tuple[str, bytes | None, dict[str, str]]:
        path = call.path
        if question.name is not None:
            path = path.replace("{id}", quote(question.name, safe=""))
        headers = {"Accept": MSGPACK, **(question.headers or {})}
        if question.body is None:
            return path + question.query, None, headers
        headers["Content-Type"] = MSGPACK
        return path + question.query, msgspec.msgpack.encode(_packed(question.body)), headers

    def _read(self, call: Call[A], reply: Reply) -> A:
        if reply.status >= _FIRST_ERROR:
            self._refuse(reply)
        if call.answer is bytes:
            return cast("A", reply.raw)
        try:
            if reply.content_type == MSGPACK:
                return msgspec.msgpack.decode(reply.raw, type=call.answer)
            if reply.content_type == JSON:
                return msgspec.json.decode(reply.raw, type=call.answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotANodeError(
                f"what {self._http.where} answers to {call.path} cannot be read: {error}",
                status=reply.status,
            ) from error
        raise self._stranger(reply)

    def _refuse(self, reply: Reply) -> NoReturn:
        """Raise the error that `reply` is."""
        problem = read_problem(reply.content_type, reply.raw)
        if problem is None:
            raise self._stranger(reply)
        raise remote_error(problem, retry_after_s=_retry_after_s(reply.headers))

    def _stranger(self, reply: Reply) -> CallError:
        return NotANodeError(
            f"what answers at {self._http.where} is no tierkv node: status {reply.status}, "
            f"{reply.content_type}",
            status=reply.status,
        )


def named(body: B) -> B:
    """`body` with a request id: with it, a call that is made again is done once."""
    if getattr(body, "request_id", None) is not None:
        return body
    return replace(body, request_id=uuid4().hex)


def _packed(body: msgspec.Struct) -> msgspec.Struct:
    """Lists of a prompt's tokens as bytes, which cost a fiftieth of them to read."""
    if isinstance(body, PromptBody) and isinstance(body.tokens, list):
        return replace(body, tokens=pack(body.tokens))
    return body


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds of the header; its other form, a date, is not what nodes send."""
    text = headers.get("Retry-After", "")
    if not (text.isascii() and text.isdigit()):
        return None
    return min(float(text), _MOST_RETRY_AFTER_S)
