"""What the host has no room for comes in portions to a request that has its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.latch import finish, turns, until
from tests.sched.test_fetch import filled
from tests.sessions import resume_request
from tests.simulated import LoopClock, SimulatedLoop, simulated, simulated_world
from tests.world import GQA, World, fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.errors import RequestAbortedError
from tierkv.gpu.protocol import Direction
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.request import Request
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetItem, GetOutcome
from tierkv.transfer.storage_io import StorageIO

LONG = tokens(400)


async def stored(*prompts: list[int]) -> MemoryStore:
    return await filled(*prompts, num_blocks=110)


@asynccontextmanager
async def small_host(
    policy: FetchPolicy = FetchPolicy.WAIT_COMPLETE, deadline_s: float = 100.0
) -> AsyncIterator[World]:
    """A node whose host has two blocks, beside a store that has LONG."""
    rules: dict[str, Any] = {"fetch_policy": policy, "fetch_deadline_s": deadline_s}
    async with world(store=await stored(LONG), device_blocks=110, host_blocks=2, **rules) as node:
        yield node
        await node.settle()


async def use(node: World, prompt: list[int], request: Request) -> int:
    """A whole request, each byte checked; how many tokens it did not compute."""
    cached = request.cached_tokens
    assert request.matched.total_tokens == cached
    await node.prefill(request, prompt)
    node.check_kv(request, prompt, len(prompt))
    node.service.scheduler.end(request)
    return cached


@pytest.mark.parametrize(("host_blocks", "count"), [(1, 400), (2, 399), (33, 397)])
async def test_a_prompt_comes_whole_through_a_host_tier_that_has_no_room_for_it(
    count: int, host_blocks: int
) -> None:
    prompt = tokens(count)
    whole = (count - 1) // 4 * 4  # the block of which a token is computed is computed
    store = await stored(prompt)
    async with world(store=store, device_blocks=101, host_blocks=host_blocks) as node:
        assert await use(node, prompt, await node.admit(prompt)) == whole
        await node.settle()
        counts = node.service.stats().requests
        assert counts.storage_hit_tokens == whole
        assert sum(counts.missed_tokens.values()) == count - whole


async def test_of_a_burst_on_a_small_host_tier_nobody_computes_what_is_stored() -> None:
    prompts = [tokens(97, 1000 * number) for number in range(6)]
    async with world(store=await stored(*prompts), device_blocks=60, host_blocks=64) as node:

        async def one(prompt: list[int]) -> int:
            return await use(node, prompt, await node.admit(prompt))

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(prompt)) for prompt in prompts]
        assert [task.result() for task in running] == [96] * 6
        await node.settle()


async def test_one_that_is_aborted_or_cancelled_between_two_portions_leaves_nothing() -> None:
    async with small_host() as node:
        num_cancelled = 0

        async def admit() -> None:
            node.service.scheduler.end(await node.admit(LONG, name="one"))

        for num_turns in range(0, 160, 8):
            admitting = asyncio.create_task(admit())
            await turns(num_turns)
            num_cancelled += admitting.cancel()
            await asyncio.wait([admitting])
            await node.settle()
            node.service.reset()
        assert num_cancelled > 5

        aborted = await between_portions(node, name="one")
        assert node.service.abort("one")
        node.the_store.release()
        with pytest.raises(RequestAbortedError):
            await finish(aborted)
        await node.settle()
        node.service.reset()
        assert await use(node, LONG, await node.admit(LONG)) == 396


async def test_a_cancelled_request_keeps_its_blocks_until_the_copy_of_a_portion_has_ended() -> None:
    """Another request would compute into blocks that the copy still writes."""
    async with small_host() as node:
        admitting = await between_portions(node)
        free = node.free_device_blocks
        node.latch.hold(Direction.LOAD)
        node.the_store.release()
        await node.latch.until_held()
        admitting.cancel()
        await asyncio.wait([admitting])
        await turns(20)
        assert node.free_device_blocks == free
        node.latch.release()
        await node.settle()
        assert node.free_device_blocks > free


async def between_portions(node: World, name: str = "") -> asyncio.Task[Request]:
    """Let the store answer until a request has blocks, and its next portion waits for the store."""
    node.the_store.hold()
    admitting = asyncio.create_task(node.admit(LONG, name=name))
    while not node.service.stats().running_requests:
        await node.the_store.until_held(1)
        node.the_store.let_through()
        await asyncio.sleep(0)
    await node.the_store.until_held(1)
    return admitting


async def test_one_whose_portion_does_not_load_is_computed_whole() -> None:
    async with small_host() as node:
        admitting = await between_portions(node)
        node.latch.fail_next(Direction.LOAD)
        node.the_store.release()
        assert await use(node, LONG, await finish(admitting)) == 0
        await node.settle()
        assert await use(node, LONG, await node.admit(LONG)) == 399


@pytest.mark.parametrize("policy", [FetchPolicy.BEST_EFFORT, FetchPolicy.DEADLINE])
async def test_portions_are_waited_for_no_longer_than_the_policy_says(policy: FetchPolicy) -> None:
    async with small_host(policy, 2.0 if policy is FetchPolicy.DEADLINE else 3600.0) as node:
        node.service.note_prefill(1000, 10.0)
        admitting = await between_portions(node)
        request = await finish(admitting)  # while the store holds what it asked for
        assert request.cached_tokens < 399
        node.the_store.release()
        await use(node, LONG, request)


async def test_all_portions_together_take_no_longer_than_the_policy_says() -> None:
    async with small_host(FetchPolicy.DEADLINE, 1.0) as node:
        admitting = await between_portions(node)
        node.the_store.delay_s = 0.6  # for each but the first
        node.the_store.release()
        request = await finish(admitting)
        assert request.cached_tokens < 396
        node.the_store.delay_s = 0.0
        await use(node, LONG, request)


async def test_a_copy_into_a_requests_blocks_is_not_left_alone_when_time_is_over() -> None:
    """Its engine would compute into the same blocks."""
    async with small_host(FetchPolicy.DEADLINE, 0.5) as node:
        admitting = await between_portions(node)
        node.latch.hold(Direction.LOAD)
        before = node.latch.count(Direction.LOAD)
        node.the_store.release()
        await until(lambda: node.latch.count(Direction.LOAD) > before or admitting.done())
        if node.latch.count(Direction.LOAD) > before:  # else it was over before, on a slow machine
            await asyncio.sleep(0.6)
            assert not admitting.done()
        node.latch.release(Direction.LOAD)
        await use(node, LONG, await finish(admitting))


@simulated
async def test_a_portion_that_comes_when_time_is_over_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine is just being told to compute into the same blocks."""
    values = MemoryStore(MemorySettings(), LoopClock())
    room = {"device_blocks": 110, "storage_write": THROUGH}
    rules: dict[str, Any] = {"fetch_policy": FetchPolicy.DEADLINE, "fetch_deadline_s": 1.0}
    async with (
        simulated_world(None, values, host_blocks=110, **room) as other,
        simulated_world(None, values, host_blocks=2, **room, **rules) as node,
    ):
        await other.run(LONG)
        num_fetched, fetch = 0, StorageIO.fetch

        async def stand_still(self: StorageIO, *blocks: Any) -> list[GetOutcome]:
            nonlocal num_fetched
            outcomes = await fetch(self, *blocks)
            num_fetched += 1
            if num_fetched == 3:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, SimulatedLoop)
                loop.now += 10.0
            return outcomes

        monkeypatch.setattr(StorageIO, "fetch", stand_still)
        request = await node.admit(LONG)
        assert request.cached_tokens == (2 + GROUP_BLOCKS) * GQA.block_size
        await use(node, LONG, request)


