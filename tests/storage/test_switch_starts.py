"""The store that a node begins with: late is not the same as gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis  # noqa: F401 - fixtures
from tests.storage.test_storage_tier import tier
from tests.world import fingerprint
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.switch import SwitchStore
from tierkv.transfer.storage_io_tier import StorageOptions


async def test_a_store_that_is_late_when_all_starts_is_asked_again(
    empty_redis: RedisServer,  # noqa: F811
) -> None:
    """Operations have 250 ms, which a machine that is just starting everything may miss."""
    place = SwitchStore(open_store(empty_redis.url, StoreSettings(), SystemClock()))
    empty_redis.pause()
    resumed = asyncio.get_running_loop().call_later(0.8, empty_redis.resume)
    try:
        async with place.running():
            assert place.store is not None
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
        async with SwitchStore(store).running():
            raise AssertionError("it opens")
    assert store.num_tries <= 3  # one, unless this process stood still for as long as a late answer
