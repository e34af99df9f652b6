"""Limits on the bytes in flight to a Redis server: few long values, all short ones at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field

import pytest

from tests.latch import finish, turns, until
from tests.storage.values import content_of, landing, redis_store
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus
from tierkv.storage.redis.store import RedisSettings, RedisStore

LONG = 3 << 19
SHORT = 16 << 10
FIVE = [f"t:f:{index:02}:0" for index in range(5)]
NAMES = FIVE[:4]
HALF_MIB = 512 << 10
LONG_ENOUGH_TO_COME_S = 0.1
# The second address differs from the client's (127.0.0.1), so its server counts as remote.
HOME, AWAY = "127.0.0.1", "127.0.0.2"


@dataclass
class SlowServer:
    """A server that answers only when a test calls `answer`, except to PING.

    Attributes:
        drops: number of connections to close in the middle of their first request.
        is_empty: True to answer at once that there are no values.
        begun: number of requests of which a part has arrived.
        heard: complete requests, each with the writer for its reply.
    """

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
                if words[0] == b"CLIENT":  # on the connection for TIME
                    self.begun -= 1
                    return
                if words[0] == b"PING" or self.is_empty:
                    self.begun -= 1
                    writer.write(b"+PONG\r\n" if words[0] == b"PING" else b"$-1\r\n")
                else:
                    self.heard.append((words, writer))

    async def next_of(self, count: int) -> list[bytes]:
        """Wait until `count` requests and no more have arrived; return the oldest one."""
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
        store = redis_store(f"redis://{host}:{slow.port}", settings)
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
        # The length of the answer does not matter.
        asking = [group.create_task(store.get(name, max_bytes=16 << 20)) for name in NAMES]
        for count in range(len(NAMES), 0, -1):
            await slow.next_of(count)
            slow.answer(b"$1\r\nx\r\n")
        assert [await one for one in asking] == [b"x"] * len(NAMES)


@pytest.mark.parametrize(
    ("host", "num_bytes", "counts"),
    [(HOME, LONG, (2, 2, 2, 1)), (AWAY, 3 << 18, (4, 3, 2, 1))],
)
async def test_few_long_values_come_at_a_time_over_how_many_connections_ever(
    host: str, num_bytes: int, counts: tuple[int, ...]
) -> None:
    """More values would wait in the server's memory, or on this machine leave the cache."""
    landings = [landing(name, num_bytes) for name in NAMES]
    items = [item for item, _ in landings]
    async with slow_server(connections=4, host=host) as (slow, store), asyncio.TaskGroup() as group:
        slow.is_empty = True
        # Waiting requests are sent when a connection is open.
        while store.stats.connections < 1 + len(NAMES):
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
    async with slow_server(connections=4, drops=3) as (slow, store), asyncio.TaskGroup() as group:
        putting = group.create_task(store.put([PutItem(NAMES[0], (content,))]))
        await until(lambda: bool(slow.heard))
        assert slow.drops == 0
        slow.answer(b"+OK\r\n")
        [outcome] = await putting
        assert outcome.status is PutStatus.STORED


def five_puts() -> list[PutItem]:
    return [PutItem(name, (content_of(name, HALF_MIB),)) for name in FIVE]


async def carriers_of_five(slow: SlowServer) -> set[asyncio.StreamWriter]:
    """Answer five long writes, of which two at a time arrive; return the connections used."""
    carried_by = set()
    for name, count in zip(FIVE, (2, 2, 2, 2, 1), strict=True):
        _, key, value, _ = await slow.next_of(count)
        assert (key, value) == (name.encode(), content_of(name, HALF_MIB))
        carried_by |= {writer for _, writer in slow.heard}
        slow.answer(b"+OK\r\n")
    return carried_by


async def test_two_long_values_at_a_time_are_sent_over_one_connection_and_the_others_idle() -> None:
    """The server would read several connections in turn."""
    async with slow_server(connections=4) as (slow, store), asyncio.TaskGroup() as group:
        slow.is_empty = True
        while store.stats.connections < 1 + 4:
            await store.put([PutItem(name, (b"short",)) for name in FIVE])
        slow.is_empty = False
        putting = group.create_task(store.put(five_puts()))
        assert len(await carriers_of_five(slow)) == 1
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


async def test_all_that_the_only_connection_carried_is_sent_again_when_it_is_lost() -> None:
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        putting = group.create_task(store.put(five_puts()))
        await slow.next_of(2)
        for _, writer in slow.heard:
            writer.transport.abort()
        await until(lambda: len(slow.heard) == 4)
        del slow.heard[:2]
        slow.begun -= 2
        await carriers_of_five(slow)
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


async def test_a_cancel_is_raised_when_none_of_two_values_is_on_its_way_any_more() -> None:
    """Until then the connection uses the caller's buffers."""
    async with slow_server(connections=1) as (slow, store):
        putting = asyncio.create_task(store.put(five_puts()))
        for count in (2, 1):
            await slow.next_of(count)
            putting.cancel()
            await turns(5)
            assert not putting.done()
            slow.answer(b"+OK\r\n")
        await finish(asyncio.wait([putting]))
        assert putting.cancelled()
        assert not slow.heard, "what had not been sent is not begun"
