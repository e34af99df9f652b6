"""What happens when somebody leaves, twice asks, or breaks in the middle of something."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns
from tests.sched.test_fetch import filled
from tests.sessions import resume_request
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.clock import SystemClock
from tierkv.errors import DuplicateRequestError, OwnershipError, RequestAbortedError
from tierkv.gpu.protocol import Direction
from tierkv.sched.request import Request, RequestState
from tierkv.storage.memory import MemorySettings, MemoryStore

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


async def preempted(on: World, prompt: list[int]) -> Request:
    request = await on.computed(prompt, name="moves")
    on.service.scheduler.preempt(request)
    return request


# Preempt and resume


async def test_of_two_that_bring_one_back_one_is_refused() -> None:
    async with world(host_write=NONE) as on:
        request = await preempted(on, tokens(8))
        results = await asyncio.gather(
            resume_request(on.service, request, max_new_tokens=0),
            resume_request(on.service, request, max_new_tokens=0),
            return_exceptions=True,
        )
        back = [one for one in results if isinstance(one, Request)]
        refused = [
            one for one in results if isinstance(one, DuplicateRequestError | OwnershipError)
        ]
        assert (len(back), len(refused)) == (1, 1)
        await on.ended(back[0])


@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_a_return_that_is_abandoned_leaves_nothing_and_an_aborted_one_can_be_tried_again(
    *, is_abandoned: bool
) -> None:
    async with world(device_blocks=4) as on:
        request = await preempted(on, tokens(8))
        other = await on.admit(tokens(16, 100))
        comes_back = asyncio.ensure_future(resume_request(on.service, request, max_new_tokens=0))
        await turns(5)
        if is_abandoned:
            on.service.scheduler.abandon(request)
            on.service.scheduler.end(other)
            with pytest.raises(OwnershipError):
                await finish(comes_back)
            assert on.service.stats().running_requests == 0
            await on.settle()
            return
        assert on.service.abort("moves")
        with pytest.raises(RequestAbortedError):
            await finish(comes_back)
        assert request.state is RequestState.PREEMPTED
        on.service.scheduler.end(other)
        back = await finish(resume_request(on.service, request, max_new_tokens=0))
        await back.gate.all_layers(100.0)
        on.check_kv(back, tokens(8), back.cached_tokens)
        assert back.cached_tokens == 8
        await on.ended(back)


# Extend


async def test_two_extensions_to_the_same_length_take_the_blocks_once() -> None:
    async with world(device_blocks=8, host_write=NONE) as on:
        request = await on.admit(tokens(8))
        other = await on.admit(tokens(20, 100))
        both = asyncio.gather(
            on.service.scheduler.growth.extend(request, 8),
            on.service.scheduler.growth.extend(request, 8),
            return_exceptions=True,
        )
        await turns(5)
        on.service.scheduler.end(other)
        assert list(await finish(both)) == [None, None]
        assert len(request.block_table) == 4
        await on.ended(request)


@pytest.mark.parametrize("how", ["end", "preempt", "abort"])
async def test_one_that_goes_while_it_waits_to_grow_hears_of_it(how: str) -> None:
    async with world(device_blocks=4, host_write=NONE) as on:
        request, other = await on.admit(tokens(8), name="it"), await on.admit(tokens(8, 100))
        grows = asyncio.ensure_future(on.service.scheduler.growth.extend(request, 8))
        await turns(5)
        if how == "end":
            on.service.scheduler.end(request)
        elif how == "preempt":
            on.service.scheduler.preempt(request)
        else:
            assert on.service.abort("it")
        with pytest.raises(RequestAbortedError if how == "abort" else OwnershipError):
            await finish(grows)
        if how == "preempt":
            on.service.scheduler.abandon(request)
        elif how == "abort":
            on.service.scheduler.end(request)
        await on.ended(other)
        assert on.service.tiers.eviction.available(Tier.DEVICE) == 4


# Stores


async def test_a_store_that_hangs_and_is_detached_lets_the_request_compute() -> None:
    async with world(store=await filled(tokens(18)), fetch_deadline_s=1.0) as on:
        on.the_store.hold()
        waits = asyncio.ensure_future(on.admit(tokens(18), name="waits"))
        await finish(on.the_store.until_held(1))
        on.service.detach_storage()
        request = await finish(waits)
        assert request.cached_tokens == 0
        await on.prefill(request, tokens(18))
        on.service.scheduler.end(request)
        on.the_store.release()
        await on.settle()


async def test_another_store_is_not_believed_to_have_what_the_one_before_had() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as on:
        await on.run(tokens(16))
        names = on.names(tokens(16))
        assert await on.the_store.exists(names) == 4
        on.service.detach_storage()
        other = MemoryStore(MemorySettings(), SystemClock())
        await finish(on.service.attach_storage(other))
        await on.run(tokens(16))
        await on.settle()
        assert await other.exists(names) == 4


async def test_a_tail_is_not_cached_if_the_blocks_above_it_are_on_their_way_for_another() -> None:
    async with world(device_blocks=16, host_write=THROUGH) as on:
        await on.run(tokens(16))
        await on.service.resize(Tier.DEVICE, 1)
        await on.service.resize(Tier.DEVICE, 16)
        on.latch.hold(Direction.LOAD)
        loads = await on.admit([*tokens(16), 99])
        alone = await on.admit(tokens(18), uses_cache=False)
        await on.commit(alone, tokens(18))
        on.service.scheduler.end(alone)
        assert on.service.verify() == []
        on.latch.release()
        await on.prefill(loads, [*tokens(16), 99])
        await on.ended(loads)
