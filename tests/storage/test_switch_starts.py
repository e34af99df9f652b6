"""The store that a node begins with: late is not the same as gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis  # noqa: F401 - fixtures
from tests.storage.test_storage_tier import tier
from tests.storage.values import get_one, landing
from tests.world import fingerprint
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreUnavailableError, TierKVError
from tierkv.storage import layered
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.layered import OpensLater
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places
from tierkv.storage.protocol import GetStatus, PutItem
from tierkv.transfer.tier import StorageOptions


async def test_a_store_that_is_late_when_all_starts_is_asked_again(
    empty_redis: RedisServer,  # noqa: F811
) -> None:
    """Operations have 250 ms, which a machine that is just starting everything may miss."""
    place = Places(open_store(empty_redis.url, StoreSettings(), SystemClock()))
    empty_redis.pause()
    resumed = asyncio.get_running_loop().call_later(0.8, empty_redis.resume)
    try:
        async with place.running():
            assert place.attached
            assert resumed.when() <= asyncio.get_running_loop().time()
    finally:
        resumed.cancel()
        empty_redis.resume()


async def test_a_tenants_store_that_is_late_when_all_starts_is_asked_again(
    empty_redis: RedisServer,  # noqa: F811
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


class RefusingStore(MemoryStore):
    num_tries = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.num_tries += 1
        raise StoreUnavailableError("nobody listens there")
        yield


async def test_a_store_that_refuses_is_not_asked_on_and_on() -> None:
    store = RefusingStore(MemorySettings(), SystemClock())
    with pytest.raises(StoreUnavailableError, match="nobody listens there"):
        async with Places(store).running():
            raise AssertionError("it opens")
    assert store.num_tries <= 3  # one, unless this process stood still for as long as a late answer


class ReluctantStore(MemoryStore):
    """Refuses to open for `refusal`, as long as there is one."""

    refusal: TierKVError | None = StoreUnavailableError("nobody listens there")
    pools: Sequence[memoryview] = ()

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        self.pools = pools

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if self.refusal is not None:
            raise self.refusal
        async with super().running():
            yield


async def test_one_of_several_stores_is_tried_until_it_opens_and_says_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layered, "_RETRY_S", 0.01)
    inner = ReluctantStore(MemorySettings(), SystemClock())
    store = OpensLater(inner)
    pools = [memoryview(bytearray(10))]
    store.use_memory(pools)
    assert inner.pools is pools

    async def says() -> str:
        try:
            await store.ping()
        except StoreUnavailableError as error:
            return str(error)
        return ""

    async def until_it_says(reason: str) -> None:
        async with asyncio.timeout(20):
            while await says() != reason:  # noqa: ASYNC110 - it tries again by itself
                await asyncio.sleep(0.01)

    async with store.running():
        assert await says() == "nobody listens there"
        for refusal in (
            StoreUnavailableError("it is at work on its log"),
            ConfigError("its TLS files are gone"),
            StoreUnavailableError("nobody listens there"),
        ):
            inner.refusal = refusal
            await until_it_says(str(refusal))
            [read] = await store.get_into([landing("t:f:a:0", 1)[0]])
            [written] = await store.put([PutItem("t:f:a:0", (b"x",))])
            assert read.reason == written.reason == str(refusal)
        inner.refusal = None
        await until_it_says("")
        assert (await get_one(store, "t:f:a:0", 1))[0] is GetStatus.MISS
