"""Two groups of blocks on their way at a time; the index takes them in order, without a hole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.gated_reads import GatedReads
from tests.latch import until
from tests.world import World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.clock import SystemClock
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetStatus

PROMPT = [token % 50 for token in range(4 * (2 * GROUP_BLOCKS + 16))]  # three groups


@asynccontextmanager
async def fetching() -> AsyncGenerator[tuple[World, GatedReads, asyncio.Task[int]], None]:
    """A request is admitted whose blocks are all in the store; the result is its cached tokens."""
    filled = MemoryStore(MemorySettings(), SystemClock())
    through = WritePolicy.WRITE_THROUGH
    async with world(
        store=filled, host_write=through, storage_write=through, device_blocks=90, host_blocks=90
    ) as other:
        await other.run(PROMPT)
    store = GatedReads(filled)
    async with world(store=store, device_blocks=90, host_blocks=90, fetch_deadline_s=100.0) as here:

        async def admit() -> int:
            request = await here.admit(PROMPT)
            await here.prefill(request, PROMPT)  # checks every byte
            here.service.scheduler.end(request)
            return request.cached_tokens

        async with asyncio.TaskGroup() as group:
            yield here, store, group.create_task(admit())
        await here.settle()


def blocks_on_host(here: World) -> int:
    return here.service.index.match(here.prompt(PROMPT)).num_blocks


async def test_the_next_group_is_asked_for_before_one_has_arrived_and_no_more() -> None:
    async with fetching() as (_, store, _admitted):
        await store.until_asked(2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(store.gates) == 2
        store.gates[0].set_result(GetStatus.HIT)
        await store.until_asked(3)
        for gate in store.gates[1:]:
            gate.set_result(GetStatus.HIT)


async def test_a_group_that_comes_before_the_one_before_it_waits_for_it() -> None:
    async with fetching() as (here, store, admitted):
        await store.until_asked(2)
        store.gates[1].set_result(GetStatus.HIT)
        await until(lambda: here.storage_stats.fetched_blocks == GROUP_BLOCKS)
        assert blocks_on_host(here) == 0
        assert here.service.verify() == []
        store.gates[0].set_result(GetStatus.HIT)
        await store.until_asked(3)
        assert blocks_on_host(here) == 2 * GROUP_BLOCKS
        store.gates[2].set_result(GetStatus.HIT)
        assert await admitted == len(PROMPT) - 1


@pytest.mark.parametrize("status", [GetStatus.MISS, GetStatus.FAILED])
async def test_nothing_is_kept_behind_a_group_that_did_not_come(status: GetStatus) -> None:
    async with fetching() as (here, store, admitted):
        await store.until_asked(2)
        store.gates[1].set_result(GetStatus.HIT)
        store.gates[0].set_result(status)
        assert await admitted == 0
        assert not len(here.service.tiers.slots.lent(Tier.HOST))
        assert len(store.gates) == 2, "nobody asks for what could not be used"


@pytest.mark.parametrize("ticks", range(12))
async def test_a_fetch_that_stops_at_any_time_leaves_no_slot_lent(ticks: int) -> None:
    async with fetching() as (here, store, admitted):
        for _ in range(ticks):
            await asyncio.sleep(0)
        here.service.abort("request 1")
        admitted.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        for gate in store.gates:
            gate.set_result(GetStatus.FAILED)
        await until(lambda: here.service.tiers.work.num_tasks == 0, "the end of the fetch")
        assert not len(here.service.tiers.slots.lent(Tier.HOST))
        assert here.service.stats().host.free == 90
