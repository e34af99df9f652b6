"""How much is on its way to a Redis server at a time: few long values, all else at once."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace

import pytest

from tests.latch import finish, turns, until
from tests.storage.values import content_of, landing
from tierkv.clock import SystemClock
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus
from tierkv.storage.redis.node import get_request, put_request, question
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
from tierkv.storage.redis.wire import Address, TransferTimeout, Unanswered, WireRequest, WireStats

LONG = 3 << 19
SHORT = 16 << 10
NAMES = [f"t:f:{index:02}:0" for index in range(4)]
FIVE = [f"t:f:{index:02}:0" for index in range(5)]
MIB = 1 << 20
HALF_MIB = MIB // 2
LONG_ENOUGH_TO_COME_S = 0.1
# To the second one we are at 127.0.0.1, so that its server counts as one on another machine.
HOME, AWAY = "127.0.0.1", "127.0.0.2"


@dataclass
class SlowServer:
    """Hears requests and answers when told to, but to PING. begun: requests of which a part has
    come. drops: so many connections are ended in the middle of what comes first. is_empty: has no
    values, and says so at once."""

    drops: int = 0
    is_empty: bool = False
    begun: int = 0
    heard: list[tuple[list[bytes], asyncio.StreamWriter]] = field(default_factory=list)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                num_words = int((await reader.readuntil(b"\r\n"))[1:])
                words = []
                for index in range(num_words):
                    num_bytes = int((await reader.readuntil(b"\r\n"))[1:])
                    if index == 0:
                        self.begun += 1
                    if self.drops and num_bytes >= LONG:
                        self.drops -= 1
                        self.begun -= 1
                        return
                    words.append((await reader.readexactly(num_bytes + 2))[:-2])
                if words[0] == b"CLIENT":  # on a connection to ask for the time
                    self.begun -= 1
                    return
                if words[0] == b"PING" or self.is_empty:
                    self.begun -= 1
                    writer.write(b"+PONG\r\n" if words[0] == b"PING" else b"$-1\r\n")
                else:
                    self.heard.append((words, writer))

    async def next_of(self, count: int) -> list[bytes]:
        """The oldest request, to be answered, of `count` that are here and no more."""
        await until(lambda: len(self.heard) == count)
        await asyncio.sleep(LONG_ENOUGH_TO_COME_S)
        assert self.begun == count
        return self.heard[0][0]

    def answer(self, reply: bytes) -> None:
        _, writer = self.heard.pop(0)
        self.begun -= 1
        writer.write(reply)


@asynccontextmanager
async def slow_server(
    *, connections: int, drops: int = 0, host: str = HOME
) -> AsyncIterator[tuple[SlowServer, RedisStore]]:
    slow = SlowServer(drops)
    async with await asyncio.start_server(slow.serve, host, 0) as server:
        slow.port = server.sockets[0].getsockname()[1]
        settings = RedisSettings(connections, connections, timeout_s=30.0, connect_timeout_s=5.0)
        url = parse_redis_url(f"redis://{host}:{slow.port}")
        store = RedisStore(url, settings, SystemClock())
        async with store.running(), asyncio.timeout(60):
            yield slow, store


async def test_short_values_and_questions_do_not_wait_for_the_answers_before() -> None:
    content = {name: content_of(name, SHORT) for name in NAMES}
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        putting = group.create_task(store.put([PutItem(n, (content[n],)) for n in NAMES]))
        for count in range(len(NAMES), 0, -1):
            await slow.next_of(count)
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
        # However long the answer may be.
        asking = [group.create_task(store.get(name, max_bytes=16 << 20)) for name in NAMES]
        for count in range(len(NAMES), 0, -1):
            await slow.next_of(count)
            slow.answer(b"$1\r\nx\r\n")
        assert [await one for one in asking] == [b"x"] * len(NAMES)


@pytest.mark.parametrize(
    ("host", "num_bytes", "counts"),
    [
        (HOME, LONG, (2, 2, 2, 1)),
        (AWAY, 3 << 18, (4, 3, 2, 1)),
    ],
)
async def test_few_long_values_come_at_a_time_over_how_many_connections_ever(
    host: str, num_bytes: int, counts: tuple[int, ...]
) -> None:
    """Those behind would only lie in the server's memory meanwhile, or, here, in no cache."""
    landings = [landing(name, num_bytes) for name in NAMES]
    items = [item for item, _ in landings]
    async with slow_server(connections=4, host=host) as (slow, store), asyncio.TaskGroup() as group:
        slow.is_empty = True
        while store.stats.connections < 1 + len(NAMES):  # what waits for one goes when it is there
            await store.get_into([landing(name, 1)[0] for name in NAMES])
        slow.is_empty = False
        getting = group.create_task(store.get_into(items))
        for count in counts:
            [verb, key] = await slow.next_of(count)
            assert verb == b"GET"
            slow.answer(b"$%d\r\n%b\r\n" % (num_bytes, content_of(key.decode(), num_bytes)))
        assert {outcome.status for outcome in await getting} == {GetStatus.HIT}
    for item, [buffer] in landings:
        assert buffer == content_of(item.name, num_bytes)


