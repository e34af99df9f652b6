"""Connections to a Redis server that have nothing to do take what waits as soon as they may."""

from __future__ import annotations

import asyncio

from tests.latch import until
from tests.storage.test_redis_traffic import SlowServer, slow_server
from tests.storage.values import content_of, landing
from tierkv.storage.protocol import GetStatus

MIB = 1 << 20
SIZES = {"t:f:short:0": MIB, "t:f:long:0": 3 * MIB, "t:f:next:0": MIB}
SHORT, LONG, NEXT = SIZES


def answer(slow: SlowServer, name: str) -> None:
    """To the question for this value, whichever came first."""
    at = [words[1] for words, _ in slow.heard].index(name.encode())
    slow.heard.insert(0, slow.heard.pop(at))
    content = content_of(name, SIZES[name])
    slow.answer(b"$%d\r\n%b\r\n" % (len(content), content))


async def test_a_value_for_which_room_comes_does_not_wait_for_the_long_one_on_its_way() -> None:
    landings = {name: landing(name, size) for name, size in SIZES.items()}
    async with slow_server(connections=2) as (slow, store), asyncio.TaskGroup() as group:
        slow.is_empty = True
        while store.stats.connections < 3:
            await store.get_into([landing(name, 1)[0] for name in SIZES])
        slow.is_empty = False
        getting = group.create_task(store.get_into([item for item, _ in landings.values()]))
        await slow.next_of(2)
        assert {words[1].decode() for words, _ in slow.heard} == {SHORT, LONG}
        answer(slow, SHORT)
        await until(lambda: len(slow.heard) == 2, "the next value's turn")
        answer(slow, NEXT)
        answer(slow, LONG)
        assert {outcome.status for outcome in await getting} == {GetStatus.HIT}
    for name, (_, [buffer]) in landings.items():
        assert buffer == content_of(name, SIZES[name])
