"""A batch for a Redis server begins at once on the connections that are open, not a turn of the
loop later."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.latch import finish, until
from tests.redis_server import (
    RedisServer,
    empty_redis,  # noqa: F401 - a fixture
    module_redis,  # noqa: F401 - a fixture
)
from tests.storage.test_redis_traffic import AWAY, HOME, SlowServer
from tests.storage.values import content_of, landing
from tierkv.clock import SystemClock
from tierkv.storage.protocol import PutItem, PutOutcome, PutStatus
from tierkv.storage.redis.node import get_whole_request, put_request, question
from tierkv.storage.redis.pool import (
    WRITING_BYTES,
    ConnectionPool,
    Dialer,
    FixedAddress,
    Login,
    finished,
)
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import (
    Address,
    TransferTimeout,
    Turn,
    Unanswered,
    WireRequest,
    WireStats,
)

LONG, SHORT = 512 << 10, 16 << 10
NAMES = [f"t:f:{index:02}:0" for index in range(4)]


@dataclass
class Lanes:
    """Connections to a slow server, and what has been sent over them."""

    slow: SlowServer
    lanes: ConnectionPool
    stats: WireStats
    turn: Turn

    async def open(self) -> None:
        """All of them."""
        self.slow.is_empty = True
        many = 2 * self.lanes.num_connections
        while self.stats.connections < self.lanes.num_connections:
            await self.lanes.ask([question("PING") for _ in range(many)])
        self.slow.is_empty = False

    def begin(self, requests: Sequence[WireRequest]) -> int:
        """Bytes that were sent before it returned."""
        before = self.stats.sent_bytes
        self.lanes.begin(requests)
        return self.stats.sent_bytes - before

    async def answer_all(self, count: int, reply: bytes) -> None:
        for _ in range(count):
            await until(lambda: bool(self.slow.heard))
            self.slow.answer(reply)


@asynccontextmanager
async def lanes_to(
    host: str, connections: int, *, writes: bool, password: str | None = None
) -> AsyncIterator[Lanes]:
    slow, stats, turn = SlowServer(), WireStats(), Turn()
    async with await asyncio.start_server(slow.serve, host, 0) as server:
        where = FixedAddress(Address(host, server.sockets[0].getsockname()[1]))
        dialer = Dialer(
            where, Login(password=password), None, 5.0, TransferTimeout(30.0, 1e6), stats, turn
        )
        if writes:
            dialer = replace(
                dialer, home_bytes=WRITING_BYTES, away_bytes=connections * WRITING_BYTES
            )
        lanes = ConnectionPool(
            dialer, num_connections=connections, max_waiting=99, url="redis://slow"
        )
        async with lanes.running(), asyncio.timeout(60):
            yield Lanes(slow, lanes, stats, turn)


def put(name: str, num_bytes: int) -> WireRequest:
    return put_request(PutItem(name, (content_of(name, num_bytes),)))


def get(name: str, num_bytes: int) -> WireRequest:
    return get_whole_request(landing(name, num_bytes)[0])


def num_bytes_of(requests: Sequence[WireRequest]) -> int:
    return sum(len(piece) for request in requests for piece in request.pieces)


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_a_value_is_on_its_way_before_begin_returns(host: str) -> None:
    async with lanes_to(host, 1, writes=True) as to:
        await to.open()
        request = put(NAMES[0], SHORT)
        assert to.begin([request]) == num_bytes_of([request])
        words = await to.slow.next_of(1)
        assert words[1:3] == [NAMES[0].encode(), content_of(NAMES[0], SHORT)]
        to.slow.answer(b"+OK\r\n")
        assert await finish(finished([request])) == [[b"OK"]]


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_each_open_connection_is_asked_for_a_value_before_begin_returns(host: str) -> None:
    async with lanes_to(host, len(NAMES), writes=False) as to:
        await to.open()
        requests = [get(name, SHORT) for name in NAMES]
        assert to.begin(requests) == num_bytes_of(requests)
        await to.slow.next_of(len(NAMES))
        assert len({writer for _, writer in to.slow.heard}) == len(NAMES)
        await to.answer_all(len(NAMES), b"$-1\r\n")
        assert await finish(finished(requests)) == [[None]] * len(NAMES)


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_of_a_batch_a_connection_is_asked_for_one_value_and_then_the_next_connection(
    host: str,
) -> None:
    """The oldest first, and what is left is for the first that has time."""
    async with lanes_to(host, 2, writes=False) as to:
        await to.open()
        requests = [get(name, SHORT) for name in NAMES]
        assert to.begin(requests) == num_bytes_of(requests[:2])
        await to.slow.next_of(len(NAMES))
        carried_by = {words[1].decode(): writer for words, writer in to.slow.heard}
        assert carried_by[NAMES[0]] is not carried_by[NAMES[1]]
        await to.answer_all(len(NAMES), b"$-1\r\n")
        await finish(finished(requests))


@pytest.mark.parametrize("num_bytes", [SHORT, 2 << 20])
@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_callers_that_come_one_by_one_are_served_by_idle_connections(
    host: str, num_bytes: int
) -> None:
    async with lanes_to(host, 2, writes=False) as to:
        await to.open()
        requests = [get(name, num_bytes) for name in NAMES[:2]]
        for count, request in enumerate(requests, 1):
            to.lanes.begin([request])
            await to.slow.next_of(count)
        assert len({writer for _, writer in to.slow.heard}) == 2
        await to.answer_all(2, b"$-1\r\n")
        await finish(finished(requests))


async def test_of_long_values_for_another_machine_each_connection_gets_one() -> None:
    async with lanes_to(AWAY, 2, writes=True) as to:
        await to.open()
        requests = [put(name, LONG) for name in NAMES]
        to.begin(requests)
        await to.slow.next_of(2)
        assert len({writer for _, writer in to.slow.heard}) == 2
        await to.answer_all(len(NAMES), b"+OK\r\n")
        await finish(finished(requests))


async def test_both_long_values_for_a_server_here_are_begun_before_begin_returns() -> None:
    begun: list[int] = []

    def put_and_tell(index: int) -> WireRequest:
        request = put(NAMES[index], LONG)
        request.complete = lambda: begun.append(index)
        return request

    async with lanes_to(HOME, 2, writes=True) as to:
        await to.open()
        requests = [put_and_tell(index) for index in range(3)]
        to.begin(requests)
        assert begun == [0, 1]
        await to.slow.next_of(2)
        assert len({writer for _, writer in to.slow.heard}) == 1
        await to.answer_all(3, b"+OK\r\n")
        await finish(finished(requests))


async def test_the_first_values_of_a_batch_are_sent_before_the_others_are_made() -> None:
    async with lanes_to(HOME, 1, writes=True) as to:
        await to.open()
        sent_before = to.stats.sent_bytes
        sent: list[int] = []

        def made() -> Iterator[WireRequest]:
            for name in NAMES * 8:
                sent.append(to.stats.sent_bytes - sent_before)
                yield put(name, LONG)

        requests = to.lanes.begin(made())
        assert len(requests) == len(sent) == 8 * len(NAMES)
        assert sent[0] == 0
        assert sent[8] > LONG
        await to.answer_all(len(requests), b"+OK\r\n")
        assert await finish(finished(requests)) == [[b"OK"]] * len(requests)


async def test_a_batch_that_is_refused_is_refused_as_a_whole() -> None:
    async with lanes_to(HOME, 1, writes=True) as to:
        await to.open()
        waiting = to.lanes.begin(put(NAMES[0], SHORT) for _ in range(200))
        refused = to.lanes.begin(put(name, SHORT) for name in NAMES * 2)
        for outcome in await finish(finished(refused)):
            assert isinstance(outcome, Unanswered)
            assert "requests waiting" in outcome.reason
        await to.answer_all(len(waiting), b"+OK\r\n")
        assert await finish(finished(waiting)) == [[b"OK"]] * len(waiting)


async def test_of_a_batch_whose_caller_goes_only_what_was_sent_goes_on() -> None:
    async with lanes_to(HOME, 1, writes=True) as to:
        await to.open()
        requests = to.lanes.begin(put(name, LONG) for name in NAMES)
        waiting = asyncio.create_task(finished(requests))
        await to.slow.next_of(2)
        waiting.cancel()
        await to.slow.next_of(2)
        assert not waiting.done(), "their buffers are in use"
        await to.answer_all(2, b"+OK\r\n")
        with pytest.raises(asyncio.CancelledError):
            await finish(waiting)
        assert [request.outcome for request in requests[:2]] == [[b"OK"]] * 2
        assert all(isinstance(request.outcome, Unanswered) for request in requests[2:])


async def test_what_waits_for_a_login_ends_when_the_store_is_left() -> None:
    async with lanes_to(HOME, 1, writes=False, password="secret") as to:
        requests = to.lanes.begin([get(NAMES[0], SHORT)])
        assert (await to.slow.next_of(1))[0] == b"AUTH"
    [outcome] = await finish(finished(requests))
    assert isinstance(outcome, Unanswered)


async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    async with lanes_to(HOME, 2, writes=False) as to:
        await to.open()
        gone, wanted = get(NAMES[0], SHORT), get(NAMES[1], SHORT)
        gone.abandon()
        assert to.begin([gone, wanted]) == num_bytes_of([wanted])
        assert (await to.slow.next_of(1))[1] == NAMES[1].encode()
        to.slow.answer(b"$-1\r\n")
        assert await finish(finished([wanted])) == [[None]]


async def test_what_was_sent_in_this_turn_of_the_loop_is_enough_for_it() -> None:
    async with lanes_to(HOME, 2, writes=True) as to:
        await to.open()
        to.turn.spend(to.turn.left)
        request, completed = put(NAMES[0], SHORT), []
        request.complete = lambda: completed.append(True)
        assert to.begin([request]) == 0
        assert not completed, "and may still be kept back"
        await to.slow.next_of(1)
        to.slow.answer(b"+OK\r\n")
        assert await finish(finished([request])) == [[b"OK"]]


async def test_a_connection_that_is_not_logged_in_is_asked_for_nothing() -> None:
    async with lanes_to(HOME, 1, writes=False, password="secret") as to:
        first, second = get(NAMES[0], SHORT), get(NAMES[1], SHORT)
        assert to.begin([first]) == 0, "there is none"
        await to.slow.next_of(1)
        assert to.begin([second]) == 0
        assert (await to.slow.next_of(1))[0] == b"AUTH"
        to.slow.answer(b"+OK\r\n")
        await to.slow.next_of(2)
        await to.answer_all(2, b"$-1\r\n")
        await finish(finished([first, second]))


@dataclass
class Resetting:
    """Answers PING, and resets all connections at once when told to, as a firewall does."""

    connections: list[socket.socket] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            self.connections.append(connection)
            self.tasks.append(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while said := await loop.sock_recv(connection, 65_536):
            await loop.sock_sendall(connection, b"+PONG\r\n" * said.count(b"PING"))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    def reset(self) -> None:
        for connection in self.connections:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
        self.connections.clear()


@pytest.mark.parametrize("connections", [1, 2, 4, 8])
async def test_what_is_begun_on_connections_that_are_all_reset_goes_over_new_ones(
    connections: int,
) -> None:
    """And the loop has heard of none of them yet."""
    server = Resetting()
    with socket.create_server((HOME, 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(server.accept(listener))
        where, stats = FixedAddress(Address(HOME, listener.getsockname()[1])), WireStats()
        dialer = Dialer(where, Login(), None, 5.0, TransferTimeout(30.0, 1e6), stats)
        lanes = ConnectionPool(
            dialer, num_connections=connections, max_waiting=999, url="redis://x"
        )
        async with asyncio.timeout(60), lanes.running():
            while stats.connections < connections:
                await lanes.ask([question("PING") for _ in range(2 * connections)])
            await server.stop()
            requests = [question("PING") for _ in range(2 * connections)]
            server.reset()
            lanes.begin(requests)
            assert await finished(requests) == [[b"PONG"]] * len(requests)
        accepting.cancel()
        await asyncio.wait([accepting])
        await server.stop()
        server.reset()


class FirstStep:
    """Runs `work`; is_a_turn: all that it waited for at first was the next turn of the loop."""

    def __init__(self, work: Coroutine[Any, Any, list[PutOutcome]]) -> None:
        self._work = work
        self.is_a_turn: bool | None = None

    async def run(self) -> list[PutOutcome]:
        return await self

    def __await__(self) -> Generator[Any, Any, list[PutOutcome]]:
        steps, sent = self._work.__await__(), None
        try:
            while True:
                waits_for = steps.send(sent)
                if self.is_a_turn is None:
                    self.is_a_turn = waits_for is None
                sent = yield waits_for
        except StopIteration as end:
            outcomes: list[PutOutcome] = end.value
            return outcomes


async def test_many_writes_let_what_others_are_answered_go_first(
    empty_redis: RedisServer,  # noqa: F811
) -> None:
    url, settings = parse_redis_url(empty_redis.url), RedisSettings(timeout_s=20.0)
    store = RedisStore(url, settings, SystemClock())

    def items(kind: str, count: int) -> list[PutItem]:
        return [PutItem(f"t:{kind}:{at}:0", (memoryview(b"x" * 100),)) for at in range(count)]

    async def lets_others_go_first(count: int, other: asyncio.Future[Any] | None = None) -> bool:
        writing = FirstStep(store.put(items("ours", count)))
        running = asyncio.create_task(writing.run())
        await asyncio.sleep(0)
        assert other is None or not other.done()
        outcomes = await finish(running)
        assert {one.status for one in outcomes} <= {PutStatus.STORED, PutStatus.EXISTED}
        return bool(writing.is_a_turn)

    async with store.running():
        assert not await lets_others_go_first(20), "there are no others"
        for count, ends in ((9, "well"), (9, "cancelled"), (8, "well")):
            other = asyncio.create_task(store.put(items("other", 2000)))
            await asyncio.sleep(0)
            assert await lets_others_go_first(count, other) is (count > 8)  # a few take no time
            if ends == "cancelled":
                other.cancel()
            await asyncio.wait([other])
            assert not await lets_others_go_first(20), "they have ended"
