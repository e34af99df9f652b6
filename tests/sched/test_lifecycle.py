"""Pools shrink and grow, caches are emptied, pins expire, all beside running requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.latch import finish, turns, until
from tests.simulated import simulated, simulated_world
from tests.world import tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.errors import BadRequestError, ConfigError, OutOfBlocksError, RequestTooLargeError
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


@pytest.mark.parametrize("capacity", [0, -1, 9])
async def test_a_size_there_is_no_memory_for_is_refused(capacity: int) -> None:
    async with world(device_blocks=8) as here:
        with pytest.raises(ConfigError, match="1 to 8"):
            await here.service.resize(Tier.DEVICE, capacity)


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


async def test_forgetting_that_is_cancelled_leaves_whole_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_SLICE", 2)
    async with world(device_blocks=64, host_write=NONE) as here:
        for number in range(8):
            await here.run(tokens(16, 100 * number))
        forgetting = asyncio.ensure_future(here.service.forget())
        await turns(2)
        forgetting.cancel()
        await asyncio.wait([forgetting])
        await here.settle()
        found = {
            here.service.index.match(here.prompt(tokens(16, 100 * number))).num_blocks
            for number in range(8)
        }
        assert found == {0, 4}


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
        request = await here.admit(tokens(16))
        await here.prefill(request, tokens(16))
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
