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
    RequestTooLargeError,
)
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
