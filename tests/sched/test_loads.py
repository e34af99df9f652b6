"""Blocks come back from the host whole, for whoever waits, and nobody else gets them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.latch import ManualEvent, cancelled_at, finish, turns, until
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.cache.node import Tier
from tierkv.errors import TransferError
from tierkv.gpu.cpu import CpuDevice, CpuEvent
from tierkv.gpu.protocol import Direction, Event
from tierkv.sched.request import RequestSpec
from tierkv.service.session import Session
from tierkv.transfer.mover import Movement

LOAD, OFFLOAD = Direction.LOAD, Direction.OFFLOAD


@asynccontextmanager
async def with_host_copies(prompt: list[int], **settings: Any) -> AsyncIterator[World]:
    """A node of 8 device blocks on which `prompt` is on the host only."""
    chosen = {"device_blocks": 8, "host_blocks": 32} | settings
    async with world(host_write=WritePolicy.WRITE_THROUGH, **chosen) as here:
        await here.run(prompt)
        await here.run(tokens(32, 5000))  # needs all of the device
        match = here.service.index.match(here.prompt(prompt))
        assert match.device_blocks == 0
        assert match.host_blocks == len(prompt) // 4
        yield here


@pytest.mark.promise("Layers open as they arrive and not before.")
async def test_layers_open_as_they_arrive_and_not_before() -> None:  # faults 4 and 5
    async with with_host_copies(tokens(8)) as here:
        here.latch.hold(LOAD)
        request = await here.admit([*tokens(8), 77])
        await here.latch.until_held()
        assert not request.gate.is_open(0)
        match = here.service.index.match(here.prompt(tokens(8)))
        assert (match.device_blocks, match.loading_blocks) == (0, 2)
        here.latch.release()
        await finish(request.gate.all_layers(100.0))
        here.check_kv(request, tokens(8), 8)
        await here.ended(request)


@pytest.mark.promise("Equal prompts share one load.")
async def test_identical_prompts_at_the_same_time_share_one_load() -> None:
    async with with_host_copies(tokens(16)) as here:
        here.latch.hold(LOAD)
        before = here.latch.count(LOAD)
        requests = [await here.admit([*tokens(16), 90 + n]) for n in range(3)]
        assert [request.cached_tokens for request in requests] == [16] * 3
        await here.latch.until_held()
        assert not any(request.gate.is_open(0) for request in requests)
        here.latch.release()
        for request in requests:
            await finish(request.gate.all_layers(100.0))
            here.check_kv(request, tokens(16), 16)
        assert here.latch.count(LOAD) == before + 1
        assert len({tuple(request.block_table[:4].tolist()) for request in requests}) == 1
        await here.ended(*requests)


async def test_blocks_stay_leased_until_the_device_is_done_even_if_the_request_ends() -> None:
    async with with_host_copies(tokens(32)) as here:
        here.latch.hold(LOAD)
        request = await here.admit(tokens(32))
        await here.latch.until_held()
        here.service.scheduler.end(request)
        async with asyncio.TaskGroup() as group:
            other = group.create_task(here.admit(tokens(32, 900)))
            await turns(50)
            assert not other.done()  # every block is still being written to
            assert here.service.verify() == []
            here.latch.release()
        await here.ended(other.result())


async def test_a_private_block_is_not_given_away_while_a_load_writes_into_it() -> None:
    async with with_host_copies(tokens(6)) as here:
        await here.run(tokens(6))
        await here.run(tokens(32, 6000))
        here.latch.hold(LOAD)
        request = await here.admit(tokens(6))  # its private second block gets a copy of the tail
        assert request.cached_tokens == 5
        private = int(request.block_table[1])
        await here.latch.until_held()
        here.service.scheduler.end(request)
        others = [await here.admit(tokens(4, 100 * n), name=f"o{n}") for n in range(1, 7)]
        assert private not in [slot for other in others for slot in other.block_table.tolist()]
        here.latch.release()
        await here.service.scheduler.commit(others[0], pack(tokens(4, 100)))
        await here.ended(*others)
        assert here.service.stats().running_requests == 0


@pytest.mark.promise("A cancelled wait does not stop a load.")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(2))
async def test_a_cancelled_wait_for_a_load_leaves_the_load_alone(at: int, late: bool) -> None:
    async with with_host_copies(tokens(16)) as here:
        here.latch.hold(LOAD)
        request = await here.admit([*tokens(16), 5])
        if late:
            here.latch.release()
        # It has one await only, where the copy was handed to its thread before that.
        release = asyncio.get_running_loop().call_later(0.3, here.latch.release)
        await cancelled_at(at, request.gate.all_layers(100.0), late=late)
        release.cancel()
        here.latch.release()
        await finish(request.gate.all_layers(100.0))
        here.check_kv(request, tokens(16), 16)
        await here.ended(request)


@pytest.mark.promise("A failed load names its blocks, and no request gets them.")
async def test_a_failed_load_names_its_blocks_and_fails_all_who_wait_for_it_or_for_one_below() -> (
    None
):
    async with with_host_copies(tokens(24)) as here:
        free = here.service.stats().device.free
        here.latch.hold(LOAD)
        here.latch.fail_next(LOAD)
        first = await here.admit([*tokens(8), 70])
        second = await here.admit([*tokens(24), 71])
        here.latch.release()
        for request in (first, second, second):
            with pytest.raises(TransferError, match="caught fire") as error:
                await finish(request.gate.all_layers(100.0))
            assert sorted(error.value.blocks) == sorted(first.block_table[:2].tolist())
        with pytest.raises(TransferError, match="caught fire"):
            await finish(here.service.scheduler.commit(second, pack([*tokens(24), 71])))
        await here.settle()
        match = here.service.index.match(here.prompt(tokens(24)))
        assert (match.device_blocks, match.loading_blocks, match.host_blocks) == (0, 0, 6)
        await here.ended(first, second)
        assert here.service.stats().device.free >= free
        assert here.service.stats().tiers.failed_transfers == 1
        assert (await here.run([*tokens(24), 72])).host_tokens == 24  # the host copy is still good


async def test_a_last_block_that_was_not_copied_fails_its_request_and_nothing_of_it_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as here:
        await here.run(tokens(16))

        def catch_fire(*_: object) -> Event:
            event = CpuEvent()
            event.reach(TransferError("the copy caught fire"))
            return event

        with monkeypatch.context() as broken:
            broken.setattr(CpuDevice, "copy_blocks", catch_fire)
            request = await here.admit(tokens(16))  # all but the last token is there
        assert request.cached_tokens == 15
        with pytest.raises(TransferError, match="caught fire"):
            await finish(request.gate.all_layers(100.0))
        for _ in range(2):
            with pytest.raises(TransferError, match="caught fire"):
                await finish(here.service.scheduler.commit(request, pack(tokens(16))))
        await here.ended(request)
        assert here.service.stats().tiers.failed_transfers == 1
        again = await here.admit(tokens(16))
        here.check_kv(again, tokens(16), 15)
        await here.ended(again)


async def test_the_block_that_is_matched_in_part_comes_in_one_movement_with_the_others() -> None:
    """Behind them, layer 0 would open only when the whole load is over: a lane runs in order."""
    async with with_host_copies(tokens(18)) as here:
        here.latch.seen.clear()
        request = await here.admit(tokens(18))
        await finish(request.gate.all_layers(100.0))
        loads = [copy for copy in here.latch.seen if copy.direction is LOAD]
        assert [copy.block_ids.tolist() for copy in loads] == [request.block_table[:5].tolist()]
        await here.ended(request)


# The engine's kernels


@pytest.mark.promise("Copies and kernels never overlap on the same blocks.")
@pytest.mark.parametrize("is_cached", [True, False])
async def test_no_block_is_written_while_a_kernel_of_its_last_request_may_read_it(
    *, is_cached: bool
) -> None:
    """Nor a private block, even if the kernel fails."""
    async with world(device_blocks=2, host_write=WritePolicy.NONE) as here:
        kernel = ManualEvent()
        request = await here.admit(tokens(8))
        if is_cached:
            await here.commit(request, tokens(8), after=[kernel])
        here.service.scheduler.end(request, after=[kernel])
        async with asyncio.TaskGroup() as group:
            other = group.create_task(here.admit(tokens(8, 100)))
            await turns(50)
            was_early = other.done()
            kernel.finish(None if is_cached else TransferError("the kernel failed"))
        assert not was_early, "blocks were given away under a running kernel"
        await here.ended(other.result())


@pytest.mark.promise("Copies and kernels never overlap on the same blocks.")
async def test_an_offload_for_room_starts_after_the_kernels_that_wrote_the_blocks() -> None:
    async with world(device_blocks=3, host_write=WritePolicy.WRITE_BACK) as here:
        kernel = ManualEvent()
        request = await here.admit(tokens(8))
        await finish(here.service.scheduler.commit(request, pack(tokens(8)), after=[kernel]))
        here.service.scheduler.end(request, after=[kernel])
        async with asyncio.TaskGroup() as group:
            other = group.create_task(here.admit(tokens(12, 100)))
            await turns(50)
            here.compute(request, tokens(8))  # the kernels run only now
            kernel.finish()
        await here.ended(other.result())
        found = await here.admit([*tokens(8), 1])
        await finish(found.gate.all_layers(100.0))
        assert found.cached_tokens == 8
        here.check_kv(found, tokens(8), 8)
        await here.ended(found)


async def test_a_write_through_copy_waits_for_the_kernels_that_wrote_the_blocks() -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH, host_blocks=64) as here:
        kernel = ManualEvent()
        request = await here.admit(tokens(8))
        await finish(here.service.scheduler.commit(request, pack(tokens(8)), after=[kernel]))
        await turns(50)
        assert here.service.stats().offloaded_bytes == 0
        here.compute(request, tokens(8))
        kernel.finish()
        await until(lambda: here.service.stats().offloaded_bytes > 0)
        await here.ended(request)
        await here.run(tokens(128, 5000))  # from the host from now on
        assert (await here.run([*tokens(8), 1])).host_tokens == 8  # checks every byte


class _Late(Movement):
    """Ends, for the scheduler, when the test says so."""

    def __init__(self, real: Movement) -> None:
        super().__init__(real.submission, real.num_bytes)
        self.real = real

    def tell(self) -> None:
        self.end(TransferError("late") if self.real.has_failed else None)


def told_late(node: World, monkeypatch: pytest.MonkeyPatch) -> list[_Late]:
    """The loads of the node from now on."""
    late: list[_Late] = []
    load = node.service.mover.load

    def loads_late(*args: Any) -> Movement:
        late.append(_Late(load(*args)))
        return late[-1]

    monkeypatch.setattr(node.service.mover, "load", loads_late)
    return late


@pytest.mark.parametrize("fails", [False, True])
async def test_blocks_are_not_on_the_device_before_those_above_them_are(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Copies of a lane end in order; who hears of the lower one first must not believe it."""
    async with with_host_copies(tokens(16)) as here:
        late = told_late(here, monkeypatch)
        here.latch.fail_next(LOAD, int(fails))
        first = await here.admit([*tokens(8), 70])
        second = await here.admit([*tokens(16), 71])
        prompt = here.prompt(tokens(16))
        assert len(late) == 2
        await until(lambda: here.service.mover.num_in_flight == 0, "the copies")
        late[1].tell()
        await turns(20)
        match = here.service.index.match(prompt)
        assert (match.device_blocks, match.loading_blocks) == (0, 4)
        assert here.service.verify() == []
        late[0].tell()
        if fails:  # the first copy, and with it what hangs below
            with pytest.raises(TransferError):
                await finish(here.service.scheduler.commit(second, pack([*tokens(16), 71])))
            assert here.service.index.match(prompt).device_blocks == 0
        else:
            await here.prefill(second, [*tokens(16), 71])  # checks every byte
            assert here.service.index.match(prompt).device_blocks == 4
        await here.ended(first, second)


