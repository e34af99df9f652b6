"""Hand-offs of the reference model over a real Redis give what a single node gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.exact import BLOCK_SIZE, ExactNode, exact_node, text, truth
from tests.latch import turns, until
from tests.redis_server import PATIENT, RedisServer, redis_server
from tests.world import background_tasks
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.refmodel.generation import GenerateRequest
from tierkv.refmodel.sampling import Sampling
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Store

NEW = 6
GREEDY, SEEDED = Sampling(), Sampling(temperature=0.9, seed=11, top_k=40)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def store(server: RedisServer, settings: StoreSettings = PATIENT) -> Store:
    return open_store(server.url, settings, SystemClock())


@asynccontextmanager
async def pair(
    server: RedisServer,
    storage_write: WritePolicy = WritePolicy.NONE,
    *,
    stores: StoreSettings = PATIENT,
) -> AsyncIterator[tuple[ExactNode, ExactNode]]:
    # The model here is so small that computing beats any store: fetch all the same.
    options: Any = {
        "device_blocks": 1024,
        "storage_write": storage_write,
        "fetch_policy": FetchPolicy.WAIT_COMPLETE,
        "handoff": HandoffSettings(
            direct=DirectPath.OFF, publish_deadline_s=60, lookup_deadline_s=20
        ),
    }
    async with (
        exact_node(store(server, stores), **options) as prefill,
        exact_node(store(server, stores), **options) as decode,
    ):
        yield prefill, decode


async def settled(*nodes: ExactNode) -> None:
    for node in nodes:
        await until(lambda node=node: node.service.tiers.work.num_tasks == 0, "an idle node")  # type: ignore[misc]
        assert node.service.stats().running_requests == 0
        assert node.service.verify() == []


async def hand_over(
    pair: tuple[ExactNode, ExactNode], prompt: list[int], ticket: str, sampling: Sampling
) -> tuple[int, ...]:
    """The claim waits before the prefill begins."""
    prefill, decode = pair

    async def claim() -> tuple[int, ...]:
        generation, found = await decode.engine.decode(
            decode.job(prompt, NEW, sampling), ticket, deadline_s=200
        )
        assert found is not None
        assert generation.computed_tokens == 0
        return generation.tokens

    async with asyncio.TaskGroup() as group:
        claiming = group.create_task(claim())
        group.create_task(prefill.engine.prefill(prefill.job(prompt, 1, sampling), ticket))
    return claiming.result()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("blocks", [1, 2, 16, 17])  # a chunk of the prefill is 16 blocks
async def test_every_length_around_a_block_boundary(
    server: RedisServer, blocks: int, sampling: Sampling
) -> None:
    async with pair(server) as nodes:
        for length in range(blocks * BLOCK_SIZE - 2, blocks * BLOCK_SIZE + 3):
            prompt = text(length, seed=1000 * blocks + length)
            tokens = await hand_over(nodes, prompt, f"{blocks}.{length}.{sampling.seed}", sampling)
            assert tokens == truth(prompt, NEW, sampling).tokens
        await settled(*nodes)


@pytest.mark.timeout(300)
async def test_two_hundred_hand_offs_at_once_are_exact_and_leave_nothing(
    server: RedisServer,
) -> None:
    async with pair(server) as nodes:  # whatever is opened once for all
        await hand_over(nodes, text(20), "warm", GREEDY)
        await settled(*nodes)
    server.execute("FLUSHALL")
    await turns(20)
    open_before, tasks = len(os.listdir("/proc/self/fd")), background_tasks()
    prompts = [text(20 + number % 50, seed=number) for number in range(200)]
    async with pair(server) as nodes:
        running = background_tasks()
        async with asyncio.TaskGroup() as group:
            hands = [
                group.create_task(hand_over(nodes, prompt, f"many{n}", SEEDED if n % 2 else GREEDY))
                for n, prompt in enumerate(prompts)
            ]
        for number, (prompt, hand) in enumerate(zip(prompts, hands, strict=True)):
            sampling = SEEDED if number % 2 else GREEDY
            assert hand.result() == truth(prompt, NEW, sampling).tokens
        await settled(*nodes)
        assert background_tasks() <= running | {"tierkv-redis-subscribe", "tierkv-redis-hear"}
        prefill = nodes[0].service.handoff
        assert prefill is not None
        assert prefill.tickets.lease.num_held == 0
    assert background_tasks() == tasks
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before, "closed files")
    names = server.execute("KEYS", "*")
    assert isinstance(names, list)
    assert names
    assert [name for name in names if server.execute("PTTL", name) == -1] == []
    assert [name for name in names if b":open:" in name or b":producer:" in name] == []


async def test_the_first_token_does_not_wait_for_storage_if_it_need_not(
    server: RedisServer,
) -> None:
    prompt = text(100, seed=77)
    async with pair(server, stores=StoreSettings()) as (prefill, decode):
        server.pause()
        try:
            prefilled = await prefill.engine.prefill(
                prefill.job(prompt, 1), "later", waits_for=PublishWait.NOTHING
            )
        finally:
            server.resume()
        assert prefilled.published is None
        assert prefilled.generation.tokens == truth(prompt, 1).tokens
        await until(lambda: prefill.service.stats().running_requests == 0, "the publish")
        await settled(prefill)
        generation, _ = await decode.engine.decode(
            decode.job(prompt, NEW), "never", policy=ClaimPolicy.RECOMPUTE, deadline_s=0.05
        )
        assert generation.tokens == truth(prompt, NEW).tokens


async def test_the_next_turn_hits_on_the_other_node_prompt_answer_and_tail(
    server: RedisServer,
) -> None:
    async with pair(server, WritePolicy.WRITE_THROUGH) as (first, second):
        prompt = text(75, seed=5)
        turn = await first.generate(prompt, 30)
        await settled(first)
        talk = [*prompt, *turn.tokens, *text(20, seed=6)]
        answer = await second.generate(talk, NEW)
        assert answer.tokens == truth(talk, NEW).tokens
        # All but the last generated token, whose KV nobody has computed yet.
        assert answer.matched.storage_tokens == len(prompt) + 30 - 1
        await settled(second)
        again = await first.generate([*talk, *answer.tokens, *text(9, seed=7)], NEW)
        assert again.matched.total_tokens == len(talk) + NEW - 1
        await settled(first)


async def test_what_a_decode_node_made_of_a_claim_is_there_for_the_prefill_node(
    server: RedisServer,
) -> None:
    async with pair(server, WritePolicy.WRITE_THROUGH) as (prefill, decode):
        prompt = text(75, seed=8)
        tokens = await hand_over((prefill, decode), prompt, "turn1", GREEDY)
        await settled(prefill, decode)
        talk = [*prompt, *tokens, *text(20, seed=9)]
        job = GenerateRequest("turn 2", prefill.job(talk, 1).tokens, 1)
        prefilled = await prefill.engine.prefill(job, "turn2")
        assert prefilled.generation.matched.total_tokens == len(prompt) + NEW - 1
        assert prefilled.generation.matched.storage_tokens > 0
        assert prefilled.generation.tokens == truth(talk, 1).tokens
        await settled(prefill)
