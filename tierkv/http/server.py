"""Listens, with TLS or without, and answers on sockets in HTTP/1.1 and 1.0: how many connections,
how long, how large, how many at once, and an answer in HTTP to what is no HTTP.

aiohttp speaks HTTP. A `Connection` stands between the socket and aiohttp's own protocol:

    socket -> Connection (counts, turns, deadlines) -> _Http (aiohttp) -> handle(request)
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import os
import resource
import socket
import ssl
import stat
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import cast
from uuid import uuid4

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from tierkv.errors import ConfigError
from tierkv.http.bodies import CONNECTION
from tierkv.http.callers import Guard
from tierkv.http.problems import framing_problem, overload_answer
from tierkv.http.process import watching
from tierkv.http.route import HttpRouter
from tierkv.http.settings import AuthSection, ListenSection, TlsSection
from tierkv.tasks import background

BACKLOG = 1024
_OTHER_FILES = 1024  # descriptors for all that is not a client: stores, files, libraries
_PROBE_S = 1.0
_WHY_NOT = {
    errno.EADDRINUSE: "is taken by another process",
    errno.EACCES: "needs rights that this process does not have",
    errno.EADDRNOTAVAIL: "is not an address of this machine",
}


def bind(settings: ListenSection, *, asks_callers: bool = False) -> socket.socket:
    """A socket that listens on the settings' address.

    asks_callers: every caller must say who it is.
    Raises ConfigError if the address cannot be had, or if others than this machine can reach it,
    nobody asks them who they are, and that is not allowed.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the host {settings.host!r} is not known: {why}") from error
    # Of a name with several addresses, such as localhost, the first IPv4 one.
    family, _, _, _, address = min(found, key=lambda one: one[0] is not socket.AF_INET)
    may_be_public = asks_callers or settings.allow_insecure_bind
    if not may_be_public and not is_loopback(str(address[0])):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and this node does not ask who "
            "calls: name an auth file (--auth), listen on 127.0.0.1, or, on a network that only "
            "you use, say --insecure"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = _WHY_NOT.get(error.errno or 0, f"cannot be had: {error.strerror}")
        raise ConfigError(f"the address {where} {why}: choose another with --port") from error
    return listener


@contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """A socket at `path` that only its owner can connect to; the path is removed at the end.

    One that a dead process has left there is replaced. Raises ConfigError if the path cannot be
    had. To be used before threads start: it changes the umask for a moment.
    """
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)  # not chmod afterwards: there is no moment when others may connect
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = _WHY_NOT.get(error.errno or 0, f"cannot be had: {error.strerror or error}")
        raise ConfigError(f"the Unix socket {path} {why}") from error
    finally:
        os.umask(umask)
    mine = path.stat().st_ino
    try:
        yield listener
    finally:
        listener.close()
        try:
            if path.stat().st_ino == mine:
                path.unlink()
        except FileNotFoundError:
            pass


