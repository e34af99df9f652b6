"""How much is on its way to a Redis server at a time: few long values, all else at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace

import pytest

from tests.latch import until
from tests.storage.values import content_of, landing
from tierkv.clock import SystemClock
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus
from tierkv.storage.redis.node import put_request
from tierkv.storage.redis.pool import WRITING_BYTES, ConnectionPool, Dialer, FixedAddress, Login
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import Address, Batch, TransferTimeout, WireStats

LONG = 3 << 19
SHORT = 16 << 10
NAMES = [f"t:f:{index:02}:0" for index in range(4)]
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
        (HOME, 3 << 18, (2, 2, 2, 1)),
        (HOME, 1 << 18, (4, 3, 2, 1)),
        (AWAY, LONG, (2, 2, 2, 1)),
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


async def test_a_connection_is_asked_for_a_second_long_value_before_the_first_has_come() -> None:
    """So that the server works on it meanwhile."""
    landings = [landing(name, LONG) for name in NAMES]
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        getting = group.create_task(store.get_into([item for item, _ in landings]))
        for name, count in zip(NAMES, (2, 2, 2, 1), strict=True):
            assert await slow.next_of(count) == [b"GET", name.encode()]
            slow.answer(b"$%d\r\n%b\r\n" % (LONG, content_of(name, LONG)))
        assert {outcome.status for outcome in await getting} == {GetStatus.HIT}
    for item, [buffer] in landings:
        assert buffer == content_of(item.name, LONG)


@dataclass
class SentAtLanding:
    """What had been sent on all connections each time a part of a value came."""

    stats: WireStats
    seen: list[int] = field(default_factory=list)

    def update(self, _: memoryview, /) -> None:
        self.seen.append(self.stats.sent_bytes)


async def test_what_follows_short_values_that_came_together_is_asked_for_in_one_go() -> None:
    """One by one it cost the client and the server a call of the system each."""
    together, num_bytes = 6, 2 << 10
    landings = [landing(f"t:f:{index:02}:0", num_bytes) for index in range(80)]
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        sent = SentAtLanding(store.stats)
        items = [replace(item, digest=lambda: sent) for item, _ in landings]
        getting = group.create_task(store.get_into(items))
        await until(lambda: len(slow.heard) >= 64)
        in_flight = len(slow.heard)
        await slow.next_of(in_flight)
        answers = [b"$%d\r\n%b\r\n" % (num_bytes, content_of(i.name, num_bytes)) for i in items]
        first = answers[:together]
        for _ in first[1:]:
            slow.answer(b"")
        slow.answer(b"".join(first))  # few enough bytes to come in one piece
        await slow.next_of(in_flight)
        assert len(sent.seen) >= together
        assert len(set(sent.seen)) == 1
        for answer in answers[together:]:
            await until(lambda: bool(slow.heard))
            slow.answer(answer)
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


async def test_the_next_value_is_sent_before_anybody_hears_of_the_one_before() -> None:
    """Else the server waits for as long as they take to be told."""
    slow, stats, sent = SlowServer(), WireStats(), []
    async with await asyncio.start_server(slow.serve, "127.0.0.1", 0) as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        dialer = Dialer(
            FixedAddress(address), Login(), None, 5.0, TransferTimeout(30.0, 1e6), stats
        )
        one_by_one = replace(dialer, home_bytes=WRITING_BYTES, away_bytes=WRITING_BYTES)
        lanes = ConnectionPool(one_by_one, num_connections=1, max_waiting=9, url="redis://slow")
        async with lanes.running(), asyncio.timeout(60):
            requests = [put_request(PutItem(name, (bytes(LONG),))) for name in NAMES]
            for request in requests:
                request.batch = Batch(1)
                request.batch.ended.add_done_callback(lambda _: sent.append(stats.sent_bytes))
            lanes.begin(requests)
            for index, count in enumerate((2, 2, 2, 1)):
                await slow.next_of(count)
                before = stats.sent_bytes
                slow.answer(b"+OK\r\n")
                await until(lambda index=index: len(sent) > index)  # type: ignore[misc]
                assert (sent[-1] > before) is (index < 2), "then all have been begun"
