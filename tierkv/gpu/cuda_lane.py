"""A lane on CUDA: accepts copies, moves their bytes through staging memory, returns events.

    load      slots --copy engine--> ring --scatter--> planes       copy streams | kernel stream
    offload   slots <--copy engine-- ring <--gather--- planes       copy streams | kernel stream

The ring is staging memory on the device, whose parts are reused in turn. A copy is divided into
units. The GPU's copy engine moves the bytes of a block as one piece. A kernel distributes these
bytes over the planes (scatter), or collects them from the planes (gather). While the kernel works
on one unit, the copy engine moves the next.

If the planes lie at equal distances in device memory, the copy engine can move a block between slot
and planes with one command, without ring and kernel. The first blocks of a copy are moved directly
in this manner if no earlier copy runs.

Kernels do not access host memory themselves, because such kernels slowed a matmul on the same GPU
by 14 to 106 % (H200).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from tierkv.errors import DeviceFailedError, LayoutError, TransferError
from tierkv.gpu.cpu import check_copy, done_event
from tierkv.gpu.cuda import CudaEvent, Gpu, PendingEvent, new_stream
from tierkv.gpu.cuda_memory import CudaPlanes, DeviceMemory, copy_rectangle
from tierkv.gpu.driver import Addresses, Column, load_driver
from tierkv.gpu.kernels import PlaneKernels
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.gpu.units import MAX_BLOCKS, Order, Ring, Unit, UnitPlanner, UnitSizes, joined, row_of
from tierkv.threads import Threads

# A batch starts when its last piece is submitted, after 1 to 1.5 us a piece, and holds the driver's
# lock until then, for which the engine's launches wait. The first batch is small, so that the copy
# engine starts early. Pieces of 256 KiB reach 97.3 % of a contiguous copy in batches of 32, 98.8 %
# in batches of 128, and 84 % if all 8,192 are one batch (H100).
_FIRST_BATCH_PIECES = 16
_BATCH_PIECES = 128
# Number of first units that move their blocks unsorted: sorting a copy's blocks and finding
# neighbours takes longer than moving the first unit.
_UNSORTED_UNITS = 2
_STRAIGHT_CALLS = 24  # largest number of rectangles with which a copy begins
_NARROW_SHARE = 16  # 1/n of a block may be in narrow rows, which the copy engine moves slowly
_MIN_STAGING = 1 << 20


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Sizes of a lane.

    Attributes:
        staging_bytes: bytes of the lane's staging memory on the device; fewer if there are few
            blocks.
        turn_bytes: bytes after which the lane continues a copy on its second copy stream, and then
            again on the first one. Streams of other work can use the GPU's copy engine at each
            change. Without changes, 8 bytes on another stream waited 34 ms for an offload of 2 GiB;
            with them 0.7 ms (H200).
        num_ctas: number of thread blocks of a gather or scatter kernel; 32 move 128 MiB in 136 us,
            132 in 120 us (H100).
        units: sizes of the units into which a copy is divided.
    """

    staging_bytes: int = 512 << 20
    turn_bytes: int = 64 << 20
    num_ctas: int = 64
    units: UnitSizes = field(default_factory=UnitSizes)


