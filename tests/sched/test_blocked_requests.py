"""Who waits holds up those it should and nobody else: quotas, growth, parked requests, pins."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.latch import finish, turns, until
from tests.sessions import begin_request
from tests.world import World, fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier
from tierkv.errors import (
    OutOfBlocksError,
    RequestAbortedError,
    RequestTooLargeError,
    ShuttingDownError,
)
from tierkv.gpu.protocol import Direction
from tierkv.sched.request import Request

NONE = WritePolicy.NONE
ACME = dataclasses.replace(fingerprint(), tenant="acme")


async def admit(
    on: World, ids: list[int], name: str, *, space: str = "", priority: int = 0
) -> Request:
    prompt = Prompt.of(ids, on.layout.block_size, space=space)
    return await begin_request(on.service, name, prompt, max_new_tokens=0, priority=priority)


async def parked(
    on: World, ids: list[int], name: str, *, priority: int = 0
) -> asyncio.Task[Request]:
    """A request that waits for blocks that a running one computes."""
    before = on.service.stats().requests.shared_waits
    task = asyncio.ensure_future(admit(on, ids, name, priority=priority))
    await until(lambda: on.service.stats().requests.shared_waits > before, "a wait")
    return task


def slow(on: World) -> None:
    on.service.note_prefill(1000, 1000.0)  # so that waiting for another's blocks is worth it


# Tenants


async def test_a_tenant_whose_quota_is_full_holds_up_itself_only() -> None:
    async with world(device_blocks=12, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME, quota=(4, None))
        first = await finish(admit(on, tokens(12), "first", space=acme))
        async with asyncio.TaskGroup() as group:
            second = group.create_task(admit(on, tokens(8, 100), "second", space=acme))
            third = group.create_task(admit(on, tokens(4, 200), "third", space=acme))
            await turns(5)
            other = await finish(admit(on, tokens(16), "other"))  # there is room for it
            assert not second.done()
            assert not third.done(), "a small one of the same tenant overtook"
            on.service.scheduler.end(first)
        for request in (other, second.result(), third.result()):
            on.service.scheduler.end(request)
        await on.settle()


async def test_a_large_one_is_not_overtaken_by_another_tenants_small_ones() -> None:
    async with world(device_blocks=8, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME)
        first = await finish(admit(on, tokens(16), "first"))
        async with asyncio.TaskGroup() as group:
            large = group.create_task(admit(on, tokens(32, 100), "large"))
            small = group.create_task(admit(on, tokens(4, 500), "small", space=acme))
            await turns(10)
            assert not small.done(), "there is room for it, but it is not its turn"
            on.service.scheduler.end(first)
            on.service.scheduler.end(await finish(large))
        on.service.scheduler.end(small.result())
        await on.settle()


async def test_one_that_grows_into_its_quota_holds_up_its_tenant_only() -> None:
    async with world(device_blocks=16, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME, quota=(4, None))
        one = await finish(admit(on, tokens(8), "one", space=acme))
        two = await finish(admit(on, tokens(8, 100), "two", space=acme))
        async with asyncio.TaskGroup() as group:
            grows = group.create_task(on.service.scheduler.growth.extend(one, 4))
            await turns(5)
            small = group.create_task(admit(on, tokens(4, 200), "small", space=acme))
            other = await finish(admit(on, tokens(16), "other"))  # there is room for it
            await turns(5)
            assert not grows.done()
            assert not small.done()
            on.service.scheduler.end(two)
            await finish(grows)
            assert len(one.block_table) == 3
        for request in (one, other, small.result()):
            on.service.scheduler.end(request)
        await on.settle()


async def test_one_whose_quota_is_raised_while_it_grows_waits_for_the_device_like_any_other() -> (
    None
):
    async with world(device_blocks=8, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME, quota=(3, None))
        one = await finish(admit(on, tokens(8), "one", space=acme))
        two = await finish(admit(on, tokens(4, 100), "two", space=acme))
        other = await finish(admit(on, tokens(16, 200), "other"))
        async with asyncio.TaskGroup() as group:
            grows = group.create_task(on.service.scheduler.growth.extend(one, 4))
            await turns(5)
            small = await finish(admit(on, tokens(4, 300), "small"))  # the last free block
            on.service.set_quota(acme, (None, None))
            await turns(5)
            late = group.create_task(admit(on, tokens(4, 400), "late"))
            await turns(5)
            on.service.scheduler.end(small)
            await finish(grows)
            assert not late.done(), "the block was for the one that grows"
            on.service.scheduler.end(other)
        for request in (one, two, late.result()):
            on.service.scheduler.end(request)
        await on.settle()


async def test_one_that_grows_into_a_full_device_goes_before_all_that_wait() -> None:
    async with world(device_blocks=8, host_write=NONE) as on:
        one = await finish(admit(on, tokens(16), "one"))
        two = await finish(admit(on, tokens(12, 100), "two"))
        async with asyncio.TaskGroup() as group:
            grows = group.create_task(on.service.scheduler.growth.extend(one, 12))
            await turns(5)
            small = group.create_task(admit(on, tokens(4, 200), "small", priority=9))
            await turns(5)
            assert not small.done(), "the block that is free is for the one that grows"
            on.service.scheduler.end(two)
            await finish(grows)
        assert len(one.block_table) == 7
        on.service.scheduler.end(one)
        on.service.scheduler.end(small.result())
        await on.settle()


async def test_what_a_tenant_got_without_waiting_counts_when_turns_are_taken() -> None:
    async with world(device_blocks=16, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME)
        big = await finish(admit(on, tokens(32), "big", space=acme))  # at once: nobody waits
        small = await finish(admit(on, tokens(4, 100), "small"))
        on.service.pause()
        order: list[str] = []

        async def run(name: str, base: int, space: str) -> None:
            request = await admit(on, tokens(4, base), name, space=space)
            order.append(name)
            on.service.scheduler.end(request)

        async with asyncio.TaskGroup() as group:
            for at, name in enumerate(("ours 1", "acme", "ours 2", "ours 3")):
                space = acme if name == "acme" else ""
                group.create_task(run(name, 1000 * (at + 1), space))
                await turns(2)
            on.service.unpause()
        assert order == ["ours 1", "ours 2", "ours 3", "acme"]
        on.service.scheduler.end(big)
        await on.ended(small)


# Parked requests


async def test_a_parked_request_of_high_priority_waits_no_longer_for_a_low_one_than_computing() -> (
    None
):
    async with world(device_blocks=12, host_write=NONE) as on:
        on.service.note_prefill(1000, 5.0)  # 80 ms for this prompt
        owner = await finish(admit(on, tokens(16), "low"))  # never computes
        started = asyncio.get_running_loop().time()
        high = await parked(on, [*tokens(16), 9], "high", priority=9)
        low = await finish(admit(on, tokens(8, 100), "behind"))
        on.service.scheduler.end(low)
        request = await finish(high)
        assert asyncio.get_running_loop().time() - started < 2.0
        on.service.scheduler.end(owner)
        await on.ended(request)


async def test_a_parked_request_has_its_turn_before_those_that_came_later() -> None:
    async with world(device_blocks=9, host_write=NONE) as on:
        slow(on)
        owner = await finish(admit(on, tokens(16), "owner"))
        order: list[str] = []

        async def run(name: str, task: asyncio.Task[Request]) -> None:
            request = await finish(task)
            order.append(name)
            await turns(5)
            on.service.scheduler.end(request)

        async with asyncio.TaskGroup() as group:
            waits = await parked(on, [*tokens(16), *tokens(8, 500)], "parked")
            filler = await finish(admit(on, tokens(20, 100), "filler"))
            later = group.create_task(admit(on, tokens(24, 300), "later"))
            for name, task in (("parked", waits), ("later", later)):
                group.create_task(run(name, task))
            await turns(5)
            on.service.scheduler.end(owner)  # it never computed: the parked one is in line again
            await turns(5)
            on.service.scheduler.end(filler)
        assert order == ["parked", "later"]
        await on.settle()


async def test_parked_requests_that_are_cancelled_leave_nothing_behind() -> None:
    async with world(host_write=NONE) as on:
        slow(on)
        for number in range(3):
            owner = await finish(admit(on, tokens(16), "owner"))
            waits = await parked(on, [*tokens(16), number], "parked")
            waits.cancel()
            await asyncio.wait([waits])
            assert on.service.stats().waiting_requests == 0
            assert on.service.verify() == []
            on.service.scheduler.end(owner)
        await on.settle()


async def test_the_first_of_two_equal_prompts_is_aborted_and_the_second_computes() -> None:
    async with world(host_write=NONE) as on:
        slow(on)
        first = await finish(admit(on, tokens(16), "first"))
        second = await parked(on, tokens(16), "second")
        assert on.service.abort("first")
        request = await finish(second)
        await on.prefill(request, tokens(16))
        on.service.scheduler.end(first)
        on.service.scheduler.end(request)
        assert (await on.run(tokens(16))).device_tokens == 15
        await on.settle()


async def test_a_device_that_shrinks_refuses_a_parked_request_that_fits_no_more() -> None:
    async with world(device_blocks=12, host_write=NONE) as on:
        slow(on)
        owner = await finish(admit(on, tokens(16), "owner"))
        big = await parked(on, [*tokens(16), *tokens(20, 500)], "big")
        shrinks = asyncio.ensure_future(on.service.resize(Tier.DEVICE, 6))
        await turns(10)
        on.service.scheduler.end(owner)
        await finish(shrinks)
        with pytest.raises(RequestTooLargeError, match="device tier has 6"):
            await finish(big)
        await on.settle()


async def test_a_drain_refuses_parked_requests_at_once() -> None:
    async with world(host_write=NONE) as on:
        slow(on)
        owner = await finish(admit(on, tokens(16), "owner"))
        waits = await parked(on, tokens(16), "parked")
        on.service.drain()
        with pytest.raises(ShuttingDownError):
            await finish(waits)
        await on.ended(owner)


# Pins and copies


async def test_a_device_full_of_pins_lets_requests_in_as_they_end() -> None:
    async with world(device_blocks=4, host_write=NONE) as on:
        await on.run(tokens(16))
        assert on.service.pin("all", on.prompt(tokens(16)), 1000.0) == 4
        waits = asyncio.ensure_future(admit(on, tokens(8, 100), "waits"))
        await turns(20)
        assert not waits.done()
        assert on.service.verify() == []
        on.service.unpin("all")
        request = await finish(waits)
        assert on.service.pin("all", on.prompt(tokens(8)), 0.02) == 2
        await on.prefill(request, tokens(8, 100))
        waits = asyncio.ensure_future(admit(on, tokens(8, 200), "more"))
        await finish(waits)  # the pin's time is up
        on.service.scheduler.end(request)
        on.service.scheduler.end(waits.result())
        await on.settle()


async def test_the_only_one_that_runs_does_not_wait_for_pins_to_grow() -> None:
    async with world(device_blocks=4, host_write=NONE) as on:
        await on.run(tokens(8))
        on.service.pin("half", on.prompt(tokens(8)), 1000.0)
        request = await finish(admit(on, tokens(8, 100), "grows"))
        with pytest.raises(OutOfBlocksError):
            await finish(on.service.scheduler.growth.extend(request, 4))
        await on.ended(request)


async def test_an_abort_during_a_write_back_lets_the_copy_end_and_the_next_one_in() -> None:
    async with world(device_blocks=4, host_write=WritePolicy.WRITE_BACK) as on:
        await on.run(tokens(16))
        on.latch.hold(Direction.OFFLOAD)
        waits = asyncio.ensure_future(admit(on, tokens(16, 100), "waits"))
        await on.latch.until_held()
        assert on.service.abort("waits")
        with pytest.raises(RequestAbortedError):
            await finish(waits)
        after = asyncio.ensure_future(admit(on, tokens(16, 200), "next"))
        await turns(10)
        assert not after.done()
        on.latch.release()
        on.service.scheduler.end(await finish(after))
        await on.settle()
        assert (await on.run(tokens(16))).host_tokens == 15
