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
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from tierkv.errors import DeviceFailedError, TransferError
from tierkv.gpu.cpu import check_copy, done_event
from tierkv.gpu.cuda import CudaEvent, DeviceMemory, Gpu, new_stream
from tierkv.gpu.cuda_planes import CudaPlanes
from tierkv.gpu.driver import Addresses, load_driver
from tierkv.gpu.kernels import PlaneKernels
from tierkv.gpu.pending import PendingEvent
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event, Ids
from tierkv.gpu.ring import Ring
from tierkv.gpu.units import Order, Unit, UnitPlanner, UnitSizes

# A batch starts when its last piece is submitted, at 1.05 us a piece, and holds the driver's lock
# till then, on which the engine's launches wait. The first layer of 2 GiB came after 1.74 ms with
# 32 pieces, 1.90 with 32 and then 128, 2.02 with 256; with two streams for the pieces of a unit,
# which moved no more bytes, after 5.7 (H100, 2026-11-21).
_BATCH_PIECES = 32
_FEW_BLOCKS = 4
_FEW_IN_FLIGHT = 16  # beyond, a full stream might make the caller wait
_LEAST_STAGING = 1 << 20
_AFTER_TIMEOUT_S = 600.0  # for events that are not CUDA's: the submitting thread waits for them


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """staging_bytes: the ring of a lane, in device memory; one for few blocks is smaller.
    num_ctas: blocks of threads of a gather or scatter kernel: with 32 it moves 128 MiB in 136 us,
        with 64 in 125, with 132 in 120 (H100, 2026-11-21)."""

    staging_bytes: int = 512 << 20
    num_ctas: int = 64
    units: UnitSizes = field(default_factory=UnitSizes)


