"""Behaviour that only the memory store has: its capacity."""

from __future__ import annotations

from tests.storage.values import TurnedClock, put_one
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import PutStatus, Usage


async def test_a_full_store_says_so_and_keeps_what_it_has() -> None:
    store = MemoryStore(MemorySettings(capacity_bytes=10), TurnedClock())
    async with store.running():
        assert await put_one(store, "a", b"123456") is PutStatus.STORED
        assert await put_one(store, "b", b"12345") is PutStatus.FULL
        assert await put_one(store, "a", b"1234567890", keep_existing=False) is PutStatus.STORED
        assert await put_one(store, "a", b"12345678901", keep_existing=False) is PutStatus.FULL
        assert await store.get("a", max_bytes=10) == b"1234567890"
        await store.delete(["a"])
        assert await put_one(store, "b", b"12345") is PutStatus.STORED
        assert await store.usage("b") == Usage(1, 5)


async def test_expired_values_make_room() -> None:
    clock = TurnedClock()
    store = MemoryStore(MemorySettings(capacity_bytes=10), clock)
    async with store.running():
        await put_one(store, "a", b"1234567890", ttl_s=5.0)
        assert await put_one(store, "b", b"x") is PutStatus.FULL
        clock.now += 5
        assert await put_one(store, "b", b"x") is PutStatus.STORED
