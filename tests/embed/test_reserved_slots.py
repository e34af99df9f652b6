"""Host slots that an engine has reserved: as many as there are, and never for old content."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.world import GQA, fingerprint, tokens
from tierkv.cache.eviction import EvictionKind
from tierkv.cache.groups import CacheGroup
from tierkv.cache.keys import Prompt
from tierkv.clock import SystemClock
from tierkv.embed.host_side import Copied, EngineCacheSettings, HostSide, HostSizes
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.memory import MemorySettings, MemoryStore

SLOTS = 8
PROMPT = Prompt.of(tokens(2 * GQA.block_size), GQA.block_size)


@asynccontextmanager
async def host_side(**cache: Any) -> AsyncIterator[tuple[Service, HostSide]]:
    sizes = HostSizes.for_blocks(fingerprint(), [CacheGroup(GQA)], SLOTS)
    service = Service(
        CpuDevice(),
        sizes.fingerprint,
        sizes.settings(CacheSettings(block_size=GQA.block_size, **cache)),
        HandoffSettings(direct=DirectPath.OFF),
        MemoryStore(MemorySettings(), SystemClock()),
    )
    async with service.running():
        side = HostSide(service, sizes, EngineCacheSettings())
        yield service, side
        await side.release_all()


async def test_an_engine_that_wants_more_slots_than_there_are_gets_all_there_are() -> None:
    async with host_side() as (_, side):
        [first] = await side.reserve([SLOTS - 3])
        [rest] = await side.reserve([SLOTS])
        assert (len(first), len(rest)) == (SLOTS - 3, 3)
        assert await side.reserve([1]) == [[]]
        await side.free_reserved([[*first, *rest]])


async def test_a_slot_that_was_given_back_unused_takes_no_content_from_before_a_deletion() -> None:
    async with host_side() as (service, side):
        [slots] = await side.reserve([4])
        one, other = (Copied(0, range(2), array("i", some), ()) for some in (slots[:2], slots[2:]))
        assert (await side.keep([(PROMPT, [one])])).num_blocks == (2,)
        again = await side.keep([(PROMPT, [other])])  # the index has these blocks
        assert sorted(again.unused[0]) == sorted(slots[2:])
        await service.free(clears_storage=True)
        assert (await side.keep([(PROMPT, [other])])).num_blocks == (0,)
        await side.free_reserved([slots[2:]])


async def test_room_is_made_of_what_the_engine_has_looked_up_least_often() -> None:
    async with host_side(host_eviction=EvictionKind.LFU) as (_, side):
        prompts = [Prompt.of(tokens(8, 100 * at), GQA.block_size) for at in range(4)]
        for prompt in prompts:
            [slots] = await side.reserve([2])
            await side.keep([(prompt, [Copied(0, range(2), array("i", slots), ())])])
        for prompt in (prompts[0], prompts[0], *prompts[1:]):  # the first is the oldest
            found = await side.promise(prompt, None, 30.0)
            assert found.claim()
            await side.free(found)
        await side.reserve([SLOTS - 2])
        left = [await side.promise(prompt, None, 30.0) for prompt in prompts]
        assert [one.num_tokens for one in left] == [8, 0, 0, 0]
        await side.release_all()
