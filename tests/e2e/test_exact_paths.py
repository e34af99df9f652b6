"""The same prompt through any path gives the same tokens and the same KV bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.exact import BLOCK_SIZE, Bytes, ExactNode, exact_node, text, truth
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Store

LENGTHS = [1, BLOCK_SIZE, 250]
NEW = 20


def file_store(folder: Path) -> Store:
    return open_store(f"file://{folder}", StoreSettings(), SystemClock())


def assert_same_bytes(cached: Sequence[Bytes], expected: Sequence[Bytes], at_least: int) -> None:
    assert len(cached[0]) >= at_least
    for ours, theirs in zip(cached, expected, strict=True):
        assert np.array_equal(ours, theirs[: len(ours)])


async def push_off_the_device(node: ExactNode, prompt: Sequence[int]) -> None:
    """Other prompts, until nothing of `prompt` is on the device."""
    for seed in range(100, 200):
        await node.generate(text(len(prompt) + 64, seed), 1)
        if (await node.where(prompt))[0] == 0:
            return
    pytest.fail("the prompt stayed on the device")


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_cold_prompt_and_its_device_hit(length: int) -> None:
    prompt = text(length)
    expected = truth(prompt, NEW)
    async with exact_node(None) as node:
        cold = await node.generate(prompt, NEW)
        warm = await node.generate(prompt, NEW)
        assert cold.tokens == warm.tokens == expected.tokens
        assert cold.matched.total_tokens == 0
        assert warm.matched.device_tokens == length - 1  # one is left to compute
        assert_same_bytes(await node.cached(prompt), expected.kv, length - 1)


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_host_hit_after_pressure(length: int) -> None:
    prompt = text(length)
    expected = truth(prompt, NEW)
    async with exact_node(None, device_blocks=-(-length // BLOCK_SIZE) + 8) as node:
        await node.generate(prompt, NEW)
        await push_off_the_device(node, prompt)
        hit = await node.generate(prompt, NEW)
        assert hit.tokens == expected.tokens
        assert hit.matched.host_tokens + hit.matched.device_tokens == length - 1
        # Of a prompt without a full block, another text's first letters may be on the device.
        assert hit.matched.host_tokens >= (length - 1) // BLOCK_SIZE
        assert_same_bytes(await node.cached(prompt), expected.kv, length - 1)


@pytest.mark.promise("A restarted node reads the same bytes from Storage.")
@pytest.mark.parametrize("length", LENGTHS)
async def test_a_storage_hit_after_a_restart(length: int, tmp_path: Path) -> None:
    prompt = text(length)
    expected = truth(prompt, NEW)
    write = WritePolicy.WRITE_THROUGH
    async with exact_node(file_store(tmp_path), storage_write=write) as node:
        assert (await node.generate(prompt, 1)).tokens == expected.tokens[:1]
    whole = FetchPolicy.WAIT_COMPLETE  # a busy machine would sooner compute
    async with exact_node(file_store(tmp_path), fetch_policy=whole) as node:
        hit = await node.generate(prompt, NEW)
        assert hit.tokens == expected.tokens
        assert hit.matched.storage_tokens == length - 1
        assert_same_bytes(await node.cached(prompt), expected.kv, length - 1)


@pytest.mark.promise("A prompt spread over all three tiers gives the same tokens.")
async def test_one_prompt_spread_over_all_three_tiers(tmp_path: Path) -> None:
    prompt = text(40 * BLOCK_SIZE + 5)
    expected = truth(prompt, NEW)
    async with exact_node(file_store(tmp_path)) as other:
        await other.engine.prefill(other.job(prompt, 1), "ticket")
    async with exact_node(
        file_store(tmp_path),
        device_blocks=60,
        fetch_policy=FetchPolicy.WAIT_COMPLETE,  # where it is, not whether it is worth it
    ) as node:
        half = prompt[: 20 * BLOCK_SIZE]
        await node.generate(half, 1)
        await node.generate(text(50 * BLOCK_SIZE, seed=9), 1)
        device, host = await node.where(half)
        assert device > 0
        assert host > 0
        hit = await node.generate(prompt, NEW)
        matched = hit.matched
        assert min(matched.device_tokens, matched.host_tokens, matched.storage_tokens) > 0
        assert matched.total_tokens == len(prompt) - 1
        assert hit.tokens == expected.tokens
        assert_same_bytes(await node.cached(prompt), expected.kv, len(prompt) - 1)


async def test_longer_and_shorter_prompts_use_a_tail_and_stay_exact() -> None:
    prompt = text(3 * BLOCK_SIZE + 9)
    async with exact_node(None) as node:
        await node.generate(prompt, 1)
        for other in (prompt[:-4], [*prompt, *text(30, seed=5)], [*prompt[:-3], 33, 34, 35]):
            expected = truth(other, NEW)
            hit = await node.generate(other, NEW)
            assert hit.matched.device_tokens > 3 * BLOCK_SIZE
            assert hit.tokens == expected.tokens
            assert_same_bytes(await node.cached(other), expected.kv, len(other) - 1)


@pytest.mark.promise("The next turn of a conversation hits the generated tokens.")
async def test_a_follow_up_turn_hits_what_was_generated() -> None:
    prompt = text(100)
    async with exact_node(None) as node:
        first = await node.generate(prompt, 40)
        turn = [*prompt, *first.tokens, *text(20, seed=3)]
        second = await node.generate(turn, NEW)
        # all but the last generated token were fed, and so have KV
        assert second.matched.device_tokens == len(prompt) + len(first.tokens) - 1
        assert second.tokens == truth(turn, NEW).tokens


async def test_many_requests_at_once_under_pressure(tmp_path: Path) -> None:
    prompts = [text(30 + 37 * i, seed=i // 3) for i in range(12)]
    async with exact_node(
        file_store(tmp_path),
        device_blocks=64,
        host_blocks=40,
        storage_write=WritePolicy.WRITE_THROUGH,
    ) as node:
        for _ in range(2):
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(node.generate(prompt, 8)) for prompt in prompts]
            for prompt, task in zip(prompts, running, strict=True):
                assert task.result().tokens == truth(prompt, 8).tokens
            assert node.service.verify() == []
