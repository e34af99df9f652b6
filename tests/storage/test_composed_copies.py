"""What becomes of the copies that several stores have of a value: some bad, some old or late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.faulty import FaultyStore
from tests.latch import until
from tests.storage.values import get_one, put_one
from tierkv.clock import SystemClock
from tierkv.storage import factory
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import (
    BreakerState,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
)

STORED = PutStatus.STORED
NAME = "t:f:a:0"
NAMES = [f"t:f:{index:02}:0" for index in range(10)]


def memory() -> FaultyStore:
    return FaultyStore(MemoryStore(MemorySettings(), SystemClock()))


async def test_damage_in_one_store_is_told_though_the_other_has_no_copy() -> None:
    first, second = memory(), memory()
    async with (store := LayeredStore(first, second, LayeredSettings())).running():
        assert await put_one(first, NAME, b"cut") is STORED
        assert (await get_one(store, NAME, 5))[0] is GetStatus.DAMAGED
        second.fail_items(NAME)
        assert (await get_one(store, NAME, 5))[0] is GetStatus.DAMAGED
        await store.forget_damaged([NAME])
        assert await first.exists([NAME]) == 0


async def test_two_who_find_one_copy_rotten_cost_that_copy() -> None:
    first, second = memory(), memory()
    async with (store := LayeredStore(first, second, LayeredSettings())).running():
        for part, content in ((first, b"rotten"), (second, b"whole!")):
            assert await put_one(part, NAME, content) is STORED
        for _ in range(2):
            assert await get_one(store, NAME, 6) == (GetStatus.HIT, b"rotten")
        for _ in range(2):
            assert await store.forget_damaged([NAME, NAME]) == [True, True]
        assert [await part.exists([NAME]) for part in (first, second)] == [0, 1]
        assert await get_one(store, NAME, 6) == (GetStatus.HIT, b"whole!")


class Gated(MemoryStore):
    """What has been read, and what is to be deleted, waits at a gate while that is closed."""

    def __init__(self) -> None:
        super().__init__(MemorySettings(), SystemClock())
        self.reads, self.deletions = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.deletions.set()
        self.num_read = 0

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        outcomes = await super().get_into(items)
        self.num_read += len(items)
        await self.reads.wait()
        return outcomes

    async def delete(self, names: Sequence[str]) -> int:
        await self.deletions.wait()
        return await super().delete(names)


async def until_near(store: LayeredStore, near: FaultyStore, far: MemoryStore) -> None:
    """Return when every copy that is made of what was read before is near."""
    assert await put_one(far, NAMES[9], b"value") is STORED
    assert (await get_one(store, NAMES[9], 5))[0] is GetStatus.HIT
    async with asyncio.timeout(20):
        while not await near.exists(NAMES[9:]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
async def test_a_value_that_is_read_from_afar_while_it_is_deleted_is_not_near_afterwards(
    begins: str,
) -> None:
    near, far = memory(), Gated()
    async with (store := LayeredStore(near, far, LayeredSettings())).running():
        assert await put_one(far, NAME, b"value") is STORED
        async with asyncio.TaskGroup() as group:
            near.hold_writes()
            if begins == "before":
                far.reads.clear()
                group.create_task(get_one(store, NAME, 5))
                await until(lambda: far.num_read == 1)
                assert await store.delete([NAME]) == 1
                far.reads.set()
            else:
                far.deletions.clear()
                deleting = group.create_task(store.delete([NAME]))
                await until(lambda: near.num_operations >= 1, "the question what there is")
                assert await get_one(store, NAME, 5) == (GetStatus.HIT, b"value")
                await near.until_held(1)  # the copy
                far.deletions.set()
                await until(deleting.done)
            near.release()
        await until_near(store, near, far)
        assert await near.exists([NAME]) == 0


async def test_copies_that_wait_for_the_near_store_end_with_the_lifetime() -> None:
    """Others can change what is there until it is opened again."""
    near, far = memory(), Gated()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        for name in NAMES[:2]:
            assert await put_one(far, name, b"value") is STORED
        near.hold_writes()
        for name in NAMES[:2]:  # the first is being put, the second waits for it
            assert (await get_one(store, name, 5))[0] is GetStatus.HIT
            await near.until_held(1)
    near.release()
    async with far.running():
        await far.delete(NAMES[:2])
    async with store.running():
        await until_near(store, near, far)
        assert await near.exists(NAMES[1:]) == 0


class Slow(MemoryStore):
    """Its reads and writes take so long, when it is told to."""

    def __init__(self) -> None:
        super().__init__(MemorySettings(), SystemClock())
        self.read_s = self.write_s = 0.0

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        await asyncio.sleep(self.read_s)
        return await super().get_into(items)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        await asyncio.sleep(self.write_s)
        return await super().put(items)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Sequence[Slow]:
    """The stores of `memory://|memory://`."""
    parts = Slow(), Slow()
    kinds = factory.open_store

    def open_part(url: str, settings: StoreSettings, clock: SystemClock) -> object:
        if url.startswith("layered:"):
            waiting[:] = parts
            return kinds(url, settings, clock)
        return waiting.pop(0)

    waiting: list[Slow] = []
    monkeypatch.setattr(factory, "open_store", open_part)
    return parts


async def test_a_store_whose_writes_are_late_costs_the_others_nothing_they_have_stored(
    parts: Sequence[Slow],
) -> None:
    settings = StoreSettings(resilience=ResilienceSettings(timeout_s=40.0, write_timeout_s=4.0))
    store = open_guarded_store("layered:memory://|memory://", settings, SystemClock())
    async with store.running():
        parts[0].write_s = 1000.0
        async with asyncio.TaskGroup() as group:
            puts = [group.create_task(put_one(store, name, b"x")) for name in NAMES[:2]]
        assert [put.result() for put in puts] == [STORED] * 2
        assert store.health.circuit is BreakerState.CLOSED
        assert await parts[1].exists(NAMES) == 2
