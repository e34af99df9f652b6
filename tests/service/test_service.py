"""What a service does that none of its parts does alone: refuse early, free everywhere, let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from tests.latch import finish, turns, until
from tests.sched.test_fetch import filled
from tests.sessions import begin_request, claim_request, resume_request
from tests.world import GQA, World, fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import Tier
from tierkv.clock import SystemClock
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    DuplicateRequestError,
    InvariantError,
    RequestAbortedError,
    RequestTooLargeError,
    ShuttingDownError,
)
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.budget import Budget
from tierkv.sched.request import RequestSpec, RequestState
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


async def run_for(here: World, tenant: str, prompt: list[int]) -> int:
    """How many tokens a tenant's request found."""
    space = here.service.space_of_tenant(tenant) if tenant else ""
    whole = Prompt.of(prompt, GQA.block_size, space=space)
    request = await finish(begin_request(here.service, f"{tenant} runs", whole, max_new_tokens=0))
    await here.prefill(request, prompt)
    await here.ended(request)
    return request.cached_tokens


async def num_values(store: Store) -> int:
    return (await store.usage("tierkv:")).num_values


async def test_freeing_storage_takes_every_tenants_values_from_every_store() -> None:
    common, own = (MemoryStore(MemorySettings(), SystemClock()) for _ in range(2))
    async with world(store=common, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.service.attach_storage(own, tenant=here.service.space_of_tenant("own"))
        for tenant in ("", "other", "own"):
            await run_for(here, tenant, tokens(16))
        blocks = 4
        before = await num_values(common), await num_values(own)
        assert before == (2 * blocks, blocks)
        assert (await here.service.free(clears_storage=True)).removed_values == 3 * blocks
        assert (await num_values(common), await num_values(own)) == (0, 0)
        for tenant in ("", "other", "own"):
            assert await run_for(here, tenant, tokens(16)) == 0


Refused = Callable[[World], Awaitable[object]]


@pytest.mark.parametrize(
    ("asks", "error"),
    [
        (lambda here: here.admit(tokens(18), name="runs"), DuplicateRequestError),
        (lambda here: here.admit(tokens(18), name="big", new=1000), RequestTooLargeError),
        (lambda here: here.admit(tokens(18), name="late"), ShuttingDownError),
    ],
    ids=["of an id that runs", "too large", "of a node that drains"],
)
async def test_what_cannot_be_admitted_is_refused_before_storage_is_asked(
    asks: Refused, error: type[Exception]
) -> None:
    async with world(store=await filled(tokens(18))) as here:
        runs = await here.admit([7], name="runs")
        if error is ShuttingDownError:
            here.service.drain()
        asked = here.the_store.num_operations
        with pytest.raises(error):
            await asks(here)
        assert here.the_store.num_operations == asked
        await here.ended(runs)


async def test_a_store_in_the_place_of_one_that_hung_is_asked_by_the_first_request() -> None:
    async with world(
        store=await filled(tokens(18)), fetch_policy=FetchPolicy.BEST_EFFORT, fetch_deadline_s=0.2
    ) as here:
        here.service.note_prefill(100, 1.0)
        here.the_store.hold()
        for number in range(3):
            assert (await here.run(tokens(18, 100 * number + 100))).total_tokens == 0
        await here.service.attach_storage(await filled(tokens(18)))
        here.the_store.release()
        assert (await here.run(tokens(18))).storage_tokens == 17


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0), (10, float("nan"))]
)
async def test_a_speed_that_cannot_be_is_not_believed(num_tokens: int, seconds: float) -> None:
    async with world() as here:
        here.service.note_prefill(num_tokens, seconds)
        assert not here.service.estimator.prefill.is_known


async def test_a_tenant_whose_claim_waits_for_its_ticket_is_not_closed() -> None:
    async with world(with_store=True) as here:
        space = here.service.space_of_tenant("waits")
        prompt = Prompt.of(tokens(16), GQA.block_size, space=space)
        claims = asyncio.ensure_future(
            claim_request(
                here.service, "waits", "no ticket", prompt, max_new_tokens=1, deadline_s=100.0
            )
        )
        await turns(10)
        with pytest.raises(BadRequestError, match="have not ended"):
            here.service.close_fingerprint(space)
        assert here.service.abort("waits")
        with pytest.raises(RequestAbortedError):
            await finish(claims)
        here.service.close_fingerprint(space)


async def test_a_node_that_does_not_stream_offers_no_stream() -> None:
    async with world(with_store=True, handoff=HandoffSettings(streams=False)) as here:
        session = Session(here.service, RequestSpec("r", here.prompt(tokens(16)), 0))
        await session.admit()
        assert not await session.stream("ticket")
        assert not session.is_streaming
        session.end()


def test_a_layout_of_another_block_size_than_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="make them equal"):
        Service(
            CpuDevice(),
            fingerprint(),
            CacheSettings(block_size=2 * GQA.block_size),
            HandoffSettings(),
            None,
        )


# Engines count with NumPy: its integers are as good as Python's, whatever form the cache has.


TOKENS = list(range(9))


async def test_numpys_integers_are_counts_of_tokens_and_blocks() -> None:
    some: int = np.int64(5)  # type: ignore[assignment]
    async with world(device_blocks=24, host_blocks=24) as node:
        request = await node.admit(TOKENS, new=some)
        await node.prefill(request, TOKENS)
        await finish(node.service.scheduler.growth.extend(request, 4 * some))
        assert len(request.block_table) == 8
        node.service.scheduler.preempt(request)
        resumed = await finish(resume_request(node.service, request, max_new_tokens=some))
        node.service.scheduler.end(resumed)
        await finish(node.service.sleep())
        await finish(node.service.wake(4 * some))
        await finish(node.service.resize(Tier.DEVICE, 2 * some))
        assert node.service.stats().device.capacity == 10
        await node.settle()


# A service that ends recounts, and says in words what somebody has kept.


@pytest.mark.promise("A service that ends reports each leaked lease and slot.")
async def test_a_lease_that_nobody_released_is_told_of_at_the_end() -> None:
    async def leak() -> None:
        async with world() as here:
            await here.run(tokens(16))
            match = here.service.index.match(here.prompt(tokens(16)))
            here.service.index.hold(match.node, match.num_blocks)

    with pytest.raises(InvariantError, match="1 leases are held"):
        await leak()


@pytest.mark.promise("A service that ends reports each leaked lease and slot.")
async def test_slots_that_nobody_gave_back_are_told_of_at_the_end() -> None:
    with pytest.raises(InvariantError, match="taken but has no owner"):
        async with world() as here:
            here.service.scheduler.acquire_device(here.prompt(tokens(16)), 2)


async def test_what_was_fetched_and_never_released_is_told_of_at_the_end() -> None:
    with pytest.raises(InvariantError, match="1 fetched prompts were never released"):
        async with world(store=await filled(tokens(18))) as here:
            await finish(here.service.fetcher.fetch(here.prompt(tokens(18)), Budget(100.0)))


async def test_pins_are_no_leak_at_the_end() -> None:
    async with world() as here:
        await here.run(tokens(16))
        here.service.pin("hard", here.prompt(tokens(16)), 1000.0)
        here.service.pin("soft", here.prompt(tokens(16)), 1000.0, is_soft=True)
    assert not here.service.unpin("hard")
    assert not here.service.unpin("soft")


# Calls of a service that meet others: an end, an abort, a removal, a second time.


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


# Storage


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
