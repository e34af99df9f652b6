"""The engine streams what it computes: cancels, failed loads, stops in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.e2e.exact import BLOCK_SIZE, text, truth
from tests.latch import finish, until
from tests.refmodel.test_engine import Bench, bench, memory
from tierkv.errors import HandoffError, ShuttingDownError
from tierkv.gpu.protocol import Direction
from tierkv.pd.handoff import PublishWait

LONG = text(40 * BLOCK_SIZE + 5, seed=3)
NEW = 4


@asynccontextmanager
async def pair(device_blocks: int = 24) -> AsyncIterator[tuple[Bench, Bench]]:
    """Two nodes over one store, idle at the end."""
    store = memory()
    async with (
        bench(store, device_blocks=device_blocks) as on,
        bench(store, device_blocks=device_blocks) as other,
    ):
        yield on, other
        await on.settle()
        await other.settle()


async def begun(on: Bench) -> None:
    """A prefill has computed something, and not all."""
    await until(lambda: on.node.engine.stats.computed_tokens > 0, "a first chunk")


async def test_a_cancelled_prefill_tells_who_waits_and_gives_its_blocks_back() -> None:
    async with pair(device_blocks=64) as (on, other):
        claiming = asyncio.create_task(
            other.node.engine.decode(other.node.job(LONG, NEW), "t", deadline_s=100.0)
        )
        prefilling = asyncio.create_task(on.node.engine.prefill(on.node.job(LONG, 1), "t"))
        await begun(on)
        prefilling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finish(prefilling)
        assert on.node.service.stats().running_requests == 0  # and not some time later
        with pytest.raises(HandoffError, match="cancelled") as refused:
            await finish(claiming)
        assert refused.value.reason == "producer_failed"


async def test_a_load_that_fails_in_a_streamed_prefill_delays_the_claim_only() -> None:
    prompt = text(3 * BLOCK_SIZE + 5)
    async with pair() as (on, other):
        await on.node.generate(prompt, 1)
        await on.push_to_host(prompt)
        on.latch.fail_next(Direction.LOAD)
        claiming = asyncio.create_task(
            other.node.engine.decode(other.node.job(prompt, NEW), "t", deadline_s=100.0)
        )
        prefilled = await finish(on.node.engine.prefill(on.node.job(prompt, 1), "t"))
        assert prefilled.generation.load_problem is not None
        generation, _ = await finish(claiming)
        assert generation.tokens == truth(prompt, NEW).tokens


async def test_stopping_to_publish_leaves_a_prefill_its_blocks_while_it_computes() -> None:
    async with bench(device_blocks=64) as on:
        prefilling = asyncio.create_task(on.node.engine.prefill(on.node.job(LONG, 1), "t"))
        await begun(on)
        on.node.service.publishings.give_up()
        await asyncio.sleep(0)
        if not prefilling.done():
            assert on.node.service.stats().running_requests == 1
        with pytest.raises(ShuttingDownError):
            await finish(prefilling)
        await on.settle()


async def test_a_publish_nobody_waits_for_that_fails_is_the_claimers_to_hear() -> None:
    async with pair(device_blocks=64) as (on, other):
        on.store.fail_next(100_000)
        prefilled = await on.node.engine.prefill(
            on.node.job(LONG, 1), "t", waits_for=PublishWait.NOTHING
        )
        assert prefilled.generation.tokens == truth(LONG, 1).tokens
        await until(lambda: on.node.service.stats().running_requests == 0, "an ended publish")
        assert on.node.service.stats().handoff.failed_publishes == 1
        on.store.fail_next(0)
        with pytest.raises(HandoffError) as refused:
            await other.node.engine.decode(other.node.job(LONG, NEW), "t", deadline_s=1.0)
        assert refused.value.reason == "not_yet"
