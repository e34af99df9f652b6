"""One connection to a Redis server.

Values are sent from the buffers of a request, and received into them, without a copy. The
connection uses a request's buffers from `submit` until the request's outcome is set.

The server answers requests in order: a reply belongs to the oldest request without a reply, even if
the caller of that request was cancelled. When replies have arrived, the next queued requests are
sent before the tasks that wait for the outcomes continue, so that the server stays busy.

When the socket is closed, every request without a reply is either sent again over another
connection or gets the outcome `Unanswered`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from aiohappyeyeballs import start_connection

from tierkv.storage.base import why_unreachable
from tierkv.storage.protocol import Digest
from tierkv.storage.redis.resp import NotRedisError, Refused, Replies, Reply

_MAX_PORT = 65_535
_MAX_PIECES = 1024  # UIO_MAXIOV
# Seconds after which the next address of a host is tried, too. RFC 8305 advises 0.25 s and at least
# 0.01 s; a store is near, so this is shorter.
_START_S = 0.05
# Balancers and firewalls silently drop a connection that is idle for some minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
# On one machine no packet is lost, and a system that is set to BBR only delays long values. With
# this algorithm, which every Linux has, SET of values that are replaced had 1.2 to 1.6 times the
# rate (512 KiB and 2 MiB, Redis 7.0, 2-core x86-64 VM); where the system is set to cubic, it
# changes nothing.
_CONGESTION_LOCAL = b"reno"
_LONG_BYTES = 256 << 10  # a longer piece gets its own system call


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server: host and port, or the path of a Unix socket.

    Attributes:
        host: name or IP address; "" for a Unix socket.
        port: TCP port; 0 for a Unix socket.
        socket_path: path of the Unix socket; None for TCP.
    """

    host: str = ""
    port: int = 0
    socket_path: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.socket_path if self.socket_path is not None else f"{host}:{self.port}"


