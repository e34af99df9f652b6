"""How long a fetch is waited for, second by second, and what the wait has taught."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faulty import FaultyStore
from tests.sessions import claim_request
from tests.simulated import LoopClock, simulated, simulated_world
from tests.world import World, tokens
from tierkv.cache.eviction import WritePolicy
from tierkv.pd.claims import ClaimPolicy
from tierkv.sched.budget import Budget
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.worth import SILENT_S, SLACK_S, SLACK_SHARE, Estimator, FetchPolicy
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
        here.service.scheduler.end(await here.admit(prompt))
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.1)
        here.the_store.release()


@simulated
async def test_a_fetch_that_came_too_late_teaches_how_slow_the_tier_is() -> None:
    async with fetching() as here:
        prompt = await stored(here)
        here.service.note_prefill(1000, 2.0)  # 1 s for this prompt
        estimator = here.service.estimator
        estimator.tier.note_transfer(1e9, 0.1)
        here.the_store.delay_s = 0.2  # the answer comes in time, the blocks do not
        request = await here.admit(prompt)
        await here.ended(request)
        took_s = estimator.tier.transfer_s(NUM_TOKENS * estimator.bytes_per_token)
        assert request.cached_tokens < NUM_TOKENS - 1
        assert took_s > 0.2


@simulated
async def test_a_fetch_that_ends_after_its_request_went_on_protects_nothing() -> None:
    async with fetching() as here:
        prompt = await stored(here, 18)
        here.service.note_prefill(1000, 1.0)
        here.service.estimator.tier.note_transfer(1e9, 0.1)
        here.the_store.delay_s = 0.2
        request = await here.admit(prompt)
        assert request.cached_tokens == 0
        await here.ended(request)
        where = await here.service.lookup(here.prompt(prompt))
        assert where.host_tokens == 18, "the fetch has ended, with a tail"
        assert here.service.reset() == 0


@simulated
async def test_a_claim_whose_ticket_is_not_found_in_time_teaches_how_slow_the_tier_is() -> None:
    async with fetching() as here:
        here.service.note_prefill(1000, 1.0)
        here.the_store.hold()
        waits = []
        for name in ("first", "trial", "third"):
            began = asyncio.get_running_loop().time()
            request, _ = await claim_request(
                here.service,
                name,
                "ticket",
                here.prompt(tokens(1000)),
                max_new_tokens=0,
                policy=ClaimPolicy.RECOMPUTE,
            )
            waits.append(asyncio.get_running_loop().time() - began)
            here.service.scheduler.end(request)
        assert waits == [pytest.approx(1.25, abs=0.1), pytest.approx(0.13, abs=0.1), 0.0]
        here.the_store.release()


# The budget by itself


async def wait_ends_after(budget: Budget) -> float:
    """Return the seconds until a wait that nothing ends is ended by `budget`."""
    time = asyncio.get_running_loop().time
    began = time()
    with pytest.raises(TimeoutError):
        async with budget.limit():
            await asyncio.Event().wait()
    return time() - began


def estimator(compute_s: float, round_trip_s: float = 0.0, transfer_s: float = 0.0) -> Estimator:
    """Return one that knows what 1,000 tokens take; of the tier nothing where that is 0."""
    known = Estimator(1.0)
    known.prefill.note(1000, compute_s)
    if round_trip_s:
        known.tier.note_answer(round_trip_s)
    if transfer_s:
        known.tier.note_transfer(1000.0, round_trip_s + transfer_s)
    return known


@simulated
async def test_a_wait_ends_at_the_deadline_and_several_share_it() -> None:
    budget = Budget(1.0)
    async with budget.limit():
        await asyncio.sleep(0.4)
    await asyncio.sleep(5.0)  # which is no wait for storage
    assert budget.left_s == pytest.approx(0.6)
    assert await wait_ends_after(budget) == pytest.approx(0.6)
    assert await wait_ends_after(budget) == pytest.approx(0.0)


@simulated
async def test_an_arrival_leaves_a_step_and_a_copy_costs_nothing() -> None:
    budget = Budget(1.0, step_s=0.5)
    async with budget.limit():
        await asyncio.sleep(0.9)
        budget.arrived()
        assert budget.left_s == pytest.approx(0.5)
        with budget.stopped():
            await asyncio.sleep(9.0)
        assert budget.left_s == pytest.approx(0.5)
    assert await wait_ends_after(budget) == pytest.approx(0.5)


@pytest.mark.parametrize(("compute_s", "most_s"), [(2.0, 2 * 0.5), (0.7, 0.7), (0.49, 0.5)])
@simulated
async def test_a_wait_whose_tier_is_known_ends_after_twice_the_estimate_or_computing(
    compute_s: float, most_s: float
) -> None:
    budget = Budget(60.0, estimator=estimator(compute_s, 0.1, 0.3))
    assert budget.restrict(1000).is_asked
    slack_s = SLACK_SHARE * compute_s + SLACK_S
    assert await wait_ends_after(budget) == pytest.approx(most_s + slack_s)


@simulated
async def test_a_decision_during_a_wait_counts_from_then_on() -> None:
    budget = Budget(60.0, estimator=estimator(2.0, 0.1, 0.3))
    first = budget.restrict(1000)
    async with budget.limit():
        await asyncio.sleep(0.4)
        budget.arrived()
        rest = budget.restrict(200, is_answered=True)
        assert rest.wait_s < first.wait_s - 0.4
        assert budget.left_s == pytest.approx(rest.wait_s)


@simulated
async def test_answers_in_time_cost_a_claim_that_waits_for_its_ticket_nothing() -> None:
    budget = Budget(1.0, is_claim=True)
    for _ in range(3):
        async with budget.limit():
            await asyncio.sleep(0.9)
        budget.restart()
    assert await wait_ends_after(budget) == pytest.approx(1.0)


@simulated
async def test_of_a_tier_that_is_not_known_one_request_at_a_time_finds_out() -> None:
    unknown = estimator(1.0)
    first, second = Budget(60.0, estimator=unknown), Budget(60.0, estimator=unknown)
    unknown.tier.num_tries += first.restrict(1000).is_try
    assert not second.restrict(1000).is_asked
    assert await wait_ends_after(first) == pytest.approx(SLACK_SHARE + SLACK_S)


@simulated
async def test_a_trial_fetch_whose_rest_comes_sooner_than_computing_may_end() -> None:
    budget = Budget(60.0, estimator=estimator(1.0))
    budget.restrict(1000)
    async with budget.limit():
        await asyncio.sleep(0.1)
        budget.arrived(rest_s=0.5)
        await asyncio.sleep(0.4)
    assert await wait_ends_after(budget) == pytest.approx(0.1)


@simulated
async def test_a_claim_that_may_recompute_gives_up_silence_and_one_that_may_not_does_not() -> None:
    claim = Budget(60.0, estimator=estimator(30.0), is_claim=True)
    claim.restrict(1000)
    assert await wait_ends_after(claim) == pytest.approx(SILENT_S)
    whole = Budget(60.0, is_claim=True)
    whole.restrict(1000)
    assert await wait_ends_after(whole) == pytest.approx(60.0)


@simulated
async def test_a_wait_that_is_just_being_given_up_is_not_made_longer() -> None:
    budget = Budget(0.5, step_s=5.0)

    async def given_up() -> None:
        async with budget.limit():
            try:
                await asyncio.Event().wait()
            finally:
                budget.arrived()

    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await given_up()
    assert asyncio.get_running_loop().time() == pytest.approx(began + 0.5)


@simulated
async def test_a_tier_that_has_nothing_is_not_asked_where_the_answer_takes_long() -> None:
    known = estimator(2.0, 0.3, 0.3)
    assert known.judge(1000, 0.0).wait_s > 0
    for _ in range(20):
        known.tier.note_answer(0.3, has_found=False)
    assert known.judge(1000, 0.0).wait_s == 0
    quick = estimator(2.0, 0.001, 0.3)
    for _ in range(20):
        quick.tier.note_answer(0.001, has_found=False)
    assert quick.judge(1000, 0.0).wait_s > 0


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
                here.service.scheduler.end(await one)
            waits.append(asyncio.get_running_loop().time() - began)
        assert waits == [pytest.approx(0.13, abs=0.01), *[pytest.approx(0.0, abs=0.01)] * 3]
        await here.settle()


@simulated
async def test_a_tier_that_is_quick_again_is_used_after_one_answer() -> None:
    known = estimator(0.4, 0.3, 0.1)
    assert known.judge(1000, 0.0).is_try
    known.tier.note_answer(0.001, has_found=True)
    assert known.judge(1000, 0.1).wait_s > 0
    known.tier.note_silence(0.5)
    assert known.judge(1000, 0.2).wait_s == 0
