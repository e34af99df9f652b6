"""A service's storage tier: a store attached and detached, tenants, trust, and touches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from tests.faulty import FaultyStore
from tests.latch import finish, until
from tests.sessions import begin_request, claim_request, publish_request
from tests.storage.values import guarded, memory
from tests.world import BLOCK, World, fingerprint, world
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.pd.settings import HandoffSettings
from tierkv.storage.codec import TenantCodecs, Trust
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import BreakerState, Store
from tierkv.transfer.tier import StorageOptions

TOKENS = list(range(3 * BLOCK + 1))


async def values_in(store: FaultyStore) -> int:
    return (await store.usage("tierkv")).num_values


def tier(
    store: Store | None = None, options: StorageOptions | None = None
) -> AbstractAsyncContextManager[World]:
    """Return a service that stores every block as soon as it is computed."""
    return world(store=store, storage=options, storage_write=WritePolicy.WRITE_THROUGH)


async def test_a_service_started_without_a_store_can_be_given_one_and_lose_it() -> None:
    store = memory()
    async with tier() as here:
        assert here.service.storage_state() == ()
        assert here.service.stats().storage is None
        await here.run(TOKENS)
        with pytest.raises(HandoffError, match="no storage tier"):
            await claim_request(here.service, "c", "t", here.prompt(TOKENS), max_new_tokens=0)

        await here.service.attach_storage(store)
        [state] = here.service.storage_state()
        assert (state.tenant, state.circuit, state.is_degraded) == ("", None, False)
        # Blocks that were computed before are stored too, when they are used again.
        await here.run(TOKENS)
        assert await values_in(store) >= 3

        request = await here.admit([7, *TOKENS])
        await here.prefill(request, [7, *TOKENS])
        await finish(publish_request(here.service, request, "ticket", [1]))
        await here.ended(request)

        assert here.service.detach_storage()
        assert not here.service.detach_storage()
        assert here.service.storage_state() == ()
        with pytest.raises(HandoffError, match="no storage tier"):
            await claim_request(here.service, "c", "ticket", here.prompt(TOKENS), max_new_tokens=0)
        await here.run([9, *TOKENS])


async def test_a_tenant_has_its_blocks_in_a_store_of_its_own() -> None:
    common, own = memory(), memory()
    async with tier(common) as here:
        tenant = here.service.open_fingerprint(fingerprint(tenant="acme"))
        await here.service.attach_storage(own, tenant=tenant)
        await here.run(TOKENS)
        assert await values_in(own) == 0
        num_common = await values_in(common)
        prompt = type(here.prompt(TOKENS))(
            here.prompt(TOKENS).tokens, here.layout.block_size, space=tenant
        )
        request = await finish(begin_request(here.service, "tenant's", prompt, max_new_tokens=0))
        here.compute(request, TOKENS)
        await finish(here.service.scheduler.commit(request, prompt.tokens))
        await here.ended(request)
        assert await values_in(common) == num_common
        assert await values_in(own) >= 3
        assert {state.tenant for state in here.service.storage_state()} == {"", tenant}
        assert here.service.detach_storage(tenant=tenant)
        assert {state.tenant for state in here.service.storage_state()} == {""}


@pytest.mark.parametrize("is_attached_later", [False, True])
async def test_a_store_that_came_back_empty_is_written_to_again(is_attached_later: bool) -> None:
    inner = memory()
    breaking = guarded(inner, failures_to_open=1, probe_interval_s=0.02, retries_per_operation=0)
    async with tier(None if is_attached_later else breaking) as here:
        if is_attached_later:
            await here.service.attach_storage(breaking)
        await here.run(TOKENS)
        assert await values_in(inner) >= 3
        await inner.delete([value.name for value in (await inner.list("tierkv", limit=99)).values])
        inner.fail_next(2)
        await here.run([5, *TOKENS])
        await until(
            lambda: here.service.storage_state()[0].circuit == BreakerState.CLOSED.value,
            "a store that is back",
        )
        await here.run(TOKENS)
        assert await values_in(inner) >= 3
        [state] = here.service.storage_state()
        assert state.degraded_s > 0
        assert state.reason


async def test_one_of_several_stores_that_is_left_alone_is_told() -> None:
    """The other stores answer in its place, so no operation shows the failure."""
    parts = [memory(), memory()]
    near = guarded(parts[0], probe_interval_s=100.0, retries_per_operation=0)
    store = guarded(LayeredStore(near, parts[1], LayeredSettings()))
    async with tier(store) as here:
        [state] = here.service.storage_state()
        assert (state.circuit, state.part) == (BreakerState.CLOSED.value, "")
        parts[0].fail_next(1_000)
        for number in range(5):
            await store.exists([f"tierkv:f:{number}:0"])
        [state] = here.service.storage_state()
        assert (state.circuit, state.part) == (BreakerState.OPEN.value, parts[0].url)
        assert state.is_degraded
        assert "does not answer, as it was told" in state.reason


# Trust


@pytest.mark.parametrize("trust", [Trust.SIGNED, Trust.SEALED])
async def test_only_who_has_the_key_reads_or_writes_blocks(trust: Trust) -> None:
    store = memory()

    def node(key: bytes | None) -> Any:
        codecs = TenantCodecs(trust if key else Trust.TRUSTED, key)
        return tier(Kept(store), StorageOptions(codecs=codecs))

    async with store.running():
        async with node(bytes(32)) as here:
            await here.run(TOKENS)
            num_values = await values_in(store)
        async with node(bytes(32)) as here:
            assert (await here.run(TOKENS)).storage_tokens >= 3 * BLOCK
        for key in (b"x" * 32, None):
            async with node(key) as here:
                assert (await here.run(TOKENS)).storage_tokens == 0
                stats = here.service.stats().storage
                assert stats is not None
                assert stats.damaged_blocks > 0
        assert num_values >= 3


class Kept(FaultyStore):
    """A store whose `running()` does nothing; the test opens and closes it."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield


