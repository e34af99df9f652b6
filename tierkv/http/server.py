"""Listening sockets, TLS, and an HTTP/1.1 and 1.0 server with limits for each connection.

The server is aiohttp's. `_Http` adds limits that aiohttp lacks: on the time in which the headers of
a request must arrive, and on the time in which a client reads nothing. Bytes that are not valid
HTTP get an answer as problem+json.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from uuid import uuid4

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from tierkv.errors import ConfigError
from tierkv.http.callers import Guard
from tierkv.http.problems import framing_problem
from tierkv.http.process import watching
from tierkv.http.route import HttpRouter
from tierkv.http.settings import AuthSection, ListenSection, TlsSection
from tierkv.threads import in_thread

BACKLOG = 1024
_OTHER_FILES = 1024  # file descriptors for stores, files and libraries
_PROBE_S = 1.0
_WHY_NOT = {
    errno.EADDRINUSE: "is used by another process",
    errno.EACCES: "needs rights that this process does not have",
    errno.EADDRNOTAVAIL: "is not an address of this machine",
}


def bind(settings: ListenSection, *, asks_callers: bool = False) -> socket.socket:
    """Return a socket that listens on the address in `settings`.

    Args:
        settings: The settings `host`, `port` and `allow_insecure_bind`.
        asks_callers: True if every caller is authenticated. If False, and `allow_insecure_bind` is
            not set, the address must be one that other machines cannot reach.

    Raises:
        ConfigError: The address cannot be used, or is not allowed without authentication.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the host name {settings.host!r} cannot be resolved: {why}") from error
    # If a name such as localhost has several addresses, the first IPv4 address is used.
    family, _, _, _, address = min(found, key=lambda one: one[0] is not socket.AF_INET)
    may_be_public = asks_callers or settings.allow_insecure_bind
    if not may_be_public and not is_loopback(str(address[0])):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and callers are not "
            "authenticated: give an auth file (--auth), listen on 127.0.0.1, or give "
            "--insecure on a private network"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = _WHY_NOT.get(error.errno or 0, f"cannot be used: {error.strerror}")
        raise ConfigError(f"the address {where} {why}: choose another with --port") from error
    return listener


@contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket at `path` that only this user can connect to, and remove it at the end.

    A socket that a dead process left at `path` is replaced. Enter this context before any thread
    starts, because it changes the process's umask for a moment.

    Raises:
        ConfigError: The path cannot be used.
    """
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)  # a later chmod would let others connect before it
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = _WHY_NOT.get(error.errno or 0, f"cannot be used: {error.strerror or error}")
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
            raise ConfigError(
                f"{path} exists and is not a socket: remove it, or choose another path"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"the Unix socket {path} cannot be examined: {error}") from error
    else:
        raise ConfigError(
            f"the Unix socket {path} is used by another process: stop it, or choose another path"
        )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Return the URL of `listener`: http://host:port, https://host:port, or unix:/path.

    Args:
        listener: A listening socket.
        has_tls: True for https, False for http.
    """
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def make_room_for(connections: int) -> None:
    """Raise the process's open-file limit for this many connections, at most to the hard limit.

    Args:
        connections: Largest number of connections at the same time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


log = logging.getLogger(__name__)


@asynccontextmanager
async def server_tls(settings: TlsSection) -> AsyncIterator[ssl.SSLContext | None]:
    """Yield a server's TLS context; None if `settings` has no certificate.

    Until the `async with` block ends, changed files are read again and used for new connections. If
    a changed file cannot be used, the error is logged, and the earlier certificate stays in use.

    Args:
        settings: Paths of the certificate, its key, and the authorities of client certificates.

    Raises:
        ConfigError: A file cannot be used at the start.
    """
    if not settings.cert:
        yield None
        return
    shared = current = _tls_context(settings)

    def use_current(connection: ssl.SSLObject, _name: str | None, _shared: ssl.SSLContext) -> None:
        connection.context = current

    # OpenSSL's way to choose the certificate of one handshake. A context with certificates never
    # changes, so no handshake sees half of a change.
    shared.sni_callback = use_current

    async def reload() -> None:
        nonlocal current
        fresh = _tls_context(settings)
        await in_thread(_load_certificates, fresh, settings)
        current = fresh
        log.info("the certificate of %s is in use", settings.cert)

    files = [Path(name) for name in (settings.cert, settings.key, settings.client_ca) if name]
    async with watching(files, reload, every_s=settings.reload_s):
        yield shared


def _tls_context(settings: TlsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificates(context: ssl.SSLContext, settings: TlsSection) -> None:
    try:
        # With an empty password, OpenSSL does not ask the terminal for the password of a key.
        context.load_cert_chain(settings.cert, settings.key or None, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(
            f"the certificate {settings.cert} or its key cannot be used: {error}"
        ) from error
    if settings.client_ca:
        try:
            context.load_verify_locations(settings.client_ca)
        except OSError as error:
            raise ConfigError(
                f"tls.client_ca {settings.client_ca} cannot be used: {error}"
            ) from error


Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_LINE_BYTES = 8_192
MAX_FIELD_BYTES = 16_384  # unlike MAX_LINE_BYTES, so that aiohttp's two errors differ
MAX_FIELDS = 100
_LAST_ANSWERS_S = 2.0  # for answers that are being sent at the end
_LINGER_S = 10.0  # seconds for which a rejected body is read
_NO_LOG = logging.getLogger("tierkv.http.access")
_NO_LOG.disabled = True  # requests are counted; a log line costs more than an answer
_TOO_MANY_FIELDS = "Too many headers received"


@asynccontextmanager
async def serving(
    handle: Handle,
    listeners: Sequence[socket.socket],
    *,
    section: ListenSection,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Answer requests on `listeners` with `handle` while this context is entered.

    At the exit, unfinished answers have 2 s to end.

    Args:
        handle: Coroutine function that returns the answer, or the error answer, to a request. It
            raises ConnectionError if the client has disconnected. It is cancelled when the client
            disconnects.
        listeners: Listening sockets.
        section: Limits of connections and requests.
        tls: TLS context of TCP connections; None for plain HTTP. Unix sockets never use TLS.
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
        protocol.head_has_come(payload)
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=section.max_body_bytes
        )

    http = web.Server(handle, request_factory=make_request, handler_cancellation=True)
    shared = _Shared(http, section)
    servers: list[asyncio.Server] = []
    try:
        for listener in listeners:
            is_unix = listener.family == socket.AF_UNIX
            context = None if is_unix else tls
            listen = loop.create_unix_server if is_unix else loop.create_server
            servers.append(
                await listen(
                    lambda: _Http(shared),
                    sock=listener,
                    backlog=BACKLOG,
                    ssl=context,
                    ssl_handshake_timeout=section.head_timeout_s if context else None,
                )
            )
        yield
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # requests that have arrived start now
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
    """Answer requests on `listeners` while this context is entered.

    Args:
        section: Limits of connections and requests.
        auth: Path of the auth file.
        tls: Paths of the certificates.
        listeners: Listening sockets.
        router_of: Function that returns the router, given the authenticator of callers.

    Yields:
        The URL of the first listener.

    Raises:
        ConfigError: The auth file or a certificate cannot be used.
    """
    guard = Guard(Path(auth.file) if auth.file else None, reload_s=auth.reload_s)
    async with (
        guard.running(),
        server_tls(tls) as context,
        serving(router_of(guard).answer, listeners, section=section, tls=context),
    ):
        yield url_of(listeners[0], has_tls=context is not None)


@dataclass
class _Shared:
    """Objects that all connections of a server share: aiohttp's server, the limits and a count."""

    http: web.Server
    limits: ListenSection
    num_open: int = 0


