"""A pool of connections to one Redis server; a task for each connection sends queued requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Protocol

from tierkv.errors import StoreUnavailableError
from tierkv.storage.base import why_unreachable
from tierkv.storage.redis.resp import Argument, Refused, pack
from tierkv.storage.redis.url import RedisSettings, TlsFiles
from tierkv.storage.redis.wire import (
    Address,
    Batch,
    InFlightLimit,
    Outcome,
    SendBudget,
    Unanswered,
    Wire,
    WireRequest,
    WireStats,
    open_pipe,
)
from tierkv.tasks import background, outlast

# Largest number of retries of a request after the server closed its connection: the other
# connections may be closed, too, and the next attempts find that out.
_MAX_RETRIES = 3
# Values of InFlightLimit for one server. For reads from this machine two values of 512 KiB fit into
# the processor's cache: GET is up to 1.5 times as fast as with 3 MiB.
# For writes the limit is two long values: with one the server is idle between its reply and the
# next value, with three the unread bytes leave the cache. Both values are sent on one connection,
# because the server reads several connections in turn: SET of 512 KiB is then 1.07 to 1.4 times as
# fast.
READING_BYTES = 1 << 20
WRITING_BYTES = 512 << 10
READING_REMOTE_BYTES = 3 << 20
_BEGUN_FIRST = 4  # requests of a batch that are sent before the rest is made
_MAX_WAITING = 16_384  # with this number of queued requests, no further batch is accepted
# Seconds for which a task that cannot connect leaves all requests to tasks with a connection.
_WITHOUT_S = 0.5


class Locator(Protocol):
    """The source of the server's current address, asked before each new connection."""

    async def locate(self) -> Address:
        """Return the server's current address.

        Raises:
            StoreUnavailableError: the address is not known.
        """


@dataclass(frozen=True, slots=True)
class FixedAddress:
    address: Address

    async def locate(self) -> Address:
        return self.address


@dataclass(frozen=True, slots=True)
class Login:
    """User, password and database of a new connection.

    Attributes:
        username: None for the default user.
        password: None for no password.
        db: number of the database.
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0

    def commands(self) -> list[tuple[Argument, ...]]:
        """Return the commands that a new connection sends first: AUTH and SELECT, if needed."""
        commands: list[tuple[Argument, ...]] = []
        if self.password is not None or self.username is not None:
            user = () if self.username is None else (self.username,)
            commands.append(("AUTH", *user, self.password or ""))
        if self.db:
            commands.append(("SELECT", self.db))
        return commands


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Settings, login and shared counters of the connections to all servers of one store.

    Attributes:
        settings: the store's settings.
        login: user, password and database.
        tls_files: paths of the TLS files, for connections of redis-py; None for plain connections.
        tls: the TLS settings of this package's own connections; None for plain connections.
        stats: totals of connections and bytes.
        send_budget: the bytes that all connections for writes may still send in this event loop
            iteration.
    """

    settings: RedisSettings
    login: Login
    tls_files: TlsFiles | None
    tls: SSLContext | None
    stats: WireStats
    send_budget: SendBudget = field(default_factory=SendBudget)


