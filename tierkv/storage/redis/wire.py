"""One connection for values: requests go out from, and replies come into, the callers' buffers.

    submit, send -> [ pieces to send ] -> socket -> server
    outcome <- [ in flight, in order ] <- socket <-'
       '-> the owner fills it up, before anybody hears of this one's end

Requests are answered in order, so a reply belongs to the oldest request in flight, whoever still
waits for it. A request's buffers are in use from `submit` to its outcome, and the outcome of one
that will never be answered is set when the socket is closed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiohappyeyeballs import start_connection

from tierkv.storage.base import why_unreachable
from tierkv.storage.protocol import Digest
from tierkv.storage.redis.resp import NotRedisError, Refused, Replies, Reply

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
        self.is_at_home = _is_at_home(sock)

    def read(self, into: Sequence[memoryview]) -> int:
        if len(into) == 1:
            return self._socket.recv_into(into[0])
        return self._socket.recvmsg_into(into[:_MAX_PIECES])[0]

    def write(self, pieces: Sequence[memoryview]) -> int:
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


# After so many bytes nothing more is sent in this turn of the loop, over all connections of a
# store: a MiB takes 0.3 ms. SET of 512 KiB over 8 connections kept the loop for 5.2 ms at times
# (p99) without.
_TURN_BYTES = 1 << 20


_LEAST_VALUES = 2


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a request has no reply. is_over: the peer ended the connection, or turned it away:
    another one may carry the request. is_new: of a connection on which nothing was ever heard."""

    reason: str
    is_over: bool = False
    is_new: bool = False


Outcome = list[Reply] | Unanswered


class Batch:
    """Requests of one caller, who is woken when all have ended: a future for each would take as
    long as all else that is done for it."""

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
    """A command in pieces, and where its value lands.

    num_bytes: of the value it carries or asks for. num_replies: of several commands in `pieces`;
    only the last one's value lands in `into`, and is given to `digest`. outcome: all replies, set
    once, when the buffers are the caller's again. batch: of whoever waits for that. is_login: of
    use on its own connection only. is_once: not sent again where it may have been carried out.
    may_retry: sent again at all.
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
        """Of a value that it moves. How long the answer to a question may be tells nothing."""
        is_question = self.into is None and len(self.pieces) == 1
        return 0 if is_question else self.num_bytes

    @property
    def is_long_write(self) -> bool:
        return self.into is None and self.bulk_bytes > _LONG_BYTES

    def make_ready(self) -> None:
        """What is sent is complete now, see PutItem."""
        if self.complete is not None:
            self.complete()
            self.complete = None

    def settle(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            if self.batch is not None:
                self.batch.one_ended()

    def abandon(self) -> None:
        """Nobody waits any more: do not begin it. What has begun goes on to its end, once."""
        self.may_retry = False
        if not self.was_sent:
            self.settle(Unanswered("nobody waits for it"))


@dataclass(slots=True)
class TransferTimeout:
    """How long an exchange may take: timeout_s, and its bytes at slowest_bytes_per_s."""

    timeout_s: float
    slowest_bytes_per_s: float

    def deadline_s(self, num_bytes: int) -> float:
        return self.timeout_s + num_bytes / self.slowest_bytes_per_s


class Window:
    """Values on their way between us and one server, over all connections of one purpose.

    home_bytes: fewer must be when one more is begun, to a server on this machine; what is behind
    costs it memory that is in no cache by the time it is sent or received. away_bytes: to another
    machine, where the next must be on its way for longer. Two values may be in any case, so that
    the next is there when one ends.
    """

    def __init__(self, *, home_bytes: int, away_bytes: int) -> None:
        self._home_bytes = home_bytes
        self._away_bytes = away_bytes
        self._num_bytes = 0
        self._num_values = 0
        self.is_at_home = False  # said by whoever has connected

    @property
    def has_room(self) -> bool:
        most = self._home_bytes if self.is_at_home else self._away_bytes
        return self._num_bytes < most or self._num_values < _LEAST_VALUES

    def began(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_values += num_bytes > 0

    def ended(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._num_values -= num_bytes > 0


@dataclass(slots=True)
class WireStats:
    """Counts over all connections that share this object."""

    connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Turn:
    """What may still be sent in this turn of the loop, over all connections that share this."""

    def __init__(self) -> None:
        self.left = _TURN_BYTES
        self._waiting: list[Callable[[], None]] = []

    def spend(self, num_bytes: int) -> None:
        if self.left == _TURN_BYTES:
            asyncio.get_running_loop().call_soon(self._begin)
        self.left -= num_bytes

    def when_next(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` as the next turn begins, before the loop's other work."""
        self._waiting.append(go_on)

    def _begin(self) -> None:
        self.left = _TURN_BYTES
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()


