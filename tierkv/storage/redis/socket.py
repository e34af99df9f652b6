"""A non-blocking socket to a Redis server, plain or TLS, that reads into many buffers at once."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohappyeyeballs import start_connection

_MAX_PORT = 65_535
_MAX_PIECES = 1024  # UIO_MAXIOV
# What an address of a host has before the next is tried too. RFC 8305 advises 0.25 s, and no less
# than 0.01; a store is near, and connecting may take 0.25 s in all.
_START_S = 0.05
# Balancers and firewalls forget a connection that is idle for some minutes, and say so to nobody.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)
# To a server on this machine nothing is lost on the way, and what paces itself (BBR) only holds
# back long values. With this one, which every Linux has and lets everybody use, SET of 2 MiB came
# to 1.0 to 1.2 of the rate into an empty server, to 1.1 to 1.35 where values are replaced, of 8 MiB
# to 1.0 to 1.2; of 512 KiB, two on one connection, to 1.0 and 1.45 (Redis 7.0, 2 cores,
# 2026-11-23).
_CONGESTION_AT_HOME = b"reno"
_LONG_BYTES = 256 << 10  # sent in one call


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: at host and port, or at a Unix socket's path."""

    host: str = ""
    port: int = 0
    socket_path: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.socket_path if self.socket_path is not None else f"{host}:{self.port}"


def port_of(text: str) -> int | None:
    """The port that a server wrote, None if it is none."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_PORT))
    return int(text) if is_number and is_port(int(text)) else None


def is_port(number: int) -> bool:
    return 0 < number <= _MAX_PORT


class Pipe(Protocol):
    """Reading and writing raise BlockingIOError when there is nothing to be had just now, and
    OSError when there never will be."""

    @property
    def fd(self) -> int: ...

    @property
    def is_at_home(self) -> bool:
        """Whether the peer is known to be on this machine."""

    @property
    def has_more(self) -> bool:
        """Whether bytes can be read although the socket is not readable."""

    def read(self, into: Sequence[memoryview]) -> int:
        """How many bytes came; 0 when the peer has ended."""

    def write(self, pieces: Sequence[memoryview]) -> int:
        """How many bytes of `pieces` went, or more: what was begun before is ended, however short
        they are now. After BlockingIOError the next ones begin with the same bytes."""

    def close(self) -> None: ...


class PlainPipe:
    """TCP or Unix: scattered reads and gathered writes, no copy of ours."""

    has_more = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.is_at_home = self._may_be_held_back = _is_at_home(sock)

    def read(self, into: Sequence[memoryview]) -> int:
        if len(into) == 1:
            return self._socket.recv_into(into[0])
        return self._socket.recvmsg_into(into[:_MAX_PIECES])[0]

    def write(self, pieces: Sequence[memoryview]) -> int:
        if self._may_be_held_back and sum(map(len, pieces)) > _LONG_BYTES:
            self._may_be_held_back = False
            with suppress(OSError):  # not to be had in this sandbox: as the system has it, then
                self._socket.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_AT_HOME
                )
        return self._socket.sendmsg(pieces[:_MAX_PIECES])

    def close(self) -> None:
        self._socket.close()


class TlsPipe:
    """TLS: one buffer at a time, as OpenSSL takes them.

    A write that OpenSSL could not end it must be given again, and no shorter: it has encrypted, and
    maybe sent, a part of it. Of another length it fails ("bad length"), and the connection with it.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.is_at_home = False  # encrypting takes longer than what this is asked for
        self._begun: memoryview | None = None

    @property
    def has_more(self) -> bool:
        return self._socket.pending() > 0

    def read(self, into: Sequence[memoryview]) -> int:
        try:
            return self._socket.recv_into(into[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def write(self, pieces: Sequence[memoryview]) -> int:
        piece = pieces[0] if self._begun is None else self._begun
        try:
            num_bytes = self._socket.send(piece)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            self._begun = piece
            raise BlockingIOError from error
        self._begun = None
        return num_bytes

    def close(self) -> None:
        self._socket.close()


async def open_pipe(address: Address, tls: ssl.SSLContext | None) -> Pipe:
    """Connect, shaking hands if `tls` is given. Raises OSError (ssl.SSLError among them).

    Has no deadline of its own; a cancel closes the socket.
    """
    sock = await _connect(address)
    if tls is None:
        return PlainPipe(sock)
    try:
        wrapped = tls.wrap_socket(sock, server_hostname=address.host, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    try:
        await _shake_hands(wrapped)
    except BaseException:
        wrapped.close()
        raise
    return TlsPipe(wrapped)


async def _connect(address: Address) -> socket.socket:
    if address.socket_path is not None:
        return await _connected(socket.AF_UNIX, address.socket_path)
    found = await _resolved(address)
    if not found:
        raise OSError(f"{address.host} has no address")
    if len(found) == 1:
        sock = await _connected(*found[0])
    else:
        sock = await _first_connected(found)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds_or_tries in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds_or_tries)
    return sock


async def _first_connected(found: Sequence[tuple[int, object]]) -> socket.socket:
    """To whichever of the addresses answers first; each has a start before the next is tried, too:
    the first may be that of a machine that is gone."""
    infos = [(f, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where) for f, where in found]
    try:
        return await start_connection(infos, happy_eyeballs_delay=_START_S)  # type: ignore[arg-type]
    except RuntimeError as error:  # of several errors that are not alike
        raise OSError(str(error)) from error


async def _resolved(address: Address) -> Sequence[tuple[int, object]]:
    """Families and socket addresses of a host, in the system's order. Raises OSError."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:  # what needs no look-up waits for no thread: 17 ms on a machine with no core to spare
            socket.inet_pton(family, address.host)
        except OSError:
            continue
        return [(family, (address.host, address.port))]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
    except ValueError as error:  # what can be no name: a label of 64 letters, a NUL
        raise socket.gaierror(socket.EAI_NONAME, "this is no name of a host") from error
    return [(family, where) for family, _, _, _, where in found]


async def _connected(family: int, where: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
        await asyncio.get_running_loop().sock_connect(sock, where)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


def _is_at_home(sock: socket.socket) -> bool:
    """Whether it is a TCP connection within this machine."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:  # the peer has gone again: whoever reads hears of it
        return False


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        ready: asyncio.Future[None] = loop.create_future()
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            loop.add_reader(sock.fileno(), _set, ready)
            stop_waiting = loop.remove_reader
        except ssl.SSLWantWriteError:
            loop.add_writer(sock.fileno(), _set, ready)
            stop_waiting = loop.remove_writer
        try:
            await ready
        finally:
            stop_waiting(sock.fileno())


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
