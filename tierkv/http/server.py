"""Answers on sockets in HTTP/1.1 and 1.0: how many connections, how long, how large, how many at
once, and an answer in HTTP to what is no HTTP.

aiohttp speaks HTTP. A `Connection` stands between the socket and aiohttp's own protocol:

    socket -> Connection (counts, turns, deadlines) -> _Http (aiohttp) -> handle(request)
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast
from uuid import uuid4

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from tierkv.http.listen import BACKLOG
from tierkv.http.problems import framing_problem, overload_answer
from tierkv.http.settings import ListenSection
from tierkv.tasks import background

log = logging.getLogger("tierkv.http")

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_LINE_BYTES = 8_192
MAX_FIELD_BYTES = 16_384  # another number than a line's: by it the two errors are told apart
MAX_FIELDS = 100
_LAST_ANSWERS_S = 2.0  # for answers that are on their way when the work is done
_LINGER_S = 1.0  # a refused body is read on for so long, or its sender would not see the answer
_REFUSAL_S = 0.5  # how long an excess connection may take to read that it is one
_MOST_EARLY_BYTES = 64 << 10  # of a connection whose turn has not come; then it is not read
_MAX_REFUSALS = 64  # at a time; more are just closed
_MOST_LOOK_S = 1.0  # between two looks at deadlines; shorter ones are looked at oftener
_NO_LOG = logging.getLogger("tierkv.http.access")
_NO_LOG.disabled = True  # what is asked is counted; a line for each would cost more than the answer
_TOO_MANY_FIELDS = "Too many headers received"
_FIRST_PER_TURN = 32
_MOST_PER_TURN = 128
_TURN_S = 0.01  # what a turn should take where there is more to do than it can


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """max_connections: of all listeners together. max_body_bytes: of one request, decompressed.
    idle_timeout_s: between two requests. head_timeout_s: from the first byte of a request's head
    to its last, and for the TLS handshake. send_timeout_s: for a client to take anything of what
    is sent to it."""

    max_connections: int
    max_body_bytes: int
    idle_timeout_s: float
    head_timeout_s: float
    send_timeout_s: float

    @classmethod
    def of(cls, section: ListenSection) -> ConnectionLimits:
        return cls(
            section.max_connections,
            section.max_body_bytes,
            section.idle_timeout_s,
            section.head_timeout_s,
            section.send_timeout_s,
        )


@asynccontextmanager
async def serving(
    handle: Handle,
    listeners: Sequence[socket.socket],
    *,
    limits: ConnectionLimits,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """`handle` answers on `listeners` while the body runs; TCP ones speak TLS if there is some.

    handle: returns every answer, also of what fails; raises ConnectionError where nobody is left.
    It is cancelled when its client goes. At the end, answers under way have two seconds.
    """
    loop = asyncio.get_running_loop()

    def make_request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        assert isinstance(protocol, _Http), "no other protocol is made here"
        protocol.front.head_has_come()
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=limits.max_body_bytes
        )

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        protocol = request.protocol
        try:
            return await handle(request)
        finally:
            if isinstance(protocol, _Http):
                protocol.front.is_answered()

    http = web.Server(answer, request_factory=make_request, handler_cancellation=True)
    shared = _Shared(http, limits, AcceptRate(loop))
    servers: list[asyncio.Server] = []
    async with background({"tierkv-http-deadlines": shared.keep_deadlines()}):
        try:
            for listener in listeners:
                is_unix = listener.family == socket.AF_UNIX
                context = None if is_unix else tls
                listen = loop.create_unix_server if is_unix else loop.create_server
                servers.append(
                    await listen(
                        lambda: Connection(shared),
                        sock=listener,
                        backlog=BACKLOG,
                        ssl=context,
                        ssl_handshake_timeout=limits.head_timeout_s if context else None,
                    )
                )
            yield
        finally:
            for server in servers:
                server.close()
            await asyncio.sleep(0)  # what has come already is begun
            http.pre_shutdown()
            await http.shutdown(_LAST_ANSWERS_S)


class AcceptRate:
    """Lets so many pieces of work through in each turn of the event loop as make it last about
    10 ms: between 1 and 128, by what they have taken lately.

    Without it, 10,000 requests that arrive together are all parsed and begun in the one turn that
    finds them, and nothing else has the loop for seconds: no timer, no copy, no probe.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._per_turn = _FIRST_PER_TURN
        self._left = _FIRST_PER_TURN
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
            self._per_turn = min(_MOST_PER_TURN, self._per_turn + 4)


class _Shared:
    """What the connections of one server have in common.

    heads, sends: connections whose request head is incomplete, or whose client takes nothing, with
    the time at which they are closed.
    """

    def __init__(self, http: web.Server, limits: ConnectionLimits, pace: AcceptRate) -> None:
        self.http = http
        self.limits = limits
        self.pace = pace
        self.num_open = 0
        self.num_refused = 0
        self.heads: dict[Connection, float] = {}
        self.sends: dict[Connection, float] = {}

    async def keep_deadlines(self) -> None:
        """Close what is late, for ever."""
        shortest_s = min(self.limits.head_timeout_s, self.limits.send_timeout_s)
        while True:
            await asyncio.sleep(min(_MOST_LOOK_S, shortest_s / 4))
            now = time.monotonic()
            for waiting in (self.heads, self.sends):
                for connection in [one for one, end in waiting.items() if end <= now]:
                    del waiting[connection]
                    connection.cut_off()


