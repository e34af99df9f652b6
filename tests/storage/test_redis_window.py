"""How many long values are on their way to a Redis server at a time, and over which connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.latch import finish, turns, until
from tests.storage.test_redis_traffic import AWAY, HOME, SlowServer, slow_server
from tests.storage.values import content_of
from tierkv.storage.protocol import PutItem, PutStatus
from tierkv.storage.redis.store import RedisStore

LONG, VERY_LONG = 512 << 10, 8 << 20
NAMES = [f"t:f:{index:02}:0" for index in range(5)]


def puts(num_bytes: int, names: Sequence[str] = NAMES) -> list[PutItem]:
    return [PutItem(name, (content_of(name, num_bytes),)) for name in names]


async def open_all(slow: SlowServer, store: RedisStore, *, connections: int) -> None:
    """So many that write, those that were lost counted, too."""
    slow.is_empty = True
    while store.stats.connections < 1 + connections:
        await store.put([PutItem(name, (b"short",)) for name in NAMES])
    slow.is_empty = False


async def test_two_long_values_at_a_time_are_sent_over_one_connection_and_the_others_idle() -> None:
    """Of several connections the server would read by turns."""
    async with slow_server(connections=4) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=4)
        putting = group.create_task(store.put(puts(LONG)))
        carried_by = set()
        for name, count in zip(NAMES, (2, 2, 2, 2, 1), strict=True):
            _, key, value, _ = await slow.next_of(count)
            assert (key, value) == (name.encode(), content_of(name, LONG))
            carried_by |= {writer for _, writer in slow.heard}
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
        assert len(carried_by) == 1


async def test_two_long_values_at_a_time_are_sent_whoever_gives_them() -> None:
    async with slow_server(connections=4) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=4)
        putting = [group.create_task(store.put([item])) for item in puts(LONG)]
        carried_by = set()
        for count in (2, 2, 2, 2, 1):
            await slow.next_of(count)
            carried_by |= {writer for _, writer in slow.heard}
            slow.answer(b"+OK\r\n")
        for one in putting:
            [outcome] = await one
            assert outcome.status is PutStatus.STORED
        assert len(carried_by) == 1


async def test_a_long_value_is_sent_when_the_one_before_it_on_its_connection_is_answered() -> None:
    """Else it lies in the server's buffer beside the one before, which then has to be copied."""
    async with (
        slow_server(connections=2, host=AWAY) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        await open_all(slow, store, connections=2)
        putting = group.create_task(store.put(puts(LONG)))
        for count in (2, 2, 2, 2, 1):
            await slow.next_of(count)
            assert len({writer for _, writer in slow.heard}) == count
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


@pytest.mark.parametrize("num_bytes", [LONG, VERY_LONG])
@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_two_long_values_are_on_their_way_over_the_only_connection(
    host: str, num_bytes: int
) -> None:
    """With one the server has nothing to do from its answer until the next one comes."""
    async with (
        slow_server(connections=1, host=host) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        putting = group.create_task(store.put(puts(num_bytes)))
        for name, count in zip(NAMES, (2, 2, 2, 2, 1), strict=True):
            verb, key, value, _ = await slow.next_of(count)
            assert (verb, key, value) == (b"SET", name.encode(), content_of(name, num_bytes))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_very_long_values_whose_connections_are_lost_are_in_nobodys_way(host: str) -> None:
    async with (
        slow_server(connections=4, host=host) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        await open_all(slow, store, connections=4)
        putting = group.create_task(store.put(puts(VERY_LONG)))
        await slow.next_of(2)
        lost = {writer for _, writer in slow.heard}
        for writer in lost:
            writer.transport.abort()
        slow.heard.clear()
        slow.begun = 0
        for _ in NAMES:
            await until(lambda: bool(slow.heard))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
        await open_all(slow, store, connections=4 + len(lost))
        putting = group.create_task(store.put(puts(VERY_LONG)))
        for count in (2, 2, 2, 2, 1):
            await slow.next_of(count)
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
        putting = group.create_task(store.put(puts(LONG)))
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
        putting = asyncio.create_task(store.put(puts(LONG)))
        for count in (2, 1):
            await slow.next_of(count)
            putting.cancel()
            await turns(5)
            assert not putting.done()
            slow.answer(b"+OK\r\n")
        await finish(asyncio.wait([putting]))
        assert putting.cancelled()
        assert not slow.heard, "what had not been sent is not begun"