class CudaLane:
    """See Lane. A thread of its own does the submitting; the events it returns stand for those
    that this thread records. It holds the interpreter for microseconds at a time. A copy of a few
    blocks is submitted on the caller's thread instead, when nothing is queued before it.

    A copy whose submission fails half-way fails only when what it had begun has ended.
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
        row = Unit(range(0), 0, planes.layout.block_bytes, 0, 1).row_bytes
        largest = 2 * row * min(planes.num_blocks, host.num_slots)
        capacity = max(min(settings.staging_bytes, largest), 2 * row, _LEAST_STAGING)
        sizes = replace(settings.units, most=min(settings.units.most, capacity // 4))
        self._planner = UnitPlanner(planes.layout, order, sizes)
        self._copies = new_stream(gpu, is_urgent=False)
        self._kernel_stream = new_stream(gpu, is_urgent=True)
        self._kernels = PlaneKernels(gpu, planes, num_ctas=settings.num_ctas)
        self._ring: Ring[CudaEvent] = Ring(capacity)
        self._staging: DeviceMemory | None = DeviceMemory(gpu, capacity)
        self._line = object()
        self._num_events = 0
        self._progress = threading.Condition(threading.RLock())
        self._num_queued = 0
        self._few: deque[CudaEvent] = deque()  # ends of copies submitted on callers' threads
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tierkv-{direction.value}")

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        check_copy(copy, self._direction, self._planes.num_blocks, self._host.num_slots)
        num_layers = self._planes.layout.num_layers
        if not len(copy):
            return (done_event(),) * num_layers
        with self._progress:  # so that positions are in the order of submission
            if self._is_closed:
                raise DeviceFailedError("this lane is closed")
            if self._may_run_at_once(copy):
                return self._run_at_once(copy)
            first = self._num_events
            events = tuple(
                PendingEvent(self._progress, self._line, position)
                for position in range(first, first + num_layers)
            )
            self._num_events += num_layers
            self._num_queued += 1
            self._thread.submit(self._run, copy, events)
            return events

    def _may_run_at_once(self, copy: BlockCopy) -> bool:
        """Whether submitting takes microseconds here: few pieces, nothing to wait for, room in the
        streams. It saves two thread switches of the 150 us that 8 MiB take."""
        if self._num_queued or len(copy) > _FEW_BLOCKS or not self._host.is_pinned:
            return False
        if not all(isinstance(event, CudaEvent) for event in copy.after):
            return False
        while self._few and self._few[0].is_done:
            self._few.popleft()
        return len(self._few) < _FEW_IN_FLIGHT

    def _run_at_once(self, copy: BlockCopy) -> tuple[Event, ...]:
        events: list[Event] = []
        try:
            with self._gpu.bound():
                for event in copy.after:
                    self._kernel_stream.wait(event, 0.0)
                for unit, end in self._submit_units(copy):
                    if unit.stop == len(copy):
                        events += [end] * len(unit.layers)
                        self._few.append(end)
        except TransferError as error:
            self._let_end()
            raise _failure(self._direction, len(events), copy, error) from error
        return tuple(events)

    def close(self) -> None:
        with self._progress:
            self._is_closed = True
        self._thread.shutdown(wait=True)
        self._let_end()
        self._staging = None

    def _run(self, copy: BlockCopy, events: tuple[PendingEvent, ...]) -> None:
        """Bring the copy to the streams, unit by unit."""
        reached = 0
        try:
            self._host.wait_until_pinned(copy.slot_ids)
            for event in copy.after:
                self._kernel_stream.wait(event, _AFTER_TIMEOUT_S)
            with self._gpu.bound():
                for unit, end in self._submit_units(copy):
                    if unit.stop == len(copy):
                        self._tell(events[unit.layers.start : unit.layers.stop], end)
                        reached = unit.layers.stop
        except Exception as error:  # noqa: BLE001 - whatever it is, waiters must hear of it
            self._let_end()
            failure = _failure(self._direction, reached, copy, error)
            with self._progress:
                for event in events[reached:]:
                    event.failed(failure)
                self._progress.notify_all()
        finally:
            with self._progress:
                self._num_queued -= 1

    def _tell(self, events: Sequence[PendingEvent], end: CudaEvent) -> None:
        with self._progress:
            for event in events:
                event.submitted(end)
            self._progress.notify_all()

    def _submit_units(self, copy: BlockCopy) -> Iterator[tuple[Unit, CudaEvent]]:
        """Each unit with the event of its end, as soon as it is submitted."""
        assert self._staging is not None, "the thread ends before the staging memory goes"
        slots = copy.slot_ids.astype(np.uint64)
        slots *= np.uint64(self._planes.layout.block_bytes)
        slots += np.uint64(self._host.address)
        move = self._load if self._direction is Direction.LOAD else self._offload
        for unit in self._planner.plan(len(copy)):
            offset, freed_by = self._ring.take(unit.staging_bytes)
            part = slice(unit.start, unit.stop)
            pieces = slots[part] + np.uint64(unit.first_byte)
            end = move(unit, pieces, copy.block_ids[part], self._staging.address + offset, freed_by)
            self._ring.use_until(end)
            yield unit, end

    def _load(
        self,
        unit: Unit,
        pieces: Addresses,
        block_ids: Ids,
        staging: int,
        free: CudaEvent | None,
    ) -> CudaEvent:
        if free is not None:
            self._copies.wait_bound(free)
        self._copy(_rows(unit, staging), pieces, unit)
        self._kernel_stream.wait_bound(self._copies.record_bound())
        self._kernels.scatter(unit, block_ids, staging, self._kernel_stream)
        return self._kernel_stream.record_bound()

    def _offload(
        self,
        unit: Unit,
        pieces: Addresses,
        block_ids: Ids,
        staging: int,
        free: CudaEvent | None,
    ) -> CudaEvent:
        if free is not None:
            self._kernel_stream.wait_bound(free)
        self._kernels.gather(unit, block_ids, staging, self._kernel_stream)
        self._copies.wait_bound(self._kernel_stream.record_bound())
        self._copy(pieces, _rows(unit, staging), unit)
        return self._copies.record_bound()

    def _copy(self, targets: Addresses, sources: Addresses, unit: Unit) -> None:
        sizes = np.full(unit.num_blocks, unit.num_bytes, np.uint64)
        for start in range(0, unit.num_blocks, _BATCH_PIECES):
            part = slice(start, start + _BATCH_PIECES)
            load_driver().copy_batch(
                targets[part], sources[part], sizes[part], stream=self._copies.address
            )

    def _let_end(self) -> None:
        """Block until what was begun has ended; then the ring is free."""
        with self._gpu.bound_to_close():
            self._copies.raw.synchronize()
            self._kernel_stream.raw.synchronize()
        self._ring.reset()


def _failure(direction: Direction, layer: int, copy: BlockCopy, error: Exception) -> TransferError:
    kind = DeviceFailedError if isinstance(error, DeviceFailedError) else TransferError
    failed = kind(
        f"{direction.value} failed at layer {layer}: {error}", blocks=tuple(copy.block_ids.tolist())
    )
    failed.__cause__ = error
    return failed


def _rows(unit: Unit, staging: int) -> Addresses:
    return np.uint64(staging) + np.arange(unit.num_blocks, dtype=np.uint64) * np.uint64(
        unit.row_bytes
    )
