"""Stores made of stores: files in front of Redis, and stores exchanged at run time."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from tests.faulty import FaultyStore
from tests.latch import until
from tests.storage.test_hung_disk import HungReads, all_locked
from tests.storage.values import Routed, content_of, get_one, landing, put_one
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreRefusedError, StoreUnavailableError
from tierkv.storage import layered
from tierkv.storage.factory import StoreSettings, open_guarded_store, open_store
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places
from tierkv.storage.protocol import BreakerState, GetStatus, PutItem, PutStatus, Store

STORED = PutStatus.STORED
NAMES = [f"t:f:{index:02}:0" for index in range(20)]


def memory() -> FaultyStore:
    return FaultyStore(MemoryStore(MemorySettings(), SystemClock()))


async def fill(store: Store) -> None:
    puts = await store.put([PutItem(name, (content_of(name, 500),)) for name in NAMES])
    assert {put.status for put in puts} == {PutStatus.STORED}


async def check(store: Store) -> None:
    landings = [landing(name, 500) for name in NAMES]
    outcomes = await store.get_into([item for item, _ in landings])
    assert {outcome.status for outcome in outcomes} == {GetStatus.HIT}
    for item, [buffer] in landings:
        assert buffer == content_of(item.name, 500)


async def test_what_came_from_afar_is_near_the_next_time() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        await fill(far)
        await check(store)
        await until(lambda: near.num_operations == 1 + len(NAMES), "copies in the near store")
        asked = far.num_operations
        await check(store)
        assert far.num_operations == asked
        assert store.num_near_hits == len(NAMES)


async def test_a_near_store_that_fails_is_a_slower_far_one() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        near.fail_next(1_000)
        await fill(store)
        assert await store.exists(NAMES) == len(NAMES)
        await check(store)


async def test_a_first_store_that_hangs_leaves_the_second_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StoreSettings(resilience=ResilienceSettings(timeout_s=1.0))
    url = f"layered:{(tmp_path / 'first').as_uri()}|{(tmp_path / 'second').as_uri()}"
    store = open_guarded_store(url, settings, SystemClock())
    async with store.running():
        for name in NAMES[:9]:
            assert await put_one(store, name, b"value") is PutStatus.STORED
        disk = HungReads(tmp_path / "fifo", monkeypatch)
        async with asyncio.TaskGroup() as group:
            try:
                for count, name in enumerate(NAMES[:4], 1):  # as many as it has threads
                    group.create_task(get_one(store, name, 5))
                    await until(lambda count=count: disk.num_hung == count)  # type: ignore[misc]
                monkeypatch.undo()  # the second disk is another
                took_s = []
                for name in NAMES[4:9]:
                    started = time.monotonic()
                    assert await get_one(store, name, 5) == (GetStatus.HIT, b"value")
                    took_s.append(time.monotonic() - started)
                assert min(took_s) < 0.2, "the first store is left alone by now"
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
        await first.delete(NAMES)
    settings = StoreSettings(resilience=resilience)
    store = open_guarded_store(f"layered:{'|'.join(urls)}", settings, SystemClock())
    async with store.running(), asyncio.TaskGroup() as group:
        with all_locked(tmp_path / "first"):  # as by a process that was stopped in the middle
            puts = []
            async with asyncio.timeout(60):
                for name in itertools.cycle(NAMES):
                    puts.append(group.create_task(put_one(store, name, b"value")))
                    await asyncio.wait(puts[-1:], timeout=0.3)
                    if puts[-1].done() and puts[-1].result() is PutStatus.STORED:
                        break
            assert not all(put.done() for put in puts)  # some buffers are the first store's yet


async def test_who_starts_while_one_of_several_stores_is_down_uses_it_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layered, "_RETRY_S", 0.02)
    paths = [tmp_path / "first", tmp_path / "second"]
    paths[0].touch()  # where a directory has to be
    url = f"layered:{'|'.join(path.as_uri() for path in paths)}"
    settings = StoreSettings(
        resilience=ResilienceSettings(timeout_s=40.0, write_timeout_s=20.0, probe_interval_s=0.02)
    )
    store = open_guarded_store(url, settings, SystemClock())
    async with store.running():
        for name in NAMES[:10]:
            assert await put_one(store, name, b"value") is STORED
            assert await get_one(store, name, 5) == (GetStatus.HIT, b"value")
        assert store.health.part == paths[0].as_uri()
        assert store.health.num_opened == 0
        paths[0].unlink()
        await until(lambda: store.health.circuit is BreakerState.CLOSED, "all stores in use")
        assert store.health.degraded_s > 0
        assert await put_one(store, NAMES[10], b"value") is STORED
    async with (back := open_store(paths[0].as_uri(), settings, SystemClock())).running():
        assert await get_one(back, NAMES[10], 5) == (GetStatus.HIT, b"value")


async def test_a_prompt_that_is_partly_near_is_found_whole() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        await near.put([PutItem(name, (b"x",)) for name in NAMES[5:8]])
        await far.put([PutItem(name, (b"x",)) for name in (*NAMES[:5], *NAMES[8:12])])
        assert await store.exists(NAMES) == 12


async def test_a_near_copy_of_the_wrong_length_is_replaced_by_what_came_from_afar() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        assert await put_one(near, NAMES[0], b"cut") is PutStatus.STORED
        assert await put_one(far, NAMES[0], b"whole") is PutStatus.STORED
        assert await get_one(store, NAMES[0], 5) == (GetStatus.HIT, b"whole")
        async with asyncio.timeout(10):
            while await get_one(near, NAMES[0], 5) != (GetStatus.HIT, b"whole"):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_copies_beyond_the_limit_are_not_made() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings(max_fill_bytes=1_000))
    async with store.running():
        await fill(far)
        near.hold_writes()
        await check(store)
        near.release()
        assert store.num_fills_dropped >= len(NAMES) - 3


async def test_stores_with_holes_where_the_other_has_values_are_asked_a_few_times() -> None:
    """Each evicts what it likes; asked in turns from hole to hole, they would be too slow."""
    first, second = memory(), memory()
    store = LayeredStore(first, second, LayeredSettings())
    async with store.running():
        for part, names in ((first, NAMES[::2]), (second, NAMES[1::2])):
            await part.put([PutItem(name, (b"x",)) for name in names])
        assert await store.exists(NAMES) == len(NAMES)
        assert first.num_operations + second.num_operations <= 2 + 8 + 2
        await second.delete([NAMES[15]])
        assert await store.exists(NAMES) == 15
        assert await store.exists([]) == 0


async def test_changes_that_one_of_several_stores_misses_keep_nobody_from_the_others() -> None:
    """Such as touches of a long prompt that is used, in batches."""
    parts = [memory(), memory()]
    store = LayeredStore(parts[0], parts[1], LayeredSettings())
    guarded = GuardedStore(store, ResilienceSettings(timeout_s=20.0), SystemClock())
    async with guarded.running():
        await fill(guarded)
        for number in range(10):
            parts[0].fail_next(1_000)
            assert await guarded.touch(NAMES[number:], ttl_s=60.0) == len(NAMES) - number
            with pytest.raises(StoreRefusedError, match="does not answer"):
                await guarded.delete([NAMES[number]])
            parts[0].fail_next(0)
            assert await parts[1].exists([NAMES[number]]) == 0
        assert guarded.health.num_opened == 0
        assert await get_one(guarded, NAMES[15], 500) == (GetStatus.HIT, content_of(NAMES[15], 500))
        for part in parts:
            part.fail_next(1_000)
        with pytest.raises(StoreUnavailableError):
            await guarded.touch(NAMES, ttl_s=60.0)


async def test_what_a_store_in_front_of_another_has_alone_is_not_all_there_is() -> None:
    near, far = memory(), memory()
    store = LayeredStore(near, far, LayeredSettings())
    async with store.running():
        await fill(store)
        for ask in (store.usage("t"), store.list("t", limit=100)):
            far.fail_next(1)
            with pytest.raises(StoreUnavailableError, match="does not answer"):
                await ask


async def answers(store: FaultyStore) -> bool:
    try:
        await store.ping()
    except StoreUnavailableError:
        return False
    return True


async def test_a_store_is_exchanged_while_requests_run(tmp_path: Path) -> None:
    old, new = memory(), memory()
    store = Places(old)
    async with store.running():
        await fill(store)
        old.hold()
        async with asyncio.TaskGroup() as group:
            under_way = group.create_task(check(store))
            await old.until_held(1)
            await store.attach(new)
            assert store.attached == {"": new}
            assert (await get_one(store, NAMES[0], 500))[0] is GetStatus.MISS
            assert not under_way.done()
            old.release()
        async with asyncio.timeout(5):
            while await answers(old):  # it is left when its last operation has ended
                pass
        await fill(store)
        await check(store)
        assert store.detach() is new
        assert (await get_one(store, NAMES[0], 500))[0] is GetStatus.FAILED
        with pytest.raises(StoreUnavailableError, match="no store is attached"):
            await store.exists(NAMES)
        await store.attach(FileStore(tmp_path / "s", FileSettings(), SystemClock()))
        await fill(store)
        await check(store)


async def test_a_store_attached_again_stays_in_use(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(), SystemClock())
    places = Places(store)
    async with places.running():
        for _ in range(3):
            await places.attach(store)
            assert await put_one(places, NAMES[0], b"x", keep_existing=False) is STORED
        for _ in range(3):  # while it is still being left
            assert places.detach() is store
            await places.attach(store)
            assert await put_one(places, NAMES[0], b"x", keep_existing=False) is STORED
        async with asyncio.TaskGroup() as group:
            writes = [
                group.create_task(put_one(places, name, bytes(100_000))) for name in NAMES[1:]
            ]
            await asyncio.sleep(0)
            places.detach()
            await places.attach(store, "t:f")
        assert {write.result() for write in writes} == {STORED}
        assert places.attached == {"t:f": store}
        assert await places.exists(NAMES) == len(NAMES)


async def test_a_store_is_attached_in_one_place_at_a_time() -> None:
    store = memory()
    places = Places(store)
    async with places.running():
        with pytest.raises(ConfigError, match="attached already"):
            await places.attach(store, "t:f")
        assert places.detach("t:f") is None
        assert await put_one(places, NAMES[0], b"x") is STORED


async def test_a_store_that_cannot_be_opened_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    store = Places(memory())
    (tmp_path / "file").write_text("x")
    broken = FileStore(tmp_path / "file", FileSettings(), SystemClock())
    async with store.running():
        await fill(store)
        with pytest.raises(StoreUnavailableError, match="set another directory"):
            await store.attach(broken)
        await check(store)


@pytest.mark.parametrize(
    "url",
    ["layered:memory://", "layered:a|b", "layered:memory://|x|y", "mirrored:memory://|memory://"],
)
def test_urls_of_composed_stores_that_make_no_sense_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url, StoreSettings(), SystemClock())


def test_urls_of_composed_stores_tell_no_secrets() -> None:
    store = open_store("layered:file:///a|redis://:s3cret@b", StoreSettings(), SystemClock())
    assert store.url == "layered:file:///a|redis://b:6379/0"


async def test_a_tenants_store_that_fails_keeps_no_other_tenants_values_from_living_on() -> None:
    """Blocks that are used are told in batches of all tenants."""
    failing, other = memory(), memory()
    store = Routed({"t:a": failing, "t:b": other}, memory())
    async with store.running():
        for name in ("t:a:1:0", "t:b:1:0"):
            assert await put_one(store, name, b"x", ttl_s=5) is STORED
        failing.fail_next(1)
        with pytest.raises(StoreUnavailableError):
            await store.touch(["t:a:1:0", "t:b:1:0"], ttl_s=5000)
        [value] = (await other.list("t:b:", limit=10)).values
        assert value.expires_at is not None
        assert value.expires_at > SystemClock().wall() + 1000
        failing.fail_next(1)
        with pytest.raises(StoreUnavailableError):
            await store.delete(["t:a:1:0", "t:b:1:0"])
        assert await other.exists(["t:b:1:0"]) == 0
