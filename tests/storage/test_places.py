"""Stores are attached, detached and exchanged while requests run, also late and after a cancel."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.faulty import FaultyStore
from tests.latch import until
from tests.redis_server import RedisServer
from tests.storage.test_storage_tier import tier
from tests.storage.values import TWENTY, Routed, check, fill, get_one, memory, put_one
from tests.world import fingerprint
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places
from tierkv.storage.protocol import GetStatus, PutStatus
from tierkv.transfer.tier import StorageOptions

STORED = PutStatus.STORED


async def closed(store: FaultyStore) -> None:
    """Wait until a task of the place has closed `store`."""
    with suppress(StoreUnavailableError):
        async with asyncio.timeout(10):
            while True:
                await store.ping()


@pytest.mark.promise("A store can be exchanged while requests run.")
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
            assert (await get_one(store, TWENTY[0], 500))[0] is GetStatus.MISS
            assert not under_way.done()
            old.release()
        await closed(old)  # when its last operation has ended
        await fill(store)
        await check(store)
        assert store.detach() is new
        assert (await get_one(store, TWENTY[0], 500))[0] is GetStatus.FAILED
        with pytest.raises(StoreUnavailableError, match="no store is attached"):
            await store.exists(TWENTY)
        await store.attach(FileStore(tmp_path / "s", FileSettings(), SystemClock()))
        await fill(store)
        await check(store)


async def test_a_store_attached_again_stays_in_use(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FileSettings(), SystemClock())
    places = Places(store)
    async with places.running():
        for _ in range(3):
            await places.attach(store)
            assert await put_one(places, TWENTY[0], b"x", keep_existing=False) is STORED
        for _ in range(3):  # while it is still being closed
            assert places.detach() is store
            await places.attach(store)
            assert await put_one(places, TWENTY[0], b"x", keep_existing=False) is STORED
        async with asyncio.TaskGroup() as group:
            writes = [
                group.create_task(put_one(places, name, bytes(100_000))) for name in TWENTY[1:]
            ]
            await asyncio.sleep(0)
            places.detach()
            await places.attach(store, "t:f")
        assert {write.result() for write in writes} == {STORED}
        assert places.attached == {"t:f": store}
        assert await places.exists(TWENTY) == len(TWENTY)


async def test_a_store_is_attached_in_one_place_at_a_time() -> None:
    store = memory()
    places = Places(store)
    async with places.running():
        with pytest.raises(ConfigError, match="already attached for another tenant"):
            await places.attach(store, "t:f")
        assert places.detach("t:f") is None
        assert await put_one(places, TWENTY[0], b"x") is STORED


async def test_a_store_that_cannot_be_opened_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    store = Places(memory())
    (tmp_path / "file").write_text("x")
    broken = FileStore(tmp_path / "file", FileSettings(), SystemClock())
    async with store.running():
        await fill(store)
        with pytest.raises(StoreUnavailableError, match="set another directory"):
            await store.attach(broken)
        await check(store)


async def test_a_tenants_store_that_fails_keeps_no_other_tenants_values_from_living_on() -> None:
    """One `touch` has the used blocks of all tenants."""
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


async def test_a_tenants_store_that_is_late_when_all_starts_is_asked_again(
    empty_redis: RedisServer,
) -> None:
    tenant = fingerprint(tenant="acme").short
    own = open_store(empty_redis.url, StoreSettings(), SystemClock())
    empty_redis.pause()
    resumed = asyncio.get_running_loop().call_later(0.8, empty_redis.resume)
    try:
        async with tier(options=StorageOptions(tenants={tenant: own})) as here:
            assert [state.tenant for state in here.service.storage_state()] == [tenant]
    finally:
        resumed.cancel()
        empty_redis.resume()


class LateStore(MemoryStore):
    """A store that opens as soon as `may_open` is set."""

    def __init__(self) -> None:
        super().__init__(MemorySettings(), SystemClock())
        self.num_tries = 0
        self.may_open = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.num_tries += 1
        await self.may_open.wait()
        async with super().running():
            yield


class ShutStore(MemoryStore):
    """A store that fails to open, as soon as `may_say` is set."""

    def __init__(self) -> None:
        super().__init__(MemorySettings(), SystemClock())
        self.num_tries = 0
        self.may_say = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.num_tries += 1
        await self.may_say.wait()
        raise StoreUnavailableError("shut")
        yield


async def test_a_store_that_refuses_is_not_asked_on_and_on() -> None:
    store = ShutStore()
    store.may_say.set()
    with pytest.raises(StoreUnavailableError, match="shut"):
        async with Places(store).running():
            raise AssertionError("it opens")
    assert store.num_tries <= 3  # one, if this process was not delayed by as long as a late answer


async def test_a_store_that_cannot_be_opened_is_no_error_once_its_attach_was_cancelled() -> None:
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unseen.append(what))
    store, place = ShutStore(), Places()
    async with place.running():
        attach = asyncio.ensure_future(place.attach(store))
        await until(lambda: store.num_tries == 1, "a try")
        attach.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attach
        store.may_say.set()
    gc.collect()
    assert not unseen
    assert not place.attached


async def test_a_store_that_opens_when_the_service_ends_is_closed_and_refused() -> None:
    store, place = LateStore(), Places()
    async with asyncio.timeout(20):
        async with place.running():
            attach = asyncio.ensure_future(place.attach(store))
            await until(lambda: store.num_tries == 1, "a try")
            asyncio.get_running_loop().call_soon(store.may_open.set)  # once the end has begun
        with pytest.raises(StoreUnavailableError, match="the service is not running"):
            await attach
    with pytest.raises(StoreUnavailableError, match="is closed"):
        await store.ping()


async def test_hints_go_by_the_store_that_is_attached_then() -> None:
    stores = Places(MemoryStore(MemorySettings(), SystemClock()))
    async with stores.running():
        notifier = stores.notifier()
        with notifier.listen("t:topic") as listener:
            await notifier.notify("t:topic", "a")
            assert await listener.next(10) == "a"
            stores.detach()
            await notifier.notify("t:topic", "b")
            assert await listener.next(0.01) is None
        with notifier.listen("t:topic") as listener:
            assert not listener.is_live
        await stores.attach(MemoryStore(MemorySettings(), SystemClock()))
        with notifier.listen("t:topic") as listener:
            await notifier.notify("t:topic", "c")
            assert await listener.next(10) == "c"


async def test_nothing_is_attached_to_a_tier_that_does_not_run() -> None:
    stores = Places()
    async with stores.running():
        await stores.attach(memory(), "tierkv:" + "f" * 16)
        assert set(stores.attached) == {"tierkv:" + "f" * 16}
    for route in ("", "tierkv:" + "f" * 16):
        with pytest.raises(StoreUnavailableError, match="stores cannot be attached"):
            await stores.attach(memory(), route)


async def test_of_two_stores_attached_at_once_for_a_tenant_one_is_used_and_the_other_left() -> None:
    first, second = memory(), memory()
    stores = Places(memory())
    async with stores.running():
        async with asyncio.TaskGroup() as group:
            group.create_task(stores.attach(first, "t:tenant"))
            group.create_task(stores.attach(second, "t:tenant"))
        await closed(first if stores.attached["t:tenant"] is second else second)
