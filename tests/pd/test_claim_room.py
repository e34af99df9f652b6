"""On a healthy store a claim waits for room within its deadline, and goes on through few slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.pd.nodes import claimed, publish, settings
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.tickets import HandoffProblem
from tierkv.storage.memory import MemorySettings, MemoryStore


def prompt_of(number: int, count: int) -> list[int]:
    return tokens(count, number << 16)


@asynccontextmanager
async def published(prompts: list[list[int]], **cache: Any) -> AsyncIterator[World]:
    """A decode node beside a store that has `prompts`, under tickets by their number."""
    store = MemoryStore(MemorySettings(), SystemClock())
    most = max(map(len, prompts)) // 4 + 1
    async with world(store=store, handoff=settings(), device_blocks=most, host_blocks=1) as prefill:
        for number, prompt in enumerate(prompts):
            await publish(prefill, prompt, str(number))
    async with world(store=store, handoff=settings(), **cache) as decode:
        yield decode
        await decode.settle()


async def claim(
    node: World, prompt: list[int], number: int = 0, *, name: str = "claim", **options: Any
) -> None:
    request = await claimed(node, prompt, str(number), name=f"{name} {number}", **options)
    assert request.cached_tokens == request.matched.total_tokens == len(prompt)
    node.service.scheduler.end(request)


@pytest.mark.promise("A claim waits for room until its deadline, then names the reason.")
@pytest.mark.parametrize("policy", [ClaimPolicy.WHOLE, ClaimPolicy.RECOMPUTE])
async def test_of_a_burst_of_claims_none_is_refused_and_nothing_is_computed_again(
    policy: ClaimPolicy,
) -> None:
    prompts = [prompt_of(number, 225) for number in range(10)]
    async with (
        published(prompts, device_blocks=128, host_blocks=256) as node,
        asyncio.TaskGroup() as claims,
    ):
        for number, prompt in enumerate(prompts):
            claims.create_task(claim(node, prompt, number, policy=policy))


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
    device_blocks: int, host_blocks: int, length: int, host_write: WritePolicy
) -> None:
    prompt = prompt_of(1, length)
    cache = {"device_blocks": device_blocks, "host_blocks": host_blocks}
    async with published([prompt], **cache, host_write=host_write) as node:
        await claim(node, prompt)
        await node.settle()
        assert (await node.run(prompt)).device_tokens >= length - 4


async def test_claims_of_one_prompt_come_through_a_small_host_tier_side_by_side() -> None:
    prompt = prompt_of(1, 200)
    async with (
        published([prompt], device_blocks=256, host_blocks=16) as node,
        asyncio.TaskGroup() as claims,
    ):
        for number in range(3):
            claims.create_task(claim(node, prompt, name=f"claim {number}"))


@pytest.mark.promise("A claim waits for room until its deadline, then names the reason.")
async def test_a_claim_that_finds_no_room_until_its_deadline_says_so() -> None:
    prompt = prompt_of(1, 100)
    async with published([prompt], device_blocks=32, host_blocks=32) as node:
        running = await node.admit(prompt_of(2, 40))
        reason = ""
        for deadline_s in (0.2, 2.0, 20.0):  # a slow machine may not come as far as that before
            with pytest.raises(HandoffError) as error:
                await claimed(node, prompt, "0", deadline_s=deadline_s)
            reason = error.value.reason
            if reason == HandoffProblem.NO_ROOM.value:
                break
        assert reason == HandoffProblem.NO_ROOM.value
        node.service.scheduler.end(running)
        await claim(node, prompt)
