"""A long prompt holds up no other request: no turn of the service's loop is as long as its hashing.

Turns are measured in processor time of the loop's thread, so that a busy machine fails nothing.
"""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest

from tests.loop_turns import LoopTurns
from tests.redis_server import PATIENT, RedisServer, empty_redis, module_redis
from tests.sessions import begin_request, claim_request, publish_request
from tierkv.cache.groups import CacheGroup
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import layered
from tierkv.clock import SystemClock
from tierkv.embed.host_side import EngineCacheSettings, HostSide, HostSizes
from tierkv.errors import HandoffError
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.factory import open_store

__all__ = ["empty_redis", "module_redis"]

BLOCK = 16
LAYOUT = layered(BLOCK, [("latent", "uint8", 1)], 1)
MILLION = 1_000_000  # tokens; hashing all of their blocks takes 0.4 s
LONGEST_S = 0.05
HANDOFF = HandoffSettings(publish_deadline_s=100.0, claim_deadline_s=100.0)


def prompt_of(num_tokens: int) -> Prompt:
    """Return a prompt of random tokens that no other call returns."""
    tokens = random.choices(range(1 << 31), k=num_tokens)
    return Prompt.of(array("i", tokens).tobytes(), BLOCK)


@pytest.mark.promise("A prompt of a million tokens blocks the loop for less than 50 ms.")
async def test_a_cold_prompt_of_a_million_tokens_holds_up_no_short_one(
    empty_redis: RedisServer,
) -> None:
    cache = CacheSettings(
        block_size=BLOCK, fetch_policy=FetchPolicy.WAIT_COMPLETE, fetch_deadline_s=100.0
    )
    fingerprint, groups = Fingerprint("m", LAYOUT), [CacheGroup(LAYOUT)]
    sizes = HostSizes.for_blocks(fingerprint, groups, MILLION // BLOCK + 256)
    store = open_store(empty_redis.url, PATIENT, SystemClock())
    service = Service(CpuDevice(), sizes.fingerprint, sizes.settings(cache), HANDOFF, store)
    async with service.running():
        side = HostSide(service, sizes, EngineCacheSettings())
        turns, both = LoopTurns(), [prompt_of(MILLION), prompt_of(500)]
        with turns.measured():
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(side.promise(one, None, 30.0)) for one in both]
        assert [one.result().num_tokens for one in asked] == [0, 0]
        assert turns.longest_s < LONGEST_S
        assert turns.total_s < 4 * LONGEST_S, "a miss is not worth hashing all of the prompt"
        await side.release_all()


@pytest.mark.promise("A prompt of a million tokens blocks the loop for less than 50 ms.")
async def test_a_claim_of_a_million_tokens_of_another_prompt_is_refused_in_portions(
    empty_redis: RedisServer,
) -> None:
    settings = CacheSettings(
        block_size=BLOCK, device_blocks=MILLION // BLOCK + 1, host_blocks=MILLION // BLOCK + 1
    )
    store = open_store(empty_redis.url, PATIENT, SystemClock())
    service = Service(CpuDevice(), Fingerprint("m", LAYOUT), settings, HANDOFF, store)
    async with service.running():
        short = prompt_of(500)
        request = await begin_request(service, "short", short, max_new_tokens=0)
        await service.scheduler.commit(request, short.tokens)
        await publish_request(service, request, "ticket", (1,))
        service.scheduler.end(request)
        long, turns = prompt_of(MILLION), LoopTurns()
        with turns.measured(), pytest.raises(HandoffError, match="for another prompt"):
            await claim_request(service, "long", "ticket", long, max_new_tokens=0)
        assert turns.longest_s < LONGEST_S