@simulated
async def test_what_is_computed_because_portions_would_take_longer_counts_as_missed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = MemoryStore(MemorySettings(), LoopClock())
    room = {"device_blocks": 110, "storage_write": THROUGH}
    async with (
        simulated_world(None, values, host_blocks=110, **room) as other,
        simulated_world(None, values, host_blocks=2, **room) as node,
    ):
        await other.run(LONG)
        node.service.note_prefill(400, 0.5)
        get_into = node.the_store.get_into

        async def beside_another(items: Sequence[GetItem]) -> list[GetOutcome]:
            node.service.estimator.tier.note_transfer(1_000, 10.0)  # a fetch that took long
            return await get_into(items)

        monkeypatch.setattr(node.the_store, "get_into", beside_another)
        request = await node.admit(LONG)
        assert request.cached_tokens == 2 * GQA.block_size
        counts = node.service.stats().requests
        assert counts.storage_hit_tokens == 2 * GQA.block_size
        assert sum(counts.missed_tokens.values()) == 400 - 2 * GQA.block_size
        await use(node, LONG, request)


async def test_what_came_in_portions_is_not_taken_for_fast_computing() -> None:
    async with small_host() as node:
        speed = node.service.estimator.prefill
        await use(node, LONG, await node.admit(LONG))
        assert not speed.is_known