class Pipeline:
    """The streams, staging memory and kernels that copy blocks in one direction.

    Blocks move between the device's `planes` and the `host` slots. Only one thread at a time may
    use a pipeline, and the GPU must be that thread's current one.
    """

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
        self._direction = direction
        self._block_bytes = planes.layout.block_bytes
        self._host = host
        # The addresses of all slots, since computing those of one copy takes 10 to 30 us a step.
        self._slots = np.arange(host.num_slots, dtype=np.uint64)
        self._slots *= np.uint64(host.stride)
        self._slots += np.uint64(host.address)
        row = row_of(self._block_bytes)
        largest = 2 * row * min(planes.num_blocks, host.num_slots)
        capacity = max(min(settings.staging_bytes, largest), 2 * row, _MIN_STAGING)
        sizes = replace(settings.units, max_unit=min(settings.units.max_unit, capacity // 4))
        if direction is Direction.OFFLOAD:
            # No kernel follows the last piece, so the last units need not be small.
            piece = max(sizes.piece, sizes.offload_piece)
            sizes = replace(sizes, piece=piece, last=sizes.max_unit, last_share=1, share=4)
        self._planner = UnitPlanner(planes.layout, order, sizes)
        self._copies, self._copies_next = (new_stream(gpu, is_urgent=False) for _ in range(2))
        self._turn_bytes = settings.turn_bytes
        self._since_turn = 0
        self._under_way: deque[CudaEvent] = deque(maxlen=4)  # ends of the last batches
        self._kernel_stream = new_stream(gpu, is_urgent=True)
        kernels = PlaneKernels(gpu, planes, num_ctas=settings.num_ctas)
        self._launch = kernels.scatter if direction is Direction.LOAD else kernels.gather
        self._ring: Ring[CudaEvent] = Ring(capacity)
        self._staging = DeviceMemory(gpu, capacity)
        # The addresses of a unit's pieces on host and device, and their bytes.
        self._host_column, self._staging_column, self._sizes = (Column(MAX_BLOCKS) for _ in "hst")
        self._rectangles = planes.rectangles
        narrow = [one for one in planes.rectangles if one.row_bytes < sizes.straight_row]
        narrow_bytes = sum(one.rows * one.row_bytes for one in narrow)
        self._has_wide_rows = narrow_bytes <= self._block_bytes // _NARROW_SHARE
        self._last_end: CudaEvent | None = None  # end of the last unit
        self._row_bytes = 0
        self._rows: Addresses = np.empty(0, np.uint64)  # starts of rows of `_row_bytes` bytes

    def submit(self, copy: BlockCopy, timeout_s: float) -> Iterator[tuple[Unit, CudaEvent | None]]:
        """Submit a copy unit by unit; yield each unit with the event that is done at its end.

        In a load, the first two units that pass through staging memory are yielded twice. The first
        time, without an event, only the copy from the host has been submitted; the second time also
        the kernel that writes the planes. A caller can thus leave the kernel to another thread.

        The first step blocks until the GPU can wait itself for each event of `copy.after`: for the
        event of a copy, until this copy is submitted; for an event of another kind of device, until
        the event is done.

        Args:
            copy: the copy.
            timeout_s: largest time for which the first step blocks for an event, in seconds.
        """
        for event in copy.after:
            self._kernel_stream.wait(event, timeout_s)
        units = self._planner.plan(len(copy))
        first = next(units)
        if self._may_begin_straight(first):
            self._last_end = self._move_straight(copy, first.stop)
            self._under_way.append(self._last_end)
            self._since_turn += first.staging_bytes
            yield first, self._last_end
        else:
            units = chain((first,), units)
        yield from self._staged(copy, units)

    def _staged(
        self, copy: BlockCopy, units: Iterator[Unit]
    ) -> Iterator[tuple[Unit, CudaEvent | None]]:
        block_ids, slots = copy.block_ids, self._slots[copy.slot_ids]
        for number, unit in enumerate(units):
            if number == _UNSORTED_UNITS:
                rest = slice(unit.start, None)
                by_slot = np.argsort(slots[rest])
                slots[rest] = slots[rest][by_slot]
                block_ids = np.concatenate((block_ids[: unit.start], block_ids[rest][by_slot]))
            joins = number >= _UNSORTED_UNITS and unit.num_bytes == self._host.stride
            offset, free = self._ring.reserve(unit.staging_bytes)
            staging = self._staging.address + offset
            blocks = block_ids[unit.start : unit.stop]
            pieces = self._write_pieces(unit, slots[unit.start : unit.stop], staging, joins=joins)
            if self._direction is Direction.LOAD:
                if free is not None:
                    self._copies.wait_bound(free)
                copied = self._copy(*pieces)
                if number < _UNSORTED_UNITS:
                    yield unit, None
                self._kernel_stream.wait_bound(copied)
                self._launch(unit, blocks, staging, self._kernel_stream)
                end = self._kernel_stream.record_bound()
            else:
                if free is not None:
                    self._kernel_stream.wait_bound(free)
                self._launch(unit, blocks, staging, self._kernel_stream)
                self._copies.wait_bound(self._kernel_stream.record_bound())
                end = self._copy(*pieces)
            self._ring.use_until(end)
            self._last_end = end
            yield unit, end

    def submit_straight(self, copy: BlockCopy) -> CudaEvent | None:
        """Submit a copy of a few blocks to the GPU's copy engine, without a kernel.

        The copy engine copies planes that have equal distances in memory (a rectangle) with one
        command. The call avoids a kernel and two waits between streams, but for many blocks kernels
        are faster.

        Returns:
            The event of the copy's end. None if nothing was submitted, because the planes do not
                form rectangles, or because an earlier copy has not ended and this copy could
                overtake it.
        """
        return self._move_straight(copy, len(copy)) if self._may_go_straight() else None

    def _may_go_straight(self) -> bool:
        return bool(self._rectangles) and (self._last_end is None or self._last_end.is_done)

    def _may_begin_straight(self, unit: Unit) -> bool:
        """Return True if the copy engine should copy the first unit's blocks, without a kernel."""
        return (
            unit.num_bytes == self._block_bytes
            and unit.num_blocks * len(self._rectangles) <= _STRAIGHT_CALLS
            and self._has_wide_rows
            and self._may_go_straight()
        )

    def _move_straight(self, copy: BlockCopy, count: int) -> CudaEvent:
        """Submit copies of the first `count` blocks directly between planes and host slots.

        The GPU's copy engine copies rectangles of bytes without staging memory.
        """
        for event in copy.after:
            self._copies.wait(event, 0.0)
        slots, blocks = copy.slot_ids[:count].tolist(), copy.block_ids[:count].tolist()
        is_load = self._direction is Direction.LOAD
        for slot, block in zip(slots, blocks, strict=True):
            slot_address = self._host.address + slot * self._host.stride
            for one in self._rectangles:
                host = (slot_address + one.block_byte, one.slot_pitch)
                device = (one.memory.of_block(block), one.pitch)
                copy_rectangle(
                    target=device if is_load else host,
                    source=host if is_load else device,
                    row_bytes=one.row_bytes,
                    rows=one.rows,
                    stream=self._copies,
                )
        return self._copies.record_bound()

    def drain(self) -> None:
        """Block until all submitted work has ended, then mark the staging memory as free."""
        with self._gpu.bound_to_close():
            for stream in (self._copies, self._copies_next):
                stream.raw.synchronize()
            self._kernel_stream.raw.synchronize()
        self._ring.reset()
        self._under_way.clear()

    def _write_pieces(
        self, unit: Unit, slots: Addresses, staging: int, *, joins: bool
    ) -> tuple[int, int]:
        """Write the addresses and sizes of a unit's pieces into the driver's arrays.

        `slots` are addresses of host slots, and with `joins` adjacent slots become one piece.
        Return the number of pieces and the bytes of the largest piece.
        """
        count, host, staged = len(slots), self._host_column.values, self._staging_column.values
        if unit.row_bytes != self._row_bytes:
            self._row_bytes = unit.row_bytes
            self._rows = np.arange(MAX_BLOCKS, dtype=np.uint64) * np.uint64(unit.row_bytes)
        np.add(slots, np.uint64(unit.first_byte), out=host[:count])
        np.add(self._rows[:count], np.uint64(staging), out=staged[:count])
        self._sizes.values[:count] = unit.num_bytes
        if not joins or count == 1 or unit.num_bytes != unit.row_bytes:
            return count, unit.num_bytes
        firsts, sizes = joined(
            slots,
            self._block_bytes,
            start=self._host.address,
            chunk_bytes=self._host.chunk_bytes,
            max_bytes=self._turn_bytes,
        )
        count = len(firsts)
        host[:count], staged[:count] = host[firsts], staged[firsts]
        self._sizes.values[:count] = sizes
        return count, int(sizes.max())

    def _copy(self, count: int, largest: int) -> CudaEvent:
        """Submit the first `count` pieces of `_write_pieces`, each of at most `largest` bytes."""
        targets, sources = self._host_column, self._staging_column
        if self._direction is Direction.LOAD:
            targets, sources = sources, targets
        most = max(self._turn_bytes // largest, 1)
        start = 0
        while start < count:
            part = range(start, min(start + min(self._batch_pieces(), most), count))
            load_driver().copy_batch(
                targets, sources, self._sizes, part, stream=self._copies.address
            )
            self._under_way.append(self._copies.record_bound())
            self._since_turn += largest * len(part)
            if self._since_turn >= self._turn_bytes:
                self._switch_stream()
            start = part.stop
        return self._under_way[-1]

    def _batch_pieces(self) -> int:
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()
        return min(_FIRST_BATCH_PIECES << len(self._under_way), _BATCH_PIECES)

    def _switch_stream(self) -> None:
        self._copies_next.wait_bound(self._under_way[-1])
        self._copies, self._copies_next = self._copies_next, self._copies
        self._since_turn = 0


_FEW_BLOCKS, _FEW_BYTES = 4, 64 << 20
# The caller's thread submits at most two units, or one of _BEGIN_BYTES (of a load also at most
# _BEGIN_PIECES pieces), before the lane's thread continues, 0.5 ms later. PCIe 5 moves 24 MiB in
# 0.4 ms.
_BEGIN_UNITS, _BEGIN_BYTES, _BEGIN_PIECES = 2, 24 << 20, 64
_MAX_AT_ONCE = 16  # with more, a full stream might block the caller
_AFTER_TIMEOUT_S = 600.0  # the submitting thread's wait for an event that is not CUDA's

Units = Iterator[tuple[Unit, CudaEvent | None]]  # see Pipeline.submit


@dataclass(slots=True, eq=False)
class _Job:
    """A copy that the lane's thread submits, unit by unit.

    Attributes:
        copy: the copy.
        events: one event for each layer, done when the layer of all blocks is copied.
        units: units that are still to be submitted; None if no unit was submitted yet.
        reached: number of layers whose copies are all submitted to CUDA.
    """

    copy: BlockCopy
    events: tuple[PendingEvent, ...]
    units: Units | None = None
    reached: int = 0


class CudaLane:
    """A lane of a GPU: copies blocks between device and host in one direction.

    A thread of the lane submits the copies to the GPU. If no copy is queued, the thread that calls
    `submit` submits the first units of the copy itself, because the lane's thread would begin 250
    to 370 us later (H100). If only some units of a copy can be submitted, the events of the copy
    fail after these units have ended.

    Args:
        gpu: the GPU.
        direction: direction of the copies.
        planes: the device blocks.
        host: the host slots.
        settings: sizes of the lane.
        order: order of a copy's parts: layer by layer, or block by block.
        before_copy: called on the lane's thread before every copy; tests delay copies with it, or
            let them fail. If it is set, only the lane's thread submits copies. None for no call.
        on_close: called when the lane is closed.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a lane is made of
        self,
        gpu: Gpu,
        direction: Direction,
        planes: CudaPlanes,
        host: PinnedSlots,
        settings: LaneSettings,
        order: Order,
        before_copy: Callable[[BlockCopy], None] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._gpu = gpu
        self._direction = direction
        self._planes = planes
        self._host = host
        self._before_copy = before_copy
        self._pipeline: Pipeline | None = Pipeline(gpu, direction, planes, host, settings, order)
        self._line = object()
        self._num_events = 0
        self._progress = threading.Condition(threading.RLock())
        self._num_queued = 0
        self._at_once: deque[CudaEvent] = deque()  # ends of copies that callers' threads submitted
        self._is_closed = False
        self._on_close = on_close
        self._thread = Threads(1, f"tierkv-{direction.value}")

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        check_copy(copy, self._direction, self._planes.num_blocks, self._host.num_slots)
        num_layers = self._planes.layout.num_layers
        if not len(copy):
            return (done_event(),) * num_layers
        with self._progress:  # so that positions are in the order of submission
            if self._is_closed:
                raise DeviceFailedError("this lane is closed")
            may_begin = self._may_begin(copy)
            if may_begin and self._is_small(copy):
                return self._run_at_once(copy)
            begun = self._begun(copy) if may_begin else None
            job = _Job(copy, self._pending_events(num_layers))
            if begun is not None:
                job.units, first_units = begun
                for unit, end in first_units:
                    self._complete_layers(job, unit, end)
            self._num_queued += 1
            self._thread.submit(self._run, job)
            return job.events

    def _may_begin(self, copy: BlockCopy) -> bool:
        """Return whether the calling thread can begin the copy without the lane's thread."""
        if self._num_queued or self._before_copy is not None or not self._host.is_pinned:
            return False
        if self._host.is_closed or self._planes.is_closed:
            return False  # the memory is closed, which the lane's thread will report
        if copy.after and not all(isinstance(event, CudaEvent) for event in copy.after):
            return False
        while self._at_once and self._at_once[0].is_done:
            self._at_once.popleft()
        return len(self._at_once) < _MAX_AT_ONCE

    def _is_small(self, copy: BlockCopy) -> bool:
        num_bytes = len(copy) * self._planes.layout.block_bytes
        return len(copy) <= _FEW_BLOCKS and num_bytes <= _FEW_BYTES

    def _pending_events(self, count: int) -> tuple[PendingEvent, ...]:
        first = self._num_events
        self._num_events += count
        positions = range(first, first + count)
        return tuple([PendingEvent(self._progress, self._line, at) for at in positions])

    def _run_at_once(self, copy: BlockCopy) -> tuple[Event, ...]:
        assert self._pipeline is not None, "the lane is open"
        events: list[Event] = []
        try:
            with self._gpu.bound():
                straight = self._pipeline.submit_straight(copy)
                if straight is not None:
                    self._at_once.append(straight)
                    return (straight,) * self._planes.layout.num_layers
                for unit, end in self._units(copy, 0.0):
                    if end is not None and unit.stop == len(copy):
                        events += [end] * len(unit.layers)
                        self._at_once.append(end)
        except TransferError as error:
            self._drain()
            raise _failure(self._direction, len(events), copy, error) from error
        return tuple(events)

    def _begun(self, copy: BlockCopy) -> tuple[Units, list[tuple[Unit, CudaEvent]]]:
        """Submit the first few units of the copy on the caller's thread.

        Return an iterator that submits the remaining units as it yields them, and the units
        submitted so far with their CUDA events.
        """
        units = self._units(copy, 0.0)
        begun: list[tuple[Unit, CudaEvent]] = []
        num_bytes = 0
        try:
            with self._gpu.bound():
                for unit, end in units:
                    if end is None:
                        is_much = unit.staging_bytes >= _BEGIN_BYTES
                        if begun or (is_much and unit.num_blocks >= _BEGIN_PIECES):
                            break
                        continue
                    begun.append((unit, end))
                    self._at_once.append(end)
                    num_bytes += unit.staging_bytes
                    is_much = self._direction is Direction.OFFLOAD and num_bytes >= _BEGIN_BYTES
                    if is_much or len(begun) == _BEGIN_UNITS:
                        break
        except TransferError as error:
            self._drain()
            raise _failure(self._direction, 0, copy, error) from error
        return units, begun

    def close(self) -> None:
        with self._progress:
            self._is_closed = True
        self._thread.shutdown(wait=True)
        self._drain()
        if self._pipeline is not None:
            self._pipeline = None
            self._on_close()

    def _run(self, job: _Job) -> None:
        units = job.units
        try:
            if units is None:
                if self._before_copy is not None:
                    self._before_copy(job.copy)
                self._host.wait_until_pinned(job.copy.slot_ids)
                units = self._units(job.copy, _AFTER_TIMEOUT_S)
            with self._gpu.bound():
                for unit, end in units:
                    if end is not None:
                        self._complete_layers(job, unit, end)
        except Exception as error:  # noqa: BLE001 - waiters must get the error
            failure = _failure(self._direction, job.reached, job.copy, error)
            try:
                self._drain()
            finally:
                with self._progress:
                    for event in job.events[job.reached :]:
                        event.failed(failure)
                    self._progress.notify_all()
        finally:
            with self._progress:
                self._num_queued -= 1

    def _complete_layers(self, job: _Job, unit: Unit, end: CudaEvent) -> None:
        """Wake the waiters of layers whose copy is wholly submitted with this unit.

        These waiters get `end`, the CUDA event that marks the unit's end.
        """
        if unit.stop < len(job.copy):
            return
        with self._progress:
            for event in job.events[unit.layers.start : unit.layers.stop]:
                event.submitted(end)
            job.reached = unit.layers.stop
            self._progress.notify_all()

    def _units(self, copy: BlockCopy, timeout_s: float) -> Units:
        assert self._pipeline is not None, "the thread ends before the pipeline goes"
        if self._planes.is_closed:
            raise LayoutError("these planes are closed")
        yield from self._pipeline.submit(copy, timeout_s)

    def _drain(self) -> None:
        if self._pipeline is not None:
            self._pipeline.drain()


def _failure(direction: Direction, layer: int, copy: BlockCopy, error: Exception) -> TransferError:
    kind = DeviceFailedError if isinstance(error, DeviceFailedError) else TransferError
    failed = kind(
        f"{direction.value} failed at layer {layer}: {error}", blocks=tuple(copy.block_ids.tolist())
    )
    failed.__cause__ = error
    return failed
