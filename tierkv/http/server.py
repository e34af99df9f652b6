"""Lets an application answer on sockets: how many connections, how long, how large, how many at
once, and an answer in HTTP to what is no HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast
from uuid import uuid4

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from tierkv.http.listen import BACKLOG
from tierkv.http.problems import framing_problem, overload_answer
from tierkv.http.settings import ListenSection

_FIRST = 32
_MOST = 128
_TURN_S = 0.01  # what a turn should take where there is more to do than it can


class Pace:
    """Lets so many pieces through in each turn as make it last about 10 ms: between 1 and 128,
    by what they have taken lately."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._per_turn = _FIRST
        self._left = _FIRST
        self._began: float | None = None  # this turn, on a monotonic clock; None: nothing came yet
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def lets_through(self) -> bool:
        """Whether one more piece may be taken in this turn; if so, it counts as taken."""
        if self._began is None:
            self._began = time.monotonic()
            self._loop.call_soon(self._loop.call_soon, self._next_turn)
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn, when those that came before it have been called."""
        self._waiting.append(go_on)

    def _next_turn(self) -> None:
        """Runs behind the handlers that this turn began: they were woken before it was called."""
        now = time.monotonic()
        if self._left == 0 and self._began is not None:
            self._adapt(now - self._began)
        self._began, self._left = None, self._per_turn
        if not self._waiting:
            return
        self._began = now
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        self._loop.call_soon(self._next_turn)

    def _adapt(self, took_s: float) -> None:
        if took_s > _TURN_S:
            self._per_turn = max(1, self._per_turn // 2)
        else:
            self._per_turn = min(_MOST, self._per_turn + 4)


log = logging.getLogger("tierkv.http")

MAX_LINE_BYTES = 8_192
MAX_FIELD_BYTES = 16_384  # another number than a line's: by it the two errors are told apart
MAX_FIELDS = 100
_LINGER_S = 1.0  # a refused body is read on for so long, or its sender would not see the answer
_REFUSAL_S = 0.5  # how long an excess connection may take to read that it is one
_MOST_EARLY_BYTES = 64 << 10  # of a connection whose turn has not come; then it is not read
_MAX_REFUSALS = 64  # at a time; more are just closed
_NO_LOG = logging.getLogger("tierkv.http.access")
_NO_LOG.disabled = True  # what is asked is counted; a line for each would cost more than the answer
_TOO_MANY_FIELDS = "Too many headers received"


@dataclass(frozen=True, slots=True)
class Limits:
    """max_connections: of all listeners together. idle_timeout_s: for a whole request head, and
    for the TLS handshake. send_timeout_s: for a client to take anything of what is sent to it."""

    max_connections: int
    idle_timeout_s: float
    send_timeout_s: float

    @classmethod
    def of(cls, section: ListenSection) -> Limits:
        return cls(section.max_connections, section.idle_timeout_s, section.send_timeout_s)


class Counted:
    """How many connections there are, how many of too many are being told so, and whose turn it
    is to be read."""

    def __init__(self, limits: Limits, pace: Pace) -> None:
        self.limits = limits
        self.pace = pace
        self.num_open = 0
        self.num_refused = 0


class Connection(web.RequestHandler):
    """One connection. Whatever comes over it, the answer is HTTP with problem+json, and the log
    says in one line what was wrong."""

    __slots__ = ("_counted", "_early", "_is_counted", "_sending")

    def __init__(
        self, manager: web.Server, loop: asyncio.AbstractEventLoop, counted: Counted
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=_NO_LOG,
            keepalive_timeout=counted.limits.idle_timeout_s,
            lingering_time=_LINGER_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_FIELDS,
        )
        self._counted = counted
        self._is_counted = False
        self._early = b""  # came before its turn
        self._sending: asyncio.TimerHandle | None = None

    # How many, and how many at once: a turn of the loop may find thousands that come or go

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        counted = self._counted
        stream = cast("asyncio.Transport", transport)  # HTTP comes over a stream
        if counted.num_open >= counted.limits.max_connections:
            _refuse(stream, counted)
            return
        counted.num_open += 1
        self._is_counted = True
        if counted.pace.lets_through():
            super().connection_made(transport)
        else:
            stream.pause_reading()
            counted.pace.wait(lambda: self._begin(stream))

    def _begin(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            super().connection_made(transport)
            transport.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override] # what the loop asks for
        """The client has gone. Closing takes a system call or two, so it has its turn as well."""
        transport, pace = self.transport, self._counted.pace
        if transport is None or self.ssl_context is not None or pace.lets_through():
            return False  # closed now
        pace.wait(transport.close)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_counted:
            self._counted.num_open -= 1
            self._is_counted = False
        self._stop_clock()
        pace = self._counted.pace
        if pace.lets_through():
            super().connection_lost(exc)
        else:
            pace.wait(lambda: super(Connection, self).connection_lost(exc))

    # How much at once

    def data_received(self, data: bytes) -> None:
        """Now or, when enough was begun in this turn of the loop, in a later one; not much more is
        read until then. Without data, aiohttp wants to go on with what it has."""
        pace, transport = self._counted.pace, self.transport
        if not data or transport is None or (not self._early and pace.lets_through()):
            super().data_received(data)
            return
        if not self._early:
            pace.wait(self._take_early)
        self._early += data
        if len(self._early) >= _MOST_EARLY_BYTES:
            transport.pause_reading()

    def _take_early(self) -> None:
        data, self._early = self._early, b""
        if self.transport is None or self.transport.is_closing():
            return  # gone meanwhile
        if len(data) >= _MOST_EARLY_BYTES:
            self.transport.resume_reading()
        super().data_received(data)

    def _process_keepalive(self) -> None:
        if self._early:  # what we let wait is not idle
            loop = asyncio.get_running_loop()
            self._next_keepalive_close_time = loop.time() + self._counted.limits.idle_timeout_s
        super()._process_keepalive()

    # How long: aiohttp closes what brings no whole head; this closes what takes no answer

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_later(
                self._counted.limits.send_timeout_s, self._give_up_sending
            )

    def resume_writing(self) -> None:
        self._stop_clock()
        super().resume_writing()

    def _give_up_sending(self) -> None:
        self._sending = None
        if self.transport is not None:
            log.info("a client took nothing of its answer in time, and is cut off")
            self.transport.abort()

    def _stop_clock(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    # What is no HTTP

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's words, which may quote the client
    ) -> web.StreamResponse:
        """What aiohttp could not read, or an error of what goes around our own middlewares. Raises
        ConnectionError where nobody is left to answer."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client went while its answer was written, which is no error of ours
        request_id = uuid4().hex
        if isinstance(exc, HttpProcessingError):
            log.info("request %s is no HTTP: %s", request_id, _one_line(exc))
            status = _status_of(exc)
        else:
            log.error("request %s failed", request_id, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        response = framing_problem(status, request_id)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(
            resp, web.HTTPException
        ):  # raised before our middlewares: 417 of `Expect`, 505
            resp = framing_problem(resp.status, uuid4().hex)
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: object, **kw: object) -> None:
        """What a client sends is not our bug, and gets one line; the rest gets its traceback."""
        error = kw.get("exc_info")
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
            log.info("a connection broke off in a bad body: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


def _status_of(error: HttpProcessingError) -> int:
    if isinstance(error, ContentEncodingError):
        return HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    if isinstance(error, LineTooLong):
        is_line = MAX_LINE_BYTES in error.args
        return (
            HTTPStatus.REQUEST_URI_TOO_LONG
            if is_line
            else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        )
    if _TOO_MANY_FIELDS in error.message:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    return HTTPStatus.BAD_REQUEST


def _one_line(error: HttpProcessingError) -> str:
    text = error.message.splitlines()[0][:120] if error.message else type(error).__name__
    return text.encode("ascii", "backslashreplace").decode()


class _Refusal(asyncio.Protocol):
    """Says 503 to one connection too many, and closes it when that has been read, or soon."""

    def __init__(self, transport: asyncio.Transport, counted: Counted) -> None:
        self._counted = counted
        counted.num_refused += 1
        transport.write(overload_answer(uuid4().hex))
        if transport.can_write_eof():
            transport.write_eof()  # not close: what the client has sent unread would reset it all
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: ARG002
        self._timer.cancel()
        self._counted.num_refused -= 1


def _refuse(transport: asyncio.Transport, counted: Counted) -> None:
    log.info("there are %d connections: one more is refused", counted.num_open)
    if counted.num_refused >= _MAX_REFUSALS:
        transport.abort()
        return
    transport.set_protocol(_Refusal(transport, counted))


_LAST_ANSWERS_S = 2.0  # for answers that are on their way when the work is done
_SPOKEN = (HttpVersion11, HttpVersion10)
_OF_OTHER_VERSION = web.RequestKey("of_other_version", bool)


@asynccontextmanager
async def serving(
    app: web.Application,
    listeners: Sequence[socket.socket],
    *,
    limits: Limits,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """`app` answers on `listeners` while the body runs; TCP ones speak TLS if there is some."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,  # a client that has gone needs no tokens
        shutdown_timeout=_LAST_ANSWERS_S,
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None, "it has been set up"
    _refuse_other_versions(handlers)
    counted = Counted(limits, Pace(loop))
    servers: list[asyncio.Server] = []
    try:
        for listener in listeners:
            is_unix = listener.family == socket.AF_UNIX
            context = None if is_unix else tls
            listen = loop.create_unix_server if is_unix else loop.create_server
            servers.append(
                await listen(
                    lambda: Connection(handlers, loop, counted),
                    sock=listener,
                    backlog=BACKLOG,
                    ssl=context,
                    ssl_handshake_timeout=limits.idle_timeout_s if context else None,
                )
            )
        yield
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()


def _refuse_other_versions(handlers: web.Server) -> None:
    """HTTP/0.9 and what calls itself HTTP/2.0 in one line reach no route: aiohttp would answer
    them, in their own name. The answer is HTTP/1.0, which any client can tell from its own."""
    make, handle = handlers.request_factory, handlers.request_handler

    def make_request(
        message: RawRequestMessage,
        payload: StreamReader,
        connection: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if message.version in _SPOKEN:
            return make(message, payload, connection, writer, task)
        message = message._replace(version=HttpVersion10, should_close=True)
        request = make(message, payload, connection, writer, task)
        request[_OF_OTHER_VERSION] = True
        return request

    async def refuse_or_handle(request: web.BaseRequest) -> web.StreamResponse:
        if _OF_OTHER_VERSION in request:
            raise web.HTTPVersionNotSupported
        return await handle(request)

    handlers.request_factory, handlers.request_handler = make_request, refuse_or_handle
