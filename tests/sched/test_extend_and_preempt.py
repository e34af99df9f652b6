"""A request may grow, step aside, and come back with all it had."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns, until
from tests.sessions import resume_request
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.cache.node import Tier
from tierkv.errors import (
    DuplicateRequestError,
    OutOfBlocksError,
    OwnershipError,
    RequestAbortedError,
    RequestTooLargeError,
)
from tierkv.gpu.protocol import Direction
from tierkv.sched.request import Request, RequestState

NONE = WritePolicy.NONE


async def test_a_request_grows_by_the_blocks_it_needs_and_no_more() -> None:
    async with world(device_blocks=8) as here:
        request = await here.computed(tokens(6))
        with pytest.raises(RequestTooLargeError):
            await here.service.scheduler.growth.extend(request, 40)
        await here.service.scheduler.growth.extend(request, 2)  # there is room in the tail
        assert len(request.block_table) == 2
        await here.service.scheduler.growth.extend(request, 7)
        assert len(request.block_table) == len(set(request.block_table.tolist())) == 4
        await here.commit(request, tokens(13), 6)
        here.check_kv(request, tokens(13), 13)
        await here.ended(request)
        assert (await here.run([*tokens(13), 1])).device_tokens == 13


async def test_room_to_grow_is_beyond_the_whole_prompt_however_much_of_it_is_committed() -> None:
    async with world(host_write=NONE) as here:
        request = await here.admit(tokens(20))
        here.compute(request, tokens(8))
        await here.service.scheduler.commit(request, pack(tokens(8)))  # a first piece of the prompt
        await here.service.scheduler.growth.extend(request, 8)
        assert len(request.block_table) == 7
        await here.commit(request, tokens(28), 8)
        await here.ended(request)


async def test_growing_evicts_waits_for_others_and_goes_before_those_who_wait() -> None:
    async with world(device_blocks=6, host_write=NONE) as here:
        await here.run(tokens(8, 900))  # can go
        first = await here.admit(tokens(8))
        await here.service.scheduler.growth.extend(first, 12)  # two of them were evicted
        await here.prefill(first, tokens(8))
        second = await here.admit(tokens(4, 100))
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(here.admit(tokens(4, 200)))
            await turns(3)
            grows = group.create_task(here.service.scheduler.growth.extend(first, 16))
            await turns(20)
            assert not grows.done()
            assert not waits.done()
            here.service.scheduler.end(second)
            await until(grows.done)
            assert not waits.done()
            here.service.scheduler.end(first)
        await here.ended(waits.result())


async def preempted(here: World, count: int) -> Request:
    request = await here.computed(tokens(count), new=4)
    here.service.scheduler.preempt(request)
    return request


@pytest.mark.promise("A preempted request comes back byte for byte.")
@pytest.mark.parametrize("count", [3, 8, 11])
async def test_what_was_preempted_comes_back_byte_for_byte_after_others_had_the_device(
    count: int,
) -> None:
    async with world(device_blocks=4, host_write=NONE) as here:
        request = await preempted(here, count)
        with pytest.raises(OwnershipError, match="preempted"):
            await here.service.scheduler.commit(request, pack(tokens(count)))
        await until(lambda: here.service.tiers.work.num_tasks == 0)
        await here.run(tokens(16, 500))
        await here.run(tokens(16, 600))
        again = await finish(resume_request(here.service, request, max_new_tokens=4))
        await finish(again.gate.all_layers(100.0))
        assert again.cached_tokens == count  # the tail included: nothing is computed again
        assert again.matched.host_tokens == count
        here.check_kv(again, tokens(count), count)
        await here.ended(again)
        with pytest.raises(OwnershipError, match="not preempted"):
            await resume_request(here.service, request, max_new_tokens=0)


@pytest.mark.parametrize("committed", [0, 8, 20])
async def test_one_preempted_in_the_middle_of_its_prompt_comes_back_for_the_whole_of_it(
    committed: int,
) -> None:
    async with world(host_write=NONE) as here:
        request = await here.admit(tokens(20))
        if committed:
            await here.commit(request, tokens(committed))
        here.service.scheduler.preempt(request)
        await here.run(tokens(20), uses_cache=False)  # another one leaves all of it here
        again = await finish(resume_request(here.service, request, max_new_tokens=4))
        assert len(again.block_table) == 6
        # The next token is known only to who has computed the last of the prompt.
        assert again.cached_tokens == (20 if committed == 20 else 19)
        await here.prefill(again, tokens(20))
        await here.ended(again)


async def test_nobody_is_told_to_yield_while_a_copy_is_under_way_after_which_there_is_room() -> (
    None
):
    async with world(device_blocks=8, host_blocks=8, host_write=WritePolicy.WRITE_BACK) as here:
        await here.run(tokens(16, 500))  # it goes to the host before its blocks go to others
        first, second = await here.admit(tokens(8)), await here.admit(tokens(8, 100))
        here.latch.hold(Direction.OFFLOAD)
        async with asyncio.TaskGroup() as group:
            grows = [
                group.create_task(here.service.scheduler.growth.extend(one, 8))
                for one in (first, second)
            ]
            await here.latch.until_held()
            await turns(20)
            assert not any(one.done() for one in grows)
            here.latch.release()
        assert [len(one.block_table) for one in (first, second)] == [4, 4]
        await here.ended(first, second)


async def test_of_those_that_all_wait_to_grow_the_lowest_priority_yields_whoever_came_first() -> (
    None
):
    async with world(device_blocks=4, host_write=NONE) as here:
        low, high = await here.admit(tokens(8)), await here.admit(tokens(8, 100), priority=5)
        async with asyncio.TaskGroup() as group:
            grows = group.create_task(here.service.scheduler.growth.extend(high, 4))
            await turns(3)
            with pytest.raises(OutOfBlocksError):
                await finish(here.service.scheduler.growth.extend(low, 4))
            assert not grows.done()
            here.service.scheduler.end(low)
        await here.ended(high)


async def test_of_two_that_bring_one_back_one_is_refused() -> None:
    async with world(host_write=NONE) as here:
        request = await preempted(here, 8)
        results = await asyncio.gather(
            resume_request(here.service, request, max_new_tokens=0),
            resume_request(here.service, request, max_new_tokens=0),
            return_exceptions=True,
        )
        back = [one for one in results if isinstance(one, Request)]
        refused = [
            one for one in results if isinstance(one, DuplicateRequestError | OwnershipError)
        ]
        assert (len(back), len(refused)) == (1, 1)
        await here.ended(back[0])


@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_a_return_that_is_abandoned_leaves_nothing_and_an_aborted_one_can_be_tried_again(
    *, is_abandoned: bool
) -> None:
    async with world(device_blocks=4) as here:
        request = await preempted(here, 8)
        other = await here.admit(tokens(16, 100))
        comes_back = asyncio.ensure_future(resume_request(here.service, request, max_new_tokens=0))
        await turns(5)
        if is_abandoned:
            here.service.scheduler.abandon(request)
            here.service.scheduler.end(other)
            with pytest.raises(OwnershipError):
                await finish(comes_back)
            assert here.service.stats().running_requests == 0
            await here.settle()
            return
        assert here.service.abort(request.request_id)
        with pytest.raises(RequestAbortedError):
            await finish(comes_back)
        assert request.state is RequestState.PREEMPTED
        here.service.scheduler.end(other)
        back = await finish(resume_request(here.service, request, max_new_tokens=0))
        await back.gate.all_layers(100.0)
        here.check_kv(back, tokens(8), back.cached_tokens)
        assert back.cached_tokens == 8
        await here.ended(back)


async def test_two_extensions_to_the_same_length_take_the_blocks_once() -> None:
    async with world(device_blocks=8, host_write=NONE) as here:
        request = await here.admit(tokens(8))
        other = await here.admit(tokens(20, 100))
        both = asyncio.gather(
            here.service.scheduler.growth.extend(request, 8),
            here.service.scheduler.growth.extend(request, 8),
            return_exceptions=True,
        )
        await turns(5)
        here.service.scheduler.end(other)
        assert list(await finish(both)) == [None, None]
        assert len(request.block_table) == 4
        await here.ended(request)


@pytest.mark.parametrize("how", ["end", "preempt", "abort"])
async def test_one_that_goes_while_it_waits_to_grow_hears_of_it(how: str) -> None:
    async with world(device_blocks=4, host_write=NONE) as here:
        request, other = await here.admit(tokens(8), name="it"), await here.admit(tokens(8, 100))
        grows = asyncio.ensure_future(here.service.scheduler.growth.extend(request, 8))
        await turns(5)
        if how == "end":
            here.service.scheduler.end(request)
        elif how == "preempt":
            here.service.scheduler.preempt(request)
        else:
            assert here.service.abort("it")
        with pytest.raises(RequestAbortedError if how == "abort" else OwnershipError):
            await finish(grows)
        if how == "preempt":
            here.service.scheduler.abandon(request)
        elif how == "abort":
            here.service.scheduler.end(request)
        await here.ended(other)
        assert here.service.tiers.eviction.available(Tier.DEVICE) == 4
