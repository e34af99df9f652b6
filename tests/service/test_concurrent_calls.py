"""Calls of a service that meet others: an end, an abort, a removal, a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.latch import finish, turns, until
from tests.sched.test_fetch import filled
from tests.sessions import begin_request, claim_request, resume_request
from tests.world import GQA, World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import Tier
from tierkv.errors import BadRequestError, RequestAbortedError, ShuttingDownError
from tierkv.sched.request import RequestSpec, RequestState
from tierkv.storage import maintenance
from tierkv.storage.protocol import Store

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


# The end


async def test_a_drain_refuses_at_once_those_whose_blocks_are_fetched() -> None:
    async with world(store=await filled(tokens(18))) as here:
        here.the_store.hold()
        admits = asyncio.ensure_future(here.admit(tokens(18)))
        await finish(here.the_store.until_held(1))
        here.service.drain()
        await turns(10)
        assert admits.done(), "it need not wait for the store to hear of it"
        with pytest.raises(ShuttingDownError):
            await admits
        here.the_store.release()
        await here.settle()


async def test_a_drain_refuses_at_once_those_who_wait_for_a_ticket() -> None:
    async with world(with_store=True) as here:
        claim = claim_request(
            here.service,
            "mine",
            "no such ticket",
            here.prompt(tokens(18)),
            max_new_tokens=0,
            deadline_s=1000.0,
        )
        claims = asyncio.ensure_future(claim)
        await turns(20)
        assert not claims.done()
        here.service.drain()
        with pytest.raises(ShuttingDownError):
            await finish(claims)


@pytest.mark.parametrize(
    "waits",
    [
        lambda here: here.service.resize(Tier.DEVICE, 1),
        lambda here: here.service.resize(Tier.HOST, 1),
        lambda here: here.service.sleep(),
    ],
    ids=["shrinks the device", "shrinks the host", "sleeps"],
)
async def test_who_waits_for_a_pin_when_the_service_ends_is_told(
    waits: Callable[[World], Awaitable[None]],
) -> None:
    async with world(host_write=THROUGH) as here:
        await here.run(tokens(16))
        here.service.pin("kept", here.prompt(tokens(16)), 1000.0)
        waiting = asyncio.ensure_future(waits(here))
        await turns(20)
        assert not waiting.done()
    with pytest.raises(ShuttingDownError):
        await finish(waiting)


async def test_who_waits_for_a_pin_when_the_service_fails_is_told() -> None:
    waiting: list[asyncio.Future[None]] = []

    async def fail() -> None:
        async with world(host_write=THROUGH) as here:
            await here.run(tokens(16))
            here.service.pin("kept", here.prompt(tokens(16)), 1000.0)
            waiting.append(asyncio.ensure_future(here.service.resize(Tier.DEVICE, 1)))
            await turns(20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with pytest.raises(ShuttingDownError):
        await finish(waiting[0])


async def test_a_service_that_runs_again_is_as_new() -> None:
    async with world() as here:
        here.service.space_of_tenant("acme")
    async with here.service.running():
        assert not here.service.is_draining
        assert here.service.verify() == []
        space = here.service.space_of_tenant("acme")
        prompt = Prompt.of(tokens(8), GQA.block_size, space=space)
        here.service.scheduler.end(
            await finish(begin_request(here.service, "mine", prompt, max_new_tokens=0))
        )
        await here.settle()


# Aborts


async def test_an_abort_may_come_twice_while_the_first_is_under_way() -> None:
    async with world(store=await filled(tokens(18))) as here:
        here.the_store.hold_firmly()  # so that a cancel takes a while
        prompt = here.prompt(tokens(18))
        claim = claim_request(
            here.service, "mine", "none", prompt, max_new_tokens=0, deadline_s=1000.0
        )
        claims = asyncio.ensure_future(claim)
        await finish(here.the_store.until_held(1))
        assert here.service.abort("mine")
        await turns(10)
        assert here.service.abort("mine")
        here.the_store.release()
        with pytest.raises(RequestAbortedError):
            await finish(claims)


async def test_one_that_was_aborted_is_not_preempted_to_come_back() -> None:
    async with world() as here:
        request = await here.admit(tokens(16), name="mine")
        await here.prefill(request, tokens(16))
        assert here.service.abort("mine")
        with pytest.raises(RequestAbortedError):
            here.service.scheduler.preempt(request)
        assert request.state is RequestState.RUNNING
        await here.ended(request)


# Preempted, and gone down to storage


async def test_one_that_comes_back_gets_from_storage_what_left_the_host_meanwhile() -> None:
    async with world(
        device_blocks=16, host_blocks=6, with_store=True, host_write=THROUGH, storage_write=THROUGH
    ) as here:
        request = await here.admit(tokens(16), name="mine")
        await here.prefill(request, tokens(16))
        await until(lambda: here.service.tiers.work.num_tasks == 0)
        here.service.scheduler.preempt(request)
        for base in range(1000, 7000, 1000):
            await here.run(tokens(60, base))
        lookup = await here.service.lookup(here.prompt(tokens(16)))
        assert lookup.storage_tokens, "some of it is in storage only"
        back = await finish(resume_request(here.service, request, max_new_tokens=0))
        assert back.cached_tokens == 16
        await back.gate.all_layers(100.0)
        here.check_kv(back, tokens(16), 16)
        await here.ended(back)


async def test_one_that_comes_back_is_aborted_while_its_blocks_are_fetched() -> None:
    async with world(store=await filled(tokens(18))) as here:
        request = await here.admit(tokens(18), name="mine", uses_cache=True)
        here.service.scheduler.preempt(request)
        await until(lambda: here.service.tiers.work.num_tasks == 0)
        here.service.reset()
        here.the_store.hold()
        comes_back = asyncio.ensure_future(resume_request(here.service, request, max_new_tokens=0))
        await finish(here.the_store.until_held(1))
        assert here.service.abort("mine")
        with pytest.raises(RequestAbortedError):
            await finish(comes_back)
        here.the_store.release()
        assert request.state is RequestState.PREEMPTED
        here.service.scheduler.abandon(request)
        await here.settle()


# Storage


async def test_what_is_written_while_storage_is_cleared_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove = maintenance.remove
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:

        async def run_and_remove(store: Store, prefix: str, **more: Any) -> int:
            await here.run(tokens(16))
            return await remove(store, prefix, **more)

        monkeypatch.setattr(maintenance, "remove", run_and_remove)
        assert (await here.service.free(clears_storage=True)).removed_values == 0
        await here.run(tokens(16))
        assert await here.the_store.exists(here.names(tokens(16))) == 4


async def test_an_explanation_names_no_block_twice_when_some_come_while_storage_is_asked() -> None:
    async with world(store=await filled(tokens(40))) as here:
        prompt = here.prompt(tokens(40))
        here.the_store.hold()
        asks = asyncio.ensure_future(here.service.explain_with_storage(prompt, deadline_s=100.0))
        await finish(here.the_store.until_held(1))
        request = await finish(here.service.scheduler.admit(RequestSpec("mine", prompt, 0)))
        here.compute(request, tokens(20))
        await here.service.scheduler.commit(request, pack(tokens(20)))
        here.the_store.release()
        runs = [(run.start, run.stop, run.where) for run in (await finish(asks)).runs]
        assert runs == [(0, 5, "device"), (5, 10, "storage")]
        await here.ended(request)


async def test_an_explanation_does_not_say_that_storage_has_what_it_was_not_asked_about() -> None:
    async with world(store=await filled(tokens(40))) as here:
        await here.run(tokens(20))
        prompt = here.prompt(tokens(40))
        here.the_store.hold()
        asked = asyncio.ensure_future(here.service.explain_with_storage(prompt, deadline_s=100.0))
        await finish(here.the_store.until_held(1))
        here.service.reset()
        here.the_store.release()
        assert (await finish(asked)).runs == ()


# What cannot be


async def test_a_request_cannot_grow_by_less_than_nothing() -> None:
    async with world() as here:
        request = await here.admit(tokens(8))
        with pytest.raises(BadRequestError, match="negative"):
            await here.service.scheduler.growth.extend(request, -1)
        here.service.scheduler.end(request)


async def test_a_subscription_that_holds_nothing_is_refused() -> None:
    async with world() as here:
        with pytest.raises(BadRequestError), here.service.events.subscribe(0):
            pass
        await here.run(tokens(8))
