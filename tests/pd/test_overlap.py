"""The stages of a hand-off run beside each other, and a fault in one of them ends it cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.gated_reads import GatedReads
from tests.latch import finish, until
from tests.pd.nodes import computed, settings
from tests.sessions import claim_request, publish_request
from tests.world import World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.gpu.protocol import Direction
from tierkv.pd import claims
from tierkv.pd.handoff import NUM_GROUPS
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.request import Request
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetStatus, Store

PROMPT = [token % 50 for token in range(4 * (3 * GROUP_BLOCKS + 10))]  # four groups
BLOCKS = len(PROMPT) // 4


@asynccontextmanager
async def node(store: Store) -> AsyncIterator[World]:
    """Moves nothing but what a hand-off asks for. Room for the prompt and a little more."""
    async with world(
        store=store,
        handoff=settings(streams=False),
        device_blocks=BLOCKS + 4,
        host_blocks=BLOCKS + 4,
        host_write=WritePolicy.NONE,
        storage_write=WritePolicy.NONE,
    ) as here:
        yield here


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[tuple[World, Request]]:
    """A request whose prompt is computed."""
    async with node(store) as here:
        request = await computed(here, PROMPT)
        yield here, request
        await here.ended(request)


def memory() -> MemoryStore:
    return MemoryStore(MemorySettings(), SystemClock())


async def test_groups_are_copied_from_the_device_while_others_are_being_stored() -> None:
    async with running(memory()) as (here, request), asyncio.TaskGroup() as group:
        here.the_store.hold_writes()
        publishing = group.create_task(publish_request(here.service, request, "t", [1]))
        await here.the_store.until_held(NUM_GROUPS)
        assert here.latch.count(Direction.OFFLOAD) == NUM_GROUPS, "as many as have staging slots"
        here.the_store.release()
        published = await publishing
        assert published.num_blocks == BLOCKS
        assert await here.the_store.exists(here.names(PROMPT)) == BLOCKS


@pytest.mark.parametrize("good_writes", range(4))
async def test_a_write_that_fails_ends_the_publish_and_gives_back_what_it_used(
    good_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.pd.handoff._PATIENCE_S", 0.0)
    async with running(memory()) as (here, request):
        here.the_store.hold_writes()
        publishing = asyncio.create_task(publish_request(here.service, request, "t", [1]))
        await here.the_store.until_held(NUM_GROUPS)
        here.the_store.release()
        for _ in range(good_writes):
            await asyncio.sleep(0)
        here.the_store.fail_next(3)
        with pytest.raises(HandoffError):
            await finish(publishing)
        here.the_store.fail_next(0)
        # All of it can be published all the same, on slots that have come back.
        await finish(publish_request(here.service, request, "t", [1]))
        assert await here.the_store.exists(here.names(PROMPT)) == BLOCKS


async def test_a_publish_that_is_cancelled_stops_all_of_its_groups() -> None:
    async with running(memory()) as (here, request):
        here.latch.hold(Direction.OFFLOAD)
        publishing = asyncio.create_task(publish_request(here.service, request, "t", [1]))
        await here.latch.until_held()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finish(publishing)
        here.latch.release()
        await here.settle()
        assert await here.the_store.exists(here.names(PROMPT)) == 0
        await finish(publish_request(here.service, request, "t", [1]))


async def test_what_has_been_fetched_is_loaded_while_the_rest_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "MIN_BYTES", 1)
    store = memory()
    async with running(store) as (there, request):
        await finish(publish_request(there.service, request, "t", [1]))
        gated = GatedReads(store)
        async with node(gated) as here, asyncio.TaskGroup() as group:
            claiming = group.create_task(
                claim_request(here.service, "c", "t", here.prompt(PROMPT), max_new_tokens=0)
            )
            for at in range(4):
                await gated.until_asked(at + 1)
                await until(lambda at=at: here.latch.count(Direction.LOAD) == at)  # type: ignore[misc]
                assert not claiming.done()
                gated.gates[at].set_result(GetStatus.HIT)
            claimed, _ = await claiming
            assert claimed.cached_tokens == len(PROMPT)
            await finish(claimed.gate.all_layers(100.0))
            here.check_kv(claimed, PROMPT, len(PROMPT))
            assert sum(len(copy) for copy in here.latch.seen) == BLOCKS, "each block once"
            await here.ended(claimed)
            assert here.service.verify() == []
