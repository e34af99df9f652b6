"""A device that is emptied or shrunk loses no more than the host has no room for, and with
write_back a host that is shrunk no more than the store does not take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.latch import finish
from tests.simulated import simulate, simulated, simulated_world
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.sched import copies
from tierkv.sched.copies import LEAVING_PATIENCE_S

NONE, THROUGH, BACK = WritePolicy.NONE, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK


async def test_a_sleep_keeps_the_first_blocks_of_a_run_that_the_host_has_not_room_for() -> None:
    async with world(device_blocks=16, host_blocks=6, host_write=NONE) as here:
        await here.run(tokens(40))
        await finish(here.service.sleep())
        assert here.service.index.match(here.prompt(tokens(40))).host_blocks == 6
        await finish(here.service.wake())
        assert (await here.run(tokens(40))).host_tokens == 24  # every byte is checked


async def test_a_shrink_keeps_the_first_blocks_of_a_run_that_the_host_has_not_room_for() -> None:
    async with world(device_blocks=16, host_blocks=6, host_write=NONE) as here:
        await here.run(tokens(40))
        await finish(here.service.resize(Tier.DEVICE, 2))
        await here.settle()
        assert here.service.index.match(here.prompt(tokens(40))).num_blocks == 6


async def test_a_sleep_that_keeps_nothing_forgets_no_copy_that_the_host_has() -> None:
    async with world(device_blocks=16, host_blocks=5, host_write=THROUGH) as here:
        await here.run(tokens(20))
        await here.run(tokens(40))  # its second half finds no room there
        assert here.service.index.match(here.prompt(tokens(40))).device_blocks == 10
        await finish(here.service.sleep(keeps_blocks=False))
        assert here.service.index.match(here.prompt(tokens(40))).host_blocks == 5
        await finish(here.service.wake())
        assert (await here.run(tokens(40))).host_tokens == 20


# A smaller host, and write_back


@asynccontextmanager
async def full_host(rule: WritePolicy = BACK) -> AsyncIterator[World]:
    """Two prompts of 10 blocks that share the first 4 are on the host only, 16 blocks."""
    async with simulated_world(
        device_blocks=16, host_blocks=16, host_write=THROUGH, storage_write=rule
    ) as here:
        await here.run(tokens(40))
        await here.run(tokens(16) + tokens(24, 100))
        await here.service.sleep(keeps_blocks=False)
        await here.service.wake()
        assert here.service.index.spaces.root.space.used == [0, 16]
        assert await num_stored(here) == 0
        yield here


async def num_stored(here: World) -> int:
    names = {*here.names(tokens(40)), *here.names(tokens(16) + tokens(24, 100))}
    found = [await here.the_store.exists([name]) for name in sorted(names)]
    return sum(found)


@simulated
async def test_a_host_that_shrinks_stores_first_what_write_back_promises() -> None:
    async with full_host() as here:
        await here.service.resize(Tier.HOST, 2)
        left = here.service.index.spaces.root.space.used[Tier.HOST]
        assert await num_stored(here) + left >= 16, "nothing is nowhere"
        assert await num_stored(here) >= 14
        await here.service.resize(Tier.HOST, 16)
        here.service.note_prefill(1000, 1000.0)
        assert (await here.run(tokens(40))).total_tokens == 39, "every byte is compared"


def test_a_host_that_shrinks_stores_a_large_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "GROUP_BLOCKS", 3)

    async def scene() -> None:
        async with full_host() as here:
            await here.service.resize(Tier.HOST, 1)
            assert await num_stored(here) >= 15
            assert here.service.tiers.copies.storing.most_in_flight <= 4 * here.layout.block_bytes
            await here.settle()

    simulate(scene())


@simulated
async def test_a_host_that_shrinks_stores_nothing_where_the_rule_does_not_say_so() -> None:
    async with full_host(NONE) as here:
        await here.service.resize(Tier.HOST, 2)
        assert await num_stored(here) == 0


@simulated
async def test_a_host_that_shrinks_stores_what_would_be_nobodys_without_the_blocks_that_go() -> (
    None
):
    async with simulated_world(
        device_blocks=16, host_blocks=16, host_write=THROUGH, storage_write=BACK
    ) as here:
        books = here.service.tiers.slots
        slots = here.service.tiers.eviction.acquire(Tier.HOST, 16)
        low = slots[slots < 8]
        books.lend(Tier.HOST, low)
        books.give(Tier.HOST, slots[slots >= 8])
        await here.run(tokens(32))
        books.unlend(Tier.HOST, low)
        books.give(Tier.HOST, low)
        await here.run(tokens(40))  # the last two where they could stay
        await here.service.sleep(keeps_blocks=False)
        await here.service.resize(Tier.HOST, 8)
        assert await here.the_store.exists(here.names(tokens(40))) == 10


@simulated
async def test_a_store_that_hangs_holds_no_shrink_up() -> None:
    async with full_host() as here:
        here.the_store.hold_writes()
        began = asyncio.get_running_loop().time()
        await here.service.resize(Tier.HOST, 2)
        assert asyncio.get_running_loop().time() - began < LEAVING_PATIENCE_S + 0.1
        assert here.service.stats().host.capacity == 2
        here.the_store.release()
        await here.settle()
        assert await num_stored(here) == 0


@simulated
async def test_a_shrink_waits_for_a_slow_store_as_long_as_that_takes_something() -> None:
    async with full_host() as here:
        here.the_store.delay_s = 0.8 * LEAVING_PATIENCE_S
        await here.service.resize(Tier.HOST, 2)
        here.the_store.delay_s = 0.0
        assert await num_stored(here) >= 14


@simulated
async def test_a_store_that_refuses_holds_no_shrink_up() -> None:
    async with full_host() as here:
        here.the_store.fail_next(1000)
        began = asyncio.get_running_loop().time()
        await here.service.resize(Tier.HOST, 2)
        assert asyncio.get_running_loop().time() - began < 0.1
        here.the_store.fail_next(0)
        await here.settle()


@simulated
async def test_what_stays_after_a_shrink_was_cancelled_is_stored_when_it_goes() -> None:
    async with full_host() as here:
        here.the_store.hold_writes()
        shrinks = asyncio.ensure_future(here.service.resize(Tier.HOST, 2))
        await here.the_store.until_held(1)
        shrinks.cancel()
        await asyncio.wait([shrinks])
        await asyncio.sleep(2 * LEAVING_PATIENCE_S)
        await here.settle()
        assert await num_stored(here) == 0
        here.the_store.release()
        here.the_store.delay_s = 0.5 * LEAVING_PATIENCE_S
        shrinks = asyncio.ensure_future(here.service.resize(Tier.HOST, 2))
        await asyncio.sleep(0.1)
        shrinks.cancel()
        await here.settle()
        here.the_store.delay_s = 0.0
        assert await num_stored(here) <= 4, "no more than the store had in hand"
        left = here.service.index.spaces.root.space.used[Tier.HOST]
        assert left == 16
        await here.service.resize(Tier.HOST, 2)
        assert await num_stored(here) >= 14
