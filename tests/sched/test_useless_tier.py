"""A tier that answers in time and is of no use costs requests no more than a small share in all."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish
from tests.sched.test_fetch import filled
from tests.simulated import simulate, simulated, simulated_world
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy

THROUGH = WritePolicy.WRITE_THROUGH
COMPUTE_S = 1.0  # for each of the prompts
REQUESTS = 400


async def waits(here: World, prompt: list[int]) -> float:
    """How long an admission takes that finds nothing: seconds."""
    time = asyncio.get_running_loop().time
    began = time()
    request = await here.admit(prompt)
    took = time() - began
    assert request.cached_tokens == 0
    here.service.scheduler.end(request)
    return took


async def waits_for_nothing() -> float:
    async with simulated_world(device_blocks=32, host_blocks=32) as here:
        here.service.note_prefill(40, COMPUTE_S)
        here.the_store.delay_s = 0.05  # of each operation, far less than it might be waited for
        waited = 0.0
        for number in range(REQUESTS):
            waited += await waits(here, tokens(40, 100 * number))
        await here.settle()
        return waited


async def waits_for_damage() -> float:
    rules = {"host_write": THROUGH, "storage_write": THROUGH}
    async with simulated_world(device_blocks=32, host_blocks=32, **rules) as here:
        await here.run(tokens(40))
        here.service.note_prefill(40, COMPUTE_S)
        waited = 0.0
        for _ in range(REQUESTS):
            here.service.reset()
            here.the_store.delay_s = 0.05
            here.the_store.flip_next_get(99)
            waited += await waits(here, tokens(40))
            await here.settle()
        return waited


@pytest.mark.parametrize("scene", [waits_for_nothing, waits_for_damage])
def test_a_store_that_answers_in_time_and_brings_nothing_costs_little_in_the_long_run(
    scene: object,
) -> None:
    waited = simulate(scene())  # type: ignore[operator]
    most = REQUESTS * (0.15 * COMPUTE_S + 0.05)
    assert COMPUTE_S < waited <= most, "it is tried at first, and now and then"


@pytest.mark.promise("A store that becomes useful is used again.")
@simulated
async def test_a_store_that_brings_something_after_all_is_used_again() -> None:
    rules = {"host_write": THROUGH, "storage_write": THROUGH}
    async with simulated_world(device_blocks=32, host_blocks=32, **rules) as here:
        here.service.note_prefill(40, COMPUTE_S)
        here.the_store.delay_s = 0.05
        for number in range(100):
            await waits(here, tokens(40, 100 * number + 1000))
        here.the_store.delay_s = 0.0
        await here.run(tokens(40))
        here.the_store.delay_s = 0.05
        found = []
        for _ in range(60):
            here.service.reset()
            found.append((await here.run(tokens(40))).storage_tokens)
        assert found[-10:].count(39) >= 9, "one may be a sample of the engine's speed"
        assert sum(map(bool, found)) > 15


async def test_what_storage_does_not_have_is_not_said_to_have_come_too_late() -> None:
    """Also when the engine has told its speed, and a prompt is computed in a moment."""
    async with world(with_store=True) as here:
        here.service.note_prefill(1000, 1.0)
        request = await here.admit(tokens(40))
        here.service.scheduler.end(request)
        found = here.service.explain(here.prompt(tokens(40)))
        assert (found.reason, found.first_miss) == ("never stored", 0)
        assert here.service.stats().decisions.recompute_late == 0
        await here.settle()


async def test_a_tail_is_shared_by_a_node_that_knows_how_fast_it_computes() -> None:
    async with world(store=await filled(tokens(3))) as here:
        here.service.note_prefill(1000, 1000.0)
        request = await here.admit([*tokens(3), 77, 78])
        assert request.cached_tokens == 3
        await finish(request.gate.all_layers(100.0))
        here.check_kv(request, tokens(3), 3)
        await here.ended(request)
