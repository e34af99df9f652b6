"""What is decided for blocks a request lacks is counted, once for each, by decision and tier."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict

import pytest

from tests.latch import finish, turns, until
from tests.sched.test_fetch import filled
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.cache.node import Tier
from tierkv.sched.fair_queue import WaitingLine
from tierkv.sched.request import Computing, PromiseWait
from tierkv.sched.worth import FetchPolicy


def decided(on: World) -> dict[str, int]:
    """Those that are not 0."""
    counts: dict[str, int] = asdict(on.service.stats().decisions)
    return {name: count for name, count in counts.items() if count}


async def test_nothing_is_decided_where_nothing_is_cached_or_all_is_there() -> None:
    async with world() as on:
        await on.run(tokens(18))
        await on.run(tokens(18))
        assert decided(on) == {}


async def test_a_load_from_the_host() -> None:
    async with world(device_blocks=8, host_write=WritePolicy.WRITE_THROUGH) as on:
        await on.run(tokens(16))
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
    policy = FetchPolicy.BEST_EFFORT
    async with world(store=await filled(tokens(18)), fetch_policy=policy) as on:
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


async def test_waiting_for_one_that_computes() -> None:
    async with world() as on:
        on.service.note_prefill(1000, 1000.0)
        owner = await on.admit(tokens(16))
        waits = asyncio.ensure_future(on.admit([*tokens(16), 99]))
        await until(lambda: on.service.stats().requests.shared_waits == 1, "a wait")
        assert decided(on) == {"wait_device": 1}
        await on.prefill(owner, tokens(16))
        on.service.scheduler.end(await finish(waits))
        await on.ended(owner)


async def test_computing_although_another_one_does_since_that_one_is_behind() -> None:
    async with world() as on:
        on.service.note_prefill(1000, 1000.0)  # 32 s for the owner's, and hardly one is over
        owner = await on.admit(tokens(32))
        on.compute(owner, tokens(16))
        await on.service.scheduler.commit(owner, pack(tokens(16)))
        request = await on.admit([*tokens(32), 99])  # of which 16 tokens are left
        assert request.cached_tokens == 16
        assert decided(on) == {"recompute_device": 1}
        on.service.scheduler.end(request)
        await on.ended(owner)


async def test_a_bug_where_a_chance_is_passed_by_keeps_no_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with world() as on:
        on.service.note_prefill(1000, 1000.0)
        owner = await on.admit(tokens(32))
        on.compute(owner, tokens(16))
        await on.service.scheduler.commit(owner, pack(tokens(16)))
        monkeypatch.setattr(Computing, "passed_by", broken)
        with pytest.raises(ZeroDivisionError):
            await on.admit([*tokens(32), 99])
        on.service.scheduler.end(owner)
        await on.settle()
        assert on.service.verify() == []
        assert on.service.stats().running_requests == 0


async def test_a_bug_where_a_start_is_counted_for_its_tenant_keeps_no_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, is_broken = WaitingLine.given, False

    def count(line: WaitingLine, tenant: str, num_blocks: int) -> None:
        if is_broken:
            raise ZeroDivisionError
        given(line, tenant, num_blocks)

    monkeypatch.setattr(WaitingLine, "given", count)
    async with world(device_blocks=8) as on:
        owner = await on.admit(tokens(24))
        waits = asyncio.ensure_future(on.admit(tokens(24, 900)))
        await until(lambda: on.service.scheduler.num_waiting == 1)
        is_broken = True
        on.service.scheduler.end(owner)
        for start in (waits, on.admit(tokens(24))):  # in its turn, and at once
            with pytest.raises(ZeroDivisionError):
                await finish(start)
        is_broken = False
        await on.settle()
        assert on.service.stats().running_requests == 0
        await on.ended(await on.admit(tokens(24)))


async def test_a_chance_is_passed_by_once_however_long_there_is_no_room() -> None:
    async with world(device_blocks=12) as on:
        on.service.note_prefill(1000, 10.0)
        owner = await on.admit(tokens(32))
        busy = await on.admit(tokens(12, 900))
        assert owner.promise is not None
        lost = PromiseWait(owner.promise, 3, 0.1)  # so that the next chance is passed by
        on.service.scheduler.computing.note_wait(lost, 0.0, was_worth_it=False)
        waits = asyncio.ensure_future(on.admit([*tokens(12), 99]))
        await until(lambda: on.service.scheduler.num_waiting == 1)
        for _ in range(5):
            on.service.tiers.work.capacity_changed()
        assert decided(on) == {}
        on.service.scheduler.end(busy)
        on.service.scheduler.end(await finish(waits))
        assert decided(on) == {"recompute_device": 1}
        await on.ended(owner)