class ConnectionPool:
    """A fixed number of connections to one server, opened when needed and again after a failure.

    If the server does not answer in time on one connection, the requests of that connection and all
    queued requests fail. If the server closes a connection, the requests of that connection are
    sent again over another one, except those that must not be repeated. While no new connection can
    be opened, requests wait for the open connections.
    """

    def __init__(
        self,
        locator: Locator,
        access: RedisAccess,
        *,
        send_budget: SendBudget,
        in_flight_limit: InFlightLimit,
        num_connections: int,
        url: str,
    ) -> None:
        """Create the pool; `running` starts it.

        Args:
            locator: the source of the server's address.
            access: login and limits of connections.
            send_budget: the bytes that may still be sent in this event loop iteration, shared with
                other pools.
            in_flight_limit: the limit on the bytes of values in flight.
            num_connections: number of connections.
            url: the server's URL without password, for error messages.
        """
        self._locator = locator
        self._access = access
        self._send_budget = send_budget
        self.num_connections = num_connections
        self._max_retries = min(num_connections, _MAX_RETRIES)
        self._url = url
        self._waiting: deque[WireRequest] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()  # one per task without a request
        self._in_flight_limit = in_flight_limit
        self._is_open = False
        self._wires: list[Wire] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep connections and carry out requests while this context is entered.

        Requests that are still queued at the exit fail.
        """
        tasks = {f"tierkv-redis-{at}": self._serve() for at in range(self.num_connections)}
        try:
            async with background(tasks):
                self._is_open = True
                try:
                    yield
                finally:
                    self._is_open = False
        finally:
            self._fail_waiting(f"{self._url} is closed")

    async def ask(self, requests: Sequence[WireRequest]) -> list[Outcome]:
        """Send requests and return the outcome of each.

        If the call is cancelled, it ends only when the requests' buffers are no longer in use.
        """
        return await finished(self.begin(requests))

    def begin(self, requests: Iterable[WireRequest]) -> list[WireRequest]:
        """Queue requests and return them; call `finished` to wait for their outcomes.

        `requests` may be a generator: the first requests are sent before the later ones are made.
        """
        refusal = None
        if not self._is_open:
            refusal = f"{self._url} is closed"
        elif len(self._waiting) >= _MAX_WAITING:
            refusal = f"{self._url} has {len(self._waiting)} requests waiting for it"
        begun: list[WireRequest] = []
        for request in requests:
            begun.append(request)
            if refusal is not None:
                request.settle(Unanswered(refusal))
                continue
            self._waiting.append(request)
            if len(begun) == _BEGUN_FIRST:
                self._begin_at_once()
        if refusal is None:
            self._begin_at_once()
            self._wake_one()
        return begun

    async def _serve(self) -> None:
        wire: Wire | None = None
        loop = asyncio.get_running_loop()
        try:
            while True:
                request = await self._next(wire)
                since = loop.time()
                if wire is None or wire.is_lost:
                    try:
                        wire = await self._connect()
                    except StoreUnavailableError as error:
                        if self._has_working_connection():
                            self._put_back([request])
                            await asyncio.sleep(_WITHOUT_S)
                        else:
                            request.settle(Unanswered(str(error)))
                            self._fail_waiting(str(error))
                        continue
                    except asyncio.CancelledError:
                        request.settle(Unanswered(f"{self._url} is closed"))
                        raise
                if request.outcome is not None:  # withdrawn: the caller may use the buffers again
                    continue
                wire.submit(request, since=since)
                wire.send()
                if self.num_connections > 1:
                    await asyncio.sleep(0)  # let other tasks take requests, too
                await wire.until_room()
                if wire.is_lost and not wire.has_answered and self._has_working_connection():
                    await asyncio.sleep(_WITHOUT_S)
        finally:
            if wire is not None:
                wire.close(Unanswered("is closed"))

    async def _next(self, wire: Wire | None) -> WireRequest:
        """Wait for a queued request, remove it from the queue, and return it.

        If `wire` is given, first wait until this connection has room for one more request.
        """
        while True:
            while wire is not None and not (wire.is_lost or wire.has_room):
                self._wake_one()  # another task can take the request
                await wire.until_room()
            request = self._pop()
            if request is not None:
                self._wake_one()
                return request
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    def fill(self, wire: Wire) -> None:
        """Submit queued requests to the connection `wire` until its limits are reached.

        The connection calls this when it has received replies, so that the server gets new requests
        before the connection's task runs.
        """
        while wire.has_room and (request := self._pop()) is not None:
            wire.submit(request, since=asyncio.get_running_loop().time())
        wire.send()
        if self._waiting and self._waiting[0].outcome is None:
            self._waiting[0].make_ready()  # while the server is busy
        self._wake_one()

    def _begin_at_once(self) -> None:
        """Send queued requests over open connections now, without waiting for another task."""
        for wire in list(self._wires):
            while self._may_begin(wire):
                request = self._pop()
                if request is None:
                    return
                wire.submit(request, since=asyncio.get_running_loop().time())
                wire.send()
                if wire.is_lost:  # other connections may be lost, too: do not try all of them
                    return

    def _may_begin(self, wire: Wire) -> bool:
        # The comment at READING_BYTES says why a busy connection may get a second long write.
        if not (self._waiting and wire.is_ready and wire.has_room and self._send_budget.left > 0):
            return False
        return wire.is_idle or (self._in_flight_limit.is_local and self._waiting[0].is_long_write)

    def _pop(self) -> WireRequest | None:
        while self._waiting and self._in_flight_limit.has_room:
            request = self._waiting.popleft()
            if request.outcome is None:
                return request
        return None

    def _wake_one(self) -> None:
        """Wake an idle connection's task for a queued request, and let it wake the next task."""
        while self._idle and self._waiting and self._in_flight_limit.has_room:
            idle = self._idle.popleft()
            if not idle.done():  # else its task is being cancelled
                idle.set_result(None)
                return

    async def _connect(self) -> Wire:
        access = self._access
        deadline_s = access.settings.connect_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                address = await self._locator.locate()
                pipe = await open_pipe(address, access.tls)
        except TimeoutError as error:
            late = f"{self._url} did not answer within {deadline_s * 1000:.0f} ms"
            is_tls = (
                " to a TLS handshake: check that it uses TLS on this port" if access.tls else ""
            )
            raise StoreUnavailableError(late + is_tls) from error
        except OSError as error:
            why = why_unreachable(error)
            raise StoreUnavailableError(f"{self._url} cannot be reached {why}") from error
        wire = Wire(
            pipe,
            access.settings.deadline_s,
            access.stats,
            send_budget=self._send_budget,
            in_flight_limit=self._in_flight_limit,
            owner=self,
        )
        self._wires = [one for one in self._wires if not one.is_lost] + [wire]
        try:
            await self._log_in(wire)
        except BaseException:
            wire.close(Unanswered("is closed"))
            raise
        if wire.is_lost:
            raise StoreUnavailableError(
                f"{self._url} closed a new connection at once: check its log and its maxclients"
            )
        wire.is_ready = True
        return wire

    async def _log_in(self, wire: Wire) -> None:
        for command in self._access.login.commands():
            if wire.is_lost:
                return
            batch = Batch(1)
            request = WireRequest([memoryview(pack(*command))], None, 0, batch=batch, is_login=True)
            wire.submit(request, since=asyncio.get_running_loop().time())
            wire.send()
            await batch.ended
            outcome = request.outcome
            assert outcome is not None, "it has ended"
            if isinstance(outcome, Unanswered):
                raise StoreUnavailableError(outcome.reason)
            if isinstance(outcome[0], Refused):
                raise StoreUnavailableError(
                    f"{self._url} refused the login ({outcome[0].message}): check "
                    "user, password and database"
                )

    def requeue(self, requests: Sequence[WireRequest], failure: Unanswered) -> None:
        """Send requests again whose connection ended before the reply, or let the requests fail.

        A request is sent again if it can be repeated and has retries left. All requests except the
        login are sent again if the server has only refused a new connection, and another connection
        works.

        Args:
            requests: the requests, the oldest first; their buffers are no longer in use.
            failure: the reason why the connection ended.
        """
        reason = f"{self._url} {failure.reason}"
        may_retry = failure.is_over and self._is_open
        serves = may_retry and failure.is_new and self._has_working_connection()
        again: list[WireRequest] = []
        lost: list[WireRequest] = []
        for request in requests:
            is_for_any = may_retry and not request.is_login
            has_retries = request.may_retry and request.num_retries < self._max_retries
            is_again = is_for_any and (serves or has_retries)
            (again if is_again else lost).append(request)
        for request in lost:
            request.settle(Unanswered(reason, is_cut=failure.is_cut))
        if lost and not again and not lost[0].is_login:
            self._fail_waiting(reason)
        self._put_back(again)

    def _put_back(self, requests: Sequence[WireRequest]) -> None:
        for request in reversed(requests):
            request.num_retries, request.was_sent = request.num_retries + 1, False
            self._waiting.appendleft(request)
        self._wake_one()

    def _has_working_connection(self) -> bool:
        return any(wire.has_answered and not wire.is_lost for wire in self._wires)

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._waiting.popleft().settle(Unanswered(reason))


async def finished(requests: Sequence[WireRequest]) -> list[Outcome]:
    """Wait until all requests have ended; return their outcomes.

    If the call is cancelled, requests that were not sent are withdrawn. The call raises
    CancelledError when the sent requests have ended.
    """

    def abandon() -> None:
        for request in requests:
            request.abandon()

    open_ones = [request for request in requests if request.outcome is None]
    if open_ones:
        batch = Batch(len(open_ones))
        for request in open_ones:
            request.batch = batch
        await outlast({batch.ended}, on_cancel=abandon)
    outcomes: list[Outcome] = []
    for request in requests:
        assert request.outcome is not None, "all have ended"
        outcomes.append(request.outcome)
    return outcomes