async def test_what_a_resumed_request_has_no_room_for_counts_as_missed_all_the_same() -> None:
    async with small_host() as node:
        request = await node.admit(LONG)
        node.service.scheduler.preempt(request)
        node.service.reset()
        again = await finish(resume_request(node.service, request, max_new_tokens=0))
        await use(node, LONG, again)
        await node.settle()
        counts = node.service.stats().requests
        found = counts.device_hit_tokens + counts.host_hit_tokens + counts.storage_hit_tokens
        assert found + sum(counts.missed_tokens.values()) == counts.prompt_tokens


# A host, or a tenant's share of the host, without room for all: the first blocks go


NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH
ACME = replace(fingerprint(), tenant="acme")
IDS = list(range(40))  # ten blocks


async def test_what_was_preempted_keeps_as_much_as_the_host_takes() -> None:
    async with world(device_blocks=10, host_blocks=7, host_write=NONE) as here:
        request = await here.computed(IDS)
        here.service.scheduler.preempt(request)
        await here.settle()
        others = await here.admit(list(range(1000, 1040)), uses_cache=False)
        await here.ended(others)
        again = await finish(resume_request(here.service, request, max_new_tokens=0))
        assert again.matched.host_tokens == 7 * GQA.block_size
        await finish(again.gate.all_layers(100.0))
        here.check_kv(again, IDS, again.cached_tokens)
        await here.ended(again)


@pytest.mark.parametrize("quota", [1, 6, 10, 11])
async def test_a_tenant_fetches_a_prompt_without_more_of_the_host_than_its_quota(
    quota: int,
) -> None:
    async with world(host_write=NONE, storage_write=THROUGH, with_store=True) as here:
        acme = here.service.open_fingerprint(ACME)
        await here.ended(await here.computed(IDS, space=acme))
        here.service.reset()
        here.service.set_quota(acme, (None, quota))
        request = await here.computed(IDS, space=acme)
        # The rest of it comes in portions; of the last block one token is computed.
        assert request.matched.storage_tokens // GQA.block_size == 9
        await here.ended(request)
        assert here.service.index.spaces.root_named(acme).space.used[1] <= quota


async def test_a_prompt_longer_than_a_tenants_host_quota_is_stored_as_far_as_that_goes() -> None:
    async with world(host_write=NONE, storage_write=THROUGH, with_store=True) as here:
        acme = here.service.open_fingerprint(ACME, quota=(None, 6))
        await here.ended(await here.computed(IDS, space=acme))
        assert here.storage_stats.flushed_blocks == 6
        await here.ended(await here.computed(IDS, space=acme))


async def test_what_the_fetch_before_took_is_part_of_the_deadline_of_its_portions() -> None:
    """The question, two blocks and four portions: six times 0.2 s, of which 1 s has room."""
    async with small_host(FetchPolicy.DEADLINE, 1.0) as node:
        node.the_store.delay_s = 0.2
        request = await node.admit(LONG)
        assert request.cached_tokens < 396
        node.the_store.delay_s = 0.0
        await use(node, LONG, request)
