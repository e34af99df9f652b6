"""Connections for values to one Redis server, each owned by a task that feeds it requests."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from typing import Protocol, cast

from tierkv.errors import StoreUnavailableError
from tierkv.storage.buffers import cut_buffers
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
)
from tierkv.storage.redis_socket import Address, open_pipe
from tierkv.storage.redis_wire import Failure, Outcome, Pace, Request, Wire, WireStats
from tierkv.storage.resp import LANDED, Argument, OtherLength, Refused, Reply, pack, pack_set
from tierkv.tasks import background, outlast

# What is longer is read in ranges of about _RANGE_BYTES: a server delivers 8 MiB in one piece at
# half the speed (1.1 and 2.3 GB/s, loopback, Redis 7.0, 2 cores, 2026-11-21).
_RANGE_BYTES = 2 << 20
_LONGEST_WHOLE = 3 << 20


class Locator(Protocol):
    """Where the server is just now; asked before each connection."""

    async def locate(self) -> Address:
        """Raises StoreUnavailableError."""


@dataclass(frozen=True, slots=True)
class FixedAddress:
    address: Address

    async def locate(self) -> Address:
        return self.address


@dataclass(frozen=True, slots=True)
class Login:
    """What a new connection says first."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0

    def commands(self) -> list[tuple[Argument, ...]]:
        commands: list[tuple[Argument, ...]] = []
        if self.password is not None or self.username is not None:
            user = () if self.username is None else (self.username,)
            commands.append(("AUTH", *user, self.password or ""))
        if self.db:
            commands.append(("SELECT", self.db))
        return commands


@dataclass(frozen=True, slots=True)
class Dialer:
    """How to get a connection that is logged in."""

    locator: Locator
    login: Login
    tls: SSLContext | None
    connect_timeout_s: float
    pace: Pace
    stats: WireStats = field(default_factory=WireStats)


