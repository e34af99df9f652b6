"""What is particular to the store in memory: its capacity."""

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


class CountingClock(TurnedClock):
    num_looks = 0

    def wall(self) -> float:
        self.num_looks += 1
        return self.now


class RunningClock(TurnedClock):
    def wall(self) -> float:
        self.now += 1
        return self.now


async def test_a_value_that_ends_while_it_is_replaced_leaves_its_room_once() -> None:
    for ttl_s in range(1, 8):
        store = MemoryStore(MemorySettings(capacity_bytes=10), RunningClock())
        async with store.running():
            await put_one(store, "a", bytes(8), ttl_s=ttl_s)
            await put_one(store, "a", bytes(11), keep_existing=False)
            await put_one(store, "a", bytes(10), keep_existing=False)
            assert await store.usage("a") == Usage(1, 10)


async def test_a_full_store_looks_at_every_value_only_when_one_can_have_expired() -> None:
    """200,000 of them kept the loop for 60 ms at each put."""
    clock = CountingClock()
    store = MemoryStore(MemorySettings(capacity_bytes=1000), clock)
    async with store.running():
        for index in range(1000):
            await put_one(store, f"v:{index}", b"x", ttl_s=100.0 + index)
        await store.touch(["v:500"], ttl_s=50.0)
        clock.num_looks = 0
        for _ in range(10):
            assert await put_one(store, "new", b"x") is PutStatus.FULL
        assert clock.num_looks < 100
        for index, later in enumerate((50.0, 50.0, 1.0)):  # v:500, v:0, v:1
            assert await put_one(store, f"new:{index}", b"x") is PutStatus.FULL
            clock.now += later
            assert await put_one(store, f"new:{index}", b"x") is PutStatus.STORED
        assert await store.present(["v:500", "v:0", "v:1", "v:2"]) == [False, False, False, True]
