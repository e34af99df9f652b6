"""Copies go down the tiers when the policy says so, and no slot is reused before they are there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.latch import finish, turns, until
from tests.world import GQA, World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.gpu.protocol import Direction
from tierkv.sched.copies import ByteBudget

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH
SELECTIVE, BACK = WritePolicy.SELECTIVE, WritePolicy.WRITE_BACK
LOAD, OFFLOAD = Direction.LOAD, Direction.OFFLOAD


def on_host(here: World) -> int:
    return here.service.stats().host.used


async def stored(here: World, prompt: list[int]) -> int:
    return await here.the_store.exists(here.names(prompt))


async def test_write_through_copies_as_soon_as_blocks_are_whole() -> None:
    async with world(host_write=THROUGH, storage_write=THROUGH, with_store=True) as here:
        request = await here.computed(tokens(10))
        await until(lambda: on_host(here) == 2)
        here.service.scheduler.end(request)  # the tail follows
        await here.settle()
        assert on_host(here) == 3
        assert await stored(here, tokens(10)) == 3


@pytest.mark.parametrize("rule", [THROUGH, SELECTIVE])
async def test_no_group_of_a_long_prompt_is_left_out_where_both_rules_want_it(
    rule: WritePolicy,
) -> None:
    """What one copies to the host the other waits for; a group is 32 blocks."""
    sizes: dict[str, Any] = {"device_blocks": 128, "host_blocks": 128}
    async with world(with_store=True, host_write=rule, storage_write=rule, **sizes) as here:
        for number in range(1 if rule is THROUGH else 3):
            await here.run([*tokens(390), 900 + number])
        assert on_host(here) >= 97
        assert await stored(here, tokens(388)) == 97
        offloaded = here.service.stats().tiers.offloaded_blocks
        assert offloaded == on_host(here), "none was copied twice"


@pytest.mark.parametrize("num_at_once", [1, 128])
async def test_who_stores_blocks_that_another_brings_to_the_host_waits_until_they_are_there(
    num_at_once: int,
) -> None:
    sizes: dict[str, Any] = {"device_blocks": 128, "host_blocks": 128}
    sizes["background_copy_bytes"] = num_at_once * GQA.block_bytes
    async with world(
        with_store=True, host_write=NONE, storage_write=SELECTIVE, storage_after_hits=1, **sizes
    ) as here:
        await here.run(tokens(300))
        here.latch.hold(OFFLOAD)
        match = here.service.index.match(here.prompt(tokens(300)))
        here.service.tiers.copies.save(match.node, match.num_blocks)
        await here.latch.until_held()
        request = await here.admit([*tokens(300), 1])  # a hit, so that it is to be stored
        await turns(20)
        here.latch.release()
        await here.settle()
        assert await stored(here, tokens(300)) == 75
        await here.ended(request)


@pytest.mark.parametrize("tier", ["host", "storage"])
async def test_selective_copies_what_was_matched_so_often(tier: str) -> None:
    """As the tier asks for, and not the other one."""
    rules: dict[str, Any] = {"host_write": NONE, "host_after_hits": 1, "storage_after_hits": 1}
    rules |= {f"{tier}_write": SELECTIVE, f"{tier}_after_hits": 2}
    async with world(with_store=True, **rules) as here:
        for expected in (0, 0, 2):
            await here.run([*tokens(8), 50 + expected])
            assert min(on_host(here), 2) == expected
            if tier == "storage":
                assert await stored(here, tokens(8)) == expected


async def test_a_block_that_was_never_matched_is_not_written_for_its_parents_hits() -> None:
    async with world(host_write=SELECTIVE, host_after_hits=2) as here:
        await here.run(tokens(8))
        for number in range(3):
            request = await here.admit([*tokens(8), 90 + number])
            await finish(request.gate.all_layers(100.0))
            here.service.scheduler.end(request)
        await here.settle()
        assert on_host(here) == 2
        await here.run(tokens(16))
        assert on_host(here) == 2


async def test_none_never_copies_and_an_evicted_block_is_computed_again() -> None:
    async with world(host_write=NONE, device_blocks=4, with_store=True) as here:
        await here.run(tokens(16))
        await here.run(tokens(16, 100))
        assert on_host(here) == 0
        assert (await here.run(tokens(16))).total_tokens == 0
        assert here.service.stats().tiers.forgotten_blocks


async def test_write_back_copies_on_eviction_and_the_slot_is_reused_only_after_the_copy() -> None:
    async with world(host_write=BACK, device_blocks=4) as here:
        await here.run(tokens(16))
        assert on_host(here) == 0
        here.latch.hold(OFFLOAD)
        async with asyncio.TaskGroup() as group:
            other = group.create_task(here.admit(tokens(16, 100)))
            await here.latch.until_held()
            await turns(50)
            assert not other.done()
            assert here.service.verify() == []
            here.latch.release()
        here.compute(other.result(), tokens(16, 100))
        await here.ended(other.result())
        assert (await here.run([*tokens(15), 99])).host_tokens == 15  # checks every byte


async def test_write_back_to_storage_happens_when_the_host_is_full() -> None:
    async with world(
        host_write=BACK, storage_write=BACK, device_blocks=4, host_blocks=4, with_store=True
    ) as here:
        for base in (0, 100, 200):
            await here.run(tokens(16, base))
        assert await stored(here, tokens(16)) == 4
        matched = await here.run(tokens(16))
        assert matched.storage_tokens == 15


async def test_a_failed_offload_costs_the_copy_and_nothing_else() -> None:
    async with world(host_write=THROUGH) as here:
        here.latch.fail_next(OFFLOAD)
        await here.run(tokens(8))
        assert on_host(here) == 0
        assert here.service.stats().tiers.failed_transfers == 1
        assert (await here.run([*tokens(8), 1])).device_tokens == 8


async def test_a_failed_write_back_lets_the_request_in_all_the_same() -> None:
    async with world(host_write=BACK, device_blocks=4) as here:
        await here.run(tokens(16))
        here.latch.fail_next(OFFLOAD)
        await here.run(tokens(16, 100))
        assert (await here.run(tokens(16))).total_tokens == 0


async def test_what_the_store_did_not_take_is_offered_again() -> None:  # fault 11
    async with world(host_write=THROUGH, storage_write=THROUGH, with_store=True) as here:
        await here.run(tokens(8))
        await here.the_store.delete(here.names(tokens(8)))
        request = await here.admit(tokens(16, 100))
        here.the_store.fail_next(1)
        await here.prefill(request, tokens(16, 100))
        await until(lambda: here.storage_stats.failed_writes == 4)
        await here.ended(request)
        await here.run([*tokens(16, 100), 1])
        assert await stored(here, tokens(16, 100)) == 4


async def test_copies_in_the_background_are_bounded() -> None:
    size = 4 * GQA.block_bytes
    async with world(
        host_write=THROUGH, device_blocks=64, host_blocks=64, background_copy_bytes=size
    ) as here:
        here.latch.hold(OFFLOAD)
        for base in range(0, 800, 100):
            here.service.scheduler.end(await here.computed(tokens(8, base)))
        await until(lambda: on_host(here) >= 4, "what may be under way")
        await turns(50)
        assert on_host(here) == 4  # two groups of two blocks, the rest waits its turn
        here.latch.release()
        await here.settle()
        assert on_host(here) == 16
        assert here.service.tiers.copies.background.max_in_flight == size


async def test_a_host_that_is_full_of_held_blocks_skips_the_copy() -> None:
    async with world(host_write=THROUGH, device_blocks=16, host_blocks=2) as here:
        await here.run(tokens(8))
        running = await here.admit([*tokens(8), 1])  # holds the two on the host
        await here.run(tokens(8, 100))
        assert here.service.stats().tiers.skipped_offloads == 2
        await here.ended(running)


async def test_a_host_too_small_for_a_hot_prompt_is_not_tried_again_at_each_admission() -> None:
    async with world(host_write=THROUGH, device_blocks=64, host_blocks=8) as here:
        await here.run(tokens(160))
        for last in range(3):
            request = await here.admit([*tokens(160), 900 + last])
            assert request.matched.device_tokens == 160
            assert here.service.tiers.work.num_tasks == 0, "no copy that would find no room"
            await here.ended(request)


# Copies in the background: bounded by bytes, in order, one at a time beside loads.


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


async def test_write_downs_make_way_for_loads() -> None:
    async with world(host_write=THROUGH, device_blocks=24, host_blocks=64) as here:
        await here.run(tokens(16))
        await here.run(tokens(96, 1000))  # the first is on the host only
        here.latch.hold(LOAD, OFFLOAD)
        loading = await here.admit([*tokens(16), 9])
        before = here.latch.count(OFFLOAD)
        for base in (2000, 3000, 4000):
            here.service.scheduler.end(await here.computed(tokens(8, base)))
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
        here.service.scheduler.end(await here.computed(tokens(16)))
        before = here.service.tiers.work.num_tasks
        for number in range(5):
            here.service.scheduler.end(await here.admit([*tokens(16), 50 + number]))
        assert here.service.tiers.work.num_tasks <= before
        here.latch.release()
        await here.settle()


async def test_a_block_that_has_left_the_host_is_copied_there_again_when_it_is_matched() -> None:
    async with world(host_write=THROUGH, device_blocks=32, host_blocks=4) as here:
        await here.run(tokens(16))
        await here.run(tokens(16, 100))  # the host has room for one of the two
        request = await here.admit([*tokens(16), 1])
        assert request.matched.device_tokens == 16
        await here.ended(request)
        await finish(here.service.sleep(keeps_blocks=False))
        assert (await here.service.lookup(here.prompt(tokens(16)))).host_tokens == 16
