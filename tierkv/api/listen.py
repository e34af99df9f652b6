"""The sockets a node listens on: a TCP address, a Unix socket, or both."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tierkv.api.listen_settings import ListenSection
from tierkv.api.settings import NodeSection
from tierkv.errors import ConfigError

BACKLOG = 1024
_OTHER_FILES = 1024  # descriptors for all that is not a client: stores, files, libraries
_PROBE_S = 1.0
_WHY_NOT = {
    errno.EADDRINUSE: "is taken by another process",
    errno.EACCES: "needs rights that this process does not have",
    errno.EADDRNOTAVAIL: "is not an address of this machine",
}


@contextmanager
def open_listeners(settings: NodeSection, *, asks_callers: bool) -> Iterator[list[socket.socket]]:
    """The sockets of `settings`, TCP first. Raises ConfigError if one cannot be had."""
    with ExitStack() as stack:
        listeners = []
        if settings.listens_tcp:
            listeners.append(stack.enter_context(bind(settings, asks_callers=asks_callers)))
        if settings.unix_socket:
            listeners.append(stack.enter_context(unix_listener(Path(settings.unix_socket))))
        yield listeners


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
