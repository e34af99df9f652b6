"""Long values on their way to a Redis server on another machine: one on each of several
connections, two on one that is the only one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.latch import finish, turns, until
from tests.storage.test_redis_traffic import AWAY, HOME, SlowServer, slow_server
from tests.storage.values import content_of
from tierkv.storage.protocol import PutItem, PutStatus
from tierkv.storage.redis.pool import WRITE_BYTES
from tierkv.storage.redis.requests import put_request
from tierkv.storage.redis.socket import PlainPipe
from tierkv.storage.redis.store import RedisStore
from tierkv.storage.redis.wire import Failure, Pace, Request, Traffic, Turn, Wire, WireStats

LONG = 512 << 10
NAMES = [f"t:f:{index:02}:0" for index in range(5)]


def puts(names: Sequence[str] = NAMES) -> list[PutItem]:
    return [PutItem(name, (content_of(name, LONG),)) for name in names]


async def open_all(slow: SlowServer, store: RedisStore, *, connections: int) -> None:
    """So many that write, those that were lost counted, too."""
    slow.is_empty = True
    while store.stats.connections < 1 + connections:
        await store.put([PutItem(name, (b"short",)) for name in NAMES])
    slow.is_empty = False


async def test_a_long_value_is_sent_when_the_one_before_it_on_its_connection_is_answered() -> None:
    """Else it lies in the server's buffer beside the one before, which then has to be copied."""
    async with (
        slow_server(connections=2, host=AWAY) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        await open_all(slow, store, connections=2)
        putting = group.create_task(store.put(puts()))
        for count in (2, 2, 2, 2, 1):
            await slow.next_of(count)
            assert len({writer for _, writer in slow.heard}) == count
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_two_long_values_are_on_their_way_over_the_only_connection(host: str) -> None:
    """With one the server has nothing to do from its answer until the next one comes."""
    async with (
        slow_server(connections=1, host=host) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        putting = group.create_task(store.put(puts()))
        for name, count in zip(NAMES, (2, 2, 2, 2, 1), strict=True):
            verb, key, value, _ = await slow.next_of(count)
            assert (verb, key, value) == (b"SET", name.encode(), content_of(name, LONG))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


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

        items.append(PutItem(name, (header, content_of(name, LONG)), complete=complete))
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        assert store.capabilities.sends_from_loop
        putting = group.create_task(store.put(items))
        for index, name in enumerate(names):
            on_their_way = min(2, len(names) - index)
            _, key, value, _ = await slow.next_of(on_their_way)
            expected = content_of(f"{name} head", 16) + content_of(name, LONG)
            assert (key, value) == (name.encode(), expected)
            ahead = 1 if index else 0  # none before the first answer
            assert len(completed) == min(index + on_their_way + ahead, len(names))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
    assert completed == names, "once each, in order"


async def test_all_that_the_only_connection_carried_is_sent_again_when_it_is_lost() -> None:
    async with slow_server(connections=1) as (slow, store), asyncio.TaskGroup() as group:
        putting = group.create_task(store.put(puts()))
        await slow.next_of(2)
        for _, writer in slow.heard:
            writer.transport.abort()
        await until(lambda: len(slow.heard) == 4)
        del slow.heard[:2]
        slow.begun -= 2
        for name, count in zip(NAMES, (2, 2, 2, 2, 1), strict=True):
            _, key, value, _ = await slow.next_of(count)
            assert (key, value) == (name.encode(), content_of(name, LONG))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


async def test_a_cancel_is_raised_when_none_of_two_values_is_on_its_way_any_more() -> None:
    """Their buffers are the caller's then."""
    async with slow_server(connections=1) as (slow, store):
        putting = asyncio.create_task(store.put(puts()))
        for count in (2, 1):
            await slow.next_of(count)
            putting.cancel()
            await turns(5)
            assert not putting.done()
            slow.answer(b"+OK\r\n")
        await finish(asyncio.wait([putting]))
        assert putting.cancelled()
        assert not slow.heard, "what had not been sent is not begun"


@dataclass
class NoOwner:
    taken_back: list[Request] = field(default_factory=list)

    def fill(self, wire: Wire) -> None: ...

    def take_back(self, requests: Sequence[Request], failure: Failure) -> None:
        self.taken_back += requests


@asynccontextmanager
async def wires(*, count: int) -> AsyncIterator[tuple[list[Wire], list[socket.socket]]]:
    """Connections for writing to one server, which is the other ends."""
    traffic, stats, turn = Traffic(WRITE_BYTES, 1), WireStats(), Turn()
    ours, theirs = [], []
    for _ in range(count):
        one, other = socket.socketpair()
        one.setblocking(False)
        theirs.append(other)
        pace, pipe = Pace(30.0, 200e6), PlainPipe(one)
        ours.append(Wire(pipe, pace, stats, turn=turn, traffic=traffic, owner=NoOwner()))
    try:
        yield ours, theirs
    finally:
        for wire, other in zip(ours, theirs, strict=True):
            wire.close(Failure("is closed"))
            other.close()


def submit(wire: Wire, count: int) -> None:
    for item in puts(NAMES[:count]):
        wire.submit(put_request(item), since=asyncio.get_running_loop().time())


async def test_a_connection_that_another_one_joins_waits_for_its_own_answers() -> None:
    """And does not ask again and again whether there is room."""
    async with wires(count=2) as ([wire, other], [server, _]):
        other.close(Failure("is closed"))
        submit(wire, 1)
        assert wire.has_room
        submit(wire, 1)
        assert not wire.has_room
        waiting = asyncio.create_task(wire.until_room())
        await turns(5)
        assert not waiting.done()
        server.send(b"+OK\r\n")
        await finish(waiting)
        assert wire.has_room
    async with wires(count=2) as ([wire, other], [server, _]):
        submit(wire, 1)
        assert not wire.has_room, "the other one is there"
        waiting = asyncio.create_task(wire.until_room())
        await turns(5)
        assert not waiting.done()
        other.close(Failure("is closed"))  # the only one again, of which its own answer tells it
        server.send(b"+OK\r\n")
        await finish(waiting)


async def test_who_waits_for_room_hears_that_the_connection_is_lost() -> None:
    async with wires(count=1) as ([wire], _):
        submit(wire, 2)
        waiting = asyncio.create_task(wire.until_room())
        await turns(5)
        assert not waiting.done()
        wire.close(Failure("is closed"))
        await finish(waiting)
        assert wire.is_lost


async def test_a_room_that_a_new_connection_takes_is_not_told_of_again_and_again() -> None:
    """What was room when somebody was told of it may be none when they look."""
    traffic, turn = Traffic(WRITE_BYTES, 1), Turn()
    ends = [socket.socketpair() for _ in range(2)]
    made: list[Wire] = []

    def wire_on(one: socket.socket) -> Wire:
        one.setblocking(False)
        pipe = PlainPipe(one)
        pace = Pace(30.0, 200e6)
        made.append(Wire(pipe, pace, WireStats(), turn=turn, traffic=traffic, owner=NoOwner()))
        return made[-1]

    try:
        first = wire_on(ends[0][0])
        submit(first, 1)
        assert first.has_room
        await finish(first.until_room())
        wire_on(ends[1][0])
        assert not first.has_room
        waiting = asyncio.create_task(first.until_room())
        await turns(5)
        assert not waiting.done()
        waiting.cancel()
    finally:
        for wire in made:
            wire.close(Failure("is closed"))
        for _, other in ends:
            other.close()
