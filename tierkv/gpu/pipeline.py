"""The staged pipeline of a lane: units of a copy, brought to two streams that events join.

    load      slots --copy engine--> ring --scatter--> planes        copy stream | kernel stream
    offload   slots <--copy engine-- ring <--gather--- planes        copy stream | kernel stream

The copy engine moves a block's bytes as one piece, the kernel spreads them over the planes; one
unit is copied while the one before is scattered.
Kernels that read host memory themselves were as fast alone, but fell to 66 % with both directions
at once and slowed a matmul beside them by 14 to 106 % (H200, 2026-11-21); this does neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tierkv.gpu.cuda import CudaEvent, DeviceMemory, Gpu, new_stream
from tierkv.gpu.cuda_planes import CudaPlanes
from tierkv.gpu.driver import Addresses, load_driver
from tierkv.gpu.kernels import PlaneKernels
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event, Ids
from tierkv.gpu.ring import Ring
from tierkv.gpu.units import Order, Unit, UnitPlanner, UnitSizes, joined

# A batch starts when its last piece is submitted, at 1.05 us a piece, and holds the driver's lock
# till then, on which the engine's launches wait. Small ones start early, large ones lose less:
# pieces of 256 KiB reach 97.3 % of a contiguous copy with 32 to a batch and 98.8 % with 128 (to the
# host 95.3 and 96.5). With all 8,192 of 2 GiB in one it was 84 and 90, since that starts late; a
# second stream for every other batch added 0.3 % at most (H100, 2026-11-21).
_FIRST_BATCH_PIECES = 32
_BATCH_PIECES = 128
_LEAST_STAGING = 1 << 20


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """staging_bytes: the ring of a lane, in device memory; one for few blocks is smaller.
    num_ctas: blocks of threads of a gather or scatter kernel: with 32 it moves 128 MiB in 136 us,
        with 64 in 125, with 132 in 120 (H100, 2026-11-21)."""

    staging_bytes: int = 512 << 20
    num_ctas: int = 64
    units: UnitSizes = field(default_factory=UnitSizes)


class Pipeline:
    """Streams, ring and kernels of one direction between `planes` and `host`. For one thread at a
    time, which has the GPU bound."""

    def __init__(  # noqa: PLR0917 - what a pipeline is made of
        self,
        gpu: Gpu,
        direction: Direction,
        planes: CudaPlanes,
        host: PinnedSlots,
        settings: LaneSettings,
        order: Order,
    ) -> None:
        self._gpu = gpu
        self._move = self._load if direction is Direction.LOAD else self._offload
        self._block_bytes = planes.layout.block_bytes
        self._host = host
        row = Unit(range(0), 0, self._block_bytes, 0, 1).row_bytes
        largest = 2 * row * min(planes.num_blocks, host.num_slots)
        capacity = max(min(settings.staging_bytes, largest), 2 * row, _LEAST_STAGING)
        sizes = replace(settings.units, most=min(settings.units.most, capacity // 4))
        self._planner = UnitPlanner(planes.layout, order, sizes)
        self._copies = new_stream(gpu, is_urgent=False)
        self._kernel_stream = new_stream(gpu, is_urgent=True)
        self._kernels = PlaneKernels(gpu, planes, num_ctas=settings.num_ctas)
        self._ring: Ring[CudaEvent] = Ring(capacity)
        self._staging = DeviceMemory(gpu, capacity)

    def wait(self, event: Event, timeout_s: float) -> None:
        """Let no unit submitted after this start before `event`. See Stream.wait."""
        self._kernel_stream.wait(event, timeout_s)

    def submit(self, copy: BlockCopy) -> Iterator[tuple[Unit, CudaEvent]]:
        """Each unit with the event of its end, as soon as it is submitted. Within a unit, blocks
        move in the order of their slots."""
        slot_ids, block_ids = copy.slot_ids, copy.block_ids
        if len(copy) > 1:
            by_slot = np.argsort(slot_ids)
            slot_ids, block_ids = slot_ids[by_slot], block_ids[by_slot]
        slots = slot_ids.astype(np.uint64)
        slots *= np.uint64(self._block_bytes)
        slots += np.uint64(self._host.address)
        for unit in self._planner.plan(len(copy)):
            offset, freed_by = self._ring.take(unit.staging_bytes)
            part = slice(unit.start, unit.stop)
            pieces = slots[part] + np.uint64(unit.first_byte)
            end = self._move(
                unit, pieces, block_ids[part], self._staging.address + offset, freed_by
            )
            self._ring.use_until(end)
            yield unit, end

    def let_end(self) -> None:
        """Block until what was begun has ended; then the ring is free."""
        with self._gpu.bound_to_close():
            self._copies.raw.synchronize()
            self._kernel_stream.raw.synchronize()
        self._ring.reset()

    def _load(
        self, unit: Unit, pieces: Addresses, block_ids: Ids, staging: int, free: CudaEvent | None
    ) -> CudaEvent:
        if free is not None:
            self._copies.wait_bound(free)
        self._copy(_rows(unit, staging), pieces, unit, host=pieces)
        self._kernel_stream.wait_bound(self._copies.record_bound())
        self._kernels.scatter(unit, block_ids, staging, self._kernel_stream)
        return self._kernel_stream.record_bound()

    def _offload(
        self, unit: Unit, pieces: Addresses, block_ids: Ids, staging: int, free: CudaEvent | None
    ) -> CudaEvent:
        if free is not None:
            self._kernel_stream.wait_bound(free)
        self._kernels.gather(unit, block_ids, staging, self._kernel_stream)
        self._copies.wait_bound(self._kernel_stream.record_bound())
        self._copy(pieces, _rows(unit, staging), unit, host=pieces)
        return self._copies.record_bound()

    def _copy(self, targets: Addresses, sources: Addresses, unit: Unit, *, host: Addresses) -> None:
        sizes = np.full(unit.num_blocks, unit.num_bytes, np.uint64)
        if unit.num_blocks > 1 and unit.num_bytes == unit.row_bytes == self._block_bytes:
            firsts, sizes = joined(
                host,
                self._block_bytes,
                start=self._host.address,
                chunk_bytes=self._host.chunk_bytes,
            )
            targets, sources = targets[firsts], sources[firsts]
        step = _BATCH_PIECES if unit.layers.start or unit.start else _FIRST_BATCH_PIECES
        for start in range(0, len(sizes), step):
            part = slice(start, start + step)
            load_driver().copy_batch(
                targets[part], sources[part], sizes[part], stream=self._copies.address
            )


def _rows(unit: Unit, staging: int) -> Addresses:
    return np.uint64(staging) + np.arange(unit.num_blocks, dtype=np.uint64) * np.uint64(
        unit.row_bytes
    )
