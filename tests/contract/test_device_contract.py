"""What every device promises, checked on each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from tests.gpu.cuda import cupy_or_skip, read_plane, write_plane
from tests.latch import CopyLatch, ManualEvent
from tests.layouts import ALL_LAYOUTS, LAYOUTS
from tierkv.cache.layout import Layout, layered
from tierkv.errors import DeviceFailedError, GateTimeoutError, LayoutError, TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import (
    BlockCopy,
    Device,
    Direction,
    Event,
    HostSlots,
    Lane,
    Planes,
)

NUM_BLOCKS, NUM_SLOTS = 9, 11
WAIT_S = 120.0


@dataclass
class Ground:
    """One device under test. write, read: plane bytes from and to the CPU; break_layer: whatever
    makes every copy fail when it comes to that layer."""

    device: Device
    latch: CopyLatch
    write: Callable[[Planes, int, np.ndarray], None]
    read: Callable[[Planes, int], np.ndarray]
    break_layer: Callable[[Planes, int], None]
    lanes: list[Lane] = field(default_factory=list)

    def open(self, layout: Layout = LAYOUTS["gqa"]) -> tuple[Planes, HostSlots]:
        """Planes and host slots full of random bytes."""
        planes = self.device.allocate_planes(layout, NUM_BLOCKS)
        host = self.device.allocate_host(layout, NUM_SLOTS)
        rng = np.random.default_rng(1)
        host.array[:] = rng.integers(0, 256, host.array.shape, np.uint8)
        for index, plane in enumerate(layout.planes):
            self.write(
                planes, index, rng.integers(0, 256, (NUM_BLOCKS, plane.block_bytes), np.uint8)
            )
        return planes, host

    def lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        lane = self.device.open_lane(direction, planes, host)
        self.lanes.append(lane)
        return lane

    def blocks(self, planes: Planes) -> np.ndarray:
        """Every device block in the order of a host slot, uint8 [num_blocks, block_bytes]."""
        return np.concatenate(
            [self.read(planes, index) for index in range(len(planes.layout.planes))], axis=1
        )


def _cpu() -> Ground:
    latch = CopyLatch()

    def write(planes: Planes, plane: int, rows: np.ndarray) -> None:
        planes.arrays[plane][:] = rows

    def break_layer(planes: Planes, layer: int) -> None:
        first = planes.layout.planes_of_layer[layer][0]
        arrays = cast("list[np.ndarray]", planes.arrays)
        arrays[first] = np.zeros((0, 0), np.uint8)

    return Ground(
        CpuDevice(before_copy=latch),
        latch,
        write,
        lambda planes, plane: planes.arrays[plane].copy(),
        break_layer,
    )


def _cuda() -> Ground:
    cupy = cupy_or_skip()
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - needs CuPy

    latch = CopyLatch()

    def break_layer(planes: Planes, layer: int) -> None:
        pytest.skip("CUDA has no failure of one layer: small copies are one unit of all layers")

    return Ground(
        CudaDevice(before_copy=latch),
        latch,
        lambda planes, plane, rows: write_plane(cupy, planes, plane, rows),
        lambda planes, plane: read_plane(cupy, planes, plane),
        break_layer,
    )


DEVICES: dict[str, Callable[[], Ground]] = {"cpu": _cpu, "cuda": _cuda}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.gpu if name != "cpu" else ()) for name in DEVICES]
)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    ground = DEVICES[request.param]()
    yield ground
    ground.latch.release()
    for lane in ground.lanes:
        lane.close()
    ground.device.close()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def wait(events: tuple[Event, ...]) -> None:
    events[-1].block_until_done(WAIT_S)


_rng = np.random.default_rng(11)
BLOCK_IDS = {
    "none": ids(),
    "one": ids(NUM_BLOCKS - 1),
    "consecutive": np.arange(2, 7, dtype=np.int32),
    "reversed": np.arange(NUM_BLOCKS - 1, -1, -1, dtype=np.int32),
    "random": _rng.permutation(NUM_BLOCKS).astype(np.int32)[:6],
}
SLOT_IDS = {  # neighbours, as blocks are; else slots are random
    "consecutive": np.arange(4, 9, dtype=np.int32),
    "reversed": np.arange(NUM_BLOCKS, 0, -1, dtype=np.int32),
}
# The CPU copies neighbouring blocks in one go where planes are so wide.
WIDE = layered(4, [("k", "uint8", 16 << 10)], 2)


@pytest.mark.promise("Every device copies exactly the named blocks.")
@pytest.mark.parametrize("pattern", BLOCK_IDS)
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("layout", [*ALL_LAYOUTS.values(), WIDE], ids=[*ALL_LAYOUTS, "wide"])
def test_exactly_the_named_blocks_are_copied_byte_for_byte(
    ground: Ground, layout: Layout, direction: Direction, pattern: str
) -> None:  # faults 6 and 8
    planes, host = ground.open(layout)
    blocks, slots = ground.blocks(planes), host.array.copy()
    block_ids = BLOCK_IDS[pattern]
    any_slots = np.random.default_rng(5).permutation(NUM_SLOTS).astype(np.int32)
    slot_ids = SLOT_IDS.get(pattern, any_slots[: len(block_ids)])
    lane = ground.lane(direction, planes, host)
    events = lane.submit(BlockCopy(direction, slot_ids, block_ids))
    assert len(events) == layout.num_layers
    wait(events)
    assert all(event.is_done for event in events)
    if direction is Direction.LOAD:
        blocks[block_ids] = slots[slot_ids]
    else:
        slots[slot_ids] = blocks[block_ids]
    assert np.array_equal(ground.blocks(planes), blocks)
    assert np.array_equal(host.array, slots)
    host.close()
    planes.close()


@pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", ["none", "random"])
def test_blocks_are_copied_within_the_device(ground: Ground, layout: Layout, pattern: str) -> None:
    planes, _ = ground.open(layout)
    expected = ground.blocks(planes)
    sources = BLOCK_IDS[pattern][:4]
    targets = np.setdiff1d(np.arange(NUM_BLOCKS), sources)[: len(sources)].astype(np.int32)
    ground.device.copy_blocks(planes, sources, targets).block_until_done(WAIT_S)
    expected[targets] = expected[sources]
    assert np.array_equal(ground.blocks(planes), expected)


def test_a_copy_within_the_device_that_cannot_be_is_refused_or_fails(ground: Ground) -> None:
    planes, _ = ground.open()
    before = ground.blocks(planes)
    with pytest.raises(LayoutError, match="the same number"):
        ground.device.copy_blocks(planes, ids(1, 2), ids(3))
    with pytest.raises(LayoutError, match="source and target"):
        ground.device.copy_blocks(planes, ids(1, 2), ids(2, 3))
    for sources, targets in ((ids(-1), ids(0)), (ids(0), ids(-1)), (ids(NUM_BLOCKS), ids(0))):
        with pytest.raises((LayoutError, TransferError)):
            ground.device.copy_blocks(planes, sources, targets).block_until_done(WAIT_S)
    assert np.array_equal(ground.blocks(planes), before)
    planes.close()
    with pytest.raises((LayoutError, TransferError), match="closed"):
        ground.device.copy_blocks(planes, ids(1), ids(2)).block_until_done(WAIT_S)


def test_a_destination_that_appears_twice_is_refused() -> None:
    for count in (2, 100, 1000):
        sources = np.arange(count, dtype=np.int32)
        targets = np.random.default_rng(count).permutation(5000)[:count].astype(np.int32)
        BlockCopy(Direction.LOAD, sources, targets)
        targets[-1] = targets[0]
        with pytest.raises(LayoutError, match="destination"):
            BlockCopy(Direction.LOAD, sources, targets)
    with pytest.raises(LayoutError, match="destination"):
        BlockCopy(Direction.OFFLOAD, ids(1, 1), ids(2, 3))
    BlockCopy(Direction.LOAD, ids(1, 1), ids(2, 3))  # one source may go to two places
    BlockCopy(Direction.OFFLOAD, ids(1, 2), ids(3, 3))
    with pytest.raises(LayoutError, match="the same number"):
        BlockCopy(Direction.LOAD, ids(1), ids(2, 3))


WIDER = np.array([0, 1, 2])[::2]  # int64, not side by side


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize(
    ("slots", "blocks", "what"),
    [
        (ids(NUM_SLOTS), ids(0), "slot"),
        (ids(0), ids(NUM_BLOCKS), "block"),
        (ids(-1), ids(0), "slot"),
        (ids(0), ids(-1), "block"),
        *(
            (np.array([0, 1, number])[::2], WIDER, "slot")
            for number in (-1, NUM_SLOTS, 1 << 32, -(1 << 32))
        ),
    ],
)
def test_ids_out_of_range_are_refused_and_nothing_is_submitted(
    ground: Ground, direction: Direction, slots: np.ndarray, blocks: np.ndarray, what: str
) -> None:
    planes, host = ground.open()
    lane = ground.lane(direction, planes, host)
    with pytest.raises(LayoutError, match=f"{what} id"):
        lane.submit(BlockCopy(direction, slots, blocks))
    assert ground.latch.seen == []


def test_a_lane_refuses_copies_of_the_other_direction(ground: Ground) -> None:
    planes, host = ground.open()
    lane = ground.lane(Direction.LOAD, planes, host)
    with pytest.raises(LayoutError, match="load lane"):
        lane.submit(BlockCopy(Direction.OFFLOAD, ids(1), ids(1)))


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_submitted_is_not_done(ground: Ground, direction: Direction) -> None:  # fault 5
    planes, host = ground.open()
    blocks, slots = ground.blocks(planes), host.array.copy()
    ground.latch.hold()
    events = ground.lane(direction, planes, host).submit(BlockCopy(direction, ids(0), ids(0)))
    assert not any(event.is_done for event in events)
    with pytest.raises(GateTimeoutError):
        events[0].block_until_done(0.001)
    assert np.array_equal(ground.blocks(planes), blocks)
    assert np.array_equal(host.array, slots)
    ground.latch.release()
    wait(events)


def test_copies_of_a_lane_finish_in_the_order_of_submission(ground: Ground) -> None:
    planes, host = ground.open()
    ground.latch.hold()
    lane = ground.lane(Direction.LOAD, planes, host)
    copies = [lane.submit(BlockCopy(Direction.LOAD, ids(slot), ids(1))) for slot in range(6)]
    ground.latch.release()
    wait(copies[-1])
    assert all(event.is_done for events in copies for event in events)
    assert [copy.slot_ids.tolist() for copy in ground.latch.seen] == [[n] for n in range(6)]
    assert np.array_equal(ground.blocks(planes)[1], host.array[5])


def test_layers_are_done_in_order(ground: Ground) -> None:
    planes, host = ground.open(LAYOUTS["mtp"])
    lane = ground.lane(Direction.LOAD, planes, host)
    every = np.arange(NUM_BLOCKS, dtype=np.int32)
    for _ in range(20):
        events = lane.submit(BlockCopy(Direction.LOAD, every, every))
        done = 0
        while done < len(events):
            states = [event.is_done for event in reversed(events)]  # the last one is asked first
            assert states == sorted(states)
            done = sum(states)


def test_a_copy_waits_for_what_it_must_come_after(ground: Ground) -> None:  # fault 7
    planes, host = ground.open()
    kernel = ManualEvent()
    lane = ground.lane(Direction.OFFLOAD, planes, host)
    events = lane.submit(BlockCopy(Direction.OFFLOAD, ids(0), ids(0), after=(kernel,)))
    with pytest.raises(GateTimeoutError):
        events[-1].block_until_done(0.01)
    for index, plane in enumerate(planes.layout.planes):
        ground.write(planes, index, np.full((NUM_BLOCKS, plane.block_bytes), 0x77, np.uint8))
    kernel.finish()
    wait(events)
    assert (host.array[0] == 0x77).all()


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("layer", range(4))
def test_a_failure_at_a_layer_fails_that_one_and_all_later_ones_only(
    ground: Ground, direction: Direction, layer: int
) -> None:
    planes, host = ground.open(LAYOUTS["mtp"])
    ground.break_layer(planes, layer)
    lane = ground.lane(direction, planes, host)
    for _ in range(2):  # the lane goes on after a failure
        events = lane.submit(BlockCopy(direction, ids(3, 4), ids(1, 2)))
        for event in events[:layer]:
            event.block_until_done(WAIT_S)
            assert event.is_done
        for event in events[layer:]:
            with pytest.raises(TransferError, match=f"failed at layer {layer}") as error:
                event.block_until_done(WAIT_S)
            assert error.value.blocks == (1, 2)
            with pytest.raises(TransferError):
                assert event.is_done


def test_a_failure_leaves_the_next_copy_alone(ground: Ground) -> None:
    planes, host = ground.open()
    ground.latch.fail_next(Direction.LOAD)
    lane = ground.lane(Direction.LOAD, planes, host)
    broken = lane.submit(BlockCopy(Direction.LOAD, ids(0), ids(0)))
    fine = lane.submit(BlockCopy(Direction.LOAD, ids(1), ids(1)))
    wait(fine)
    with pytest.raises(TransferError, match="layer 0"):
        wait(broken)
    assert np.array_equal(ground.blocks(planes)[1], host.array[1])


def test_closing_a_lane_waits_for_its_copies_and_then_it_refuses(ground: Ground) -> None:
    planes, host = ground.open()
    ground.latch.hold()
    lane = ground.device.open_lane(Direction.LOAD, planes, host)
    events = [lane.submit(BlockCopy(Direction.LOAD, ids(n), ids(n))) for n in range(3)]
    closer = threading.Thread(target=lane.close)
    closer.start()
    assert not events[-1][-1].is_done
    ground.latch.release()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert all(event.is_done for copy in events for event in copy)
    assert np.array_equal(ground.blocks(planes)[:3], host.array[:3])
    with pytest.raises(DeviceFailedError):
        lane.submit(BlockCopy(Direction.LOAD, ids(0), ids(0)))


def test_memory_is_given_back_once_and_is_gone_then(ground: Ground) -> None:  # fault 14
    planes, host = ground.open()
    host.close()
    planes.close()
    with pytest.raises(LayoutError, match="closed already"):
        host.close()
    with pytest.raises(LayoutError, match="closed already"):
        planes.close()
    with pytest.raises(LayoutError, match="closed"):
        assert host.array is None
    with pytest.raises(LayoutError, match="closed"):
        assert planes.arrays is None


@pytest.mark.parametrize("closed", ["host", "planes"])
def test_a_copy_into_closed_memory_fails_and_says_so(ground: Ground, closed: str) -> None:
    planes, host = ground.open()
    lane = ground.lane(Direction.LOAD, planes, host)
    ground.latch.hold()
    events = lane.submit(BlockCopy(Direction.LOAD, ids(0), ids(0)))
    (host if closed == "host" else planes).close()
    ground.latch.release()
    with pytest.raises(TransferError, match="closed"):
        wait(events)


def test_host_slots_are_contiguous_and_aligned(ground: Ground) -> None:
    for layout in ALL_LAYOUTS.values():
        planes, host = ground.open(layout)
        assert host.num_slots == NUM_SLOTS
        assert host.array.shape == (NUM_SLOTS, layout.block_bytes)
        assert host.array.flags.c_contiguous
        assert host.array.ctypes.data % 16 == 0
        assert planes.num_blocks == NUM_BLOCKS
        assert [array.shape for array in planes.arrays] == [
            (NUM_BLOCKS, plane.block_bytes) for plane in layout.planes
        ]


def test_the_compute_stream_records_and_waits(ground: Ground) -> None:
    stream = ground.device.compute_stream
    stream.record().block_until_done(WAIT_S)
    planes, host = ground.open()
    ground.latch.hold()
    lane = ground.lane(Direction.LOAD, planes, host)
    events = lane.submit(BlockCopy(Direction.LOAD, ids(0), ids(0)))
    releaser = threading.Thread(target=ground.latch.release)
    releaser.start()
    stream.wait(events[-1], WAIT_S)
    stream.record().block_until_done(WAIT_S)
    assert events[-1].is_done
    releaser.join()
