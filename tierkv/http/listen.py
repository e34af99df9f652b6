"""The sockets a server listens on, TCP or Unix, and the TLS context of the TCP ones."""

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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.http.process import watching
from tierkv.http.settings import ListenSection, TlsSection

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


log = logging.getLogger("tierkv.tls")


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
        await asyncio.to_thread(_load, context, settings)
        log.info("the certificate of %s is in use", settings.cert)

    files = [Path(name) for name in (settings.cert, settings.key, settings.client_ca) if name]
    async with watching(files, reload, every_s=settings.reload_s):
        yield context


def _load(context: ssl.SSLContext, settings: TlsSection) -> None:
    # First into a context of its own: a key that does not fit would break the live one.
    for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
        try:
            # An encrypted key is refused; without a password, OpenSSL would ask on the terminal.
            target.load_cert_chain(settings.cert, settings.key or None, password="")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(
                f"the certificate {settings.cert} or its key cannot be used: {error}"
            ) from error
        if settings.client_ca:
            try:
                target.load_verify_locations(settings.client_ca)
            except OSError as error:
                raise ConfigError(
                    f"tls.client_ca {settings.client_ca} cannot be used: {error}"
                ) from error
