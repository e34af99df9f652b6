"""The store that other tests lean on to fail."""

from __future__ import annotations

import asyncio

import pytest

from tests.faulty import FaultyStore
from tests.storage.values import TurnedClock, get_one, put_one
from tierkv.errors import StoreUnavailableError
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetItem, GetStatus, PutItem, PutStatus


def faulty() -> FaultyStore:
    return FaultyStore(MemoryStore(MemorySettings(), TurnedClock()))


async def test_held_operations_wait_until_released() -> None:
    store = faulty()
    async with store.running(), asyncio.TaskGroup() as group:
        store.hold()
        puts = [group.create_task(put_one(store, f"a{i}", b"x")) for i in range(3)]
        await store.until_held(3)
        assert not any(put.done() for put in puts)
        store.release()
    assert [put.result() for put in puts] == [PutStatus.STORED] * 3


async def test_those_that_wait_are_let_through_and_those_that_come_later_wait() -> None:
    store = faulty()
    async with store.running(), asyncio.TaskGroup() as group:
        store.hold()
        first = group.create_task(put_one(store, "a", b"x"))
        await store.until_held(1)
        store.let_through()
        later = group.create_task(put_one(store, "b", b"x"))
        await first
        await store.until_held(1)
        assert store.num_held == 1
        assert not later.done()
        store.release()
    assert later.result() is PutStatus.STORED


async def test_a_held_operation_can_be_cancelled_and_then_never_reaches_the_store() -> None:
    store = faulty()
    async with store.running():
        store.hold()
        async with asyncio.TaskGroup() as group:
            put = group.create_task(put_one(store, "a", b"x"))
            await store.until_held(1)
            put.cancel()
        store.release()
        assert await store.exists(["a"]) == 0


async def test_a_firmly_held_operation_ends_only_when_released_even_if_cancelled() -> None:
    store = faulty()
    async with store.running(), asyncio.TaskGroup() as group:
        store.hold_firmly()
        put = group.create_task(put_one(store, "a", b"x"))
        await store.until_held(1)
        put.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not put.done()
        store.release()
    assert put.cancelled()


async def test_told_failures_come_in_the_form_of_each_method_and_then_stop() -> None:
    store = faulty()
    async with store.running():
        store.fail_next(5)
        assert await put_one(store, "a", b"x") is PutStatus.FAILED
        assert (await get_one(store, "a", 1))[0] is GetStatus.FAILED
        for work in (store.ping(), store.exists(["a"]), store.get("a", max_bytes=1)):
            with pytest.raises(StoreUnavailableError):
                await work
        assert await put_one(store, "a", b"x") is PutStatus.STORED
    assert store.num_operations == 6


async def test_a_flipped_bit_reaches_the_reader_not_the_store() -> None:
    store = faulty()
    async with store.running():
        await store.put([PutItem("a", (b"\0" * 10,)), PutItem("b", (b"\0" * 10,))])
        store.flip_next_get(0, 79)
        buffers = [bytearray(4), bytearray(6), bytearray(10)]
        views = [memoryview(buffer) for buffer in buffers]
        await store.get_into([GetItem("a", tuple(views[:2])), GetItem("b", (views[2],))])
        assert buffers == [b"\1\0\0\0", bytes(6), b"\0" * 9 + b"\x80"]
        assert await get_one(store, "a", 10) == (GetStatus.HIT, b"\0" * 10)


async def test_a_cut_value_is_damage_to_its_reader() -> None:
    store = faulty()
    async with store.running():
        store.cut_next_put(3)
        assert await put_one(store, "a", b"12345") is PutStatus.STORED
        assert (await get_one(store, "a", 5))[0] is GetStatus.DAMAGED
