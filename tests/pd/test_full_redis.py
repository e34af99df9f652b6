"""A Redis that evicts what was used longest ago goes on handing prompts over when it is full."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.pd.nodes import claim, publish, settings
from tests.redis_server import PATIENT, redis_server
from tests.world import World, tokens, world
from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import layered
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.pd.settings import DirectPath
from tierkv.storage.factory import open_store

BLOCK = 16
WHO = Fingerprint("m", layered(BLOCK, [("latent", "uint8", 1024)], 1))  # 16 KiB a block
NUM_BLOCKS = 64  # of a prompt: 1 MiB
# They share nothing, and are three times as much as the server holds.
PROMPTS = [tokens(NUM_BLOCKS * BLOCK, number << 16) for number in range(24)]


def node(url: str) -> AbstractAsyncContextManager[World]:
    """A node with room for two prompts."""
    store, room = open_store(url, PATIENT, SystemClock()), 2 * NUM_BLOCKS
    way = settings(direct=DirectPath.AUTO)
    return world(store=store, who=WHO, handoff=way, device_blocks=room, host_blocks=room)


async def publish_all(prefill: World) -> None:
    for number, prompt in enumerate(PROMPTS):
        await publish(prefill, prompt, str(number))


@pytest.mark.promise("Hand-offs succeed over a full Redis with LRU eviction.")
async def test_hand_offs_go_on_over_a_full_redis_that_evicts_the_least_recently_used() -> None:
    limits = ["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"]
    # Redis evicts the oldest of a random sample. Of few keys the default of 5 takes young ones too.
    with redis_server(*limits, "--maxmemory-samples", "64") as server:
        async with node(server.url) as prefill, node(server.url) as decode:
            for number, prompt in enumerate(PROMPTS):
                await publish(prefill, prompt, str(number))
                await claim(decode, prompt, str(number))
        evicted = server.execute("INFO", "stats")
        assert isinstance(evicted, dict)
        assert evicted["evicted_keys"] > NUM_BLOCKS


async def test_a_full_redis_that_evicts_nothing_hands_nothing_over() -> None:
    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        async with node(server.url) as prefill:
            with pytest.raises(HandoffError, match="OOM"):
                await publish_all(prefill)
            for request in prefill.service.scheduler.running_requests:
                prefill.service.scheduler.end(request)