async def test_what_ended_with_its_connection_is_in_nobodys_way() -> None:
    content = content_of(NAMES[0], LONG)
    async with (
        slow_server(connections=4, drops=3) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        putting = group.create_task(store.put([PutItem(NAMES[0], (content,))]))
        await until(lambda: bool(slow.heard))
        assert slow.drops == 0
        slow.answer(b"+OK\r\n")
        [outcome] = await putting
        assert outcome.status is PutStatus.STORED


# How many long values are on their way at a time, and over which connections


def puts(num_bytes: int, names: Sequence[str] = FIVE) -> list[PutItem]:
    return [PutItem(name, (content_of(name, num_bytes),)) for name in names]


async def open_all(slow: SlowServer, store: RedisStore, *, connections: int) -> None:
    """So many that write, those that were lost counted, too."""
    slow.is_empty = True
    while store.stats.connections < 1 + connections:
        await store.put([PutItem(name, (b"short",)) for name in FIVE])
    slow.is_empty = False


async def test_two_long_values_at_a_time_are_sent_over_one_connection_and_the_others_idle() -> None:
    """Of several connections the server would read by turns."""
    async with slow_server(connections=4) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=4)
        putting = group.create_task(store.put(puts(HALF_MIB)))
        carried_by = set()
        for name, count in zip(FIVE, (2, 2, 2, 2, 1), strict=True):
            _, key, value, _ = await slow.next_of(count)
            assert (key, value) == (name.encode(), content_of(name, HALF_MIB))
            carried_by |= {writer for _, writer in slow.heard}
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
        assert len(carried_by) == 1


async def test_a_value_is_made_complete_when_it_is_sent_and_the_next_one_meanwhile() -> None:
    """So its bytes are in the processor's cache when the kernel copies them, and to make the next
    one's checksum takes no time in which the server could work."""
    names = [f"t:f:{index:02}:0" for index in range(8)]
    completed: list[str] = []
    items = []
    for name in names:
        header = bytearray(16)

        def complete(name: str = name, header: bytearray = header) -> None:
            header[:] = content_of(f"{name} head", 16)
            completed.append(name)

        items.append(PutItem(name, (header, content_of(name, HALF_MIB)), complete=complete))
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        assert store.capabilities.sends_from_loop
        putting = group.create_task(store.put(items))
        for index, name in enumerate(names):
            on_their_way = min(2, len(names) - index)
            _, key, value, _ = await slow.next_of(on_their_way)
            expected = content_of(f"{name} head", 16) + content_of(name, HALF_MIB)
            assert (key, value) == (name.encode(), expected)
            ahead = 1 if index else 0  # none before the first answer
            assert len(completed) == min(index + on_their_way + ahead, len(names))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
    assert completed == names, "once each, in order"


async def test_all_that_the_only_connection_carried_is_sent_again_when_it_is_lost() -> None:
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        putting = group.create_task(store.put(puts(HALF_MIB)))
        await slow.next_of(2)
        for _, writer in slow.heard:
            writer.transport.abort()
        await until(lambda: len(slow.heard) == 4)
        del slow.heard[:2]
        slow.begun -= 2
        for name, count in zip(FIVE, (2, 2, 2, 2, 1), strict=True):
            _, key, value, _ = await slow.next_of(count)
            assert (key, value) == (name.encode(), content_of(name, HALF_MIB))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


async def test_a_cancel_is_raised_when_none_of_two_values_is_on_its_way_any_more() -> None:
    """Their buffers are the caller's then."""
    async with slow_server(connections=1) as (slow, store):
        putting = asyncio.create_task(store.put(puts(HALF_MIB)))
        for count in (2, 1):
            await slow.next_of(count)
            putting.cancel()
            await turns(5)
            assert not putting.done()
            slow.answer(b"+OK\r\n")
        await finish(asyncio.wait([putting]))
        assert putting.cancelled()
        assert not slow.heard, "what had not been sent is not begun"


# What is begun at once, and what when connections are lost


@dataclass
class Lanes:
    """Connections to a slow server, and what has been sent over them."""

    slow: SlowServer
    lanes: ConnectionPool
    stats: WireStats

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
    slow, stats = SlowServer(), WireStats()
    async with await asyncio.start_server(slow.serve, host, 0) as server:
        where = FixedAddress(Address(host, server.sockets[0].getsockname()[1]))
        login = Login(password=password)
        dialer = Dialer(where, login, None, 5.0, TransferTimeout(30.0, 1e6), stats)
        if writes:
            dialer = replace(
                dialer, home_bytes=WRITING_BYTES, away_bytes=connections * WRITING_BYTES
            )
        lanes = ConnectionPool(
            dialer, num_connections=connections, max_waiting=99, url="redis://slow"
        )
        async with lanes.running(), asyncio.timeout(60):
            yield Lanes(slow, lanes, stats)


def put(name: str, num_bytes: int) -> WireRequest:
    return put_request(PutItem(name, (content_of(name, num_bytes),)))


def get(name: str, num_bytes: int) -> WireRequest:
    return get_request(landing(name, num_bytes)[0])


async def test_what_waits_for_a_login_ends_when_the_store_is_left() -> None:
    async with lanes_to(HOME, 1, writes=False, password="secret") as to:
        requests = to.lanes.begin([get(NAMES[0], SHORT)])
        assert (await to.slow.next_of(1))[0] == b"AUTH"
    [outcome] = await finish(finished(requests))
    assert isinstance(outcome, Unanswered)


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


@pytest.mark.parametrize("connections", [1, 4])
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