class BulkLanes:
    """`num_connections` connections, opened when first needed and again after a failure.

    A connection that fails takes the requests with it that wait for one: the server that is silent
    for one is silent for all. One that its peer closed while it was idle costs nobody an answer.
    """

    def __init__(self, dialer: Dialer, *, num_connections: int, max_waiting: int, url: str) -> None:
        """max_waiting: requests that may wait for a connection, over all callers."""
        self._dialer = dialer
        self._num_connections = num_connections
        self._max_waiting = max_waiting
        self._url = url
        self._waiting: deque[Request] = deque()
        self._came = asyncio.Event()
        self._is_open = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving closes the connections; whoever still waits gets a Failure."""
        lanes = {f"tierkv-redis-{lane}": self._serve() for lane in range(self._num_connections)}
        try:
            async with background(lanes):
                self._is_open = True
                try:
                    yield
                finally:
                    self._is_open = False
        finally:
            self._fail_waiting(f"{self._url} is closed")

    async def ask(self, requests: Sequence[Request]) -> list[Outcome]:
        """The outcome of each. A cancel is raised when no buffer of theirs is in use any more."""
        self.begin(requests)
        return await finished(requests)

    def begin(self, requests: Sequence[Request]) -> None:
        """Have `requests` carried out; their outcomes tell the rest."""
        if not self._is_open:
            refusal = f"{self._url} is closed"
        elif len(self._waiting) + len(requests) > self._max_waiting:
            refusal = f"{self._url} has {len(self._waiting)} requests waiting for it"
        else:
            self._waiting.extend(requests)
            self._came.set()
            return
        for request in requests:
            request.settle(Failure(refusal))

    async def _serve(self) -> None:
        wire: Wire | None = None
        try:
            while True:
                request = await self._next()
                if wire is None or wire.is_lost:
                    try:
                        wire = await self._connect()
                    except StoreUnavailableError as error:
                        request.settle(Failure(str(error)))
                        self._fail_waiting(str(error))
                        continue
                    except asyncio.CancelledError:
                        request.settle(Failure(f"{self._url} is closed"))
                        raise
                if request.outcome.done():  # its caller has gone meanwhile, and its buffers too
                    continue
                wire.submit(request)
                await asyncio.sleep(0)  # the other lanes take their share
                await wire.until_room()
        finally:
            if wire is not None:
                wire.close(Failure("is closed"))

    async def _next(self) -> Request:
        while True:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.outcome.done():
                    return request
            self._came.clear()
            await self._came.wait()

    async def _connect(self) -> Wire:
        """Raises StoreUnavailableError."""
        dialer = self._dialer
        try:
            async with asyncio.timeout(dialer.connect_timeout_s):
                address = await dialer.locator.locate()
                pipe = await open_pipe(address, dialer.tls)
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"{self._url} did not answer within {dialer.connect_timeout_s * 1000:.0f} ms"
            ) from error
        except OSError as error:
            raise StoreUnavailableError(f"{self._url} cannot be reached ({error})") from error
        wire = Wire(pipe, dialer.pace, dialer.stats, on_lost=self._take_back)
        try:
            await self._log_in(wire)
        except BaseException:
            wire.close(Failure("is closed"))
            raise
        return wire

    async def _log_in(self, wire: Wire) -> None:
        for command in self._dialer.login.commands():
            request = new_request([memoryview(pack(*command))], None, 0)
            request.was_retried = True
            wire.submit(request)
            outcome = await request.outcome
            if isinstance(outcome, Failure):
                raise StoreUnavailableError(outcome.reason)
            if isinstance(outcome[0], Refused):
                raise StoreUnavailableError(
                    f"{self._url} refused to log us in ({outcome[0].message}): "
                    "check user, password and database"
                )

    def _take_back(self, requests: Sequence[Request], failure: Failure) -> None:
        """Try once more what a peer that closed an idle connection has not seen; fail the rest."""
        reason = f"{self._url} {failure.reason}"
        again = [r for r in requests if failure.was_silent and not r.was_retried and self._is_open]
        for request in requests:
            if request not in again:
                request.settle(Failure(reason))
        if requests and not again:
            self._fail_waiting(reason)
        for request in reversed(again):
            request.was_retried, request.was_sent = True, False
            self._waiting.appendleft(request)
            self._came.set()

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._waiting.popleft().settle(Failure(reason))


async def finished(requests: Sequence[Request]) -> list[Outcome]:
    """The outcome of each request begun. A cancel keeps back those that have not been sent, and is
    raised when the others have ended."""

    def abandon() -> None:
        for request in requests:
            request.abandon()

    futures = cast("set[asyncio.Future[None]]", {request.outcome for request in requests})
    await outlast(futures, on_cancel=abandon)
    return [request.outcome.result() for request in requests]


def new_request(
    pieces: Sequence[memoryview], into: tuple[memoryview, ...] | None, num_bytes: int
) -> Request:
    return Request(pieces, into, num_bytes, asyncio.get_running_loop().create_future())


def question(*command: Argument, num_bytes: int = 0) -> Request:
    """A command whose reply is small, or at most `num_bytes`."""
    return new_request([memoryview(pack(*command))], None, num_bytes)


def pipeline(commands: bytes, num_replies: int) -> Request:
    """Several packed commands in one request, each with a small reply."""
    request = new_request([memoryview(commands)], None, 0)
    request.num_replies = num_replies
    return request


def get_requests(item: GetItem) -> list[Callable[[], Request]]:
    """What makes GET of the value, or of its ranges if it is long.

    The last range ends one byte after the value, so that a longer one shows. Should the value be
    replaced between two ranges, its checksum will not fit.
    """
    num_bytes = item.num_bytes
    if num_bytes <= _LONGEST_WHOLE:
        return [partial(_get, ("GET", item.name), item.into)]
    makers: list[Callable[[], Request]] = []
    sizes = _range_sizes(num_bytes)
    start = 0
    for size, views in zip(sizes, cut_buffers(item.into, sizes), strict=True):
        end = start + size
        last = end - 1 if end < num_bytes else end
        makers.append(partial(_get, ("GETRANGE", item.name, start, last), views))
        start = end
    return makers


def _get(command: Sequence[Argument], into: tuple[memoryview, ...]) -> Request:
    num_bytes = sum(view.nbytes for view in into)
    return new_request([memoryview(pack(*command))], into, num_bytes)


def _range_sizes(num_bytes: int) -> list[int]:
    num_ranges = -(-num_bytes // _RANGE_BYTES)
    least, longer = divmod(num_bytes, num_ranges)
    return [least + (index < longer) for index in range(num_ranges)]


def put_request(item: PutItem) -> Request:
    options: list[Argument] = []
    if item.ttl_s is not None:
        options += ["PX", math.ceil(item.ttl_s * 1000)]
    if item.keep_existing:
        options.append("NX")
    return new_request(pack_set(item.name, item.parts, options), None, item.num_bytes)


def get_outcome(item: GetItem, replies: Sequence[Reply | Failure]) -> GetOutcome:
    """From the replies to `get_requests`: the first that brought nothing decides."""
    for reply in replies:
        if reply is not LANDED:
            return _no_hit(item, reply)
    return GetOutcome(GetStatus.HIT)


def _no_hit(item: GetItem, reply: Reply | Failure) -> GetOutcome:  # noqa: PLR0911 - a table
    match reply:
        case None:
            return GetOutcome(GetStatus.MISS)
        case OtherLength(0) if item.num_bytes > _LONGEST_WHOLE:
            return GetOutcome(GetStatus.MISS)  # GETRANGE of what is not there
        case OtherLength(num_bytes):
            return GetOutcome(
                GetStatus.DAMAGED,
                f"{item.name}, or a range of it, has {num_bytes} bytes; it should have "
                f"{item.num_bytes}",
            )
        case Refused(message) if reply.code == "WRONGTYPE":
            return GetOutcome(GetStatus.DAMAGED, f"{item.name} is not a string: {message}")
        case Refused(message):
            return GetOutcome(GetStatus.FAILED, f"{item.name}: {message}")
        case Failure(reason):
            return GetOutcome(GetStatus.FAILED, reason)
    return GetOutcome(GetStatus.FAILED, f"{item.name}: {reply!r:.80} is no answer to a GET")


def put_outcome(item: PutItem, reply: Reply | Failure) -> PutOutcome:
    match reply:
        case None:
            return PutOutcome(PutStatus.EXISTED)
        case b"OK":
            return PutOutcome(PutStatus.STORED)
        case Refused(message):
            status = PutStatus.FULL if reply.code == "OOM" else PutStatus.FAILED
            return PutOutcome(status, f"{item.name}: {message}")
        case Failure(reason):
            return PutOutcome(PutStatus.FAILED, reason)
    return PutOutcome(PutStatus.FAILED, f"{item.name}: {reply!r:.80} is no answer to a SET")