def _remove_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"{path} is there already and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"the Unix socket {path} cannot be looked at: {error}") from error
    else:
        raise ConfigError(f"the Unix socket {path} is taken by another process")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Where a client finds it: http://host:port, https://host:port, or unix:/path."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def make_room_for(connections: int) -> None:
    """Let this process have so many connections, as far as the system allows it to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


log = logging.getLogger(__name__)


@asynccontextmanager
async def server_tls(settings: TlsSection) -> AsyncIterator[ssl.SSLContext | None]:
    """A context for a server, None without a certificate. While the body runs, new files are read
    and used for new connections; wrong ones are logged, and the old ones stay.

    Raises ConfigError if a file cannot be used at the start.
    """
    if not settings.cert:
        yield None
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED

    async def reload() -> None:
        pems = await asyncio.to_thread(_Pems.read, settings)
        # First into a context of its own: what does not fit would break the live one. That is then
        # changed between two turns of the loop, or a handshake would see half of the change.
        await asyncio.to_thread(pems.load, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        pems.load(context)
        log.info("the certificate of %s is in use", settings.cert)

    files = [Path(name) for name in (settings.cert, settings.key, settings.client_ca) if name]
    async with watching(files, reload, every_s=settings.reload_s):
        yield context


@dataclass(frozen=True, slots=True, repr=False)  # it holds a key, which no traceback may show
class _Pems:
    """What the files of `settings` held at one moment: what is tried is what is used."""

    settings: TlsSection
    chain: bytes
    key: bytes
    client_ca: bytes

    @classmethod
    def read(cls, settings: TlsSection) -> _Pems:
        """Raises ConfigError."""
        try:
            chain = Path(settings.cert).read_bytes()
            key = Path(settings.key).read_bytes() if settings.key else chain
        except OSError as error:
            raise _unusable(settings, error) from error
        try:
            client_ca = Path(settings.client_ca).read_bytes() if settings.client_ca else b""
        except OSError as error:
            raise _unusable_ca(settings, error) from error
        return cls(settings, chain, key, client_ca)

    def load(self, context: ssl.SSLContext) -> None:
        """Raises ConfigError."""
        with _in_memory(self.chain) as chain, _in_memory(self.key) as key:
            try:
                # A password, or OpenSSL would ask on the terminal for that of an encrypted key.
                context.load_cert_chain(chain, key, password="")
            except (OSError, ValueError) as error:  # SSLError is an OSError
                raise _unusable(self.settings, error) from error
        if not self.settings.client_ca:
            return
        with _in_memory(self.client_ca) as client_ca:
            try:
                context.load_verify_locations(client_ca)
            except OSError as error:
                raise _unusable_ca(self.settings, error) from error


def _unusable(settings: TlsSection, error: Exception) -> ConfigError:
    return ConfigError(f"the certificate {settings.cert} or its key cannot be used: {error}")


def _unusable_ca(settings: TlsSection, error: Exception) -> ConfigError:
    return ConfigError(f"tls.client_ca {settings.client_ca} cannot be used: {error}")


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The name of a file that holds `content` as long as the body runs: OpenSSL is given
    certificates by name."""
    with open(os.memfd_create("tierkv-pem"), "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{file.fileno()}"


Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_LINE_BYTES = 8_192
MAX_FIELD_BYTES = 16_384  # another number than a line's: by it the two errors are told apart
MAX_FIELDS = 100
_LAST_ANSWERS_S = 2.0  # for answers that are on their way when the work is done
# A refused body is read on while its sender sends, or who sends all before they read would see a
# reset, not the answer: so long without a byte, so long at the most, and so many times the most
# bytes that a body may have. 30 of 15 MiB at once take 9 s. Of more than so many the oldest goes:
# each holds up to 256 KiB.
_LINGER_IDLE_S, _LINGER_S, _LINGER_BODIES, _MOST_LINGERING = 2.0, 60.0, 4, 128
_REFUSAL_S = 0.5  # how long an excess connection may take to read that it is one
# One read of 256 KiB of a refused body every so often: 50 MB/s of all of them together. 50 clients
# that send 15 MiB each whatever they are told made a turn of the loop 10 to 20 ms longer.
_LINGER_EVERY_S = 0.005
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

    handle: returns every answer, also of what fails, and calls `let_go` then; raises
    ConnectionError where nobody is left. It is cancelled when its client goes. At the end, answers
    under way have two seconds.
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
        request = web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=limits.max_body_bytes
        )
        request[CONNECTION] = protocol.front
        return request

    http = web.Server(handle, request_factory=make_request, handler_cancellation=True)
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
            for refused in tuple(shared.refused):
                refused.cut_off()
            http.pre_shutdown()
            await http.shutdown(_LAST_ANSWERS_S)


