"""Of fetching and computing a node does what is better, whatever the delay of its store."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.latch import until
from tests.simulated import simulate, simulated, simulated_world
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.clock import SystemClock
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore

BEST, THROUGH = FetchPolicy.BEST_EFFORT, WritePolicy.WRITE_THROUGH
NUM_TOKENS, COMPUTE_S = 240, 0.32  # two groups of blocks
FIRST, ALL = 10, 60  # requests until a node has learnt; and with those that are counted
# A way is as good as the better one if it takes so much of its time, and so many seconds, more.
SHARE_MORE, MORE_S = 1.15, 0.05
STALLED_AT, STALL_S = 15, 2.0  # the request at which a store stalls, and for how long
# Of a call to the store, and of computing a prompt.
CASES = [
    *((delay_s, COMPUTE_S) for delay_s in (0.0, 0.15, 0.17, 0.6)),
    *((0.06, 0.02), (0.3, 2.4)),
    *(
        pytest.param(delay_s, compute_s, marks=pytest.mark.slow)
        for delay_s, compute_s in (
            *((0.06, COMPUTE_S), (0.09, COMPUTE_S), (0.2, COMPUTE_S), (0.06, 0.1), (0.06, 2.4)),
            *((0.02, 0.1), (0.02, 1.0), (0.02, 2.4), (0.3, 0.1), (0.3, 1.0)),
        )
    ),
]


def prompt_of(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + NUM_TOKENS))


@pytest.fixture(scope="module")
def stored() -> MemoryStore:
    """Every prompt, as another node has stored it."""
    values = MemoryStore(MemorySettings(), SystemClock())

    async def fill() -> None:
        async with node(BEST, values) as here:
            for number in range(ALL):
                request = await here.admit(prompt_of(number), uses_cache=False)
                await here.service.scheduler.commit(request, pack(prompt_of(number)))
                here.service.scheduler.end(request)
                await until(lambda: here.service.tiers.work.num_tasks == 0, "an idle node")

    simulate(fill())
    return values


def node(
    policy: FetchPolicy, values: MemoryStore, **settings: Any
) -> AbstractAsyncContextManager[World]:
    """It has nothing and knows nothing, but what its store has."""
    return simulated_world(
        None,
        values,
        device_blocks=128,
        host_blocks=256,
        host_write=THROUGH,
        storage_write=THROUGH,
        fetch_policy=policy,
        **settings,
    )


async def answers(here: World, number: int, whole_s: float = COMPUTE_S, *, tells: bool) -> float:
    """Return the seconds until all of a prompt is committed. whole_s: of computing all of it."""
    loop, prompt = asyncio.get_running_loop(), prompt_of(number)
    began = loop.time()
    request = await here.admit(prompt)
    await request.gate.all_layers(100.0)
    rest = NUM_TOKENS - request.cached_tokens
    compute_s = whole_s * rest / NUM_TOKENS
    await asyncio.sleep(compute_s)
    if tells and rest > 1:  # as the reference model, which does not tell of a prompt's last token
        here.service.note_prefill(rest, compute_s)
    await here.service.scheduler.commit(request, pack(prompt))
    took_s = loop.time() - began
    here.service.scheduler.end(request)
    return took_s


def seconds_of_all(
    stored: MemoryStore,
    delay_s: float,
    compute_s: float,
    *,
    tells: bool,
    stalls_after_s: float = -1,
) -> tuple[list[float], float]:
    """What each prompt takes, and what a fetch takes that is waited for whatever it takes."""

    async def scene(policy: FetchPolicy, count: int) -> list[float]:
        loop, took = asyncio.get_running_loop(), list[float]()
        async with node(policy, stored, fetch_deadline_s=60.0) as here:
            here.the_store.delay_s = delay_s
            if tells:
                here.service.note_prefill(NUM_TOKENS, compute_s)
            for at in range(count):
                if at == STALLED_AT and stalls_after_s >= 0:
                    loop.call_later(stalls_after_s, here.the_store.hold)
                    loop.call_later(stalls_after_s + STALL_S, here.the_store.release)
                took.append(await answers(here, at, compute_s, tells=tells))
            here.the_store.delay_s = 0.0
        return took

    return simulate(scene(BEST, ALL)), simulate(scene(FetchPolicy.WAIT_COMPLETE, 1))[0]


@pytest.mark.promise("Fetching costs at most 15 % and 50 ms beyond the better choice.")
@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize(("delay_s", "compute_s"), CASES)
def test_a_node_takes_the_better_way_whatever_the_delay_of_its_store(
    delay_s: float, compute_s: float, stored: MemoryStore, *, tells: bool
) -> None:
    """Also while it learns how fast its engine is, though all its prompts are in storage; where the
    engine tells, the first request finds out how fast the store is, and waits no longer for it."""
    took, fetch_s = seconds_of_all(stored, delay_s, compute_s, tells=tells)
    best_s = min(fetch_s, compute_s)
    for counted in (took[FIRST:], took[FIRST : 2 * FIRST]):
        assert sum(counted) <= len(counted) * (SHARE_MORE * best_s + MORE_S)
    most_s = SHARE_MORE * compute_s + MORE_S
    assert max(took) <= (most_s if tells else max(most_s, fetch_s))


@pytest.mark.parametrize(
    ("is_mid_fetch", "delay_s", "compute_s", "tells"),
    [
        (False, 0.02, 0.3, True),
        (True, 0.09, 1.0, False),
        (False, 0.3, 1.0, False),
        (True, 0.3, 0.3, True),
    ],
)
def test_a_few_requests_after_a_store_has_stalled_the_better_way_is_taken_again(
    is_mid_fetch: bool, delay_s: float, compute_s: float, tells: bool, stored: MemoryStore
) -> None:
    few, after_s = 7, 1.5 * delay_s if is_mid_fetch else 0.0
    took, fetch_s = seconds_of_all(stored, delay_s, compute_s, tells=tells, stalls_after_s=after_s)
    rest = took[STALLED_AT + few :]
    assert sum(rest) <= len(rest) * (SHARE_MORE * min(fetch_s, compute_s) + MORE_S)
    assert max(took) <= SHARE_MORE * compute_s + MORE_S + 2 * fetch_s


def test_a_node_learns_that_its_store_has_become_slow_or_fast(stored: MemoryStore) -> None:
    async def scene() -> list[list[float]]:
        found = []
        async with node(BEST, stored) as here:
            for delay_s in (0.0, 0.6, 0.03):
                here.the_store.delay_s = delay_s
                here.service.reset()
                found.append([await answers(here, number, tells=True) for number in range(ALL)])
            here.the_store.delay_s = 0.0
        return found

    fast, slow, fast_again = simulate(scene())
    assert sum(fast[1:]) < 0.1 * COMPUTE_S * ALL
    assert sum(slow) <= (ALL + 5) * COMPUTE_S
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
        assert found[1:] == [399] * 9, "the first short one has found out how fast the store is"


# A tier that answers in time and is of no use costs requests no more than a small share in all.


WHOLE_S = 1.0  # for each of the prompts
REQUESTS = 400
RULES = {"host_write": THROUGH, "storage_write": THROUGH}


async def waits(here: World, prompt: list[int]) -> float:
    """How long an admission takes that finds nothing: seconds."""
    time = asyncio.get_running_loop().time
    began = time()
    request = await here.admit(prompt)
    took = time() - began
    assert request.cached_tokens == 0
    here.service.scheduler.end(request)
    return took


@pytest.mark.parametrize("is_damaged", [False, True], ids=["nothing", "damage"])
@simulated
async def test_a_store_that_answers_in_time_and_brings_nothing_costs_little_in_the_long_run(
    *, is_damaged: bool
) -> None:
    async with simulated_world(device_blocks=32, host_blocks=32, **RULES) as here:
        await here.run(tokens(40))
        here.service.note_prefill(40, WHOLE_S)
        waited = 0.0
        for number in range(REQUESTS):
            here.service.reset()
            here.the_store.delay_s = 0.05  # of each operation, far less than it might be waited for
            if is_damaged:
                here.the_store.flip_next_get(99)
            waited += await waits(here, tokens(40, 0 if is_damaged else 100 * (number + 1)))
            await here.settle()
        most = REQUESTS * (0.15 * WHOLE_S + 0.05)
        assert WHOLE_S < waited <= most, "it is tried at first, and now and then"


@pytest.mark.promise("A store that becomes useful is used again.")
@simulated
async def test_a_store_that_brings_something_after_all_is_used_again() -> None:
    async with simulated_world(device_blocks=32, host_blocks=32, **RULES) as here:
        here.service.note_prefill(40, WHOLE_S)
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
