"""A fetch is waited for as long as it is worth it; what was decided, and why, can be asked."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any

import pytest

from tests.latch import finish, turns
from tests.sched.test_fetch import filled
from tests.simulated import simulate, simulated_world
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.errors import RequestAbortedError
from tierkv.sched.budget import Budget
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.protocol import GetItem, GetOutcome, GetStatus

BEST = FetchPolicy.BEST_EFFORT


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def best_effort(**settings: Any) -> AbstractAsyncContextManager[World]:
    return world(fetch_policy=BEST, **settings)


async def test_while_a_tier_is_late_for_one_request_no_other_asks_it() -> None:
    async with best_effort(store=await filled(tokens(40)), fetch_deadline_s=60.0) as here:
        here.service.note_prefill(1000, 0.1)
        here.the_store.hold()
        for _ in range(20):
            request = await here.admit(tokens(40))
            assert request.cached_tokens == 0
            here.service.scheduler.end(request)
        assert here.the_store.num_operations == 1
        here.the_store.release()
        await here.settle()
        here.service.reset()
        here.service.note_prefill(1000, 1000.0)  # long enough to get an answer
        request = await here.admit(tokens(40))
        assert request.cached_tokens >= 36  # or a sample of the engine's speed less
        await here.ended(request)


@pytest.mark.promise("A store slower than computing is not used, and `explain` says so.")
async def test_a_tier_slower_than_computing_is_not_used_and_it_says_so() -> None:
    async with best_effort(store=await filled(tokens(40))) as here:
        here.service.note_prefill(1000, 100.0)  # 4 s for this prompt
        here.service.estimator.tier.note_transfer(1.0, 1e6)
        here.service.estimator.tier.try_at = math.inf
        prompt, fetcher = here.prompt(tokens(40)), here.service.fetcher
        fetched = await finish(fetcher.fetch(prompt, here.service.budget()))
        assert len(fetched.tokens) == 0
        fetched.release()
        assert here.service.explain(prompt).reason == "not worth it"
        whole = await finish(fetcher.fetch(prompt, Budget(10.0, step_s=10.0)))
        assert len(whole.tokens) == 40  # who must have it gets it all the same
        whole.release()
        await here.settle()


async def test_blocks_that_others_fetch_are_waited_for_no_longer_than_is_worth_it() -> None:
    async with best_effort(store=await filled(tokens(40)), fetch_deadline_s=60.0) as here:
        here.the_store.hold()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(here.admit(tokens(40)))
            await here.the_store.until_held(1)
            here.service.note_prefill(1000, 1.0)
            second = await here.admit(tokens(40))
            assert second.cached_tokens == 0
            assert here.service.explain(here.prompt(tokens(40))).reason == "in flight"
            here.the_store.release()
            here.service.scheduler.end(second)
            here.service.scheduler.end(await finish(first))
        await here.settle()


async def test_damage_and_failure_are_explained() -> None:
    async with best_effort(store=await filled(tokens(16))) as here:
        here.the_store.flip_next_get(4000)
        await here.run(tokens(16), uses_cache=True)
        here.service.reset()
        prompt = here.prompt(tokens(16))
        assert here.service.explain(prompt).reason in ("checksum failed", "evicted")
    async with best_effort(store=await filled(tokens(16))) as here:
        here.the_store.fail_next(1)
        here.service.scheduler.end(await here.admit(tokens(16)))
        assert here.service.explain(here.prompt(tokens(16))).reason == "the transfer failed"
        await here.settle()


async def test_explain_asks_storage_where_wanted_and_not_for_ever() -> None:
    async with best_effort(store=await filled(tokens(18))) as here:
        prompt = here.prompt(tokens(18))
        assert here.service.explain(prompt).reason == "never stored"
        asked = await finish(here.service.explain_with_storage(prompt, deadline_s=5.0))
        assert asked.reason == "only in storage"
        assert [(run.start, run.stop, run.where) for run in asked.runs] == [(0, 5, "storage")]
        here.the_store.hold()
        late = await finish(here.service.explain_with_storage(prompt, deadline_s=0.05))
        assert late.reason == "never stored"
        here.the_store.release()
        await here.settle()


async def test_a_running_request_is_aborted_by_its_engine_when_its_kernels_allow() -> None:
    async with world(device_blocks=10) as here:
        request = await here.admit(tokens(16), name="runs")
        before = here.free_device_blocks
        assert here.service.abort("runs")
        assert here.free_device_blocks == before  # its kernels may still write
        with pytest.raises(RequestAbortedError):
            await here.prefill(request, tokens(16))
        with pytest.raises(RequestAbortedError):
            await here.service.scheduler.growth.extend(request, 8)
        await here.ended(request)
        assert here.free_device_blocks == 10
        assert not here.service.abort("runs")


async def test_what_went_below_a_run_that_was_forgotten_is_explained_too() -> None:
    """Two prompts with the same stem, all forgotten; then the stem alone is cached again."""
    async with world() as here:
        stem = tokens(16)
        longer, other = stem + [1] * 16, stem + [2] * 16
        for prompt in (longer, other):
            await here.run(prompt)
        here.service.reset()
        await here.run(stem)
        for prompt in (longer, other):
            found = here.service.explain(here.prompt(prompt))
            assert (found.reason, found.first_miss is not None) == ("evicted", True)


def test_a_store_that_says_what_it_has_and_does_not_send_it_is_known_to_be_slow() -> None:
    """Where a guard gives it up, long after the request has gone on."""

    async def scene() -> list[bool]:
        values, room = await filled(tokens(40)), {"device_blocks": 32, "host_blocks": 32}
        async with simulated_world(None, values, fetch_policy=BEST, **room) as here:

            async def silent(items: Sequence[GetItem]) -> list[GetOutcome]:
                await asyncio.sleep(0.7)
                return [GetOutcome(GetStatus.FAILED, "no answer within 700 ms")] * len(items)

            monkey = pytest.MonkeyPatch()
            monkey.setattr(here.the_store, "get_into", silent)
            here.service.note_prefill(1000, 12.5)  # 0.5 s for this prompt
            waits = []
            for _ in range(2):
                began = loop_time()
                here.service.scheduler.end(await here.admit(tokens(40)))
                waits.append(loop_time() > began)
                await asyncio.sleep(1.0)
            monkey.undo()
            await here.settle()
            return waits

    assert simulate(scene()) == [True, False]


@pytest.mark.parametrize(("seconds_per_token", "is_told"), [(0.007, False), (100.0, True)])
async def test_only_a_store_that_is_late_is_warned_of(
    caplog: pytest.LogCaptureFixture, seconds_per_token: float, is_told: bool
) -> None:
    caplog.set_level(logging.DEBUG, "tierkv.sched.fetch")
    async with best_effort(store=await filled(tokens(40)), fetch_deadline_s=1.0) as here:
        here.service.note_prefill(1000, 1000 * seconds_per_token)
        here.the_store.hold()
        request = await here.admit(tokens(40), new=1)
        assert request.cached_tokens == 0
        here.the_store.release()
        await here.ended(request)
    [record] = [r for r in caplog.records if "ended early" in r.message]
    assert (record.levelno == logging.WARNING) == is_told


# What is decided for blocks a request lacks is counted, once for each, by decision and tier.


def decided(on: World) -> dict[str, int]:
    """Those that are not 0."""
    counts: dict[str, int] = asdict(on.service.stats().decisions)
    return {name: count for name, count in counts.items() if count}


async def test_a_load_from_the_host() -> None:
    async with world(device_blocks=8, host_write=WritePolicy.WRITE_THROUGH) as on:
        await on.run(tokens(16))
        await on.run(tokens(16))
        assert decided(on) == {}, "nothing is cached, or all is there"
        await on.service.resize(Tier.DEVICE, 1)
        await on.service.resize(Tier.DEVICE, 8)
        await on.run(tokens(16))
        assert decided(on) == {"load_host": 1}


async def test_a_fetch_and_one_that_waits_for_it() -> None:
    async with world(store=await filled(tokens(18))) as on:
        on.the_store.hold()
        both = [asyncio.ensure_future(on.admit(tokens(18))) for _ in range(2)]
        await finish(on.the_store.until_held(1))
        await turns(5)
        on.the_store.release()
        for one in both:
            on.service.scheduler.end(await finish(one))
        await on.settle()
        assert decided(on) == {"fetch_storage": 1, "wait_storage": 1, "load_host": 1}


async def test_computing_what_storage_would_bring_more_slowly_or_too_late() -> None:
    async with best_effort(store=await filled(tokens(18))) as on:
        on.service.note_prefill(1000, 10.0)
        on.service.estimator.tier.note_transfer(1.0, 1e6)
        on.service.estimator.tier.try_at = math.inf
        await on.run(tokens(18))
        assert decided(on) == {"recompute_storage": 1}
    async with world(store=await filled(tokens(18)), fetch_deadline_s=0.3) as on:
        on.the_store.hold()
        request = await on.admit(tokens(18))
        on.the_store.release()
        await on.ended(request)
        assert decided(on) == {"recompute_late": 1}
