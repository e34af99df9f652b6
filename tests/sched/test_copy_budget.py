"""Copies in the background: bounded by bytes, in order, one at a time beside loads."""

from __future__ import annotations

import asyncio

from tests.latch import finish, turns, until
from tests.world import GQA, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.gpu.protocol import Direction
from tierkv.sched.copies import ByteBudget

LOAD, OFFLOAD = Direction.LOAD, Direction.OFFLOAD


class Pieces:
    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}

    async def piece(self, number: int, size: int) -> None:
        self.ends[number] = asyncio.Event()
        async with self.budget.room(size):
            self.begun.append(number)
            await self.ends[number].wait()


async def test_what_is_in_flight_stays_below_the_bound_and_goes_in_order() -> None:
    pieces = Pieces(ByteBudget(10, lambda: False))
    async with asyncio.TaskGroup() as group:
        for number, size in enumerate([6, 4, 1, 20, 2]):
            group.create_task(pieces.piece(number, size))
        await turns(5)
        assert pieces.begun == [0, 1]
        pieces.ends[1].set()
        await turns(5)
        assert pieces.begun == [0, 1, 2]  # the big one waits to go alone, none overtakes it
        pieces.ends[0].set()
        pieces.ends[2].set()
        await turns(5)
        assert pieces.begun == [0, 1, 2, 3]
        pieces.ends[3].set()
        await turns(5)
        pieces.ends[4].set()
    assert pieces.budget.findings() == []


async def test_one_that_is_cancelled_in_the_line_or_at_its_turn_leaves_its_room() -> None:
    pieces = Pieces(ByteBudget(10, lambda: False))
    tasks = [asyncio.ensure_future(pieces.piece(number, 10)) for number in range(4)]
    await turns(5)
    tasks[1].cancel()  # in the line
    pieces.ends[0].set()
    await turns(1)
    tasks[2].cancel()  # its turn has come, or is about to
    await turns(5)
    assert pieces.begun[-1] == 3
    pieces.ends[3].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pieces.budget.findings() == []
    assert pieces.budget.num_waiting == 0


async def test_while_something_urgent_is_on_its_way_one_piece_goes_at_a_time() -> None:
    busy = True
    pieces = Pieces(ByteBudget(100, lambda: busy))
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(pieces.piece(number, 1))
        await turns(5)
        assert pieces.begun == [0]
        pieces.ends[0].set()
        await turns(5)
        assert pieces.begun == [0, 1]  # it lives on
        busy = False
        pieces.budget.look_again()
        await turns(5)
        assert pieces.begun == [0, 1, 2]
        for number in (1, 2):
            pieces.ends[number].set()


async def test_write_downs_make_way_for_loads() -> None:
    async with world(
        host_write=WritePolicy.WRITE_THROUGH, device_blocks=24, host_blocks=64
    ) as here:
        await here.run(list(range(16)))
        await here.run(list(range(1000, 1096)))  # the first is on the host only
        here.latch.hold(LOAD, OFFLOAD)
        loading = await here.admit([*range(16), 9])
        before = here.latch.count(OFFLOAD)
        for base in (2000, 3000, 4000):
            prompt = list(range(base, base + 8))
            request = await here.admit(prompt)
            here.compute(request, prompt)
            await finish(here.service.scheduler.commit(request, pack(prompt)))
            here.service.scheduler.end(request)
        await until(lambda: here.service.tiers.copies.background.num_waiting == 2)
        assert here.service.tiers.copies.background.bytes_in_flight == 2 * GQA.block_bytes
        here.latch.release(LOAD)
        await until(lambda: here.service.tiers.copies.background.num_waiting == 0)
        here.latch.release()
        await here.ended(loading)
        assert here.latch.count(OFFLOAD) == before + 3


async def test_a_block_that_is_matched_again_while_its_copy_waits_is_not_queued_twice() -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH, device_blocks=32) as here:
        here.latch.hold(OFFLOAD)
        prompt = list(range(16))
        request = await here.admit(prompt)
        here.compute(request, prompt)
        await finish(here.service.scheduler.commit(request, pack(prompt)))
        here.service.scheduler.end(request)
        before = here.service.tiers.work.num_tasks
        for number in range(5):
            again = await here.admit([*prompt, 50 + number])
            here.service.scheduler.end(again)
        assert here.service.tiers.work.num_tasks <= before
        here.latch.release()
        await here.settle()


async def test_one_cancelled_in_the_moment_in_which_its_turn_would_come_is_passed_by() -> None:
    budget = ByteBudget(10, lambda: False)
    pieces = Pieces(budget)
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(pieces.piece(number, 10)) for number in range(3)]
        await turns(2)
        jobs[0].cancel()  # it makes room, while the next one's cancel is on its way
        jobs[1].cancel()
        await turns(3)
        assert pieces.begun == [0, 2]
        pieces.ends[2].set()
    assert budget.findings() == []
    assert budget.num_waiting == 0