class _Http(web.RequestHandler):
    """aiohttp's protocol of one connection, with the time limits that aiohttp lacks.

    Bytes that are not valid HTTP get an answer as problem+json, and one line in the log.
    """

    __slots__ = ("_body", "_head_timer", "_is_answered", "_is_counted", "_send_timer", "_shared")

    def __init__(self, shared: _Shared) -> None:
        limits = shared.limits
        super().__init__(
            shared.http,
            loop=asyncio.get_running_loop(),
            access_log=_NO_LOG,
            keepalive_timeout=limits.idle_timeout_s,
            # Otherwise a client that sends its whole body before it reads would see a reset.
            lingering_time=min(_LINGER_S, limits.body_timeout_s),
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_FIELDS,
        )
        self._shared = shared
        self._is_counted = False
        self._body: StreamReader | None = None  # body of the last request with complete headers
        self._is_answered = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        if shared.num_open >= shared.limits.max_connections:
            log.info("a connection was closed, since %d are open, the maximum", shared.num_open)
            transport.close()
            return
        shared.num_open += 1
        self._is_counted = True
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self._shared.num_open -= 1
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._body = self._head_timer = self._send_timer = (
            None  # each of them references this object
        )
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_body = self._body is not None and not self._body.is_eof()
        if self._head_timer is None and self._is_answered and not is_body:
            limit_s = self._shared.limits.head_timeout_s
            self._head_timer = asyncio.get_running_loop().call_later(limit_s, self._cut_off)
        super().data_received(data)

    def head_has_come(self, body: StreamReader) -> None:
        self._body, self._is_answered = body, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._is_answered = True

    def pause_writing(self) -> None:
        super().pause_writing()
        limit_s = self._shared.limits.send_timeout_s
        self._send_timer = asyncio.get_running_loop().call_later(limit_s, self._cut_off)

    def resume_writing(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def _cut_off(self) -> None:
        if self.transport is not None:
            log.info(
                "a connection was closed: the client did not send its request or read its "
                "answer in time"
            )
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's words, which may quote the client
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise exc  # the client disconnected while its answer was written
        request_id = uuid4().hex
        if isinstance(exc, HttpProcessingError):
            log.info("request %s is not valid HTTP: %s", request_id, _one_line(exc))
            status = _status_of(exc)
        else:
            log.error("request %s failed", request_id, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        return framing_problem(status, request_id)

    def log_exception(self, *args: object, **kw: object) -> None:
        error = kw.get("exc_info")
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
            log.info("a connection ended within a malformed body: %s", type(error).__name__)
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
