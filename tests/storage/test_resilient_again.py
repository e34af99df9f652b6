"""A resilient store that is left and opened again, and a write whose caller has gone."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import until
from tests.storage.test_resilient_store import Pair
from tests.storage.values import get_one, put_one
from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import BreakerState, GetStatus, PutItem, PutStatus

NAME = "t:f:a:0"


async def open_its_breaker(pair: Pair) -> None:
    pair.faulty.fail_next(1)
    with pytest.raises(StoreUnavailableError):
        await pair.store.exists([NAME])


async def test_a_store_left_in_the_middle_of_a_probe_works_when_it_is_opened_again() -> None:
    pair = Pair(failures_to_open=1)
    async with pair.store.running():
        await open_its_breaker(pair)
        pair.faulty.hold()
        await until(lambda: pair.state is BreakerState.HALF_OPEN, "a probe")
    pair.faulty.release()
    async with pair.store.running():
        assert await put_one(pair.store, NAME, b"x") is PutStatus.STORED
        await open_its_breaker(pair)
        await until(lambda: pair.state is BreakerState.CLOSED, "a probe that is answered")
        assert await get_one(pair.store, NAME, 1) == (GetStatus.HIT, b"x")


async def test_who_attaches_a_store_again_and_again_hears_once_that_it_is_back() -> None:
    pair, heard = Pair(failures_to_open=1), []

    class Node:
        def is_back(self) -> None:
            heard.append(self)

    one, other = Node(), Node()
    for node in (one, other, one, one):
        pair.store.when_back(node.is_back)
    async with pair.store.running():
        await open_its_breaker(pair)
        await until(lambda: pair.state is BreakerState.CLOSED, "a probe that is answered")
        assert heard == [one, other]


def test_a_store_can_be_opened_again_on_another_loop() -> None:
    pair = Pair()

    async def write(content: bytes) -> tuple[PutStatus, bytes | None]:
        async with pair.store.running():
            status = await put_one(pair.store, NAME, content, keep_existing=False)
            return status, await pair.store.get(NAME, max_bytes=10)

    for content in (b"first", b"again"):
        assert asyncio.run(write(content)) == (PutStatus.STORED, content)


async def test_what_a_cancelled_put_has_written_is_not_believed_to_be_missing() -> None:
    pair = Pair(negative_ttl_s=60.0)
    async with pair.store.running():
        pair.faulty.hold_writes()
        put = asyncio.ensure_future(pair.store.put([PutItem(NAME, (b"x",))]))
        await pair.faulty.until_held(1)
        assert await pair.store.exists([NAME]) == 0
        put.cancel()
        pair.faulty.release()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await pair.store.exists([NAME]) == 1
