"""On a healthy store a claim waits for room within its deadline, and goes on through few slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.latch import finish
from tests.sessions import claim_request, publish_request
from tests.world import World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.tickets import HandoffProblem
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

SHORT = HandoffSettings(publish_deadline_s=100.0, claim_deadline_s=100.0, direct=DirectPath.OFF)


def prompt_of(number: int, count: int) -> list[int]:
    return [(number << 16) + at for at in range(count)]


@pytest.fixture
def store() -> Store:
    return MemoryStore(MemorySettings(), SystemClock())


@asynccontextmanager
async def published(
    store: Store, prompts: list[list[int]], **settings: Any
) -> AsyncIterator[World]:
    """A decode node beside a store that has `prompts`, under tickets by their number."""
    most = max(map(len, prompts)) // 4 + 1
    async with world(store=store, handoff=SHORT, device_blocks=most, host_blocks=1) as prefill:
        for number, prompt in enumerate(prompts):
            request = await prefill.admit(prompt)
            await prefill.prefill(request, prompt)
            await finish(publish_request(prefill.service, request, str(number), [42]))
            await prefill.ended(request)
    async with world(store=store, handoff=SHORT, **settings) as decode:
        yield decode


async def claim(
    node: World, number: int, prompt: list[int], policy: ClaimPolicy = ClaimPolicy.WHOLE
) -> None:
    request, _ = await claim_request(
        node.service,
        f"claim {number}",
        str(number),
        node.prompt(prompt),
        max_new_tokens=1,
        policy=policy,
    )
    await request.gate.all_layers(100.0)
    assert request.cached_tokens == len(prompt)
    assert request.matched.total_tokens == len(prompt)
    node.check_kv(request, prompt, len(prompt))
    node.service.scheduler.end(request)


@pytest.mark.promise("A claim waits for room until its deadline, then names the reason.")
@pytest.mark.parametrize("policy", [ClaimPolicy.WHOLE, ClaimPolicy.RECOMPUTE])
async def test_of_a_burst_of_claims_none_is_refused_and_nothing_is_computed_again(
    store: Store, policy: ClaimPolicy
) -> None:
    prompts = [prompt_of(number, 225) for number in range(10)]
    async with published(store, prompts, device_blocks=128, host_blocks=256) as node:
        async with asyncio.TaskGroup() as claims:
            for number, prompt in enumerate(prompts):
                claims.create_task(claim(node, number, prompt, policy))
        await node.settle()


@pytest.mark.promise("A prompt larger than the host tier is claimed whole.")
@pytest.mark.parametrize(
    ("device_blocks", "host_blocks", "length", "host_write"),
    [
        (1000, 100, 427, WritePolicy.WRITE_THROUGH),
        (128, 32, 511, WritePolicy.WRITE_BACK),
        (128, 1, 510, WritePolicy.WRITE_THROUGH),
    ],
)
async def test_a_prompt_up_to_the_devices_size_comes_through_a_small_host_tier(
    store: Store, device_blocks: int, host_blocks: int, length: int, host_write: WritePolicy
) -> None:
    prompts = [prompt_of(1, length)]
    settings = {"device_blocks": device_blocks, "host_blocks": host_blocks}
    async with published(store, prompts, **settings, host_write=host_write) as node:
        await finish(claim(node, 0, prompts[0]))
        await node.settle()
        assert (await node.run(prompts[0])).device_tokens >= length - 4


async def test_claims_of_one_prompt_come_through_a_small_host_tier_side_by_side(
    store: Store,
) -> None:
    prompts = [prompt_of(1, 200)]
    async with published(store, prompts, device_blocks=256, host_blocks=16) as node:

        async def claim_it(name: str) -> None:
            request, _ = await claim_request(
                node.service, name, "0", node.prompt(prompts[0]), max_new_tokens=1
            )
            await request.gate.all_layers(100.0)
            node.check_kv(request, prompts[0], 200)
            node.service.scheduler.end(request)

        async with asyncio.TaskGroup() as claims:
            for number in range(3):
                claims.create_task(claim_it(f"claim {number}"))
        await node.settle()


@pytest.mark.promise("A claim waits for room until its deadline, then names the reason.")
async def test_a_claim_that_finds_no_room_until_its_deadline_says_so(store: Store) -> None:
    prompts = [prompt_of(1, 100)]
    async with published(store, prompts, device_blocks=32, host_blocks=32) as node:
        running = await node.admit(prompt_of(2, 40))
        reason = ""
        for deadline_s in (0.2, 2.0, 20.0):  # a slow machine may not come as far as that before
            with pytest.raises(HandoffError) as error:
                await claim_request(
                    node.service,
                    "claim",
                    "0",
                    node.prompt(prompts[0]),
                    max_new_tokens=1,
                    deadline_s=deadline_s,
                )
            reason = error.value.reason
            if reason == HandoffProblem.NO_ROOM.value:
                break
        assert reason == HandoffProblem.NO_ROOM.value
        node.service.scheduler.end(running)
        await finish(claim(node, 0, prompts[0]))
        await node.settle()
