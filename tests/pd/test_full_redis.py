"""A Redis that evicts what was used longest ago goes on handing prompts over when it is full."""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.redis_server import PATIENT, redis_server
from tests.sessions import begin_request, claim_request, publish_request
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import layered
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.factory import open_store

BLOCK = 16
LAYOUT = layered(BLOCK, [("latent", "uint8", 1024)], 1)  # 16 KiB a block
NUM_BLOCKS = 64  # of a prompt: 1 MiB
NUM_PROMPTS = 24


@asynccontextmanager
async def node(url: str) -> AsyncIterator[Service]:
    """A node with room for two prompts."""
    settings = CacheSettings(
        block_size=BLOCK, device_blocks=2 * NUM_BLOCKS, host_blocks=2 * NUM_BLOCKS
    )
    handoff = HandoffSettings(publish_deadline_s=30.0, claim_deadline_s=30.0)
    store = open_store(url, PATIENT, SystemClock())
    service = Service(CpuDevice(), Fingerprint("m", LAYOUT), settings, handoff, store)
    async with service.running():
        yield service


async def publish(service: Service, name: str, prompt: Prompt) -> None:
    """Compute `prompt` and publish it under the ticket `name`."""
    request = await begin_request(service, name, prompt, max_new_tokens=0)
    try:
        await service.scheduler.commit(request, prompt.tokens)
        await publish_request(service, request, name, (1,))
    finally:
        service.scheduler.end(request)


def prompts() -> list[Prompt]:
    """Return prompts that share nothing, three times as much as the server holds."""
    return [
        Prompt.of(array("i", random.choices(range(1 << 31), k=NUM_BLOCKS * BLOCK)).tobytes(), BLOCK)
        for _ in range(NUM_PROMPTS)
    ]


async def publish_all(service: Service) -> None:
    """Publish all prompts, each under a ticket of its own."""
    for number, prompt in enumerate(prompts()):
        await publish(service, str(number), prompt)


@pytest.mark.promise("Hand-offs succeed over a full Redis with LRU eviction.")
async def test_hand_offs_go_on_over_a_full_redis_that_evicts_the_least_recently_used() -> None:
    limits = ["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"]
    # Redis evicts the oldest of a random sample. Of few keys the default of 5 takes young ones too.
    with redis_server(*limits, "--maxmemory-samples", "64") as server:
        async with node(server.url) as prefill, node(server.url) as decode:
            for number, prompt in enumerate(prompts()):
                name = str(number)
                await publish(prefill, name, prompt)
                claimed, ticket = await claim_request(
                    decode, name, name, prompt, max_new_tokens=0, deadline_s=30.0
                )
                assert ticket is not None
                assert claimed.cached_tokens == prompt.num_tokens
                decode.scheduler.end(claimed)
        evicted = server.execute("INFO", "stats")
        assert isinstance(evicted, dict)
        assert evicted["evicted_keys"] > NUM_BLOCKS


async def test_a_full_redis_that_evicts_nothing_hands_nothing_over() -> None:
    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        async with node(server.url) as prefill:
            with pytest.raises(HandoffError, match="OOM"):
                await publish_all(prefill)