def port_of(text: str) -> int | None:
    """Return the port number that is written in `text`; None if `text` is not a valid port."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_PORT))
    return int(text) if is_number and is_port(int(text)) else None


def is_port(number: int) -> bool:
    return 0 < number <= _MAX_PORT


class Pipe(Protocol):
    """A connected socket, plain or with TLS.

    `read` and `write` raise BlockingIOError if no byte can be read or written now, and OSError if
    the connection is lost.
    """

    @property
    def fd(self) -> int: ...

    @property
    def is_local(self) -> bool:
        """True if the peer is known to be on this machine."""

    @property
    def has_more(self) -> bool:
        """True if decrypted bytes are buffered, so that `read` returns some at once.

        The event loop does not report the socket as readable for these bytes.
        """

    def read(self, into: Sequence[memoryview]) -> int:
        """Receive bytes into the buffers `into`, in order.

        Returns:
            The number of bytes; 0 if the peer has closed the connection.
        """

    def write(self, pieces: Sequence[memoryview]) -> int:
        """Send bytes from the buffers `pieces`, in order; return the number of bytes sent.

        After BlockingIOError the next call must begin with the same bytes. With TLS that call may
        complete an earlier, longer write, so the number can exceed the length of `pieces`.
        """

    def close(self) -> None: ...


class PlainPipe:
    """A TCP or Unix socket. One call reads into several buffers or writes several buffers."""

    has_more = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.is_local = _is_local(sock)
        if self.is_local:
            with suppress(OSError):  # a Unix socket has none; a sandbox may refuse it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_LOCAL)

    def read(self, into: Sequence[memoryview]) -> int:
        if len(into) == 1:
            return self._socket.recv_into(into[0])
        return self._socket.recvmsg_into(into[:_MAX_PIECES])[0]

    def write(self, pieces: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(pieces[:_MAX_PIECES])

    def close(self) -> None:
        self._socket.close()


class TlsPipe:
    """A socket with TLS. Each call reads into one buffer or writes one buffer.

    OpenSSL requires that an incomplete write is repeated with the same bytes and length. `write`
    therefore completes the earlier write before it begins with other bytes.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        # Encryption takes longer than cache misses, so the cache does not limit values in flight.
        self.is_local = False
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
    """Connect to a server, without a time limit. A cancel closes the socket.

    Args:
        address: the server's address.
        tls: settings of the TLS handshake; None for a plain connection.

    Raises:
        OSError: the connection or the TLS handshake failed (ssl.SSLError is an OSError).
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
        return await _connected(address.socket_path)
    found = await _resolved(address)
    if not found:
        raise OSError(f"the host {address.host} has no IP address")
    # Each address is tried _START_S seconds after the previous one, as that machine may be down.
    infos = [(f, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where) for f, where in found]
    try:
        sock = await start_connection(infos, happy_eyeballs_delay=_START_S)  # type: ignore[arg-type]
    except RuntimeError as error:  # aiohappyeyeballs joins several different errors
        raise OSError(str(error)) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds_or_tries in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds_or_tries)
    return sock


async def _resolved(address: Address) -> Sequence[tuple[int, object]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:  # an IP address needs no DNS query in a thread, which takes up to 17 ms
            socket.inet_pton(family, address.host)
        except OSError:
            continue
        return [(family, (address.host, address.port))]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
    except ValueError as error:  # an impossible name, such as one with a label of 64 letters
        raise socket.gaierror(socket.EAI_NONAME, "this is no name of a host") from error
    return [(family, where) for family, _, _, _, where in found]


async def _connected(socket_path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
        await asyncio.get_running_loop().sock_connect(sock, socket_path)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_local(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:  # the peer has closed already, so the next read raises
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


# Largest number of bytes that all connections of a store send in one event loop iteration: 1 MiB
# takes 0.3 ms. Without this limit SET of 512 KiB over 8 connections blocks the loop for 5.2 ms.
_SEND_ITERATION_BYTES = 1 << 20


_MIN_VALUES = 2


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The reason why a request has no reply.

    Attributes:
        reason: the end of an error sentence that begins with the server's URL.
        is_over: True if the connection is closed for a reason of the server's, so that the request
            can be sent again over another one.
        is_cut: True if the server closed or refused the connection, which it may have done because
            of a request.
        is_new: True if the server had answered nothing on the connection.
    """

    reason: str
    is_over: bool = False
    is_cut: bool = False
    is_new: bool = False


Outcome = list[Reply] | Unanswered


class Batch:
    """One future for all requests of a call, resolved when every request has an outcome.

    With one future for each request, a request would take twice as much processor time.

    Args:
        num_open: number of requests.

    Attributes:
        ended: the future.
    """

    __slots__ = ("_num_open", "ended")

    def __init__(self, num_open: int) -> None:
        self._num_open = num_open
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def one_ended(self) -> None:
        self._num_open -= 1
        if not (self._num_open or self.ended.done()):
            self.ended.set_result(None)


