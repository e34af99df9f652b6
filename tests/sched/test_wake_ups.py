"""Who waits is woken when what it waits for comes, or will not come, whatever else happens.

In simulated time: where nobody would ever be woken, the test fails at once, with who waits where.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace

import pytest

from tests.latch import turns, until
from tests.sessions import claim_request, publish_request
from tests.simulated import simulate, simulated_world
from tests.world import World, fingerprint, tokens
from tierkv.cache.eviction import WritePolicy
from tierkv.errors import OutOfBlocksError, RequestAbortedError
from tierkv.sched.request import Request

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH
ACME = replace(fingerprint(), tenant="acme")
Scene = Callable[[World], Awaitable[None]]


def play(scene: Scene, **settings: object) -> None:
    async def run() -> None:
        chosen = {"device_blocks": 16, "host_blocks": 16, "host_write": NONE} | settings
        async with simulated_world(**chosen) as here:
            async with asyncio.timeout(1000):
                await scene(here)
            await here.settle()

    simulate(run())


async def whole(here: World, ids: list[int], name: str, space: str = "") -> None:
    """A request from its admission to its end, and all that its blocks set going."""
    here.service.scheduler.end(await here.computed(ids, name=name, space=space))
    while here.service.tiers.work.num_tasks:
        await here.service.tiers.work.next_change()


async def grown(here: World, request: Request, count: int) -> bool:
    """Whether the request could grow; if not, it has given all back, as it was told."""
    try:
        await here.service.scheduler.growth.extend(request, count)
    except OutOfBlocksError:
        here.service.scheduler.end(request)
        return False
    return True


@pytest.mark.parametrize("least_waits_first", [True, False])
def test_the_least_of_all_that_grow_is_told_to_yield_whoever_waits_first(
    least_waits_first: bool,
) -> None:
    async def scene(here: World) -> None:
        first, second = await here.admit(tokens(8)), await here.admit(tokens(8, 100))
        order = [second, first] if least_waits_first else [first, second]
        async with asyncio.TaskGroup() as group:
            jobs = {}
            for one in order:
                jobs[one] = group.create_task(grown(here, one, 4))
                await turns(5)
        assert jobs[first].result()
        assert not jobs[second].result()
        here.service.scheduler.end(first)

    play(scene, device_blocks=4)


def test_those_that_grow_do_not_wait_for_a_store_that_hangs() -> None:
    async def scene(here: World) -> None:
        first = await here.admit(tokens(8), uses_cache=False)
        second = await here.admit(tokens(8, 100), uses_cache=False)
        here.service.note_prefill(1000, 0.1)
        here.the_store.hold_firmly()
        stuck = asyncio.ensure_future(here.admit(tokens(8, 500)))
        await asyncio.sleep(1.0)
        try:
            async with asyncio.timeout(1.0):
                both = await asyncio.gather(grown(here, first, 4), grown(here, second, 4))
            assert list(both) == [True, False]
        finally:
            here.the_store.release()
        here.service.scheduler.end(first)
        here.service.scheduler.end(await stuck)

    play(scene, device_blocks=4)


def test_those_that_grow_do_not_wait_for_a_store_that_does_not_take_what_it_was_given() -> None:
    async def scene(here: World) -> None:
        here.the_store.hold_writes()
        stored = await here.computed(tokens(8, 500), uses_cache=False)
        here.service.scheduler.end(stored)
        await until(lambda: here.service.tiers.copies.storing.bytes_in_flight > 0)
        first = await here.admit(tokens(8), uses_cache=False)
        second = await here.admit(tokens(8, 100), uses_cache=False)
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(1.0):
            both = await asyncio.gather(grown(here, first, 4), grown(here, second, 4))
        assert list(both) == [True, True]
        assert asyncio.get_running_loop().time() == began
        here.the_store.release()
        here.service.scheduler.end(first)
        here.service.scheduler.end(second)

    play(scene, device_blocks=6, storage_write=THROUGH)


def test_before_one_that_runs_gives_up_those_that_wait_let_go_what_they_hold() -> None:
    async def scene(here: World) -> None:
        await whole(here, tokens(32), "stored")
        here.service.reset()
        await whole(here, tokens(16), "half of it is on the device")
        running = await here.admit(tokens(16, 1000))
        waits = asyncio.ensure_future(here.admit(tokens(32)))
        await asyncio.sleep(1.0)
        assert here.service.stats().waiting_requests == 1
        await here.service.scheduler.growth.extend(running, 16)
        here.service.scheduler.end(running)
        here.service.scheduler.end(await waits)

    play(scene, device_blocks=8, storage_write=THROUGH)


def test_a_tenant_whose_waiting_requests_fill_its_quota_goes_on_while_others_run() -> None:
    async def scene(here: World) -> None:
        acme = here.service.open_fingerprint(ACME, quota=(8, None))
        prompts = {"one": tokens(32), "two": tokens(32, 1000)}
        for name, ids in prompts.items():
            await whole(here, ids, name, acme)
        here.service.reset()
        for name, ids in prompts.items():
            await whole(here, ids[:16], name, acme)
        others = await here.admit(tokens(8, 9000))  # runs all the while

        async def again(name: str) -> None:  # half of it is cached, and held while it waits
            request = await here.admit(prompts[name], space=acme)
            await request.gate.all_layers(100.0)
            here.service.scheduler.end(request)

        await asyncio.gather(*(again(name) for name in prompts))
        here.service.scheduler.end(others)

    play(scene, device_blocks=32, host_blocks=64, storage_write=THROUGH)


def test_a_pin_that_replaces_another_lets_those_in_for_whom_there_is_room_now() -> None:
    async def scene(here: World) -> None:
        for name, base in (("one", 0), ("two", 1000)):
            await whole(here, tokens(16, base), name)
            here.service.pin(name, here.prompt(tokens(16, base)), 1e6)
        waits = asyncio.ensure_future(here.admit(tokens(16, 5000)))
        await asyncio.sleep(1.0)
        assert not waits.done()
        here.service.pin("one", here.prompt([1]), 1e6)
        async with asyncio.timeout(1.0):
            here.service.scheduler.end(await waits)
        for name in ("one", "two"):
            here.service.unpin(name)

    play(scene, device_blocks=8)


def test_the_end_of_a_fetch_that_nobody_waits_for_lets_those_in_for_whom_there_is_room() -> None:
    async def scene(here: World) -> None:
        await whole(here, tokens(16), "stored")
        here.service.reset()
        await whole(here, tokens(8), "half of it is on the device")
        here.service.note_prefill(1000, 0.1)
        here.the_store.hold()
        stored = await here.computed(tokens(4, 9000), uses_cache=False)
        here.service.scheduler.end(stored)  # its write takes for ever
        await asyncio.sleep(5.0)
        here.service.scheduler.end(await here.admit(tokens(16)))  # its fetch goes on until 10 s
        began = asyncio.get_running_loop().time()
        here.service.scheduler.end(await here.admit(tokens(28, 5000), uses_cache=False))
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0, abs=0.5)
        here.the_store.release()

    play(scene, device_blocks=8, storage_write=THROUGH, fetch_deadline_s=10.0)


def test_a_sleep_does_not_wait_for_what_others_ask_of_a_store() -> None:
    async def scene(here: World) -> None:
        here.the_store.delay_s = 0.05

        async def one(number: int) -> None:
            request = await here.admit(tokens(8, 40 * number), name=str(number))
            here.service.scheduler.end(request)

        async with asyncio.TaskGroup() as group:
            group.create_task(one(0))
            await asyncio.sleep(0.02)
            tired = asyncio.ensure_future(here.service.sleep(keeps_blocks=True))
            for number in range(1, 200):  # there is always one that asks
                group.create_task(one(number))
                await asyncio.sleep(0.02)
                if tired.done():
                    break
            assert tired.done(), "it came to rest beside them"
            await here.service.wake(16)

    play(scene)


async def is_aborted(here: World, work: Coroutine[None, None, Request], moment: int) -> bool:
    """Whether an abort of "mine", so many turns after it came, keeps it from running."""
    comes = asyncio.ensure_future(work)
    await turns(moment)
    was_there = here.service.abort("mine")
    try:
        async with asyncio.timeout(0.5):
            request = await comes
    except RequestAbortedError:
        assert was_there
        return True
    assert request.is_aborted == was_there, f"after {moment} turns"
    here.service.scheduler.end(request)
    return False


async def claimed(here: World, ids: list[int], ticket_id: str = "ticket") -> Request:
    claim = claim_request(here.service, "mine", ticket_id, here.prompt(ids), max_new_tokens=0)
    return (await claim)[0]


def test_an_abort_is_one_at_whatever_moment_of_an_arrival_it_comes() -> None:
    async def scene(here: World) -> None:
        for moment in range(40):
            await is_aborted(here, here.admit(tokens(16, 50 * moment), name="mine"), moment)

    play(scene)


def test_a_claim_that_waits_for_its_ticket_can_be_aborted_by_its_id() -> None:
    async def scene(here: World) -> None:
        for moment in range(1, 30):
            assert await is_aborted(here, claimed(here, tokens(16), "no such ticket"), moment)

    play(scene)


def test_a_claim_that_is_aborted_as_it_gets_its_blocks_does_not_run() -> None:
    async def scene(here: World) -> None:
        ids, moment = tokens(12), 1
        request = await here.computed(ids)
        await publish_request(here.service, request, "ticket", [1])
        here.service.scheduler.end(request)
        while await is_aborted(here, claimed(here, ids), moment):
            assert here.service.stats().running_requests == 0
            moment += 1
        assert moment > 5

    play(scene)
