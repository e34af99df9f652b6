"""Movements end when the device says so, whoever waits; closing waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from operator import le

import numpy as np
import pytest

from tests.latch import CopyLatch, ManualEvent, cancelled_at, finish, turns, until
from tests.layouts import LAYOUTS
from tierkv.errors import LayoutError, TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy, Direction, Event, HostSlots, Lane, Planes
from tierkv.transfer import mover as mover_module
from tierkv.transfer.mover import Mover

LAYOUT = LAYOUTS["fp8"]
NUM_BLOCKS, NUM_SLOTS = 8, 10


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@dataclass
class Ground:
    device: CpuDevice
    mover: Mover
    planes: Planes
    host: HostSlots
    latch: CopyLatch

    def block(self, block: int) -> bytes:
        """A device block in the order of its host slot."""
        return b"".join(array[block].tobytes() for array in self.planes.arrays)

    def slot(self, slot: int) -> bytes:
        return bytes(self.host.array[slot])


@contextmanager
def memory_of(device: CpuDevice) -> Iterator[tuple[Planes, HostSlots]]:
    """Planes and host slots, of random bytes."""
    planes = device.allocate_planes(LAYOUT, NUM_BLOCKS)
    host = device.allocate_host(LAYOUT, NUM_SLOTS)
    rng = np.random.default_rng(7)
    for array in (host.array, *planes.arrays):
        array[:] = rng.integers(0, 256, array.shape, np.uint8)
    try:
        yield planes, host
    finally:
        for made in (host, planes, device):
            made.close()


@asynccontextmanager
async def ground(device: CpuDevice | None = None) -> AsyncIterator[Ground]:
    latch = CopyLatch()
    device = device or CpuDevice(before_copy=latch)
    with memory_of(device) as (planes, host):
        mover = Mover(device, planes, host)
        async with mover.running():
            try:
                yield Ground(device, mover, planes, host, latch)
            finally:
                latch.release()


async def test_a_copy_starts_after_the_events_it_must_come_after() -> None:  # fault 7
    async with ground() as here:
        before, kernel = ManualEvent(), ManualEvent()
        before.finish()
        movement = here.mover.offload(ids(1), ids(1), [before, kernel])
        await finish(here.mover.load(ids(2), ids(2)).done())  # the other lane goes on
        for array in here.planes.arrays:
            array[1] = 0xAB  # what the last kernel writes before its event
        kernel.finish()
        await finish(movement.done())
        assert set(here.slot(1)) == {0xAB}


async def test_a_copy_whose_kernel_failed_fails_and_moves_nothing() -> None:
    async with ground() as here:
        kernel = ManualEvent()
        before = here.slot(1)
        movement = here.mover.offload(ids(1), ids(1), [kernel])
        kernel.finish(TransferError("the kernel crashed"))
        with pytest.raises(TransferError, match="the kernel crashed") as error:
            await finish(movement.done())
        assert error.value.blocks == (1,)
        assert here.slot(1) == before


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancelled_waiter_does_not_stop_the_copy(late: bool) -> None:
    async with ground() as here:
        here.latch.hold()
        expected = here.slot(4)
        movement = here.mover.load(ids(4), ids(4))
        if late:  # once somebody waits
            asyncio.get_running_loop().call_later(0.01, here.latch.release)
        assert await cancelled_at(0, movement.done(), late=late)
        here.latch.release()
        await finish(movement.done())
        assert here.block(4) == expected


async def test_a_failed_copy_names_its_blocks_and_the_next_one_works() -> None:
    async with ground() as here:
        here.latch.fail_next(Direction.LOAD)
        broken, fine = here.mover.load(ids(0, 1), ids(6, 7)), here.mover.load(ids(2), ids(5))
        with pytest.raises(TransferError, match="caught fire") as error:
            await finish(broken.done())
        assert error.value.blocks == (6, 7)
        await finish(fine.done())
        assert here.block(5) == here.slot(2)
        assert here.mover.bytes_moved[Direction.LOAD] == LAYOUT.block_bytes


async def test_ids_that_do_not_exist_fail_the_movement_not_the_mover() -> None:
    async with ground() as here:
        movement = here.mover.load(ids(NUM_SLOTS), ids(0))
        with pytest.raises(TransferError, match="slot id"):
            await finish(movement.done())
        with pytest.raises(LayoutError, match="twice"):
            here.mover.load(ids(0, 1), ids(2, 2))
        await finish(here.mover.load(ids(1), ids(0)).done())


class Layers:
    """A lane whose copies come layer by layer, as the test says."""

    def __init__(self) -> None:
        self.events = tuple(ManualEvent() for _ in range(LAYOUT.num_layers))
        self.is_closed = False

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        return self.events

    def close(self) -> None:
        self.is_closed = True


class LayerByLayer(CpuDevice):
    def __init__(self, kind: type[Layers] = Layers) -> None:
        super().__init__()
        self.kind = kind
        self.lanes: list[Layers] = []

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        self.lanes.append(self.kind())
        return self.lanes[-1]


async def test_a_movement_ends_with_its_last_layer_and_a_lane_with_its_planes() -> None:
    device = LayerByLayer()
    async with ground(device) as here:
        movement = here.mover.load(ids(0), ids(0))
        early = []
        for event in device.lanes[0].events:  # lanes are opened in the order of `Direction`
            await turns(20)
            early.append(movement.has_ended)
            event.finish()
        await finish(movement.done())
        assert not any(early)
        await here.mover.suspend()
        assert all(lane.is_closed for lane in device.lanes)
        await here.mover.reopen(here.planes)
        assert not any(lane.is_closed for lane in device.lanes[2:])
    assert len(device.lanes) == 4
    assert all(lane.is_closed for lane in device.lanes)


async def test_of_a_load_it_is_told_when_each_layer_was_there() -> None:
    device = LayerByLayer()
    async with ground(device) as here:
        mover = here.mover
        assert mover.layer_times.num_loads == 0
        movement = mover.load(ids(0), ids(0))
        beside = mover.load(ids(1), ids(1))  # is not looked at: one at a time is
        loop, earliest = asyncio.get_running_loop(), []
        began = loop.time()
        for event in device.lanes[0].events:
            await asyncio.sleep(0.002)
            earliest.append(loop.time() - began)
            event.finish()
        await finish(movement.done())
        await finish(beside.done())
        times = mover.layer_times
        assert times.num_loads == 1  # and no offload
        assert times.total_s == times.longest_s
        assert len(times.total_s) == LAYOUT.num_layers
        assert all(map(le, earliest, times.total_s))
        assert list(times.total_s) == sorted(times.total_s)
        await finish(mover.load(ids(0), ids(0)).done())  # soon after: is not looked at either
        assert mover.layer_times is times


async def test_after_a_load_that_failed_the_next_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover_module, "_TIMED_EVERY_S", 0.0)
    async with ground() as here:
        here.latch.fail_next(Direction.LOAD)
        with pytest.raises(TransferError):
            await finish(here.mover.load(ids(0), ids(0)).done())
        assert here.mover.layer_times.num_loads == 0
        await finish(here.mover.load(ids(0), ids(0)).done())
        assert here.mover.layer_times.num_loads == 1


class BadlyMade(Layers):
    def close(self) -> None:
        super().close()
        raise TransferError("it cannot be closed")


@pytest.mark.parametrize("is_suspended", [False, True])
async def test_a_lane_whose_close_raises_leaves_no_other_open(*, is_suspended: bool) -> None:
    device = LayerByLayer(BadlyMade)

    async def live() -> None:
        async with ground(device) as here:
            if is_suspended:
                await here.mover.suspend()

    with pytest.raises(TransferError, match="cannot be closed"):
        await live()
    assert [lane.is_closed for lane in device.lanes] == [True, True]


async def test_an_empty_movement_ends() -> None:  # fault 5
    async with ground() as here:
        await finish(here.mover.load(ids(), ids()).done())
        await finish(here.mover.gate([here.mover.load(ids(), ids())]).all_layers(100.0))


@pytest.mark.parametrize("is_quick", [True, False])
async def test_a_small_copy_within_memory_is_over_at_once_and_a_thread_submits_another(
    *, is_quick: bool
) -> None:
    async with ground() as here:
        expected = here.block(3)
        if not is_quick:
            here.device.quick_copy_bytes = 0
        movement = here.mover.copy_within(ids(3), ids(0))
        assert movement.has_ended == is_quick
        await finish(movement.done())
        assert here.block(0) == expected
        assert here.mover.gate([movement]).is_open(LAYOUT.num_layers - 1)
        refused = here.mover.copy_within(ids(3), ids(3))
        assert refused.has_failed == is_quick
        with pytest.raises(TransferError, match="source and target"):
            await finish(refused.done())
        assert here.mover.num_in_flight == 0


async def test_callbacks_hear_of_the_end_well_or_not_and_even_late() -> None:
    async with ground() as here:
        heard: list[str] = []
        here.latch.fail_next(Direction.LOAD)
        broken, fine = here.mover.load(ids(0), ids(0)), here.mover.offload(ids(1), ids(1))
        broken.when_ended(lambda: heard.append("broken"))
        fine.when_ended(lambda: heard.append("fine"))
        await until(lambda: len(heard) == 2)
        broken.when_ended(lambda: heard.append("late"))
        await until(lambda: heard[-1] == "late")
