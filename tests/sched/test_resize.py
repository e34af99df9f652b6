"""Both pools grow and shrink beside requests, past the size they started with; nobody deadlocks."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns
from tests.sessions import begin_request, publish_request
from tests.world import GQA, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.errors import ConfigError, OwnershipError, RequestTooLargeError, ShuttingDownError

THROUGH = WritePolicy.WRITE_THROUGH


async def test_the_host_grows_beyond_its_start_and_keeps_what_it_has() -> None:
    async with world(device_blocks=8, host_blocks=4, host_max_blocks=24, host_write=THROUGH) as on:
        await on.run(tokens(15))
        await on.service.resize(Tier.HOST, 24)
        assert on.service.stats().host.capacity == 24
        for base in (100, 200, 300):  # of which the device keeps no two
            await on.run(tokens(31, base))
        for base in (200, 300):
            matched = await on.run(tokens(31, base))  # every byte is checked
            assert matched.total_tokens >= 28
        assert on.service.tiers.slots.pools[Tier.HOST].num_free < 24 - 4, (
            "slots beyond the start are used"
        )
        await on.service.resize(Tier.HOST, 2)
        assert on.service.stats().host.capacity == 2
        await on.run(tokens(31, 300))
        await on.settle()


async def test_what_is_published_never_passes_through_slots_of_the_cache() -> None:
    async with world(
        with_store=True, device_blocks=16, host_blocks=4, host_max_blocks=8, host_after_hits=1
    ) as on:
        await on.service.resize(Tier.HOST, 8)
        for _ in range(2):
            await on.run(tokens(31, 100))
        on.service.pin("kept", on.prompt(tokens(31, 100)), 1000.0)
        assert on.service.stats().host.free == 1  # so what is published now finds no room there
        request = await on.admit(tokens(18), name="one", uses_cache=False)
        await on.prefill(request, tokens(18))
        await publish_request(on.service, request, "ticket", [1])
        assert await on.the_store.exists(on.names(tokens(18))) == 5
        on.service.scheduler.end(request)
        on.service.unpin("kept")
        await on.run(tokens(63, 200))  # takes the device
        # Every byte that comes back from the host is checked.
        assert (await on.run(tokens(31, 100))).host_tokens == 28


async def test_a_host_size_without_memory_is_refused_and_says_what_to_do() -> None:
    async with world(host_blocks=4) as on:
        with pytest.raises(ConfigError, match=r"1 to 4 blocks, not 5.*cache\.host_max_blocks"):
            await on.service.resize(Tier.HOST, 5)
    with pytest.raises(
        ConfigError, match=r"host_max_blocks \(3\) must be at least cache\.host_blocks \(4\)"
    ):
        async with world(host_blocks=4, host_max_blocks=3):
            pass


async def test_a_second_resize_does_not_wait_for_slots_that_the_first_holds() -> None:
    second = 6
    async with world(device_blocks=8) as on:
        request = await on.admit(tokens(31))
        first = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 4))
        await turns(5)
        with pytest.raises(OwnershipError, match="being resized"):
            await finish(on.service.resize(Tier.DEVICE, second))
        await on.service.resize(Tier.HOST, 30)  # another tier is another matter
        on.service.scheduler.end(request)
        await finish(first)
        assert on.service.stats().device.capacity == 4
        await on.service.resize(Tier.DEVICE, second)
        assert on.service.stats().device.capacity == second
        await on.settle()


async def test_a_sleep_and_a_shrink_do_not_wait_for_each_other() -> None:
    async with world(device_blocks=8) as on:
        request = await on.admit(tokens(31))
        shrinks = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 4))
        await turns(5)
        with pytest.raises(OwnershipError, match="being resized"):
            await finish(on.service.sleep())
        assert not on.service.scheduler.is_paused
        on.service.scheduler.end(request)
        await finish(shrinks)

        request = await on.admit(tokens(15))
        sleeps = asyncio.ensure_future(on.service.sleep())
        await turns(5)
        with pytest.raises(OwnershipError, match="being resized, emptied or refilled"):
            await finish(on.service.resize(Tier.DEVICE, 2))
        on.service.scheduler.end(request)
        await finish(sleeps)
        await on.service.resize(Tier.HOST, 16)
        await on.service.wake(8)
        await on.run(tokens(31))
        await on.settle()


async def test_a_drain_in_the_middle_of_a_shrink_lets_both_end() -> None:
    async with world(device_blocks=8) as on:
        request = await on.admit(tokens(31))
        waiting = asyncio.ensure_future(on.admit(tokens(31, 100)))
        shrinks = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 4))
        await turns(5)
        on.service.drain()
        with pytest.raises(ShuttingDownError):
            await finish(waiting)
        await on.prefill(request, tokens(31))
        on.service.scheduler.end(request)
        await finish(shrinks)
        assert on.service.stats().device.capacity == 4
        await on.settle()


async def test_who_waits_for_room_does_not_get_the_slots_that_a_shrink_has_freed() -> None:
    async with world(device_blocks=8, host_write=WritePolicy.NONE) as on:
        first, second = await on.admit(tokens(8)), await on.admit(tokens(16, 100))
        shrinks = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 5))
        await turns(5)
        waits = asyncio.ensure_future(on.admit(tokens(20, 200)))  # 5 blocks
        await turns(5)
        on.service.scheduler.end(
            second
        )  # 4 are free, and then, for a moment, the shrink's 3 as well
        await finish(shrinks)
        assert on.service.stats().device.capacity == 5
        on.service.scheduler.end(first)
        on.service.scheduler.end(await finish(waits))
        await on.settle()


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_shrink_does_not_wait_until_nobody_is_in_line(
    tier: Tier, *, is_cached: bool
) -> None:
    async def client(base: int) -> None:
        request = await on.admit(tokens(16, base))  # 4 blocks
        if is_cached:
            await on.prefill(request, tokens(16, base))
        await turns(5)
        on.service.scheduler.end(request)

    async with world(device_blocks=8, host_blocks=8, host_write=THROUGH) as on:
        holding = [await on.admit(tokens(16, base)) for base in (100, 200)]
        async with asyncio.TaskGroup() as group:
            for base in range(1000, 4000, 100):
                group.create_task(client(base))
            await turns(5)
            shrinks = group.create_task(on.service.resize(tier, 4))
            await turns(5)
            for request in holding:
                on.service.scheduler.end(request)
            await finish(shrinks)
            assert on.service.scheduler.num_waiting, "else it had all the time of the world"
            assert on.service.verify() == []
        assert on.service.stats().device.capacity == (4 if tier is Tier.DEVICE else 8)
        await on.settle()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_request_that_a_shrink_leaves_no_room_for_takes_nothing_with_it(
    *, is_cancelled: bool
) -> None:
    async with world(device_blocks=8, host_write=WritePolicy.NONE) as on:
        first, second = await on.admit(tokens(12)), await on.admit(tokens(16, 100))
        shrinks = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 4))
        await turns(5)
        waits = asyncio.ensure_future(on.admit(tokens(20, 200)))  # 5 blocks
        on.service.scheduler.end(first)
        await turns(5)
        assert not waits.done()
        assert on.service.verify() == []
        if is_cancelled:
            shrinks.cancel()
            on.service.scheduler.end(second)
            on.service.scheduler.end(await finish(waits))
            assert on.service.stats().device.free == 8
        else:
            on.service.scheduler.end(second)
            await finish(shrinks)
            with pytest.raises(RequestTooLargeError):
                await finish(waits)
            assert on.service.stats().device.free == 4
        await on.settle()


async def test_of_two_wakes_at_once_one_is_refused_and_takes_no_memory() -> None:
    async with world(device_blocks=8) as on:
        await on.service.sleep()
        first = asyncio.ensure_future(on.service.wake(8))
        await turns(1)
        with pytest.raises(OwnershipError, match="filled"):
            await on.service.wake(16)
        await finish(first)
        assert on.service.stats().device.capacity == 8
        assert on.service.planes.num_blocks == 8
        await on.run(tokens(31))
        await on.settle()


async def test_a_shrink_of_a_large_cache_lets_others_go_on_and_misses_nothing_meanwhile() -> None:
    async with world(device_blocks=4096, host_blocks=16, host_write=WritePolicy.NONE) as here:
        service, size = here.service, GQA.block_size
        for number in range(4000):
            prompt = here.prompt([number, *range(size - 1)])
            request = await begin_request(service, str(number), prompt, max_new_tokens=0)
            await service.scheduler.commit(request, prompt.tokens)
            service.scheduler.end(request)
        host = service.tiers.eviction.acquire(Tier.HOST, 16)  # no copy ends meanwhile
        service.tiers.slots.lend(Tier.HOST, host)
        newest = here.prompt([3999, *range(size - 1)])  # is looked at first
        assert service.pin("newest", newest, 1000.0) == 1
        shrinks = asyncio.ensure_future(service.resize(Tier.DEVICE, 1))
        await turns(1)
        used = [service.stats().device.used]
        service.unpin("newest")  # after it was looked at, and before all were
        while not shrinks.done():
            await turns(1)
            used.append(service.stats().device.used)
            assert len(used) < 100, "nobody tells it again"
        service.tiers.slots.unlend(Tier.HOST, host)
        service.tiers.slots.give(Tier.HOST, host)
        assert len(used) >= 4, "thousands of runs are not one turn's work"
        assert service.stats().device.capacity == 1
        await here.settle()