# Worth and touching


async def test_blocks_that_were_hit_are_worth_more_and_earlier_ones_than_later() -> None:
    worth: dict[str, float] = {}

    class Noting(MemoryStore):
        async def put(self, items: Any) -> Any:
            worth.update({item.name: item.worth for item in items})
            return await super().put(items)

    async with tier(Noting(MemorySettings(), SystemClock())) as here:
        await here.run(TOKENS)
        names = here.names(TOKENS)[:3]
        assert [*sorted(names, key=lambda name: -worth[name])] == names
        cold = dict(worth)
        for _ in range(3):
            await here.run(TOKENS)
        await here.service.attach_storage(Noting(MemorySettings(), SystemClock()))
        await here.run(TOKENS)
        assert all(worth[name] >= cold[name] + 1 for name in names)


class Touched(Kept):
    """A store that records the names of each `touch` that it does not fail."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__(store)
        self.touched: list[str] = []
        self.failures_due = 0

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        assert ttl_s == HandoffSettings().block_ttl_s
        if self.failures_due:
            self.failures_due -= 1
            raise StoreUnavailableError("it does not answer, as it was told")
        self.touched += names
        return await super().touch(names, ttl_s=ttl_s)


async def read_again(here: World, times: int) -> None:
    for _ in range(times):
        here.service.reset()
        assert (await here.run(TOKENS)).storage_tokens >= 3 * BLOCK


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_stored_block_that_is_used_lives_on_and_the_store_hears_of_it_once(
    failures: int,
) -> None:
    inner = memory()
    store = Touched(inner)
    store.failures_due = failures
    async with inner.running():
        async with tier(store) as here:
            await here.run(TOKENS)
            await read_again(here, 2)
            assert store.touched == []  # not asked for
        async with tier(store, StorageOptions(touches_per_ttl=10)) as here:
            wanted = set(here.names(TOKENS)[:3])
            async with asyncio.timeout(20):
                while not wanted <= set(store.touched):
                    await read_again(here, 1)
            await read_again(here, 3)
            assert len(store.touched) == len(set(store.touched))
            assert store.failures_due == 0


async def test_what_was_just_written_is_not_touched() -> None:
    inner = memory()
    store = Touched(inner)
    async with inner.running(), tier(store, StorageOptions(touches_per_ttl=10)) as here:
        await here.run(TOKENS)
        await read_again(here, 3)
        assert not set(store.touched) & set(here.names(TOKENS)[:3])