@pytest.mark.parametrize("step", ["loaded", "commit"])
async def test_a_wait_cancelled_just_before_its_load_has_settled_leaves_the_load_alone(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with with_host_copies(tokens(12)) as here:
        late = told_late(here, monkeypatch)
        above = [await here.admit([*tokens(4 * count), 70]) for count in (1, 2)]
        session = Session(here.service, RequestSpec("s", here.prompt([*tokens(12), 70]), 0))
        await finish(session.admit())
        await until(lambda: here.service.mover.num_in_flight == 0, "the copies")
        for one in (late[2], late[1]):
            one.tell()
        all_tokens = pack([*tokens(12), 70])
        waits = session.loaded(100.0) if step == "loaded" else session.commit(all_tokens)
        waiting = asyncio.create_task(waits)
        await turns(3)
        late[0].tell()
        await turns(1)  # the second load has settled, the third has not
        assert waiting.cancel()
        await asyncio.wait([waiting])
        await finish(session.loaded(100.0))
        here.check_kv(session.request, tokens(12), 12)
        session.end()
        await here.ended(*above)


@pytest.mark.parametrize("ends", ["before the failure", "at the failure", "after the failure"])
@pytest.mark.parametrize(("count", "cached"), [(3, 0), (11, 8), (16, 8)])  # a tail, or whole blocks
async def test_blocks_whose_kernels_failed_are_not_cached(
    count: int, cached: int, ends: str
) -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH) as here:
        prompt, event = tokens(count), ManualEvent()
        request = await here.admit(prompt)
        here.compute(request, prompt)
        if cached:
            await here.service.scheduler.commit(request, pack(prompt[:cached]))
        await here.service.scheduler.commit(request, pack(prompt), after=[event])
        failure = TransferError("the kernel that wrote them failed")
        if ends == "before the failure":
            here.service.scheduler.end(request)
            event.finish(failure)
        else:
            event.finish(failure)
            if ends == "after the failure":
                await until(lambda: here.service.tiers.work.num_tasks == 0, "the end of the commit")
            here.service.scheduler.end(request, after=[event])
        await here.settle()
        found = await here.service.lookup(here.prompt(prompt))
        assert found.device_tokens + found.host_tokens == cached


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_later_commit_does_not_tell_of_blocks_that_earlier_kernels_still_write(
    *, ends_first: bool
) -> None:
    async with world(host_write=WritePolicy.NONE) as here:
        prompt, slow, fast = tokens(16), ManualEvent(), ManualEvent()
        request = await here.admit(prompt)
        here.compute(request, prompt)
        await here.service.scheduler.commit(request, pack(prompt[:8]), after=[slow])
        await here.service.scheduler.commit(request, pack(prompt), after=[fast])
        fast.finish()
        if ends_first:
            here.service.scheduler.end(request)
        await turns(10)
        assert here.service.index.match(here.prompt(prompt)).num_blocks == 0
        slow.finish()
        await until(lambda: here.service.index.match(here.prompt(prompt)).num_blocks > 0)
        if not ends_first:
            here.service.scheduler.end(request)
        await here.settle()
        assert here.service.index.match(here.prompt(prompt)).num_blocks == 4


