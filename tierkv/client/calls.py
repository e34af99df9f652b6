"""One call of the client: its deadline, its attempts and pauses, its body and its answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from tierkv.api.types import PromptBody
from tierkv.cache.keys import pack
from tierkv.client.errors import (
    BrokenOffError,
    CallError,
    DeadlineError,
    NotANodeError,
    RemoteError,
    UnreachableError,
    read_problem,
    remote_error,
)
from tierkv.client.http import Body, Http, Reply
from tierkv.client.streams import Events, TokenStream
from tierkv.errors import BadRequestError, ConfigError, HandoffError, TierKVError
from tierkv.http.bodies import EVENT_STREAM, JSON, MSGPACK
from tierkv.tasks import deadline

_NOT_NOW = (429, 503)
_PROXY_NOT_NOW = (502, 503, 504)  # a proxy in front of the nodes reaches none of them


@dataclass(frozen=True, slots=True)
class Retries:
    """The number of attempts of a failing call, and the pauses between them.

    The pause before a retry is a random time, plus the seconds of the node's Retry-After header.
    The random time before the first retry is at most `first_s`; this limit doubles with each retry,
    up to `most_s`.

    Attributes:
        attempts: Number of attempts, the first included.
        first_s: Limit of the random time before the first retry, in seconds.
        most_s: Largest limit of the random time, in seconds.

    Raises:
        ConfigError: A number is out of range.
    """

    attempts: int = 4
    first_s: float = 0.05
    most_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s < 0 or self.most_s < 0:
            raise ConfigError(
                f"a retry policy needs at least one attempt, and pauses of at least 0 s: {self}"
            )

    def allows(self, error: TierKVError, attempt: int) -> bool:
        """Return True if a call should be made again after `error`.

        This is safe, because a node does the work of one request id only once.

        Args:
            error: The error of the last attempt.
            attempt: Number of the last attempt, from 1.
        """
        if attempt >= self.attempts:
            return False
        if isinstance(error, UnreachableError):
            return True
        if isinstance(error, HandoffError):  # a refused claim has waited until its own deadline
            return False
        if isinstance(error, RemoteError):
            return error.status in _NOT_NOW
        if isinstance(error, NotANodeError):
            return error.status in _PROXY_NOT_NOW
        return isinstance(error, BrokenOffError)

    def pause_s(self, error: TierKVError, attempt: int) -> float:
        """Return the seconds to wait before the next attempt.

        The time is partly random, so that clients refused at the same time retry at different
        times.

        Args:
            error: The error of the last attempt, which may carry the node's Retry-After in seconds.
            attempt: Number of the last attempt, from 1.
        """
        jitter = random.uniform(0, min(self.most_s, self.first_s * 2 ** (attempt - 1)))
        server_s = error.retry_after_s if isinstance(error, RemoteError) else None
        return jitter + (server_s or 0.0)


A = TypeVar("A")
B = TypeVar("B", bound=msgspec.Struct)

_FIRST_ERROR = 300  # a node sends no redirects
_MAX_RETRY_AFTER_S = 3600.0


class Calls:
    """A client of one node, which calls HTTP routes and decodes the answers.

    Use the object inside `running()`.

    Args:
        http: The connections to the node.
        timeout_s: Seconds for a whole call, its retries included. For a stream, seconds until the
            first event, and between two events.
        retries: Decides whether and when a failed call is retried.
    """

    def __init__(self, http: Http, timeout_s: float, retries: Retries) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._retries = retries

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._http.running()

    async def ask(  # noqa: PLR0913 - what makes a call, all but three with a default
        self,
        method: str,
        path: str,
        answer: type[A],
        name: str | None = None,
        body: msgspec.Struct | None = None,
        *,
        query: str = "",
        timeout_s: float | None = None,
    ) -> A:
        """Call a route of the node, and return the decoded answer. Some failed calls are retried.

        Args:
            method: The HTTP method.
            path: The path; {id} in it is replaced by `name`.
            answer: The type of the answer; `bytes` to return the body undecoded.
            name: The id in the path; None for a path without {id}.
            body: The request's body; None for no body.
            query: The query string, with its question mark; "" for none.
            timeout_s: Seconds for the whole call; None for the client's own limit.

        Raises:
            RemoteError: The node has answered with an error.
            CallError: There is no answer.
        """
        accept = "*/*" if answer is bytes else MSGPACK
        raw, headers = _encoded(body, accept)
        if name is not None:
            path = path.replace("{id}", quote(name, safe=""))
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        attempt = 0
        async with deadline(limit_s, lambda: self._deadline_error(path, limit_s)) as scope:
            while True:
                attempt += 1
                try:
                    reply = await self._http.ask(method, path + query, raw, headers)
                    return self._read(path, answer, reply)
                except TierKVError as error:
                    if not self._retries.allows(error, attempt):
                        raise
                    pause_s = self._retries.pause_s(error, attempt)
                    until, now = scope.when(), asyncio.get_running_loop().time()
                    if until is not None and now + pause_s >= until:
                        raise  # more useful than the DeadlineError after a longer wait
                await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def stream(
        self, path: str, answer: type[A], body: msgspec.Struct
    ) -> AsyncIterator[TokenStream[A]]:
        """Call a route, and provide its stream of tokens.

        The first event must arrive within the client's timeout, and each event within the same time
        after the event before.

        Args:
            path: Path of the route.
            answer: Type of the final answer.
            body: The request's body.

        Raises:
            RemoteError: The node has answered with an error.
            CallError: There is no answer.
        """
        raw, headers = _encoded(body, EVENT_STREAM)
        limit_s = self._timeout_s
        async with AsyncExitStack() as stack:
            async with deadline(limit_s, lambda: self._deadline_error(path, limit_s)):
                response = await stack.enter_async_context(
                    self._http.opened("POST", path, raw, headers)
                )
                if response.content_type != EVENT_STREAM:
                    self._refuse(await self._http.whole(response))
            yield TokenStream(self._http.where, Events(self._http.where, response, limit_s), answer)

    def _deadline_error(self, path: str, limit_s: float) -> DeadlineError:
        return DeadlineError(f"{self._http.where} did not answer {path} within {limit_s:g} s")

    def _read(self, path: str, answer: type[A], reply: Reply) -> A:
        if reply.status >= _FIRST_ERROR:
            self._refuse(reply)
        if answer is bytes:
            return cast("A", reply.raw)
        try:
            if reply.content_type == MSGPACK:
                return msgspec.msgpack.decode(reply.raw, type=answer)
            if reply.content_type == JSON:
                return msgspec.json.decode(reply.raw, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotANodeError(
                f"the answer of {self._http.where} to {path} cannot be read: {error}",
                status=reply.status,
            ) from error
        raise self._not_a_node(reply)

    def _refuse(self, reply: Reply) -> NoReturn:
        problem = read_problem(reply.content_type, reply.raw)
        if problem is None:
            raise self._not_a_node(reply)
        raise remote_error(problem, retry_after_s=_retry_after_s(reply.headers))

    def _not_a_node(self, reply: Reply) -> CallError:
        return NotANodeError(
            f"the server at {self._http.where} is not a tierkv node: it answered "
            f"status {reply.status}, {reply.content_type}",
            status=reply.status,
        )


def named(body: B) -> B:
    """Return `body`, with a random request id if it has none.

    By the id a node recognizes a retried call, and does its work only once.
    """
    if getattr(body, "request_id", None) is not None:
        return body
    return replace(body, request_id=uuid4().hex)


def _encoded(body: msgspec.Struct | None, accept: str) -> tuple[Body | None, dict[str, str]]:
    headers = {"Accept": accept}
    if body is None:
        return None, headers
    headers["Content-Type"] = MSGPACK
    try:
        return [msgspec.msgpack.encode(_packed(body))], headers
    except OverflowError as error:
        raise BadRequestError(
            "a number of the request has more than 64 bits: nodes accept at most 64"
        ) from error


def _packed(body: msgspec.Struct) -> msgspec.Struct:
    """Return `body` with its tokens as bytes, because nodes read bytes 50 times faster."""
    if isinstance(body, PromptBody) and isinstance(body.tokens, list):
        return replace(body, tokens=pack(body.tokens))
    return body


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "")
    if not (text.isascii() and text.isdigit()):
        return None
    return min(float(text), _MAX_RETRY_AFTER_S)
