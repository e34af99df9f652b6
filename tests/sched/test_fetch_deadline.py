"""How long a fetch is waited for, second by second, and what the wait has taught."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faulty import FaultyStore
from tests.simulated import LoopClock, simulated, simulated_world
from tests.world import World, tokens
from tierkv.cache.eviction import WritePolicy
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.fetch import LEAVE_S, FetchDeadline
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetItem, GetOutcome

THROUGH = WritePolicy.WRITE_THROUGH
NUM_TOKENS = 4 * 4 * GROUP_BLOCKS  # four groups of blocks of 4 tokens


async def stored(here: World, count: int = NUM_TOKENS) -> list[int]:
    """A prompt that is in storage and nowhere else."""
    prompt = tokens(count)
    await here.run(prompt)
    here.service.reset()
    return prompt


def fetching(**settings: Any) -> Any:
    return simulated_world(
        device_blocks=256, host_blocks=256, host_write=THROUGH, storage_write=THROUGH, **settings
    )


@pytest.mark.parametrize(
    ("policy", "blocks"), [(FetchPolicy.WAIT_COMPLETE, 4), (FetchPolicy.DEADLINE, 2)]
)
@simulated
async def test_each_arrival_renews_the_deadline_only_of_who_waits_for_all(
    policy: FetchPolicy, blocks: int
) -> None:
    async with fetching(fetch_policy=policy, fetch_deadline_s=1.0) as here:
        prompt = await stored(here)
        here.the_store.delay_s = 0.45  # the answer at 0.45 s, two groups at 0.9, two at 1.35
        request = await here.admit(prompt)
        assert request.matched.storage_tokens in (
            blocks * 4 * GROUP_BLOCKS,
            blocks * 4 * GROUP_BLOCKS - 1,
        )
        await here.prefill(request, prompt)
        await here.ended(request)


@simulated
async def test_a_long_estimate_of_computing_does_not_outlast_the_deadline() -> None:
    async with fetching(fetch_deadline_s=1.0) as here:
        prompt = await stored(here)
        here.service.note_prefill(100, 100.0)
        here.the_store.hold()
        began = asyncio.get_running_loop().time()
        here.service.end(await here.admit(prompt))
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.1)
        here.the_store.release()


@simulated
async def test_a_fetch_that_came_too_late_teaches_how_slow_the_tier_is() -> None:
    async with fetching() as here:
        prompt = await stored(here)
        here.service.note_prefill(1000, 2.0)  # 1 s for this prompt
        estimator = here.service.estimator
        estimator.note_fetch(1e9, 0.1)
        here.the_store.delay_s = 0.2  # the answer comes in time, the blocks do not
        request = await here.admit(prompt)
        await here.ended(request)
        took_s = estimator.transfer.seconds(NUM_TOKENS * estimator.bytes_per_token)
        assert request.cached_tokens < NUM_TOKENS - 1
        assert took_s > 0.2


@simulated
async def test_of_two_fetches_at_once_the_second_knows_that_it_waited_for_the_first() -> None:
    async with fetching(fetch_policy=FetchPolicy.WAIT_COMPLETE) as here:
        await here.run(tokens(64))
        await here.run(tokens(64, 1000))
        here.service.reset()
        here.the_store.delay_s = 0.1
        both = [asyncio.ensure_future(here.admit(tokens(64, base))) for base in (0, 1000)]
        requests = [await one for one in both]
        # Its own bytes and those of the first before them, in the same time.
        transfer = here.service.estimator.transfer
        first = 16 * here.layout.block_bytes
        assert transfer.x == pytest.approx(transfer.decay * first + 2 * first)
        for request in requests:
            here.service.end(request)
        await here.settle()


class Promising(FaultyStore):
    """Says what it has, and while it is stuck gives none of it."""

    is_stuck = False

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        if self.is_stuck:
            await asyncio.sleep(1e6)
        return await super().get_into(items)


@simulated
async def test_fetches_that_queue_behind_others_and_come_to_nothing_are_not_made_for_ever() -> None:
    async with fetching() as here:
        store = Promising(MemoryStore(MemorySettings(), LoopClock()))
        await here.service.attach_storage(store)
        prompts = [tokens(64, 1000 * number) for number in range(16)]
        for prompt in prompts:
            await here.run(prompt)
        here.service.reset()
        store.is_stuck = True
        here.service.note_prefill(64, 1.0)
        waits = []
        for first in range(0, 16, 4):
            began = asyncio.get_running_loop().time()
            four = [asyncio.ensure_future(here.admit(one)) for one in prompts[first : first + 4]]
            for one in four:
                here.service.end(await one)
            waits.append(asyncio.get_running_loop().time() - began)
        assert waits == [pytest.approx(0.15, abs=0.01), *[pytest.approx(0.0, abs=0.01)] * 3]
        await here.settle()


@simulated
async def test_no_later_wait_outlasts_the_requests_own_deadline_and_it_is_stuck_once() -> None:
    loop, stuck = asyncio.get_running_loop(), list[float]()
    async with asyncio.timeout(None) as scope:
        began = loop.time()
        deadline = FetchDeadline(
            scope, 1.0, FetchPolicy.DEADLINE, lambda: stuck.append(loop.time() - began)
        )
        for at, seconds, end in ((0.0, 0.3, 0.3), (0.2, 5.0, 1.0), (0.4, None, 1.0)):
            await asyncio.sleep(began + at - loop.time())
            deadline.until(seconds)
            assert scope.when() == pytest.approx(began + end)
        deadline.arrived()  # no news for a policy that has a deadline
        assert scope.when() == pytest.approx(began + 1.0)
        scope.reschedule(None)  # a store that does not leave when it is told to
        await asyncio.sleep(3.0)
        deadline.end()
        assert stuck == [pytest.approx(1.0 + LEAVE_S)]


@simulated
async def test_what_an_arrival_has_renewed_is_the_deadline_of_every_wait_after_it() -> None:
    async with asyncio.timeout(None) as scope:
        deadline = FetchDeadline(scope, 1.0, FetchPolicy.WAIT_COMPLETE, lambda: None)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.5)
        deadline.arrived()
        deadline.until(0.2)
        assert scope.when() == pytest.approx(began + 0.7)
        deadline.until(None)
        assert scope.when() == pytest.approx(began + 1.5)
        deadline.end()


@simulated
async def test_a_wait_that_is_just_being_given_up_is_not_made_longer() -> None:
    async def given_up() -> None:
        async with asyncio.timeout(None) as scope:
            deadline = FetchDeadline(scope, 1.0, FetchPolicy.WAIT_COMPLETE, lambda: None)
            deadline.until(0.5)
            try:
                await asyncio.Event().wait()
            finally:
                deadline.until(None)  # a hedge of the same moment
                deadline.arrived()
                deadline.end()

    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await given_up()
    assert asyncio.get_running_loop().time() == pytest.approx(began + 0.5)
