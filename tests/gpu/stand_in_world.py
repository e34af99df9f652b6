"""A device on the stand-in for a GPU, and what should lie in its slots and blocks."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.gpu.cuda import WAIT_S
from tests.gpu.stand_in import Gpu, Steps
from tierkv.cache.layout import Layout, Plane, layered
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event, HostSlots, Ids
from tierkv.gpu.units import Order, UnitSizes
from tierkv.ranks.memory import SharedSlots, shared_memory

if TYPE_CHECKING:
    from tierkv.gpu.cuda_device import CudaDevice

ODD = Layout(1, tuple(Plane(at, "key", "uint8", size) for at, size in enumerate((4097, 1, 15, 17))))
LAYOUTS = (
    ODD,
    layered(1, [("key", "uint8", 9001), ("scale", "float32", 12)], num_layers=3),
    layered(4, [("key", "uint8", 1024), ("value", "uint8", 1024)], num_layers=2),
)
SMALL = UnitSizes(
    first=1 << 12, min_unit=1 << 10, max_unit=1 << 13, last=1 << 10, piece=512, max_piece=1 << 11
)


def new_device(**lanes: Any) -> CudaDevice:
    """lanes: of LaneSettings."""
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - once the stand-in is there
    from tierkv.gpu.cuda_lane import LaneSettings  # noqa: PLC0415

    return CudaDevice(lanes=LaneSettings(**lanes))


class World:
    """Each step is ordered behind those before it that touch the same memory, by events alone."""

    def __init__(self, gpu: Gpu, rng: random.Random, layout: Layout, count: int) -> None:
        from tierkv.gpu.pinned import PinnedSlots  # noqa: PLC0415 - once the stand-in is there

        self._gpu, self._rng, self._count = gpu, rng, count
        self._numbers = np.random.default_rng(rng.getrandbits(32))
        turn_bytes = rng.choice((1, 1 << 12, 64 << 20))
        units = rng.choice((UnitSizes(), UnitSizes(min_unit=1, max_unit=1, piece=1), SMALL))
        units = replace(units, straight_row=1 << 10)
        self._device = device = new_device(staging_bytes=1, turn_bytes=turn_bytes, units=units)
        self._planes = planes = device.allocate_planes(layout, count)
        chunk_bytes = rng.choice((1, 1 << 14, 1 << 20))
        self._others = self._slots_of_others(rng, layout)
        memory = None if self._others is None else self._others.array
        self._host = host = PinnedSlots(
            device.gpu, layout, count, chunk_bytes=chunk_bytes, array=memory
        )
        for array in (host.array, *planes.arrays):
            array[:] = self._numbers.integers(0, 256, array.shape, np.uint8)
        self._slots, self._blocks = host.array.copy(), np.concatenate(planes.arrays, axis=1)
        self._lanes = {
            one: device.open_ordered_lane(one, planes, host, rng.choice(list(Order)))
            for one in Direction
        }
        self._ends: dict[Direction, Event] = {}

    def _slots_of_others(self, rng: random.Random, layout: Layout) -> HostSlots | None:
        """Memory that was mapped before: a piece of each slot, as a rank has it, or all of it."""
        size = layout.block_bytes
        kind = rng.choice(("own", "cpu", "piece", "piece"))
        if kind == "own":
            return None
        if kind == "cpu":
            return CpuHostSlots(layout, self._count)
        before, after = rng.choice(((0, size), (size, 0), (5000, 1), (0, 0)))
        num_bytes = before + size + after
        memory = shared_memory(self._count * num_bytes)
        return SharedSlots(memory, self._count, num_bytes, slice(before, before + size))

    def _ids(self) -> tuple[Ids, Ids]:
        size = self._rng.choice((1, 2, 3, 4, 4, self._count // 2, self._count))
        here, there = (
            self._numbers.permutation(self._count).astype(np.int32)[:size] for _ in range(2)
        )
        return (here, there) if self._rng.random() < 0.6 else (np.sort(here), np.sort(there))

    def copy(self) -> None:
        slots, blocks = self._ids()
        direction = self._rng.choice(list(Direction))
        other = next(one for one in Direction if one is not direction)
        if direction is Direction.LOAD and other in self._ends:
            self._ends[other].block_until_done(WAIT_S)  # slots are read at once
        after: tuple[Event, ...] = ()
        if other in self._ends:
            if self._rng.random() < 0.5:
                after = (self._ends[other],)
            else:
                self._device.compute_stream.wait(self._ends[other], WAIT_S)
        release = self._gpu.hold(0) if self._rng.random() < 0.5 else None
        after += (self._device.compute_stream.record(),)
        copy = BlockCopy(direction, slots, blocks, after)
        self._ends[direction] = self._lanes[direction].submit(copy)[-1]
        if release is not None:
            threading.Timer(0.02, release).start()
        if direction is Direction.LOAD:
            self._blocks[blocks] = self._slots[slots]
        else:
            self._slots[slots] = self._blocks[blocks]

    def _compute_after_copies(self) -> None:
        for event in self._ends.values():
            self._device.compute_stream.wait(event, WAIT_S)

    def write(self) -> None:
        """As an engine's kernel on the legacy default stream does."""
        blocks, rows = self._ids()[0], self._numbers.integers(0, 256, self._blocks.shape, np.uint8)
        planes = self._planes

        def steps() -> Steps:
            for block in blocks.tolist():
                for array, start in zip(planes.arrays, planes.layout.offsets, strict=True):
                    array[block] = rows[block, start : start + array.shape[1]]
                    yield

        self._compute_after_copies()
        self._gpu.submit(0, steps())
        self._blocks[blocks] = rows[blocks]

    def copy_within(self) -> None:
        ids = self._ids()[0]
        source, target = np.split(ids[: len(ids) // 2 * 2], 2)
        self._compute_after_copies()
        self._device.copy_blocks(self._planes, source, target).block_until_done(WAIT_S)
        self._blocks[target] = self._blocks[source]

    def close(self) -> None:
        self._device.compute_stream.record().block_until_done(WAIT_S)
        for lane in self._lanes.values():
            lane.close()
        assert np.array_equal(self._host.array, self._slots)
        assert np.array_equal(np.concatenate(self._planes.arrays, axis=1), self._blocks)
        self._host.close()
        if self._others is not None:
            self._others.close()
        self._planes.close()
        self._device.close()