@asynccontextmanager
async def answering(
    section: ListenSection,
    auth: AuthSection,
    tls: TlsSection,
    listeners: Sequence[socket.socket],
    router_of: Callable[[Guard], HttpRouter],
) -> AsyncIterator[str]:
    """Answers on `listeners` by settings; yields the URL of the first.

    Raises ConfigError if the auth file or the certificate cannot be used.
    """
    guard = Guard(Path(auth.file) if auth.file else None, reload_s=auth.reload_s)
    async with (
        guard.running(),
        server_tls(tls) as context,
        serving(
            router_of(guard).answer, listeners, limits=ConnectionLimits.of(section), tls=context
        ),
    ):
        yield url_of(listeners[0], has_tls=context is not None)


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
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def lets_through(self) -> bool:
        """Whether one more piece may be taken in this turn of the loop; if so, it is counted."""
        if self._began is None:
            self._began = time.monotonic()
            self._loop.call_soon(self._loop.call_soon, self._next_turn)
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def wait(self, go_on: Callable[[], object]) -> None:
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
    """What the connections of one server share.

    heads, sends, refused: connections whose request head is incomplete, whose client takes nothing,
    or whose refused body is read on, with the time at which they are closed.
    """

    def __init__(self, http: web.Server, limits: ConnectionLimits, pace: AcceptRate) -> None:
        self.http = http
        self.limits = limits
        self.pace = pace
        self.num_open = 0
        self.num_refused = 0
        self.heads: dict[Connection, float] = {}
        self.sends: dict[Connection, float] = {}
        self.refused: dict[Connection, float] = {}
        self._refused: deque[Connection] = deque()

    def linger(self, connection: Connection) -> None:
        """Read its refused body on, for a while."""
        self.refused[connection] = time.monotonic() + _LINGER_IDLE_S
        if len(self.refused) > _MOST_LINGERING:
            oldest = next(iter(self.refused))
            del self.refused[oldest]
            oldest.cut_off()

    def read_refused(self, connection: Connection) -> None:
        """It takes what has come of a refused body when it is its turn."""
        self._refused.append(connection)
        if len(self._refused) == 1:
            asyncio.get_running_loop().call_later(_LINGER_EVERY_S, self._next_refused)

    def _next_refused(self) -> None:
        while self._refused and not self._refused.popleft().take_early():
            pass  # that one has gone
        if self._refused:
            asyncio.get_running_loop().call_later(_LINGER_EVERY_S, self._next_refused)

    async def keep_deadlines(self) -> None:
        """Close what is late, for ever."""
        shortest_s = min(self.limits.head_timeout_s, self.limits.send_timeout_s)
        while True:
            await asyncio.sleep(min(_MOST_LOOK_S, shortest_s / 4))
            now = time.monotonic()
            for waiting in (self.heads, self.sends, self.refused):
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
        """The answer to what aiohttp could not read, or to an error that `handle` raised. Raises
        ConnectionError if the client has gone, or the answer has begun."""
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
        """Log a client's fault in one line, anything else with its traceback."""
        error = kw.get("exc_info")
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
            log.info("a connection broke off in a bad body: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


class Connection(asyncio.Protocol):
    """Passes the events of one connection on to aiohttp at the rate that `AcceptRate` allows: in
    one turn of the loop thousands of clients may come, send or go."""

    __slots__ = (
        "_early",
        "_http",
        "_is_busy",
        "_is_counted",
        "_refused",
        "_refused_bytes",
        "_shared",
        "_transport",
    )

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._http = _Http(self, shared)
        self._transport: asyncio.Transport | None = None
        self._is_counted = False
        self._is_busy = False  # with a request whose head has come
        self._refused: StreamReader | None = None  # what comes is a body that nobody reads
        self._refused_bytes = 0
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
        """The client has gone. Closing takes a system call or two, so it waits its turn, too."""
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
        shared.refused.pop(self, None)
        self._early, self._refused = b"", None
        http = self._http
        del self._http  # it holds this, and nothing comes for it any more
        if shared.pace.lets_through():
            http.connection_lost(exc)
        else:
            shared.pace.wait(lambda: http.connection_lost(exc))

    def data_received(self, data: bytes) -> None:
        """Pass `data` on now, or in a later turn of the loop if this one has begun enough; until
        then, at most 64 KiB more are read."""
        shared, transport = self._shared, self._transport
        if self in shared.refused:
            shared.refused[self] = math.inf  # it waits for its turn
        elif not self._is_busy and self not in shared.heads:
            shared.heads[self] = time.monotonic() + shared.limits.head_timeout_s
        if not self._early and self._refused is None and shared.pace.lets_through():
            self._http.data_received(data)
            return
        if not self._early and self._refused is not None:
            shared.read_refused(self)
        elif not self._early:
            shared.pace.wait(self.take_early)
        self._early += data
        if transport is not None and len(self._early) >= _MOST_EARLY_BYTES:
            transport.pause_reading()

    def take_early(self) -> bool:
        """Take what has come before its turn; False if the client has gone meanwhile."""
        data, self._early = self._early, b""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if len(data) >= _MOST_EARLY_BYTES:
            transport.resume_reading()
        self._http.data_received(data)
        if self._refused is not None:
            self._read_refused(len(data), transport)
        return True

    def _read_refused(self, num_bytes: int, transport: asyncio.Transport) -> None:
        """So much more of a refused body has come."""
        assert self._refused is not None, "there is one"
        self._refused_bytes += num_bytes
        if self._refused.is_eof():
            self._refused = None
            self._shared.refused.pop(self, None)
        elif self._refused_bytes > _LINGER_BODIES * self._shared.limits.max_body_bytes:
            transport.close()
        elif self in self._shared.refused:
            self._shared.refused[self] = time.monotonic() + _LINGER_IDLE_S

    def head_has_come(self) -> None:
        """What comes until `is_answered` belongs to a request whose head is whole."""
        self._is_busy, self._refused = True, None
        self._shared.heads.pop(self, None)
        self._shared.refused.pop(self, None)

    def is_answered(self, body: StreamReader) -> None:
        """body: of the request; what of it has not come yet, nobody reads."""
        self._is_busy = False
        if not body.is_eof():
            self._refused, self._refused_bytes = body, 0
            self._shared.linger(self)

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
            log.info(
                "a client sent no more of what it began, or took nothing, in time: it is cut off"
            )
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
