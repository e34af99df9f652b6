"""Memory of the device and the host has one owner, and goes back however a service, a sleep or a
wake ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from tests.latch import CopyLatch, finish, until
from tests.world import GQA, World, fingerprint
from tierkv.cache.layout import Layout
from tierkv.errors import DeviceFailedError, LayoutError, OwnershipError, ShuttingDownError
from tierkv.gpu.cpu import CpuDevice, CpuHostSlots, CpuPlanes
from tierkv.gpu.protocol import Direction, HostSlots, Lane, Planes
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service


class Counting(CpuDevice):
    """Knows what it has given; lanes can be made to fail, and both to take long."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[CpuPlanes | CpuHostSlots] = []
        self.fails_lanes = False
        self.num_open_lanes = 0
        self.may_allocate, self.may_open_lanes = threading.Event(), threading.Event()
        self.may_allocate.set()
        self.may_open_lanes.set()

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        self.may_allocate.wait(20)
        planes = CpuPlanes(layout, num_blocks)
        self.given.append(planes)
        return planes

    def allocate_host(self, layout: Layout, num_slots: int) -> HostSlots:
        host = CpuHostSlots(layout, num_slots)
        self.given.append(host)
        return host

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        if self.fails_lanes:
            raise DeviceFailedError("no lane can be opened")
        self.may_open_lanes.wait(20)
        lane = super().open_lane(direction, planes, host)
        close = lane.close

        def closed() -> None:
            self.num_open_lanes -= 1
            close()

        self.num_open_lanes += 1
        lane.close = closed  # type: ignore[method-assign]
        return lane

    @property
    def num_held(self) -> int:
        """How much of it nobody has given back."""
        return sum(map(_is_open, self.given))


def _is_open(memory: CpuPlanes | CpuHostSlots) -> bool:
    try:
        _ = memory.arrays if isinstance(memory, CpuPlanes) else memory.array
    except LayoutError:
        return False
    return True


@asynccontextmanager
async def node(device: Counting) -> AsyncIterator[World]:
    settings = CacheSettings(block_size=GQA.block_size, device_blocks=8, host_blocks=8)
    service = Service(device, fingerprint(), settings, HandoffSettings(), None)
    async with service.running():
        yield World(service, CopyLatch())


@pytest.fixture
def device() -> Counting:
    return Counting()


async def test_a_service_that_is_cancelled_as_it_opens_waits_for_its_memory_and_frees_it(
    device: Counting,
) -> None:
    async def live() -> None:
        async with node(device):
            raise AssertionError("it was cancelled before")

    device.may_allocate.clear()
    opens = asyncio.ensure_future(live())
    await asyncio.sleep(0.01)
    opens.cancel()
    await asyncio.sleep(0.01)
    assert not opens.done()
    device.may_allocate.set()
    with pytest.raises(asyncio.CancelledError):
        await finish(opens)
    assert len(device.given) == 2
    assert device.num_held == 0


@pytest.mark.promise("A service that ended has released all memory.")
async def test_asleep_the_devices_memory_is_gone_and_awake_it_is_other_memory(
    device: Counting,
) -> None:
    async with node(device) as here:
        before = here.service.planes
        await here.service.sleep()
        assert device.num_held == 1
        with pytest.raises(LayoutError, match="closed"):
            _ = before.arrays
        await here.service.wake(4)
        assert here.service.planes is not before
        assert device.num_held == 2
        await here.run(list(range(10)))
    assert device.num_held == 0


async def test_a_wake_whose_lanes_cannot_be_opened_leaves_it_asleep_and_can_be_tried_again(
    device: Counting,
) -> None:
    async with node(device) as here:
        await here.run(list(range(10)))
        await here.service.sleep()
        device.fails_lanes = True
        for _ in range(2):
            with pytest.raises(DeviceFailedError):
                await finish(here.service.wake())
            assert here.service.is_asleep
            assert device.num_held == 1
        device.fails_lanes = False
        await finish(here.service.wake())
        assert (await here.run(list(range(10)))).total_tokens == 9
        with pytest.raises(OwnershipError):
            await here.service.wake()
    assert device.num_held == 0


async def test_planes_that_come_for_a_wake_that_was_cancelled_go_back(device: Counting) -> None:
    async with node(device) as here:
        await here.service.sleep()
        device.may_allocate.clear()
        wakes = asyncio.ensure_future(here.service.wake())
        await asyncio.sleep(0.01)
        wakes.cancel()
        await asyncio.wait([wakes])
        assert wakes.cancelled()
        device.may_allocate.set()
        await until(lambda: len(device.given) == 3, "the planes")
        await until(lambda: device.num_held == 1, "planes that are given back")
        assert here.service.is_asleep
        await finish(here.service.wake())
        await here.run(list(range(10)))
    assert device.num_held == 0


@pytest.mark.parametrize("how", ["ends", "fails", "ends after a cancel"])
@pytest.mark.parametrize("stage", ["allocates", "opens lanes"])
async def test_a_service_that_ends_during_a_wake_has_given_everything_back(
    device: Counting, stage: str, how: str
) -> None:
    held = device.may_allocate if stage == "allocates" else device.may_open_lanes
    wakes: list[asyncio.Future[None]] = []

    async def end_during_a_wake() -> None:
        async with node(device) as here:
            await here.service.sleep()
            held.clear()
            wakes.append(asyncio.ensure_future(here.service.wake()))
            await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.1, held.set)
            if how == "fails":
                raise DeviceFailedError("something else")
            if how == "ends after a cancel":
                wakes[0].cancel()

    with pytest.raises(DeviceFailedError) if how == "fails" else nullcontext():
        await end_during_a_wake()
    await asyncio.wait(wakes)
    assert len(device.given) == 3
    assert device.num_held == 0
    assert device.num_open_lanes == 0


async def test_a_service_that_has_ended_asleep_is_not_woken(device: Counting) -> None:
    async with node(device) as here:
        await here.service.sleep()
    with pytest.raises(ShuttingDownError):
        await here.service.wake()
    assert device.num_held == 0
