"""Of fetching and computing a node does what is better, whatever the delay of its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.latch import until
from tests.simulated import simulate, simulated, simulated_world
from tests.world import World
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.sched.worth import MOST_IN_VAIN, SHARE, FetchPolicy

THROUGH = WritePolicy.WRITE_THROUGH
NUM_TOKENS, COMPUTE_S = 240, 0.32  # two groups of blocks
FIRST, ALL = 10, 70  # requests until a node has learnt; and with those that are counted
# A way is as good as the better one if it takes so much of its time, and so many seconds, more.
SHARE_MORE, MORE_S = 1.1, 0.02
DELAYS = (0.0, 0.06, 0.09, 0.15, 0.17, 0.2, 0.6)


def prompt_of(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + NUM_TOKENS))


@asynccontextmanager
async def filled(policy: FetchPolicy, **settings: Any) -> AsyncIterator[World]:
    """A node whose store has every prompt, and which has none and knows nothing."""
    async with simulated_world(
        device_blocks=128,
        host_blocks=256,
        host_write=THROUGH,
        storage_write=THROUGH,
        fetch_policy=policy,
        **settings,
    ) as here:
        for number in range(ALL):
            request = await here.admit(prompt_of(number), uses_cache=False)
            await here.service.commit(request, pack(prompt_of(number)))
            here.service.end(request)
            await until(lambda: here.service.tiers.work.num_tasks == 0, "an idle node")
        here.service.reset()
        yield here


async def answers(here: World, number: int, *, tells: bool) -> float:
    """How long a request takes until all of its prompt is committed: seconds."""
    loop, prompt = asyncio.get_running_loop(), prompt_of(number)
    began = loop.time()
    request = await here.admit(prompt)
    await request.gate.all_layers(20.0)
    rest = NUM_TOKENS - request.cached_tokens
    compute_s = COMPUTE_S * rest / NUM_TOKENS
    await asyncio.sleep(compute_s)
    if tells and rest:
        here.service.note_prefill(rest, compute_s)
    await here.service.commit(request, pack(prompt))
    took_s = loop.time() - began
    here.service.end(request)
    return took_s


async def takes(policy: FetchPolicy, delay_s: float, *, tells: bool) -> list[float]:
    async with filled(policy) as here:
        here.the_store.delay_s = delay_s
        took = [await answers(here, number, tells=tells) for number in range(ALL)]
        here.the_store.delay_s = 0.0
        return took


@pytest.mark.parametrize("tells", [True, False], ids=["told", "observed"])
@pytest.mark.parametrize("delay_s", DELAYS)
def test_a_node_takes_the_better_way_whatever_the_delay_of_its_store(
    delay_s: float, tells: bool
) -> None:
    [fetch_s] = simulate(takes_whole(delay_s))
    best_s = min(fetch_s, COMPUTE_S)
    took = simulate(takes(FetchPolicy.BEST_EFFORT, delay_s, tells=tells))
    assert sum(took[FIRST:]) <= (ALL - FIRST) * (SHARE_MORE * best_s + MORE_S)
    lost_s = sum(took) - ALL * COMPUTE_S
    assert lost_s <= SHARE * ALL * COMPUTE_S + (MOST_IN_VAIN + 2) * COMPUTE_S


async def takes_whole(delay_s: float) -> list[float]:
    """What a fetch takes that is waited for whatever it takes."""
    async with filled(FetchPolicy.WAIT_COMPLETE, fetch_deadline_s=60.0) as here:
        here.the_store.delay_s = delay_s
        took = await answers(here, 0, tells=True)
        here.the_store.delay_s = 0.0
        return [took]


def test_a_node_learns_that_its_store_has_become_slow_or_fast() -> None:
    async def scene() -> list[list[float]]:
        found = []
        async with filled(FetchPolicy.BEST_EFFORT) as here:
            for delay_s in (0.0, 0.6, 0.03):
                here.the_store.delay_s = delay_s
                here.service.reset()
                found.append([await answers(here, number, tells=True) for number in range(ALL)])
            here.the_store.delay_s = 0.0
        return found

    fast, slow, fast_again = simulate(scene())
    assert sum(fast[1:]) < 0.1 * COMPUTE_S * ALL
    assert sum(slow) <= (ALL + 3 + ALL * SHARE) * COMPUTE_S
    assert max(fast_again[-10:]) < 0.1, "it was tried again"


@simulated
async def test_a_node_fetches_long_prompts_though_short_ones_could_not_wait_for_the_store() -> None:
    async with simulated_world(
        device_blocks=256, host_blocks=256, host_write=THROUGH, storage_write=THROUGH
    ) as here:
        short = [list(range(at, at + 8)) for at in range(10_000, 10_080, 8)]
        long = [list(range(at, at + 400)) for at in range(0, 4000, 400)]
        for prompt in (*short, *long):
            await here.run(prompt)
        here.service.reset()
        here.service.note_prefill(1000, 1.0)
        here.the_store.delay_s = 0.02  # a short one is computed in 8 ms, a long one in 400
        found = []
        for less, more in zip(short, long, strict=True):
            await here.run(less)
            found.append((await here.run(more)).storage_tokens)
        assert found == [399] * 10