# Loads ahead of the request that wants the blocks


async def test_a_request_finds_a_load_that_is_on_its_way_and_shares_it() -> None:
    async with with_host_copies(tokens(16)) as here:
        here.latch.hold(LOAD)
        loading = asyncio.ensure_future(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        await here.latch.until_held()
        request = await here.admit(tokens(17))
        loading.cancel()
        here.latch.release()
        await here.prefill(request, tokens(17))  # checks every byte
        here.service.scheduler.end(request)
        assert here.service.stats().loaded_bytes == 4 * here.layout.block_bytes
        await here.settle()


async def test_nothing_is_loaded_while_somebody_waits_for_room() -> None:
    async with with_host_copies(tokens(16)) as here:
        busy = await here.admit(tokens(12, 900))
        waits = asyncio.ensure_future(here.admit(tokens(32, 700)))
        await until(lambda: here.service.scheduler.num_waiting == 1)
        await finish(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        await turns(3)
        assert here.latch.count(LOAD) == 0
        here.service.scheduler.end(busy)
        await here.ended(await finish(waits))


async def test_nothing_is_loaded_where_what_others_hold_leaves_no_room() -> None:
    async with with_host_copies(tokens(16)) as here:
        busy = await here.admit(tokens(20, 900))
        await finish(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        assert here.latch.count(LOAD) == 0
        await here.ended(busy)


@pytest.mark.parametrize(("cached", "shared"), [(18, 14), (4, 3)], ids=["with others", "alone"])
async def test_the_block_that_is_matched_in_part_stays_until_it_has_been_copied(
    cached: int, shared: int
) -> None:
    async with with_host_copies(tokens(cached)) as here:
        here.latch.hold(Direction.LOAD)
        request = await here.admit([*tokens(shared), 900])
        await here.latch.until_held()
        here.service.reset()
        assert here.service.stats().host.used == shared // 4 + 1, "and the one shared in part"
        here.latch.release()
        await finish(request.gate.all_layers(100.0))
        here.check_kv(request, tokens(shared), shared)
        await here.ended(request)
        here.service.reset()
        assert here.service.stats().host.used == 0


async def test_a_tail_is_not_cached_if_the_blocks_above_it_are_on_their_way_for_another() -> None:
    async with world(device_blocks=16, host_write=WritePolicy.WRITE_THROUGH) as here:
        await here.run(tokens(16))
        await here.service.resize(Tier.DEVICE, 1)
        await here.service.resize(Tier.DEVICE, 16)
        here.latch.hold(LOAD)
        loads = await here.admit([*tokens(16), 99])
        alone = await here.admit(tokens(18), uses_cache=False)
        await here.commit(alone, tokens(18))
        here.service.scheduler.end(alone)
        assert here.service.verify() == []
        here.latch.release()
        await here.prefill(loads, [*tokens(16), 99])
        await here.ended(loads)
