"""A node gives its device's memory back and takes it again; what the host can keep is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.latch import finish, turns, until
from tests.simulated import simulate, simulated, simulated_world
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.errors import ConfigError, OwnershipError
from tierkv.gpu.protocol import Direction
from tierkv.sched import copies
from tierkv.sched.copies import LEAVING_PATIENCE_S
from tierkv.sched.request import Request

NONE, THROUGH, BACK = WritePolicy.NONE, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK


async def test_what_is_only_on_the_device_survives_a_sleep_on_the_host() -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        await here.run(tokens(18))
        before = here.service.planes
        await finish(here.service.sleep())
        assert here.service.is_asleep
        assert here.service.verify() == []
        match = here.service.index.match(here.prompt(tokens(18)))
        assert (match.device_blocks, match.host_blocks) == (0, 4)
        await finish(here.service.wake())
        assert here.service.planes is not before
        matched = await here.run(tokens(18))  # checks every byte
        assert (matched.host_tokens, matched.total_tokens) == (17, 17)


async def test_copies_that_fail_on_the_way_to_sleep_are_not_tried_for_ever() -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        await here.run(tokens(16))
        here.latch.fail_next(Direction.OFFLOAD, 100)
        await finish(here.service.sleep())
        assert here.service.index.match(here.prompt(tokens(16))).num_blocks == 0
        here.latch.fail_next(Direction.OFFLOAD, 0)
        await finish(here.service.wake())
        await here.run(tokens(16))


async def test_requests_wait_for_the_wake_and_running_ones_for_the_sleep() -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        running = await here.admit(tokens(8))
        async with asyncio.TaskGroup() as group:
            sleeps = group.create_task(here.service.sleep())
            await turns(20)
            assert not sleeps.done()
            await here.prefill(running, tokens(8))
            here.service.scheduler.end(running)
            await until(sleeps.done)
            waits = group.create_task(here.admit(tokens(8)))
            await turns(20)
            assert not waits.done()
            await finish(here.service.wake())
            request = await finish(waits)
        await here.prefill(request, tokens(8))
        await here.ended(request)


@pytest.mark.parametrize("count", [4, 16])
async def test_a_wake_may_take_another_number_of_blocks(count: int) -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        await here.run(tokens(12))
        await finish(here.service.sleep())
        await finish(here.service.wake(count))
        assert here.service.stats().device.capacity == count
        assert (await here.run(tokens(12))).total_tokens == 11
        await here.run(tokens(4 * count, 100))
        with pytest.raises(ConfigError, match="put the device to sleep"):
            await here.service.resize(Tier.DEVICE, count + 1)


@pytest.mark.parametrize("count", [0, -5])
async def test_a_wake_with_no_blocks_is_refused_and_the_device_sleeps_on(count: int) -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        await finish(here.service.sleep())
        with pytest.raises(ConfigError, match="at least 1 block"):
            await here.service.wake(count)
        assert here.service.is_asleep
        await finish(here.service.wake())
        await here.run(tokens(16))
        await here.settle()


async def test_a_node_that_was_paused_before_it_slept_is_paused_when_it_wakes() -> None:
    async with world(host_write=NONE) as here:
        here.service.pause()
        await finish(here.service.sleep())
        await finish(here.service.wake())
        waits = asyncio.ensure_future(here.admit(tokens(8)))
        await turns(20)
        assert not waits.done()
        here.service.unpause()
        await here.ended(await finish(waits))


async def test_an_unpause_admits_nobody_while_the_device_is_being_emptied() -> None:
    async with world(host_write=NONE) as here:
        running = await here.admit(tokens(8))
        sleeps = asyncio.ensure_future(here.service.sleep())
        await turns(20)
        here.service.unpause()
        waits = asyncio.ensure_future(here.admit(tokens(8, 100)))
        await turns(20)
        assert not waits.done(), "the sleep would wait for it too"
        here.service.scheduler.end(running)
        await finish(sleeps)
        await finish(here.service.wake())
        await here.ended(await finish(waits))


async def test_sleeping_twice_or_waking_when_awake_is_refused() -> None:
    async with world() as here:
        with pytest.raises(OwnershipError):
            await here.service.wake()
        await finish(here.service.sleep())
        with pytest.raises(OwnershipError):
            await here.service.sleep()
        with pytest.raises(OwnershipError):
            await here.service.resize(Tier.DEVICE, 2)


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
@pytest.mark.parametrize("what", ["sleep", "shrink"])
async def test_who_waits_while_nobody_is_admitted_holds_up_neither_a_sleep_nor_a_shrink(
    what: str, comes: str
) -> None:
    """With a store, what a prompt has here is held for its request until that is admitted."""
    async with world(with_store=True, device_blocks=8, host_write=NONE) as here:
        await here.run(tokens(16))
        running = await here.admit(tokens(16, 100))
        here.service.pause()

        async def comes_now() -> asyncio.Future[Request]:
            waits = asyncio.ensure_future(here.admit(tokens(16), name="waits"))
            await until(lambda: here.service.scheduler.num_waiting == 1)
            return waits

        before = await comes_now() if comes == "before" else None
        work = here.service.sleep() if what == "sleep" else here.service.resize(Tier.DEVICE, 4)
        empties = asyncio.ensure_future(work)
        await turns(5)
        waits = before or await comes_now()
        here.service.scheduler.end(running)
        await finish(empties)
        if what == "sleep":
            await finish(here.service.wake())
        here.service.unpause()
        request = await finish(waits)
        await here.prefill(request, tokens(16))  # checks every byte
        assert request.cached_tokens >= 12
        await here.ended(request)


# A smaller device or host, and what has no room there


@pytest.mark.parametrize("what", ["sleep", "shrink"])
async def test_the_first_blocks_of_a_run_stay_where_the_host_has_not_room_for_all(
    what: str,
) -> None:
    async with world(device_blocks=16, host_blocks=6, host_write=NONE) as here:
        await here.run(tokens(40))
        if what == "sleep":
            await finish(here.service.sleep())
            await finish(here.service.wake())
        else:
            await finish(here.service.resize(Tier.DEVICE, 2))
            await here.settle()
            await finish(here.service.resize(Tier.DEVICE, 16))
        assert here.service.index.match(here.prompt(tokens(40))).num_blocks == 6
        assert (await here.run(tokens(40))).total_tokens == 24  # every byte is checked


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


@pytest.mark.parametrize("delay_s", [0.0, 0.8 * LEAVING_PATIENCE_S])
@simulated
async def test_a_host_that_shrinks_stores_first_what_write_back_promises(delay_s: float) -> None:
    """It waits for a slow store as long as that takes something."""
    async with full_host() as here:
        here.the_store.delay_s = delay_s
        await here.service.resize(Tier.HOST, 2)
        here.the_store.delay_s = 0.0
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
            assert here.service.tiers.copies.storing.max_in_flight <= 4 * here.layout.block_bytes
            await here.settle()

    simulate(scene())


@simulated
async def test_a_host_that_shrinks_stores_nothing_where_the_rule_does_not_say_so() -> None:
    async with full_host(NONE) as here:
        await here.service.resize(Tier.HOST, 2)
        assert await num_stored(here) == 0


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
@simulated
async def test_a_store_that_takes_nothing_holds_no_shrink_up(fault: str) -> None:
    async with full_host() as here:
        if fault == "hangs":
            here.the_store.hold_writes()
        else:
            here.the_store.fail_next(1000)
        began = asyncio.get_running_loop().time()
        await here.service.resize(Tier.HOST, 2)
        most_s = LEAVING_PATIENCE_S if fault == "hangs" else 0.0
        assert asyncio.get_running_loop().time() - began < most_s + 0.1
        assert here.service.stats().host.capacity == 2
        here.the_store.fail_next(0)
        here.the_store.release()
        await here.settle()
        assert await num_stored(here) == 0


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
        books.free(Tier.HOST, slots[slots >= 8])
        await here.run(tokens(32))
        books.unlend(Tier.HOST, low)
        books.free(Tier.HOST, low)
        await here.run(tokens(40))  # the last two where they could stay
        await here.service.sleep(keeps_blocks=False)
        await here.service.resize(Tier.HOST, 8)
        assert await here.the_store.exists(here.names(tokens(40))) == 10
