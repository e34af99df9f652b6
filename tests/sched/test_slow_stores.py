"""A store that is slow, or hangs, keeps no request waiting: not in what it is asked, and not in
what it is given."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from tests.simulated import simulate, simulated, simulated_world
from tests.world import World, tokens
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.cache.node import Tier
from tierkv.errors import OutOfBlocksError
from tierkv.sched.slots import MAX_AT_ONCE_S, STORE_PATIENCE_S

NONE, THROUGH, BACK = WritePolicy.NONE, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK


async def longest_admission(here: World, num_requests: int, num_tokens: int = 16) -> float:
    """In seconds, of requests one after the other; of a device of 16 blocks, 16 tokens are a
    quarter."""
    loop, longest = asyncio.get_running_loop(), 0.0
    for number in range(num_requests):
        ids = tokens(num_tokens, 100 * (number % 20))
        began = loop.time()
        request = await here.admit(ids)
        longest = max(longest, loop.time() - began)
        await request.gate.all_layers(100.0)
        await here.commit(request, ids, request.cached_tokens)
        here.service.scheduler.end(request)
        await asyncio.sleep(0.01)
    return longest


@pytest.mark.parametrize("storage_write", list(WritePolicy))
@pytest.mark.parametrize("host_write", list(WritePolicy))
@simulated
async def test_a_store_slower_than_the_engine_keeps_no_request_waiting_whatever_is_written_when(
    host_write: WritePolicy, storage_write: WritePolicy
) -> None:
    async with simulated_world(
        device_blocks=16, host_blocks=24, host_write=host_write, storage_write=storage_write
    ) as here:
        here.service.note_prefill(1000, 0.01)
        here.the_store.delay_s = 3.0
        assert await longest_admission(here, 40) < STORE_PATIENCE_S + 0.05
        here.the_store.delay_s = 0.0


@pytest.mark.parametrize("storage_write", [THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("num_tokens", [16, 48, 64])
@simulated
async def test_a_store_whose_writes_hang_keeps_a_quarter_of_the_host_and_no_request(
    num_tokens: int, storage_write: WritePolicy
) -> None:
    """Also where each request takes most of the device, or all of it."""
    async with simulated_world(
        device_blocks=16,
        host_blocks=16 if storage_write is WritePolicy.WRITE_BACK else 64,
        host_write=THROUGH,
        storage_write=storage_write,
    ) as here:
        here.service.note_prefill(1000, 0.01)
        here.the_store.hold_writes()
        async with asyncio.timeout(100):
            assert await longest_admission(here, 30, num_tokens) < STORE_PATIENCE_S + 0.05
        assert here.service.tiers.copies.storing.max_in_flight <= 16 * here.layout.block_bytes
        assert here.service.verify() == []
        here.the_store.release()
        await here.settle()


@simulated
async def test_a_host_slot_that_two_writes_read_is_free_after_the_second() -> None:
    """As when a store was attached anew while it was written to the one before."""
    async with simulated_world(device_blocks=16, host_blocks=4) as here:
        tiers = here.service.tiers
        slots = tiers.eviction.acquire(Tier.HOST, 2)
        first, second = slots.copy(), slots[:1].copy()
        tiers.slots.begin_reading(first)
        tiers.slots.begin_reading(second)
        assert len(tiers.slots.free_of(Tier.HOST, slots)) == 0
        waits = asyncio.ensure_future(tiers.work.next_change())
        await asyncio.sleep(0)
        tiers.slots.end_reading(first)
        await asyncio.wait_for(waits, 1)  # for room that there may be now
        assert here.service.stats().host.free == 3
        assert tiers.slots.lent(Tier.HOST).tolist() == second.tolist()
        tiers.slots.end_reading(second)
        assert here.service.stats().host.free == 4


@simulated
async def test_host_slots_that_a_store_reads_are_not_counted_on_and_others_go_instead() -> None:
    rules = {"host_write": THROUGH, "storage_write": NONE}
    async with simulated_world(device_blocks=16, host_blocks=4, **rules) as here:
        await here.run(tokens(16))
        tiers, index = here.service.tiers, here.service.index
        read = index.slots(Tier.HOST, index.match(here.prompt(tokens(16))).node, 2, 4)
        tiers.slots.begin_reading(read)
        assert tiers.eviction.available(Tier.HOST) == 2
        with pytest.raises(OutOfBlocksError):
            tiers.eviction.acquire(Tier.HOST, 3)
        assert index.spaces.root.space.used == [4, 4], "all or nothing"
        slots = tiers.eviction.acquire(Tier.HOST, 1)
        assert not set(slots.tolist()) & set(read.tolist())
        tiers.slots.end_reading(read)
        tiers.slots.free(Tier.HOST, slots)
        assert here.service.stats().host.free == 4 - index.spaces.root.space.used[1]
        assert here.service.verify() == []


async def computed(here: World, ids: list[int]) -> None:
    """A whole request, which waits for no copy of its own."""
    request = await here.computed(ids, uses_cache=False)
    here.service.scheduler.end(request)
    await asyncio.sleep(0.1)


@simulated
async def test_what_was_evicted_while_the_store_had_it_is_told_as_stored() -> None:
    async with simulated_world(
        device_blocks=16, host_blocks=16, host_write=THROUGH, storage_write=THROUGH
    ) as here:
        with here.service.events.subscribe() as events:
            here.the_store.hold_writes()
            await computed(here, tokens(10))
            here.service.reset()
            await computed(here, tokens(6) + [9] * 12)
            here.the_store.release()
            await here.settle()
            told: set[tuple[int, bytes]] = set()
            for event in events.drain():
                if event.tier == "storage":
                    told.update(enumerate(event.digests, event.start))
        assert set(enumerate(key.digest for key in here.keys(tokens(10)))) <= told
        assert set(enumerate(key.digest for key in here.keys(tokens(6) + [9] * 12))) <= told


async def total_time(here: World, *, uses_cache: bool) -> float:
    """Seconds of 60 requests of up to half of the device, four at a time, from arrival to end."""
    loop, took, rng = asyncio.get_running_loop(), 0.0, random.Random(3)
    work = iter([(number, rng.randrange(16, 120)) for number in range(60)])

    async def one_after_another() -> None:
        nonlocal took
        for number, size in work:
            ids = tokens(size, 1000 * number)
            began = loop.time()
            request = await here.admit(ids, uses_cache=uses_cache)
            await asyncio.sleep(size / 1000)
            took += loop.time() - began
            await here.service.scheduler.commit(request, pack(ids))
            here.service.scheduler.end(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(one_after_another())
    return took


@pytest.mark.parametrize(
    ("rule", "host_blocks", "delay_s", "share", "more_s"),
    [
        pytest.param(THROUGH, 256, 1.0, 1.06, 0.0, id="a store slower than the engine"),
        # Never late, and always in the way; four requests wait at once.
        pytest.param(BACK, 64, 0.05, 1.1, 4 * MAX_AT_ONCE_S, id="write-back to a faster store"),
    ],
)
def test_a_full_device_goes_at_the_speed_of_the_engine_whatever_the_store_takes(
    rule: WritePolicy, host_blocks: int, delay_s: float, share: float, more_s: float
) -> None:
    async def scene(rule: WritePolicy, *, uses_cache: bool) -> float:
        async with simulated_world(
            device_blocks=64, host_blocks=host_blocks, host_write=rule, storage_write=rule
        ) as here:
            here.service.note_prefill(1000, 1.0)
            here.the_store.delay_s = delay_s
            took = await total_time(here, uses_cache=uses_cache)
            here.the_store.delay_s = 0.0
            return took

    without = simulate(scene(NONE, uses_cache=False))
    assert simulate(scene(rule, uses_cache=True)) < without * share + more_s


@simulated
async def test_blocks_that_a_store_is_slow_to_take_leave_the_device_at_once() -> None:
    async with simulated_world(
        device_blocks=16, host_blocks=16, host_write=NONE, storage_write=THROUGH
    ) as here:
        for base, delay_s in ((0, 1.0), (100, 100.0)):
            here.the_store.delay_s = delay_s
            await computed(here, tokens(8, base))
        here.service.note_prefill(1000, 0.01)
        began = asyncio.get_running_loop().time()
        request = await here.admit(tokens(56, 1000), uses_cache=False)
        assert asyncio.get_running_loop().time() - began < 0.1
        here.service.scheduler.end(request)


@simulated
async def test_what_was_evicted_while_it_waited_for_the_store_is_offered_again_later() -> None:
    async with simulated_world(
        device_blocks=16, host_blocks=8, host_write=NONE, storage_write=THROUGH
    ) as here:
        here.service.note_prefill(1000, 0.01)
        here.the_store.hold_writes()
        await longest_admission(here, 12)
        here.the_store.release()
        await here.settle()
        prompts = [tokens(16, 100 * number) for number in range(12)]
        stored = [await here.the_store.exists(here.names(ids)) for ids in prompts]
        assert 0 < stored.count(4) < 12, "some had gone from the host when their turn came"
        for ids in prompts:
            there = np.array(await here.the_store.present(here.names(ids)))
            for node in here.service.index.match(here.prompt(ids)).node.path():
                believed = node.stored_in(0, node.num_blocks)
                assert not (believed & ~there[node.start : node.end]).any(), "it is not there"
        lost = prompts[stored.index(0)]
        await here.run(lost)
        assert await here.the_store.exists(here.names(lost)) == 4
        assert here.service.verify() == []


@simulated
async def test_of_a_host_that_became_smaller_the_store_has_a_quarter_too() -> None:
    async with simulated_world(
        device_blocks=64, host_blocks=64, host_write=NONE, storage_write=THROUGH
    ) as here:
        await here.service.resize(Tier.HOST, 16)
        here.service.note_prefill(1000, 0.01)
        here.the_store.hold_writes()
        async with asyncio.timeout(100):
            assert await longest_admission(here, 30) < 0.05
        assert here.service.tiers.copies.storing.max_in_flight <= 4 * here.layout.block_bytes
        here.the_store.release()
        await here.settle()