# Most bytes read in one callback, so that the loop's other work is not held up. With 256 KiB, GET
# of 2 MiB took an eighth more processor time.
_READ_TURN_BYTES = 1 << 20
# What a read counts for at least: of short values many come in a turn, and each is work of its own.
_READ_BYTES_AT_LEAST = 128 << 10
# Most bytes sent in one call: a value of 2 MiB goes at once. In pieces of 512 KiB, each in a turn
# of its own, it took client and server an eighth more processor time.
_CALL_BYTES = (2 << 20) + (64 << 10)
_HEADS_BYTES = 64 << 10
_MAX_IN_FLIGHT = 64
# With no more in flight than these the server may soon have nothing to do, so that what is next is
# sent when one ends. Where more values are to land, when all that has come is read, in one call:
# GET of 64 KiB over one connection at 1.3 to 1.6 of the rate (loopback, Redis 7.0,
# 2 cores). Answers to SET are short, and there each has its successor sent at once.
_FEW_IN_FLIGHT = 2


@dataclass(slots=True)
class _InFlight:
    request: WireRequest
    allowed_s: float
    due: float
    replies: list[Reply] = field(default_factory=list)


class Owner(Protocol):
    """Who has the requests of several connections. Called on the loop, and does not wait."""

    def fill(self, wire: Wire) -> None:
        """Answers have come on `wire`, which may have room for more."""

    def take_back(self, requests: Sequence[WireRequest], failure: Unanswered) -> None:
        """These will get no reply; their buffers are free."""


