"""A near store in front of a far one: copies, reads of either store, and failures."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faulty import FaultyStore
from tests.latch import until
from tests.storage.test_hung_disk import all_locked, hung_reads
from tests.storage.test_redis_odd_servers import odd_server
from tests.storage.values import (
    TWENTY,
    check,
    content_of,
    fill,
    get_one,
    guarded,
    landing,
    memory,
    put_one,
)
from tierkv.clock import SystemClock
from tierkv.errors import StoreRefusedError, StoreUnavailableError
from tierkv.storage import layered
from tierkv.storage.factory import StoreSettings, open_guarded_store, open_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import (
    BreakerState,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutStatus,
    Store,
)
from tierkv.storage.redis.url import RedisSettings

STORED = PutStatus.STORED
NAME = "t:f:a:0"


async def test_what_came_from_afar_is_near_the_next_time() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        await fill(far)
        await check(store)
        await until(lambda: near.num_operations == 1 + len(TWENTY), "copies in the near store")
        asked = far.num_operations
        await check(store)
        assert far.num_operations == asked


@pytest.mark.promise("A failing near store or damaged near copy is replaced by the far store.")
async def test_a_near_store_that_fails_is_a_slower_far_one() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        near.fail_next(1_000)
        await fill(store)
        assert await store.exists(TWENTY) == len(TWENTY)
        await check(store)


async def test_a_first_store_that_hangs_leaves_the_second_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StoreSettings(resilience=ResilienceSettings(timeout_s=1.0))
    url = f"layered:{(tmp_path / 'first').as_uri()}|{(tmp_path / 'second').as_uri()}"
    store = open_guarded_store(url, settings, SystemClock())
    async with store.running():
        for name in TWENTY[:9]:
            assert await put_one(store, name, b"value") is PutStatus.STORED
        disk = hung_reads(tmp_path, monkeypatch)
        async with asyncio.TaskGroup() as group:
            try:
                for count, name in enumerate(TWENTY[:4], 1):  # the number of its threads
                    group.create_task(get_one(store, name, 5))
                    await until(lambda count=count: disk.num_hung == count)  # type: ignore[misc]
                monkeypatch.undo()  # the second store is on another disk
                took_s = []
                for name in TWENTY[4:9]:
                    started = time.monotonic()
                    assert await get_one(store, name, 5) == (GetStatus.HIT, b"value")
                    took_s.append(time.monotonic() - started)
                assert min(took_s) < 0.2, "the first store's circuit is open by now"
            finally:
                disk.release()


async def test_a_first_store_whose_writes_hang_leaves_the_second_one_in_use(
    tmp_path: Path,
) -> None:
    resilience = ResilienceSettings(timeout_s=20.0, write_timeout_s=0.2)
    urls = [(tmp_path / name).as_uri() for name in ("first", "second")]
    first = open_store(urls[0], StoreSettings(), SystemClock())
    async with first.running():
        await fill(first)  # so that there are directories to lock
        await first.delete(TWENTY)
    settings = StoreSettings(resilience=resilience)
    store = open_guarded_store(f"layered:{'|'.join(urls)}", settings, SystemClock())
    async with store.running(), asyncio.TaskGroup() as group:
        with all_locked(tmp_path / "first"):  # as by a process that was stopped with the locks
            puts = []
            async with asyncio.timeout(60):
                for name in itertools.cycle(TWENTY):
                    puts.append(group.create_task(put_one(store, name, b"value")))
                    await asyncio.wait(puts[-1:], timeout=0.3)
                    if puts[-1].done() and puts[-1].result() is PutStatus.STORED:
                        break
            assert not all(put.done() for put in puts)  # the first store still uses some buffers


async def test_each_of_two_stores_has_the_whole_time_for_the_bytes_of_a_value() -> None:
    """20 kB have 20 ms, and a write has its time limit of 100 ms, for each store."""
    limits = ResilienceSettings(timeout_s=0.3, write_timeout_s=0.1, slowest_bytes_per_s=1e6)
    settings = StoreSettings(resilience=limits, redis=RedisSettings(timeout_s=0.5))
    async with odd_server(lambda verb: b"" if verb in (b"GET", b"SET") else b"+OK\r\n") as server:
        url = f"layered:memory://|{server.url}"
        async with (store := open_guarded_store(url, settings, SystemClock())).running():
            read, _ = landing(NAME, 20_000 - (16 << 10))  # each value counts 16 KiB more
            [got], [put] = await asyncio.gather(
                store.get_into([read]), store.put([PutItem(NAME, (bytes(20_000),))])
            )
            assert got.reason.endswith("did not answer within 340 ms")
            assert put.reason.endswith("did not answer within 240 ms")


async def test_who_starts_while_one_of_several_stores_is_down_uses_it_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layered, "_RETRY_S", 0.02)
    paths = [tmp_path / "first", tmp_path / "second"]
    paths[0].touch()  # a file where a directory is needed
    url = f"layered:{'|'.join(path.as_uri() for path in paths)}"
    settings = StoreSettings(
        resilience=ResilienceSettings(timeout_s=40.0, write_timeout_s=20.0, probe_interval_s=0.02)
    )
    store = open_guarded_store(url, settings, SystemClock())
    async with store.running():
        for name in TWENTY[:10]:
            assert await put_one(store, name, b"value") is STORED
            assert await get_one(store, name, 5) == (GetStatus.HIT, b"value")
        assert store.health.part == paths[0].as_uri()
        assert store.health.num_opened == 0
        paths[0].unlink()
        await until(lambda: store.health.circuit is BreakerState.CLOSED, "all stores in use")
        assert store.health.degraded_s > 0
        assert await put_one(store, TWENTY[10], b"value") is STORED
    async with (back := open_store(paths[0].as_uri(), settings, SystemClock())).running():
        assert await get_one(back, TWENTY[10], 5) == (GetStatus.HIT, b"value")


async def test_a_prompt_that_is_partly_near_is_found_whole() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        await near.put([PutItem(name, (b"x",)) for name in TWENTY[5:8]])
        await far.put([PutItem(name, (b"x",)) for name in (*TWENTY[:5], *TWENTY[8:12])])
        assert await store.exists(TWENTY) == 12


async def test_copies_beyond_the_limit_are_not_made() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings(max_fill_bytes=1_000))
    async with store.running():
        await fill(far)
        near.hold_writes()
        await check(store)
        near.release()
        await until_near(store, near, far)
        assert 1 <= sum(await near.present(TWENTY)) <= 3


async def test_changes_that_one_of_several_stores_misses_keep_nobody_from_the_others() -> None:
    """For example, blocks of a long prompt are touched in batches."""
    near, far = memory(), memory()
    store = guarded(LayeredStore(near, far, LayeredSettings()))
    async with store.running():
        await fill(store)
        for number in range(10):
            near.fail_next(1_000)
            assert await store.touch(TWENTY[number:], ttl_s=60.0) == len(TWENTY) - number
            with pytest.raises(StoreRefusedError, match="does not answer"):
                await store.delete([TWENTY[number]])
            near.fail_next(0)
            assert await far.exists([TWENTY[number]]) == 0
        assert store.health.num_opened == 0
        value = content_of(TWENTY[15], 500)
        assert await get_one(store, TWENTY[15], 500) == (GetStatus.HIT, value)
        near.fail_next(1_000)
        far.fail_next(1_000)
        with pytest.raises(StoreUnavailableError):
            await store.touch(TWENTY, ttl_s=60.0)


async def test_what_a_store_in_front_of_another_has_alone_is_not_all_there_is() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        await fill(store)
        for ask in (store.usage("t"), store.list("t", limit=100)):
            far.fail_next(1)
            with pytest.raises(StoreUnavailableError, match="does not answer"):
                await ask


@pytest.mark.promise("A failing near store or damaged near copy is replaced by the far store.")
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
        assert await get_one(store, NAME, 6) == (GetStatus.HIT, b"whole!")  # without a near copy
        before = first.num_operations
        assert await get_one(store, NAME, 6) == (GetStatus.HIT, b"whole!")
        await until(lambda: first.num_operations == before + 2, "a read and a copy in the near one")
        await put_one(first, NAME, b"rotten", keep_existing=False)  # the copy rots later
        assert await get_one(store, NAME, 6) == (GetStatus.HIT, b"rotten")
        assert await store.forget_damaged([NAME]) == [True]
        assert [await part.exists([NAME]) for part in (first, second)] == [0, 1]


class Gated(MemoryStore):
    """A store whose reads wait for `reads` after reading, and deletions for `deletions` before."""

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


async def until_near(store: LayeredStore, near: FaultyStore, far: Store) -> None:
    """Wait until all copies of values that were read before are in the near store."""
    assert await put_one(far, "t:f:last:0", b"value") is STORED
    assert (await get_one(store, "t:f:last:0", 5))[0] is GetStatus.HIT
    async with asyncio.timeout(20):
        while not await near.exists(["t:f:last:0"]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
async def test_a_value_that_is_read_from_afar_while_it_is_deleted_is_not_near_afterwards(
    begins: str,
) -> None:
    near, far = memory(), Gated()
    settings = LayeredSettings(max_fill_bytes=len(b"value"))  # one copy at a time
    async with (store := LayeredStore(near, far, settings)).running():
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


async def test_a_value_that_is_replaced_while_it_is_copied_is_not_near_afterwards() -> None:
    near, far = memory(), memory()
    async with (store := LayeredStore(near, far, LayeredSettings())).running():
        assert await put_one(far, NAME, b"value") is STORED
        near.hold_writes()
        assert await get_one(store, NAME, 5) == (GetStatus.HIT, b"value")
        await near.until_held(1)  # the copy
        await store.put([PutItem(NAME, (b"other",), keep_existing=False)])
        near.release()
        await until_near(store, near, far)
        assert await get_one(store, NAME, 5) == (GetStatus.HIT, b"other")


async def test_copies_that_wait_for_the_near_store_end_with_the_lifetime() -> None:
    """Other processes can change the values until the store is opened again."""
    near, far = memory(), Gated()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        for name in TWENTY[:2]:
            assert await put_one(far, name, b"value") is STORED
        near.hold_writes()
        for name in TWENTY[:2]:  # the first is being written, the second waits for it
            assert (await get_one(store, name, 5))[0] is GetStatus.HIT
            await near.until_held(1)
    near.release()
    async with far.running():
        await far.delete(TWENTY[:2])
    async with store.running():
        await until_near(store, near, far)
        assert await near.exists(TWENTY[1:]) == 0