class _Http(web.RequestHandler):
    """aiohttp's protocol of one connection. Whatever comes over it, the answer is HTTP with
    problem+json, and the log says in one line what was wrong."""

    __slots__ = ("front",)

    def __init__(self, front: Connection, shared: _Shared) -> None:
        super().__init__(
            shared.http,
            loop=asyncio.get_running_loop(),
            access_log=_NO_LOG,
            keepalive_timeout=shared.limits.idle_timeout_s,
            lingering_time=_LINGER_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_FIELDS,
        )
        self.front = front

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's words, which may quote the client
    ) -> web.StreamResponse:
        """What aiohttp could not read, or an error that `handle` did not answer. Raises
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
        return framing_problem(status, request_id)

    def log_exception(self, *args: object, **kw: object) -> None:
        """What a client sends is not our bug, and gets one line; the rest gets its traceback."""
        error = kw.get("exc_info")
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
            log.info("a connection broke off in a bad body: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


class Connection(asyncio.Protocol):
    """Hands the events of one connection on to aiohttp, when it is their turn: one turn of the
    loop may find thousands of clients that come, send or go."""

    __slots__ = ("_early", "_http", "_is_busy", "_is_counted", "_shared", "_transport")

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._http = _Http(self, shared)
        self._transport: asyncio.Transport | None = None
        self._is_counted = False
        self._is_busy = False  # with a request whose head has come
        self._early = b""  # came before its turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        stream = cast("asyncio.Transport", transport)  # HTTP comes over a stream
        if shared.num_open >= shared.limits.max_connections:
            _refuse(stream, shared)
            return
        shared.num_open += 1
        self._is_counted = True
        self._transport = stream
        if shared.pace.lets_through():
            self._http.connection_made(stream)
        else:
            stream.pause_reading()
            shared.pace.wait(self._begin)

    def _begin(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._http.connection_made(transport)
            transport.resume_reading()

    def eof_received(self) -> bool:
        """The client has gone. Closing takes a system call or two, so it has its turn as well."""
        transport, pace = self._transport, self._shared.pace
        is_tls = self._http.ssl_context is not None
        if transport is None or is_tls or pace.lets_through():
            return False  # closed now
        pace.wait(transport.close)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        shared = self._shared
        if self._is_counted:
            shared.num_open -= 1
            self._is_counted = False
        self._transport = None
        shared.heads.pop(self, None)
        shared.sends.pop(self, None)
        if shared.pace.lets_through():
            self._http.connection_lost(exc)
        else:
            shared.pace.wait(lambda: self._http.connection_lost(exc))

    def data_received(self, data: bytes) -> None:
        """Now or, when enough was begun in this turn of the loop, in a later one; not much more is
        read until then."""
        shared, transport = self._shared, self._transport
        if not self._is_busy and self not in shared.heads:
            shared.heads[self] = time.monotonic() + shared.limits.head_timeout_s
        if not self._early and shared.pace.lets_through():
            self._http.data_received(data)
            return
        if not self._early:
            shared.pace.wait(self._take_early)
        self._early += data
        if transport is not None and len(self._early) >= _MOST_EARLY_BYTES:
            transport.pause_reading()

    def _take_early(self) -> None:
        data, self._early = self._early, b""
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # gone meanwhile
        if len(data) >= _MOST_EARLY_BYTES:
            transport.resume_reading()
        self._http.data_received(data)

    def head_has_come(self) -> None:
        """What comes until `is_answered` belongs to a request whose head is whole."""
        self._is_busy = True
        self._shared.heads.pop(self, None)

    def is_answered(self) -> None:
        self._is_busy = False

    def pause_writing(self) -> None:
        self._http.pause_writing()
        shared = self._shared
        shared.sends[self] = time.monotonic() + shared.limits.send_timeout_s

    def resume_writing(self) -> None:
        self._shared.sends.pop(self, None)
        self._http.resume_writing()

    def cut_off(self) -> None:
        """Close it: it is late."""
        if self._transport is not None:
            log.info("a client sent no whole head, or took nothing, in time: it is cut off")
            self._transport.abort()


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

    def __init__(self, transport: asyncio.Transport, shared: _Shared) -> None:
        self._shared = shared
        shared.num_refused += 1
        transport.write(overload_answer(uuid4().hex))
        if transport.can_write_eof():
            transport.write_eof()  # not close: what the client has sent unread would reset it all
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: ARG002
        self._timer.cancel()
        self._shared.num_refused -= 1


def _refuse(transport: asyncio.Transport, shared: _Shared) -> None:
    log.info("there are %d connections: one more is refused", shared.num_open)
    if shared.num_refused >= _MAX_REFUSALS:
        transport.abort()
        return
    transport.set_protocol(_Refusal(transport, shared))