class Wire:
    """A connected socket. Everything here runs on the loop and nothing waits but `until_room`."""

    def __init__(
        self,
        pipe: Pipe,
        pace: TransferTimeout,
        stats: WireStats,
        *,
        turn: Turn,
        window: Window,
        owner: Owner,
    ) -> None:
        self._pipe = pipe
        self._pace = pace
        self._stats = stats
        self._turn = turn
        self._window = window
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._replies = Replies()
        self._to_send: deque[memoryview] = deque()
        self._in_flight: deque[_InFlight] = deque()
        self._in_flight_bytes = 0
        self._was_heard = False
        self._has_ended_some = False  # which the owner has not been told
        self._is_writing = False  # as soon as the socket takes more
        self._waits_for_turn = False
        self._is_broken = False
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        self.is_lost = False
        self.has_answered = False
        self.is_ready = False  # for callers' requests; set by whoever has logged in
        self._reads_on: asyncio.Handle | None = None
        self._loop.add_reader(pipe.fd, self._read)
        stats.connections += 1
        window.is_at_home = pipe.is_at_home

    def submit(self, request: WireRequest, *, since: float) -> None:
        """`send` sends `request`, as soon as what is before it has been sent.

        since: when it could have been sent, had there been a connection: to make one takes at most
        half of the time that the request has.
        """
        assert not self.is_lost, "who submits looks before"
        if not self._in_flight:
            self._was_heard = False
        request.was_sent = True
        request.make_ready()
        self._in_flight_bytes += request.num_bytes
        allowed_s = self._pace.deadline_s(self._in_flight_bytes)
        due = max(since + allowed_s, self._loop.time() + allowed_s / 2)
        self._in_flight.append(_InFlight(request, allowed_s, due))
        self._window.began(request.bulk_bytes)
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
        """Send what was submitted, in as few calls as it takes."""
        if not (self._is_writing or self.is_lost):
            self._write()

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def has_room(self) -> bool:
        """Whether another request may be submitted, as far as this connection goes."""
        return not (self.is_lost or self._is_broken) and len(self._in_flight) < _MAX_IN_FLIGHT

    async def until_room(self) -> None:
        """Return when another request may be submitted, or the connection is lost."""
        await self._room.wait()

    def close(self, failure: Unanswered) -> None:
        """Close the socket; requests in flight get `failure`. Again: nothing."""
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
            self._window.ended(waiting.request.bulk_bytes)
        self._in_flight.clear()
        self._room.set()
        self._owner.take_back(requests, failure)

    def _read(self) -> None:
        if self._reads_on is None:  # else it has its turn
            self._read_turn()

    def _read_on(self) -> None:
        self._reads_on = None
        self._read_turn()

    def _read_turn(self) -> None:
        self._read_some()
        if self._has_ended_some:
            self._fill()

    def _read_some(self) -> None:
        left = _READ_TURN_BYTES
        while not self.is_lost and left > 0:
            try:
                num_bytes = self._pipe.read(self._replies.targets(left))
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(why_unreachable(error))
                return
            if num_bytes == 0:
                self._lose("(it closed the connection)")
                return
            self._was_heard = True
            self._stats.received_bytes += num_bytes
            left -= max(num_bytes, _READ_BYTES_AT_LEAST)
            self._take_in(num_bytes)
            # Of a socket whose peer has died uvloop tells once, though there may be bytes to read
            # first. So while somebody waits it is read until there is nothing more, or the error.
            if self.is_lost or not (self._in_flight or self._pipe.has_more):
                return
        if not self.is_lost:
            self._reads_on = self._loop.call_soon(self._read_on)

    def _take_in(self, num_bytes: int) -> None:
        try:
            replies = self._replies.received(num_bytes)
        except NotRedisError as error:
            self.close(Unanswered(f"does not speak Redis ({error})"))
            return
        if not replies:
            return
        while replies and not self.is_lost:
            replies = self._answer(replies)
        # Not before all have been given: to send may be to read, see `_write`.
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
        """Give the oldest request its replies; returns those that are not its."""
        first = replies[0]
        if not self.has_answered and isinstance(first, Refused) and first.turns_away:
            why = f"turns connections away ({first.message:.80})"
            self.close(Unanswered(why, is_over=True, is_new=True))
            return []
        self.has_answered = True
        waiting = self._in_flight[0]
        wanted = waiting.request.num_replies - len(waiting.replies)
        waiting.replies += replies[:wanted]
        if len(replies) < wanted:
            return []
        self._in_flight.popleft()
        self._in_flight_bytes -= waiting.request.num_bytes
        self._window.ended(waiting.request.bulk_bytes)
        waiting.request.settle(waiting.replies)
        last = replies[wanted - 1]
        if isinstance(last, Refused) and last.code == "READONLY":
            # A master no more: the next connection asks anew where it is.
            self.close(Unanswered("is a replica now"))
        return replies[wanted:]

    def _send_on(self) -> None:
        self._waits_for_turn = False
        self.send()

    def _write(self) -> None:
        is_full = False
        while self._to_send and self._turn.left > 0:
            try:
                num_bytes = self._pipe.write(self._next_pieces(_CALL_BYTES))
            except BlockingIOError:
                is_full = True
                break
            except OSError as error:
                self._is_broken = True
                self._read_turn()  # it may have said why, or answered what came before
                if not self.is_lost:
                    self._lose(why_unreachable(error))
                return
            self._stats.sent_bytes += num_bytes
            self._turn.spend(num_bytes)
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
            self._turn.when_next(self._send_on)

    def _next_pieces(self, max_bytes: int) -> list[memoryview]:
        """A long one waits for a call of its own, behind another and more than a turn has left."""
        pieces: list[memoryview] = []
        num_bytes = 0
        for piece in self._to_send:
            is_second = num_bytes > _LONG_BYTES and len(piece) > _LONG_BYTES
            if is_second and num_bytes + len(piece) > self._turn.left + _HEADS_BYTES:
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

    def _lose(self, why: str) -> None:
        """The peer ended the connection: all is to be sent again but what would not be answered the
        same."""
        for place, waiting in enumerate(self._in_flight):
            # The oldest one's digest may have taken a part of the value. That nothing was heard
            # does not tell that nothing was done: a server that ends a connection drops answers.
            has_begun = self._was_heard and place == 0 and waiting.request.digest is not None
            if has_begun or waiting.request.is_once:
                waiting.request.may_retry = False
        reason = f"cannot be reached {why}"
        is_new = not (self.has_answered or self._was_heard)
        self.close(Unanswered(reason, is_over=True, is_new=is_new))
