"""A lane on CUDA: the staged pipeline between host slots and planes.

    load      slots --copy engine--> ring --scatter--> planes        copy stream | kernel stream
    offload   slots <--copy engine-- ring <--gather--- planes        copy stream | kernel stream

The copy engine moves a block's bytes as one piece, the kernel spreads them over the planes; events
join the two streams unit by unit, so that one unit is copied while the one before is scattered.
Kernels that read host memory themselves were as fast alone, but fell to 66 % with both directions
at once and slowed a matmul beside them by 14 to 106 % (H200, 2026-11-21); this does neither.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tierkv.errors import DeviceFailedError, TransferError
from tierkv.gpu.cpu import check_copy, done_event
from tierkv.gpu.cuda import CudaEvent, DeviceMemory, Gpu, new_stream
from tierkv.gpu.cuda_planes import CudaPlanes
from tierkv.gpu.driver import load_driver
from tierkv.gpu.kernels import PlaneKernels
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.gpu.ring import Ring
from tierkv.gpu.units import Order, Unit, UnitSizes, plan_units

_LEAST_STAGING = 1 << 20
_AFTER_TIMEOUT_S = 600.0  # for events that are not CUDA's: the submitting thread waits for them


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """staging_bytes: the ring of a lane, in device memory; one for few blocks is smaller.
    num_ctas: blocks of threads of a gather or scatter kernel."""

    staging_bytes: int = 512 << 20
    num_ctas: int = 64
    units: UnitSizes = field(default_factory=UnitSizes)


class CudaLane:
    """See Lane. Submit from one thread at a time; it blocks no other Python thread for long.

    If a submission fails half-way, it raises only when what it had begun has ended.
    """

    def __init__(  # noqa: PLR0917 - what a lane is made of
        self,
        gpu: Gpu,
        direction: Direction,
        planes: CudaPlanes,
        host: PinnedSlots,
        settings: LaneSettings,
        order: Order,
    ) -> None:
        self._gpu = gpu
        self._direction = direction
        self._planes = planes
        self._host = host
        self._order = order
        self._lock = threading.Lock()
        self._copies = new_stream(gpu, is_urgent=False)
        self._kernel_stream = new_stream(gpu, is_urgent=True)
        self._kernels = PlaneKernels(gpu, planes, num_ctas=settings.num_ctas)
        row = Unit(range(0), 0, planes.layout.block_bytes, 0, 1).row_bytes
        largest = 2 * row * min(planes.num_blocks, host.num_slots)
        capacity = max(min(settings.staging_bytes, largest), 2 * row, _LEAST_STAGING)
        self._sizes = replace(settings.units, most=min(settings.units.most, capacity // 4))
        self._ring: Ring[CudaEvent] = Ring(capacity)
        self._staging: DeviceMemory | None = DeviceMemory(gpu, capacity)

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        check_copy(copy, self._direction, self._planes.num_blocks, self._host.num_slots)
        num_layers = self._planes.layout.num_layers
        if not len(copy):
            return (done_event(),) * num_layers
        with self._lock:
            if self._staging is None:
                raise DeviceFailedError("this lane is closed")
            self._host.wait_until_pinned(copy.slot_ids)
            try:
                with self._gpu.bound():
                    for event in copy.after:
                        self._kernel_stream.wait(event, _AFTER_TIMEOUT_S)
                    return self._submit(copy, self._staging.address)
            except TransferError as error:
                self._abandon()
                error.blocks = tuple(copy.block_ids.tolist())
                raise

    def _submit(self, copy: BlockCopy, staging: int) -> tuple[Event, ...]:
        layout = self._planes.layout
        reached: list[CudaEvent | None] = [None] * layout.num_layers
        slots = np.uint64(self._host.address) + copy.slot_ids.astype(np.uint64) * np.uint64(
            layout.block_bytes
        )
        for unit in plan_units(layout, len(copy), self._order, self._sizes):
            offset, freed_by = self._ring.take(unit.staging_bytes)
            part = slice(unit.start, unit.stop)
            pieces = slots[part] + np.uint64(unit.first_byte)
            ids = copy.block_ids[part]
            if self._direction is Direction.LOAD:
                end = self._load(unit, pieces, ids, staging + offset, freed_by)
            else:
                end = self._offload(unit, pieces, ids, staging + offset, freed_by)
            self._ring.use_until(end)
            for layer in unit.layers:
                reached[layer] = end
        assert all(reached), "every layer is in a unit"
        return tuple(event for event in reached if event is not None)

    def _load(
        self,
        unit: Unit,
        pieces: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.int32],
        staging: int,
        freed_by: CudaEvent | None,
    ) -> CudaEvent:
        if freed_by is not None:
            self._copies.wait(freed_by, 0.0)
        rows = _rows(unit, staging)
        load_driver().copy_batch(rows, pieces, _sizes(unit), stream=self._copies.address)
        self._kernel_stream.wait(self._copies.record(), 0.0)
        self._kernels.scatter(unit, block_ids, staging, self._kernel_stream)
        return self._kernel_stream.record()

    def _offload(
        self,
        unit: Unit,
        pieces: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.int32],
        staging: int,
        freed_by: CudaEvent | None,
    ) -> CudaEvent:
        if freed_by is not None:
            self._kernel_stream.wait(freed_by, 0.0)
        self._kernels.gather(unit, block_ids, staging, self._kernel_stream)
        self._copies.wait(self._kernel_stream.record(), 0.0)
        rows = _rows(unit, staging)
        load_driver().copy_batch(pieces, rows, _sizes(unit), stream=self._copies.address)
        return self._copies.record()

    def _abandon(self) -> None:
        """After an error in the middle: what was begun has ended, and the ring is free."""
        with self._gpu.bound_to_close():
            self._copies.raw.synchronize()
            self._kernel_stream.raw.synchronize()
        self._ring.reset()

    def close(self) -> None:
        with self._lock:
            if self._staging is not None:
                self._abandon()
                self._staging = None


def _rows(unit: Unit, staging: int) -> npt.NDArray[np.uint64]:
    return np.uint64(staging) + np.arange(unit.num_blocks, dtype=np.uint64) * np.uint64(
        unit.row_bytes
    )


def _sizes(unit: Unit) -> npt.NDArray[np.uint64]:
    return np.full(unit.num_blocks, unit.num_bytes, np.uint64)
