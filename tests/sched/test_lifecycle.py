"""Pools shrink and grow, caches are emptied, pins expire, all beside running requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.latch import finish, turns, until
from tests.sessions import publish_request
from tests.simulated import simulated, simulated_world
from tests.world import GQA, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    OutOfBlocksError,
    OwnershipError,
    RequestTooLargeError,
    ShuttingDownError,
)
from tierkv.sched import lifecycle, slots

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


async def test_shrinking_evicts_what_can_go_and_growing_gives_it_back() -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        await here.run(tokens(32))
        await here.service.resize(Tier.DEVICE, 3)
        assert here.service.stats().device.capacity == 3
        assert here.service.verify() == []
        with pytest.raises(RequestTooLargeError):
            await here.admit(tokens(16, 100))
        request = await here.admit(tokens(12, 100))
        assert max(request.block_table.tolist()) < 3
        here.service.scheduler.end(request)
        await here.service.resize(Tier.DEVICE, 8)
        await here.run(tokens(32, 200))
        await here.settle()


@pytest.mark.parametrize("tier", Tier)
async def test_a_copy_on_the_other_tier_stays_when_one_shrinks(tier: Tier) -> None:
    async with world(device_blocks=8, host_blocks=8, host_write=WritePolicy.WRITE_THROUGH) as here:
        await here.run(tokens(31))
        await here.service.resize(tier, 2)
        assert here.service.verify() == []
        match = here.service.index.match(here.prompt(tokens(31)))
        assert match.num_blocks == 7
        if tier is Tier.HOST:
            assert match.device_blocks == 7
        await here.service.resize(tier, 8)
        matched = await here.run(tokens(31))  # checks every byte
        assert matched.total_tokens >= 28


async def test_a_reset_forgets_all_but_what_is_held() -> None:
    async with world(device_blocks=16, host_write=WritePolicy.WRITE_THROUGH) as here:
        await here.run(tokens(16))
        held = await here.admit(tokens(8))
        await here.run(tokens(16, 100))
        assert here.service.reset() > 0
        assert here.service.verify() == []
        assert here.service.index.match(here.prompt(tokens(16, 100))).num_blocks == 0
        here.check_kv(held, tokens(8), held.cached_tokens)
        await here.ended(held)
        assert here.service.reset() == 0
        assert here.free_device_blocks == 16


async def test_what_is_forgotten_in_slices_lets_others_have_their_turns_and_keeps_what_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_SLICE", 4)
    async with world(device_blocks=64, host_blocks=64, host_write=THROUGH) as here:
        for number in range(12):
            await here.run(tokens(16, 100 * number))
        num_turns = 0

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        counting = asyncio.ensure_future(count_turns())
        forgetting = asyncio.ensure_future(here.service.forget())
        await turns(2)  # it has begun
        held = await here.admit(tokens(17))
        assert await forgetting == 2 * 4, "what it holds, on both tiers"
        assert num_turns >= 12 // 4
        counting.cancel()
        assert here.service.verify() == []
        await here.prefill(held, tokens(17))
        await here.ended(held)
        assert await here.service.forget() == 0
        stats = here.service.stats()
        assert stats.device.used == stats.host.used == 0


async def test_a_hard_pin_stays_under_pressure_until_it_ends() -> None:
    async with world(device_blocks=6, host_write=NONE) as here:
        await here.run(tokens(8))
        assert here.service.pin("mine", here.prompt(tokens(8)), 1000.0) == 2
        for number in range(4):
            await here.run(tokens(16, 100 * (number + 1)))
        assert here.service.index.match(here.prompt(tokens(8))).device_blocks == 2
        with pytest.raises(OutOfBlocksError):
            here.service.tiers.eviction.acquire(Tier.DEVICE, 5)
        assert here.service.unpin("mine")
        assert not here.service.unpin("mine")
        await here.run(tokens(24, 900))
        assert here.service.index.match(here.prompt(tokens(8))).num_blocks == 0


@pytest.mark.parametrize("is_soft", [True, False])
async def test_a_pin_ends_when_its_time_is_up(is_soft: bool) -> None:
    async with world(device_blocks=6, host_write=NONE) as here:
        await here.run(tokens(8))
        here.service.pin("short", here.prompt(tokens(8)), 1e-9, is_soft=is_soft)
        await here.run(tokens(24, 100))
        assert here.service.index.match(here.prompt(tokens(8))).num_blocks == 0
        with pytest.raises(BadRequestError):
            here.service.pin("never", here.prompt(tokens(8)), 0.0)


@pytest.mark.parametrize("is_soft", [True, False])
@simulated
async def test_a_pin_that_is_replaced_neither_holds_anything_nor_ends_the_one_in_its_place(
    is_soft: bool,
) -> None:
    async with simulated_world(device_blocks=16, host_write=NONE) as here:
        first, second = tokens(16), tokens(16, 100)
        await here.run(first)
        await here.run(second)
        here.service.pin("it", here.prompt(first), 1.0, is_soft=is_soft)
        here.service.pin("it", here.prompt(second), 100.0, is_soft=is_soft)
        await asyncio.sleep(10.0)
        nodes = list(here.service.index.spaces.nodes())
        assert [bool(node.holders or node.soft_pins) for node in nodes].count(True) == 1
        assert here.service.unpin("it"), "the first one's time is not the second one's"
        assert here.service.reset() == 0
        assert here.service.verify() == []


async def test_after_a_reset_what_a_request_holds_is_offered_to_storage_again() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        request = await here.computed(tokens(16))
        await here.settle()
        assert here.service.reset() > 0
        await here.the_store.delete(here.names(tokens(16)))
        here.service.scheduler.end(request)
        await here.run(tokens(16))
        assert await here.the_store.exists(here.names(tokens(16))) == 4


async def test_a_soft_pin_goes_last_but_never_holds_a_request_up() -> None:
    async with world(device_blocks=6, host_write=NONE) as here:
        await here.run(tokens(8))
        here.service.pin("soft", here.prompt(tokens(8)), 1000.0, is_soft=True)
        await here.run(tokens(8, 100))
        await here.run(tokens(8, 200))
        await here.run(tokens(8, 300))
        assert here.service.index.match(here.prompt(tokens(8))).device_blocks == 2
        request = await finish(here.admit(tokens(24, 900)))
        await here.ended(request)


async def test_closing_waits_for_a_store_that_uses_the_slots_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slots, "CLOSING_PATIENCE_S", 0.01)
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(world(with_store=True, fetch_deadline_s=0.3))
        here.the_store.hold_firmly()
        here.service.scheduler.end(await here.admit(list(range(8))))
        assert here.service.tiers.work.num_tasks
        here.service.drain()
        release = here.the_store.release

        async def let_go_once_it_was_said() -> None:
            try:
                await until(
                    lambda: "closing still waits for 1 tasks" in caplog.text, "a word of it"
                )
            finally:
                release()

        here.the_store.release = lambda: None  # type: ignore[method-assign] # leaving calls it
        async with asyncio.TaskGroup() as group:
            group.create_task(let_go_once_it_was_said())
            await stack.aclose()


# Both pools grow and shrink beside requests, past the size they started with; nobody deadlocks.


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
        request = await on.computed(tokens(18), name="one", uses_cache=False)
        await publish_request(on.service, request, "ticket", [1])
        assert await on.the_store.exists(on.names(tokens(18))) == 5
        on.service.scheduler.end(request)
        on.service.unpin("kept")
        await on.run(tokens(63, 200))  # takes the device
        # Every byte that comes back from the host is checked.
        assert (await on.run(tokens(31, 100))).host_tokens == 28


async def test_a_size_without_memory_is_refused_and_says_what_to_do() -> None:
    async with world(device_blocks=8, host_blocks=4) as on:
        for capacity in (0, -1, 9):
            with pytest.raises(ConfigError, match="1 to 8"):
                await on.service.resize(Tier.DEVICE, capacity)
        with pytest.raises(ConfigError, match=r"1 to 4 blocks, not 5.*cache\.host_max_blocks"):
            await on.service.resize(Tier.HOST, 5)
    with pytest.raises(
        ConfigError, match=r"host_max_blocks \(3\) must be at least cache\.host_blocks \(4\)"
    ):
        async with world(host_blocks=4, host_max_blocks=3):
            pass


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


async def test_a_request_for_which_a_shrinking_device_has_too_few_blocks_takes_none() -> None:
    async with world(device_blocks=8, host_write=NONE) as on:
        low = await on.admit(tokens(8))
        middle = await on.admit(tokens(16, 100))
        high = await on.admit(tokens(8, 200))
        assert sorted(middle.block_table.tolist()) == [2, 3, 4, 5]
        waits = asyncio.ensure_future(on.admit(tokens(16, 300)))
        shrinks = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 4))
        await turns(5)
        on.service.scheduler.end(middle)  # two of its blocks stay, for one that wants four
        assert not waits.done()
        assert on.service.verify() == []
        on.service.scheduler.end(low)
        request = await finish(waits)
        on.service.scheduler.end(high)
        await finish(shrinks)
        await on.ended(request)


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
            request = await here.admit([number, *range(size - 1)])
            await service.scheduler.commit(request, request.prompt.tokens)
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
        service.tiers.slots.free(Tier.HOST, host)
        assert len(used) >= 4, "thousands of runs are not one turn's work"
        assert service.stats().device.capacity == 1
        await here.settle()


async def test_runs_that_go_while_others_are_forgotten_in_slices_are_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_SLICE", 1)
    async with world(device_blocks=64, host_blocks=64, host_write=THROUGH) as here:
        for number in range(6):
            await here.run(tokens(16, 100 * number))
            await here.run([*tokens(8, 100 * number), *tokens(8, 1000)])  # cuts it in two
        forgetting = asyncio.ensure_future(here.service.forget())
        await turns(3)
        assert not forgetting.done()
        here.service.reset()
        for number in range(6):
            await here.run([*tokens(4, 100 * number), *tokens(8, 2000)])
        await forgetting
        assert here.service.verify() == []
        here.service.reset()
        stats = here.service.stats()
        assert stats.device.used == stats.host.used == 0
