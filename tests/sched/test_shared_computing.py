"""What another request is computing is waited for where that is cheaper; and never for long."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import ManualEvent, finish, turns, until
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.cache.node import Tier
from tierkv.errors import RequestTooLargeError, ShuttingDownError
from tierkv.sched.request import Request


def slow(here: World, seconds_per_token: float = 1.0) -> None:
    """Computing takes long, so that waiting for it is worth a test's time."""
    here.service.note_prefill(1000, 1000 * seconds_per_token)


async def waiting(
    here: World, group: asyncio.TaskGroup, prompt: list[int]
) -> asyncio.Task[Request]:
    task = group.create_task(here.admit(prompt))
    before = here.service.stats().requests.shared_waits
    await until(lambda: here.service.stats().requests.shared_waits > before, "a wait")
    assert here.service.verify() == []
    return task


async def test_blocks_that_are_being_computed_are_not_computed_twice() -> None:
    async with world() as here:
        slow(here)
        owner = await here.admit(tokens(16))
        async with asyncio.TaskGroup() as group:
            waits = await waiting(here, group, [*tokens(16), 99])
            assert here.service.stats().decisions.wait_device == 1
            await here.prefill(owner, tokens(16))
            request = await finish(waits)
        assert request.cached_tokens == 16
        await here.prefill(request, [*tokens(16), 99])  # checks every byte
        await here.ended(owner, request)
        assert here.service.stats().requests.lost_waits == 0


async def test_it_goes_on_as_soon_as_the_blocks_it_shares_are_there() -> None:
    async with world() as here:
        slow(here)
        owner = await here.admit(tokens(32))
        async with asyncio.TaskGroup() as group:
            waits = await waiting(here, group, [*tokens(12), 99])
            here.compute(owner, tokens(32))
            await finish(here.service.scheduler.commit(owner, pack(tokens(8))))
            await turns(20)
            assert not waits.done()
            await finish(here.service.scheduler.commit(owner, pack(tokens(12))))
            request = await finish(waits)
        assert request.cached_tokens == 12
        await here.ended(request, owner)


async def test_blocks_whose_kernels_still_run_are_waited_for_as_well() -> None:
    async with world() as here:
        slow(here)
        owner, event = await here.admit(tokens(16)), ManualEvent()
        async with asyncio.TaskGroup() as group:
            waits = await waiting(here, group, [*tokens(16), 99])
            await here.commit(owner, tokens(16), after=[event])
            here.service.scheduler.end(owner, after=[event])
            await turns(20)
            assert not waits.done()
            event.finish()
            request = await finish(waits)
        assert request.cached_tokens == 16
        await here.ended(request)


@pytest.mark.parametrize("how", ["end", "preempt", "abort"])
async def test_an_owner_that_goes_without_computing_lets_the_others_compute(how: str) -> None:
    async with world() as here:
        slow(here, 1000.0)  # nobody waits until that is over
        owner = await here.admit(tokens(16), name="owner")
        async with asyncio.TaskGroup() as group:
            waits = await waiting(here, group, [*tokens(16), 99])
            if how == "abort":
                assert here.service.abort("owner")
            elif how == "preempt":
                here.service.scheduler.preempt(owner)
            else:
                here.service.scheduler.end(owner)
            request = await finish(waits)
        assert request.cached_tokens == 0
        assert here.service.stats().requests.lost_waits == 1
        if how == "abort":
            here.service.scheduler.end(owner)
        await here.ended(request)


async def test_an_owner_that_takes_too_long_is_not_waited_for() -> None:
    async with world() as here:
        slow(here, 0.005)
        owner = await here.admit(tokens(16))
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = await here.admit([*tokens(16), 99])
        assert 0.9 * 16 * 0.005 < loop.time() - started < 5.0
        assert request.cached_tokens == 0
        assert here.service.stats().requests.lost_waits == 1
        await here.ended(owner, request)


async def test_nobody_waits_while_the_engines_speed_is_not_known() -> None:
    async with world() as here:
        owner = await here.admit(tokens(16))
        request = await here.admit([*tokens(16), 99])
        assert here.service.stats().requests.shared_waits == 0
        await here.ended(owner, request)


async def test_who_waits_for_blocks_holds_up_neither_those_behind_nor_an_owner_that_grows() -> None:
    async with world(device_blocks=6) as here:
        slow(here)
        owner = await here.admit(tokens(16))
        async with asyncio.TaskGroup() as group:
            waits = await waiting(here, group, [*tokens(12), 99])
            here.service.scheduler.end(await here.admit(tokens(8, 500)))
            await finish(here.service.scheduler.growth.extend(owner, 8))
            assert len(owner.block_table) == 6
            assert not waits.done()
            here.service.scheduler.end(owner)
            here.service.scheduler.end(await finish(waits))
        await here.settle()


@pytest.mark.parametrize("how", ["drains", "shrinks"])
async def test_a_node_that_drains_or_shrinks_below_their_size_refuses_those_who_wait(
    how: str,
) -> None:
    async with world(device_blocks=12, host_write=WritePolicy.NONE) as here:
        slow(here)
        owner = await here.admit(tokens(16))

        async def wait_for_it() -> None:
            error = ShuttingDownError if how == "drains" else RequestTooLargeError
            with pytest.raises(error, match="shut" if how == "drains" else "device tier has 6"):
                await here.admit([*tokens(16), *tokens(20, 500)])

        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_it())
            await until(lambda: here.service.stats().requests.shared_waits == 1)
            if how == "drains":
                here.service.drain()
            else:
                group.create_task(here.service.resize(Tier.DEVICE, 6))
            await turns(10)
            here.service.scheduler.end(owner)
        await here.settle()
