"""A store that is slow, or hangs, keeps no request waiting: not in what it is asked, and not in
what it is given."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulated import simulate, simulated_world
from tests.world import World
from tierkv.cache.node import Tier
from tierkv.cache.tokens import pack
from tierkv.cache.write_policy import WritePolicy
from tierkv.sched.books import STORE_PATIENCE_S

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


def tokens(count: int, base: int = 0) -> list[int]:
    return list(range(base, base + count))


async def longest_admission(here: World, num_requests: int) -> float:
    """In seconds, of requests one after the other, each of a quarter of the device."""
    loop, longest = asyncio.get_running_loop(), 0.0
    for number in range(num_requests):
        ids = tokens(16, 100 * (number % 20))
        began = loop.time()
        request = await here.service.admit(str(number), here.prompt(ids), max_new_tokens=0)
        longest = max(longest, loop.time() - began)
        await request.gate.all_layers(20.0)
        here.compute(request, ids, request.cached_tokens)
        await here.service.commit(request, pack(ids))
        here.service.end(request)
        await asyncio.sleep(0.01)
    return longest


@pytest.mark.parametrize("storage_write", list(WritePolicy))
@pytest.mark.parametrize("host_write", list(WritePolicy))
def test_a_store_slower_than_the_engine_keeps_no_request_waiting_whatever_is_written_when(
    host_write: WritePolicy, storage_write: WritePolicy
) -> None:
    async def scene() -> None:
        async with simulated_world(
            random.Random(1),
            device_blocks=16,
            host_blocks=24,
            host_write=host_write,
            storage_write=storage_write,
        ) as here:
            here.service.note_prefill(1000, 0.01)
            here.the_store.delay_s = 3.0
            assert await longest_admission(here, 40) < STORE_PATIENCE_S + 0.05
            here.the_store.delay_s = 0.0

    simulate(scene())


def test_a_store_whose_writes_hang_keeps_a_quarter_of_the_device_and_no_request() -> None:
    async def scene() -> None:
        async with simulated_world(
            random.Random(1),
            device_blocks=16,
            host_blocks=64,
            host_write=NONE,
            storage_write=THROUGH,
        ) as here:
            here.service.note_prefill(1000, 0.01)
            here.the_store.hold_writes()
            async with asyncio.timeout(100):
                assert await longest_admission(here, 30) < 0.05
            assert here.service.tiers.storing.most_in_flight <= 4 * here.layout.block_bytes
            here.the_store.release()

    simulate(scene())


@pytest.mark.parametrize("by", ["resize", "sleep"])
def test_of_a_device_that_became_smaller_the_store_has_a_quarter_too(by: str) -> None:
    async def scene() -> None:
        async with simulated_world(
            random.Random(1),
            device_blocks=64,
            host_blocks=64,
            host_write=NONE,
            storage_write=THROUGH,
        ) as here:
            if by == "resize":
                await here.service.resize(Tier.DEVICE, 16)
            else:
                await here.service.sleep()
                await here.service.wake(16)
            here.service.note_prefill(1000, 0.01)
            here.the_store.hold_writes()
            async with asyncio.timeout(100):
                assert await longest_admission(here, 30) < 0.05
            assert here.service.tiers.storing.most_in_flight <= 4 * here.layout.block_bytes
            here.the_store.release()
            await here.settle()

    simulate(scene())


def test_a_write_that_has_ended_makes_room_though_another_one_goes_on() -> None:
    async def scene() -> None:
        async with simulated_world(
            random.Random(1),
            device_blocks=16,
            host_blocks=16,
            host_write=NONE,
            storage_write=THROUGH,
        ) as here:
            for base, delay_s in ((0, 1.0), (100, 100.0)):
                here.the_store.delay_s = delay_s
                request = await here.admit(tokens(8, base), uses_cache=False)
                await here.prefill(request, tokens(8, base))
                here.service.end(request)
                await asyncio.sleep(0.1)
            here.service.note_prefill(1000, 0.01)
            began = asyncio.get_running_loop().time()
            request = await here.admit(tokens(56, 1000), uses_cache=False)
            assert 0.5 < asyncio.get_running_loop().time() - began < 1.0
            here.service.end(request)

    simulate(scene())


def test_what_was_evicted_while_it_waited_for_the_store_is_offered_again_when_it_comes_back() -> (
    None
):
    async def scene() -> None:
        async with simulated_world(
            random.Random(1),
            device_blocks=16,
            host_blocks=8,
            host_write=NONE,
            storage_write=THROUGH,
        ) as here:
            here.service.note_prefill(1000, 0.01)
            here.the_store.hold_writes()
            await longest_admission(here, 12)
            here.the_store.release()
            await here.settle()
            prompts = [tokens(16, 100 * number) for number in range(12)]
            stored = [await here.the_store.exists(here.names(ids)) for ids in prompts]
            assert 0 < stored.count(4) < 12, "some had gone from the host when their turn came"
            lost = prompts[stored.index(0)]
            await here.run(lost)
            assert await here.the_store.exists(here.names(lost)) == 4
            assert here.service.verify() == []

    simulate(scene())


def test_what_left_the_host_before_its_turn_at_the_store_is_not_believed_to_be_stored() -> None:
    async def scene() -> None:
        async with simulated_world(
            random.Random(1),
            device_blocks=16,
            host_blocks=8,
            host_write=NONE,
            storage_write=THROUGH,
        ) as here:
            here.service.note_prefill(1000, 0.01)
            here.the_store.hold_writes()
            await longest_admission(here, 12)
            here.the_store.release()
            await here.settle()
            for number in range(12):
                ids = tokens(16, 100 * number)
                match = here.service.index.match(here.prompt(ids))
                for node in match.node.path():
                    names = here.names(ids)[node.start : node.end]
                    believed = node.stored_in(0, node.num_blocks).tolist()
                    there = [bool(await here.the_store.exists([name])) for name in names]
                    assert not any(b and not t for b, t in zip(believed, there, strict=True))

    simulate(scene())