@dataclass(eq=False, slots=True)
class WireRequest:
    """One or several commands to send, and the buffers for the value in the reply.

    Attributes:
        pieces: the bytes to send, in order.
        into: buffers for the value in the last command's reply; None if the outcome is to contain
            that reply itself.
        num_bytes: size of the value that is sent, or largest size of the value in the reply, in
            bytes; 0 for a command without a value.
        outcome: the replies in the order of the commands, or the reason why there are none. None
            until the request has ended; afterwards the connection does not use the buffers.
        batch: the `Batch` to notify when the outcome is set; None for none.
        num_replies: number of commands in `pieces`, each of which gets one reply.
        digest: receives the bytes that are written into `into`; None for none.
        was_sent: True once the request was submitted to a connection.
        may_retry: False if the request must not be sent again when its connection ends without a
            reply, for example because its caller was cancelled.
        num_retries: number of times that the request was queued again.
        is_login: True for AUTH and SELECT, which concern only the connection that sends them.
        is_once: True for a command such as UNLINK, whose result would be different the second time.
            After a lost connection such a request is not sent again.
        complete: fills in bytes of `pieces` that are not known before they are sent, such as a
            checksum; None if all bytes are known.
    """

    pieces: Sequence[memoryview]
    into: tuple[memoryview, ...] | None
    num_bytes: int
    outcome: Outcome | None = None
    batch: Batch | None = None
    num_replies: int = 1
    digest: Digest | None = None
    was_sent: bool = False
    may_retry: bool = True
    num_retries: int = 0
    is_login: bool = False
    is_once: bool = False
    complete: Callable[[], None] | None = None

    @property
    def bulk_bytes(self) -> int:
        """Size in bytes of the value that the request writes or reads; 0 for a short command."""
        is_question = self.into is None and len(self.pieces) == 1
        return 0 if is_question else self.num_bytes

    @property
    def is_long_write(self) -> bool:
        return self.into is None and self.bulk_bytes > _LONG_BYTES

    def make_ready(self) -> None:
        """Complete the bytes to send, for example with a checksum. Further calls do nothing."""
        if self.complete is not None:
            self.complete()
            self.complete = None

    def settle(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            if self.batch is not None:
                self.batch.one_ended()

    def abandon(self) -> None:
        """End the request, whose caller was cancelled, if the request was not sent yet.

        A request that was sent still waits for its reply, but is not sent again over another
        connection.
        """
        self.may_retry = False
        if not self.was_sent:
            self.settle(Unanswered("withdrawn: its caller was cancelled"))


class InFlightLimit:
    """A limit on the bytes of values that are in flight to or from one server.

    All connections that read share one object, and all connections that write share another. Two
    values of any size may always be in flight, so that the server need not wait for the next one.

    Args:
        local_bytes: limit for a server on this machine: with this many bytes in flight, no further
            value is sent or requested. More bytes would not fit into the processor's cache.
        remote_bytes: the same limit for a server on another machine. It is higher because the next
            value takes longer to arrive.
    """

    def __init__(self, *, local_bytes: int, remote_bytes: int) -> None:
        self._local_bytes = local_bytes
        self._remote_bytes = remote_bytes
        self._num_bytes = 0
        self._num_values = 0
        self.is_local = False  # set when a connection is made

    @property
    def has_room(self) -> bool:
        most = self._local_bytes if self.is_local else self._remote_bytes
        return self._num_bytes < most or self._num_values < _MIN_VALUES

    def began(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_values += num_bytes > 0

    def ended(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._num_values -= num_bytes > 0


@dataclass(slots=True)
class WireStats:
    """Totals of all connections that share this object.

    Attributes:
        connections: number of connections that were opened.
        sent_bytes: bytes sent, without TLS and TCP overhead.
        received_bytes: bytes received, without TLS and TCP overhead.
    """

    connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class SendBudget:
    """The number of bytes that several connections may still send in this event loop iteration.

    The limit keeps sending from blocking the event loop.

    Attributes:
        left: the bytes that may still be sent; 0 or less if none may.
    """

    def __init__(self) -> None:
        self.left = _SEND_ITERATION_BYTES
        self._waiting: list[Callable[[], None]] = []

    def spend(self, num_bytes: int) -> None:
        if self.left == _SEND_ITERATION_BYTES:
            asyncio.get_running_loop().call_soon(self._refill)
        self.left -= num_bytes

    def on_refill(self, resume: Callable[[], None]) -> None:
        """Call `resume` once at the next event loop iteration, when connections may send again."""
        self._waiting.append(resume)

    def _refill(self) -> None:
        self.left = _SEND_ITERATION_BYTES
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


# Largest number of bytes read in one callback, so that the loop's other work can run. With 256 KiB,
# GET of 2 MiB takes an eighth more processor time.
_READ_ITERATION_BYTES = 1 << 20
# Number of bytes that a shorter read counts for: many short values take long, too.
_MIN_READ_BYTES = 128 << 10
# Largest number of bytes sent in one call: a value of 2 MiB is sent at once. In pieces of 512 KiB,
# one per iteration, client and server take an eighth more processor time.
_CALL_BYTES = (2 << 20) + (64 << 10)
_HEADS_BYTES = 64 << 10
_MAX_IN_FLIGHT = 64
# With at most this many requests in flight the server may soon be idle, so the next request is sent
# as soon as one ends. With more reads in flight the next ones are sent in one call, after all
# received bytes are parsed: GET of 64 KiB is then 1.3 to 1.6 times as fast. Replies to SET are
# short, so after each reply the next request is sent at once.
_FEW_IN_FLIGHT = 2


@dataclass(slots=True)
class _InFlight:
    request: WireRequest
    allowed_s: float
    due: float
    replies: list[Reply] = field(default_factory=list)


class Owner(Protocol):
    """The object that submits requests to connections, and retries requests after a failure.

    The connections call these methods on the event loop; the methods return without waiting.
    """

    def fill(self, wire: Wire) -> None:
        """Submit queued requests to a connection that has received replies and can send more."""

    def requeue(self, requests: Sequence[WireRequest], failure: Unanswered) -> None:
        """Handle requests whose connection ended before the reply: send each again, or fail it.

        Args:
            requests: the requests, the oldest first; their buffers are no longer in use.
            failure: the reason why the connection ended.
        """


class Wire:
    """A connection to a server, and the requests that are in flight on it.

    A request is in flight from `submit` until it has its replies or the connection ends. Call the
    methods on the event loop. Only `until_room` waits.

    Args:
        pipe: the connected socket.
        deadline_s: returns the time limit of requests, in seconds, for their number of bytes.
        stats: counters of all connections, to which this connection adds.
        send_budget: bytes that may still be sent in this iteration of the event loop, shared with
            other connections.
        in_flight_limit: limit on the bytes of values in flight, shared with other connections.
        owner: the object that submits requests, and submits them again after a failure.

    Attributes:
        is_lost: True once the socket is closed.
        has_answered: True once the server has answered a command.
        is_ready: True once the login has succeeded; requests that read and write values may then be
            submitted.
    """

    def __init__(
        self,
        pipe: Pipe,
        deadline_s: Callable[[int], float],
        stats: WireStats,
        *,
        send_budget: SendBudget,
        in_flight_limit: InFlightLimit,
        owner: Owner,
    ) -> None:
        self._pipe = pipe
        self._deadline_s = deadline_s
        self._stats = stats
        self._send_budget = send_budget
        self._in_flight_limit = in_flight_limit
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._replies = Replies()
        self._to_send: deque[memoryview] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._in_flight_bytes = 0
        self._was_heard = False
        self._has_ended_some = False  # since the owner's last `fill`
        self._is_writing = False  # True while waiting until the socket takes more bytes
        self._waits_for_turn = False
        self._is_broken = False
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self.is_lost = False
        self.has_answered = False
        self.is_ready = False  # for callers' requests; set after the login
        self._reads_on: asyncio.Handle | None = None
        self._loop.add_reader(pipe.fd, self._read)
        stats.connections += 1
        in_flight_limit.is_local = pipe.is_local

    def submit(self, request: WireRequest, *, since: float) -> None:
        """Queue `request` behind the requests submitted before. Call `send` to start sending.

        Args:
            request: the request. The connection uses its buffers until the outcome is set.
            since: time on the event loop's clock, in seconds, from which the request's time limit
                counts. At least half of the time limit remains after this call.
        """
        assert not self.is_lost, "a lost connection takes no requests"
        if not self._in_flight:
            self._was_heard = False
        request.was_sent = True
        request.make_ready()
        self._in_flight_bytes += request.num_bytes
        allowed_s = self._deadline_s(self._in_flight_bytes)
        due = max(since + allowed_s, self._loop.time() + allowed_s / 2)
        self._in_flight.append(_InFlight(request, allowed_s, due))
        self._in_flight_limit.began(request.bulk_bytes)
        for _ in range(request.num_replies - 1):
            self._replies.expect()
        if request.into is None and not request.num_bytes:
            self._replies.expect()
        else:
            into = request.num_bytes if request.into is None else request.into
            self._replies.expect(into, request.digest)
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._check_deadline)
        if not self.has_room:
            self._room.clear()
        self._to_send.extend(request.pieces)

    def send(self) -> None:
        """Send submitted bytes until the socket is full; the event loop sends the rest later."""
        if not (self._is_writing or self.is_lost):
            self._write()

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def has_room(self) -> bool:
        """True if another request may be submitted to this connection."""
        return not (self.is_lost or self._is_broken) and len(self._in_flight) < _MAX_IN_FLIGHT

    async def until_room(self) -> None:
        """Wait until another request may be submitted, or the connection is lost."""
        await self._room.wait()

    def close(self, failure: Unanswered) -> None:
        """Close the socket. Further calls do nothing.

        Requests without a reply go back to the owner of the connection, which retries or fails
        them.

        Args:
            failure: the reason why the connection ended, for the owner.
        """
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._pipe.fd)
        self._loop.remove_writer(self._pipe.fd)
        self._pipe.close()
        if self._timer is not None:
            self._timer.cancel()
        self._to_send.clear()
        requests = [waiting.request for waiting in self._in_flight]
        for waiting in self._in_flight:
            self._in_flight_limit.ended(waiting.request.bulk_bytes)
        self._in_flight.clear()
        self._room.set()
        self._owner.requeue(requests, failure)

    def _read(self) -> None:
        if self._reads_on is None:  # else `_read_on` is scheduled
            self._read_turn()

    def _read_on(self) -> None:
        self._reads_on = None
        self._read_turn()

    def _read_turn(self) -> None:
        self._read_some()
        if self._has_ended_some:
            self._fill()

    def _read_some(self) -> None:
        left = _READ_ITERATION_BYTES
        while not self.is_lost and left > 0:
            try:
                num_bytes = self._pipe.read(self._replies.targets(left))
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"cannot be reached {why_unreachable(error)}")
                return
            if num_bytes == 0:
                self._lose("cannot be reached (it closed the connection)")
                return
            self._was_heard = True
            self._stats.received_bytes += num_bytes
            left -= max(num_bytes, _MIN_READ_BYTES)
            self._handle_received(num_bytes)
            # After the peer has died uvloop calls back only once, even if bytes are left to read.
            # While requests are in flight the socket is therefore read until it is empty or fails.
            if self.is_lost or not (self._in_flight or self._pipe.has_more):
                return
        if not self.is_lost:
            self._reads_on = self._loop.call_soon(self._read_on)

    def _handle_received(self, num_bytes: int) -> None:
        try:
            replies = self._replies.received(num_bytes)
        except NotRedisError as error:
            self.close(Unanswered(f"does not use the Redis protocol ({error})"))
            return
        if not replies:
            return
        while replies and not self.is_lost:
            replies = self._answer(replies)
        # After the loop, when all replies are assigned: sending may read, see `_write`.
        self._has_ended_some = True
        if len(self._in_flight) <= _FEW_IN_FLIGHT or self._in_flight[0].request.into is None:
            self._fill()

    def _fill(self) -> None:
        self._has_ended_some = False
        if self.is_ready:
            self._owner.fill(self)
        if self.has_room:
            self._room.set()

    def _answer(self, replies: list[Reply]) -> list[Reply]:
        """Add replies to the oldest request in flight, which ends once it has all of its replies.

        Return the replies that are left over, because they are for later requests.
        """
        first = replies[0]
        if not self.has_answered and isinstance(first, Refused) and first.turns_away:
            why = f"refuses connections ({first.message:.80})"
            self.close(Unanswered(why, is_over=True, is_cut=True, is_new=True))
            return []
        self.has_answered = True
        waiting = self._in_flight[0]
        wanted = waiting.request.num_replies - len(waiting.replies)
        waiting.replies += replies[:wanted]
        if len(replies) < wanted:
            return []
        self._in_flight.popleft()
        self._in_flight_bytes -= waiting.request.num_bytes
        self._in_flight_limit.ended(waiting.request.bulk_bytes)
        waiting.request.settle(waiting.replies)
        last = replies[wanted - 1]
        if isinstance(last, Refused) and last.code == "READONLY":
            # The server is no longer the master: the next connection asks for the master's address.
            self._lose("became a replica", is_cut=False)
        return replies[wanted:]

    def _send_on(self) -> None:
        self._waits_for_turn = False
        self.send()

    def _write(self) -> None:
        is_full = False
        while self._to_send and self._send_budget.left > 0:
            try:
                num_bytes = self._pipe.write(self._next_pieces(_CALL_BYTES))
            except BlockingIOError:
                is_full = True
                break
            except OSError as error:
                self._is_broken = True
                self._read_turn()  # received bytes may contain the reason, or earlier replies
                if not self.is_lost:
                    self._lose(f"cannot be reached {why_unreachable(error)}")
                return
            self._stats.sent_bytes += num_bytes
            self._send_budget.spend(num_bytes)
            self._drop_sent(num_bytes)
        if self.is_lost:
            return
        if is_full is not self._is_writing:
            self._is_writing = is_full
            if is_full:
                self._loop.add_writer(self._pipe.fd, self._write)
            else:
                self._loop.remove_writer(self._pipe.fd)
        if self._to_send and not (is_full or self._waits_for_turn):
            self._waits_for_turn = True
            self._send_budget.on_refill(self._send_on)

    def _next_pieces(self, max_bytes: int) -> list[memoryview]:
        pieces: list[memoryview] = []
        num_bytes = 0
        for piece in self._to_send:
            # A second long piece waits for the next call if the budget has no bytes left for it.
            is_second = num_bytes > _LONG_BYTES and len(piece) > _LONG_BYTES
            if is_second and num_bytes + len(piece) > self._send_budget.left + _HEADS_BYTES:
                break
            pieces.append(piece[: max_bytes - num_bytes])
            num_bytes += len(piece)
            if num_bytes >= max_bytes:
                break
        return pieces

    def _drop_sent(self, num_bytes: int) -> None:
        while num_bytes:
            piece = self._to_send.popleft()
            if num_bytes < len(piece):
                self._to_send.appendleft(piece[num_bytes:])
                return
            num_bytes -= len(piece)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._in_flight:
            return
        oldest = self._in_flight[0]
        if oldest.due > self._loop.time():
            self._timer = self._loop.call_at(oldest.due, self._check_deadline)
            return
        self.close(Unanswered(f"did not answer within {oldest.allowed_s * 1000:.0f} ms"))

    def _lose(self, reason: str, *, is_cut: bool = True) -> None:
        """Close the failed connection, whose requests may be sent again on another connection.

        The exceptions are a request whose second attempt could have another result, and a read
        that has passed a part of the value to its checksum.
        """
        for place, waiting in enumerate(self._in_flight):
            # The oldest request's digest may have received a part of the value. Without an answer
            # the command may have been carried out: a server that closes drops its answers.
            has_begun = self._was_heard and place == 0 and waiting.request.digest is not None
            if has_begun or waiting.request.is_once:
                waiting.request.may_retry = False
        is_new = not (self.has_answered or self._was_heard)
        self.close(Unanswered(reason, is_over=True, is_cut=is_cut, is_new=is_new))
