"""Requests get their blocks in the order in which they came, or a clear refusal."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns, until
from tests.world import BLOCK, tokens, world
from tierkv.cache.keys import Prompt, pack
from tierkv.errors import (
    BadRequestError,
    DuplicateRequestError,
    OwnershipError,
    RequestAbortedError,
    RequestTooLargeError,
    ShuttingDownError,
)
from tierkv.sched.request import Request


async def test_a_request_gets_blocks_for_its_prompt_and_all_it_may_generate() -> None:
    async with world(device_blocks=8) as here:
        request = await here.admit(tokens(5), new=8)
        assert len(set(request.block_table.tolist())) == 4
        assert here.free_device_blocks == 4
        here.service.scheduler.end(request)
        assert here.free_device_blocks == 8


async def test_a_small_request_does_not_overtake_a_large_one_so_none_starves() -> None:
    async with world(device_blocks=4) as here:
        first = await here.admit(tokens(8))
        order: list[str] = []

        async def one(name: str, count: int) -> Request:
            request = await here.admit(tokens(count, 1000), name=name)
            order.append(name)
            return request

        async with asyncio.TaskGroup() as group:
            large = group.create_task(one("large", 16))
            await turns(2)
            small = group.create_task(one("small", 4))
            await turns(10)
            assert here.free_device_blocks == 2  # the small one would fit
            assert order == []
            here.service.scheduler.end(first)
            await until(large.done)
            assert order == ["large"]
            here.service.scheduler.end(large.result())
        here.service.scheduler.end(small.result())
        assert order == ["large", "small"]
        await here.settle()


async def test_a_request_larger_than_the_device_is_refused_in_a_clear_sentence() -> None:
    async with world(device_blocks=4) as here:
        message = "the request needs 5 blocks of 4 tokens, but the device tier has 4"
        with pytest.raises(RequestTooLargeError, match=message):
            await here.admit(tokens(17))
        with pytest.raises(RequestTooLargeError):
            await here.admit(tokens(9), new=8)
        assert here.service.stats().waiting_requests == 0
        request = await here.admit(tokens(9), new=7)
        await here.ended(request)


@pytest.mark.parametrize("with_store", [False, True])
async def test_a_running_or_waiting_request_of_the_same_id_is_refused(with_store: bool) -> None:
    async with world(device_blocks=4, with_store=with_store) as here:
        running = await here.admit(tokens(16), name="a")
        with pytest.raises(DuplicateRequestError, match="'a' is already running"):
            await here.admit(tokens(4), name="a")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(here.admit(tokens(16, 50), name="b"))
            await until(lambda: here.service.stats().waiting_requests == 1)
            with pytest.raises(DuplicateRequestError, match="'b'"):
                await here.admit(tokens(4), name="b")
            here.service.scheduler.end(running)
        here.service.scheduler.end(waiting.result())
        again = await here.admit(tokens(4), name="a")
        await here.ended(again)


async def test_two_of_one_id_at_the_same_moment_are_one_and_a_refusal() -> None:
    async with world(with_store=True) as here:
        here.the_store.hold()

        async def one() -> Request | None:
            try:
                return await here.admit(tokens(9), name="twin")
            except DuplicateRequestError:
                return None

        async with asyncio.TaskGroup() as group:
            twins = [group.create_task(one()) for _ in range(2)]
            await here.the_store.until_held(1)
            here.the_store.release()
        [request] = [twin.result() for twin in twins if twin.result() is not None]
        assert request is not None
        await here.ended(request)


async def test_an_empty_prompt_or_negative_numbers_are_refused() -> None:
    async with world() as here:
        with pytest.raises(BadRequestError, match="empty"):
            await here.admit([])
        with pytest.raises(BadRequestError, match="negative"):
            await here.admit([1], new=-1)
        with pytest.raises(BadRequestError):
            Prompt.of([-1], BLOCK)


@pytest.mark.parametrize(
    ("cached", "asked"), [*((n, tokens(n)) for n in (13, 14, 15, 16)), (14, [*tokens(15), 99])]
)
async def test_a_request_that_fits_is_admitted_though_its_own_cache_fills_the_device(
    cached: int, asked: list[int]
) -> None:
    """The block it would copy its last tokens from may have to go to make room for the copy."""
    async with world(device_blocks=4) as here:
        await here.run(tokens(cached))
        await here.run(asked)


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_request_that_leaves_the_queue_lets_the_next_one_in(how: str) -> None:
    async with world(device_blocks=4) as here:
        running = await here.admit(tokens(8))
        large = asyncio.ensure_future(here.admit(tokens(16, 100), name="large"))
        await turns(2)
        small = asyncio.ensure_future(here.admit(tokens(8, 200)))
        await turns(2)
        assert not small.done()
        if how == "cancel":
            large.cancel()
        else:
            assert here.service.abort("large")
        here.service.scheduler.end(await finish(small))  # it fits beside the running one
        with pytest.raises((asyncio.CancelledError, RequestAbortedError)):
            await large
        await here.ended(running)


async def test_a_request_ends_once() -> None:  # fault 9
    async with world() as here:
        request = await here.admit(tokens(5))
        here.service.scheduler.end(request)
        with pytest.raises(OwnershipError, match="has ended"):
            here.service.scheduler.end(request)
        with pytest.raises(OwnershipError, match="has ended"):
            await here.service.scheduler.commit(request, pack(tokens(5)))


async def test_without_cache_everything_is_computed_and_nothing_breaks() -> None:
    async with world() as here:
        await here.run(tokens(10))
        request = await here.admit(tokens(10), uses_cache=False)
        assert request.cached_tokens == 0
        assert request.num_private == len(request.block_table)
        await here.prefill(request, tokens(10))
        here.check_kv(request, tokens(10), 10)
        await here.ended(request)
        assert (await here.run(tokens(10))).device_tokens == 9


@pytest.mark.parametrize(
    "bad",
    [
        [*tokens(4), 99, 98, 97, 96],  # not what was committed before
        tokens(100),  # more than there are blocks for
        tokens(3),  # less than the prompt
    ],
    ids=["other", "too many", "too few"],
)
async def test_a_commit_that_cannot_be_true_is_refused_and_changes_nothing(bad: list[int]) -> None:
    async with world() as here:
        request = await here.computed(tokens(8), new=4)
        with pytest.raises(BadRequestError):
            await here.service.scheduler.commit(request, pack(bad))
        assert here.service.verify() == []
        await here.service.scheduler.commit(request, pack(tokens(9)))
        await here.ended(request)


# Leaving


async def test_after_drain_new_requests_are_refused_waiting_ones_too_running_ones_go_on() -> None:
    async with world(device_blocks=4) as here:
        running = await here.admit(tokens(16))

        async def waits() -> None:
            with pytest.raises(ShuttingDownError):
                await here.admit(tokens(16, 50))

        async with asyncio.TaskGroup() as group:
            group.create_task(waits())
            await turns(2)
            here.service.drain()
        with pytest.raises(ShuttingDownError):
            await here.admit(tokens(4))
        await here.prefill(running, tokens(16))
        await here.ended(running)


async def test_leaving_waits_for_the_requests_that_run() -> None:
    """`drain` promises: `running()` then ends once the running ones have."""
    ended = False
    async with asyncio.TaskGroup() as group:
        async with world() as here:
            request = await here.admit(tokens(8))

            async def end_later() -> None:
                nonlocal ended
                await until(lambda: here.service.is_draining)
                await turns(5)
                ended = True
                here.service.scheduler.end(request)

            group.create_task(end_later())
        assert ended
