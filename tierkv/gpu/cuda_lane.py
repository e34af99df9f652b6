"""A lane on CUDA: takes copies, brings them to its pipeline, hands out events. See pipeline.py."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tierkv.errors import DeviceFailedError, LayoutError, TransferError
from tierkv.gpu.cpu import check_copy, done_event
from tierkv.gpu.cuda import Gpu
from tierkv.gpu.cuda_planes import CudaPlanes
from tierkv.gpu.cuda_streams import CudaEvent
from tierkv.gpu.pending import PendingEvent
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.pipeline import LaneSettings, Pipeline
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.gpu.units import Order, Unit

_FEW_BLOCKS, _FEW_BYTES = 4, 64 << 20
# What a caller's thread begins with, until the lane's goes on, 0.5 ms later: of offloads two units,
# or one of so many bytes; of loads the pieces of two, or of one of so many bytes and pieces. PCIe 5
# moves 24 MiB in 0.4 ms.
_BEGIN_UNITS, _BEGIN_BYTES, _BEGIN_PIECES = 2, 24 << 20, 64
_MOST_AT_ONCE = 16  # beyond, a full stream might make the caller wait
_AFTER_TIMEOUT_S = 600.0  # for events that are not CUDA's: the submitting thread waits for them

Units = Iterator[tuple[Unit, CudaEvent | None]]  # see Pipeline.submit


@dataclass(slots=True, eq=False)
class _Job:
    """A copy that the lane's thread brings to the streams. units: what is left of it to submit,
    None where nobody has begun. reached: how many layers' events have been recorded."""

    copy: BlockCopy
    events: tuple[PendingEvent, ...]
    units: Units | None = None
    reached: int = 0


class CudaLane:
    """See Lane. A thread of its own does the submitting; the events it returns stand for those
    that this thread records. It holds the interpreter for microseconds at a time.

    Where nothing is queued before, the caller's thread submits the first units of a copy, which for
    a few blocks are all of it: the lane's thread would begin 250 to 370 us later (H100 in a virtual
    machine, 2026-11-21), twice what 8 MiB take.

    A copy whose submission fails half-way fails only when what it had begun has ended.
    before_copy: see CpuLane. With one, nothing is submitted on the caller's thread.
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
        self._at_once: deque[CudaEvent] = deque()  # ends of what callers' threads submitted
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
            may_begin = self._may_begin(copy)
            if may_begin and self._is_small(copy):
                return self._run_at_once(copy)
            begun = self._begun(copy) if may_begin else None
            job = _Job(copy, self._pending_events(num_layers))
            if begun is not None:
                job.units, first_units = begun
                for unit, end in first_units:
                    self._tell(job, unit, end)
            self._num_queued += 1
            self._thread.submit(self._run, job)
            return job.events

    def _may_begin(self, copy: BlockCopy) -> bool:
        """Whether submitting a unit takes microseconds here: nothing to wait for, room in the
        streams."""
        if self._num_queued or self._before_copy is not None or not self._host.is_pinned:
            return False
        if self._host.is_closed or self._planes.is_closed:
            return False  # that memory is somebody else's: the lane's thread says so
        if copy.after and not all(isinstance(event, CudaEvent) for event in copy.after):
            return False
        while self._at_once and self._at_once[0].is_done:
            self._at_once.popleft()
        return len(self._at_once) < _MOST_AT_ONCE

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
            self._let_end()
            raise _failure(self._direction, len(events), copy, error) from error
        return tuple(events)

    def _begun(self, copy: BlockCopy) -> tuple[Units, list[tuple[Unit, CudaEvent]]]:
        """Submit the first unit of the copy, or two where they are small; the lane's thread goes
        on from there, with the kernel behind the last pieces if it is a load."""
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
            self._let_end()
            raise _failure(self._direction, 0, copy, error) from error
        return units, begun

    def close(self) -> None:
        with self._progress:
            self._is_closed = True
        self._thread.shutdown(wait=True)
        self._let_end()
        self._pipeline = None

    def _run(self, job: _Job) -> None:
        """Bring the copy to the streams, unit by unit."""
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
                        self._tell(job, unit, end)
        except Exception as error:  # noqa: BLE001 - whatever it is, waiters must hear of it
            failure = _failure(self._direction, job.reached, job.copy, error)
            try:
                self._let_end()
            finally:
                with self._progress:
                    for event in job.events[job.reached :]:
                        event.failed(failure)
                    self._progress.notify_all()
        finally:
            with self._progress:
                self._num_queued -= 1

    def _tell(self, job: _Job, unit: Unit, end: CudaEvent) -> None:
        """The unit is submitted up to `end`; tell who waits for its layers if it is their last."""
        if unit.stop < len(job.copy):
            return
        with self._progress:
            for event in job.events[unit.layers.start : unit.layers.stop]:
                event.submitted(end)
            job.reached = unit.layers.stop
            self._progress.notify_all()

    def _units(self, copy: BlockCopy, timeout_s: float) -> Units:
        """Submit unit after unit, as they are asked for, once `copy.after` is waited for."""
        assert self._pipeline is not None, "the thread ends before the pipeline goes"
        if self._planes.is_closed:
            raise LayoutError("these planes are closed")
        for event in copy.after:
            self._pipeline.wait(event, timeout_s)
        yield from self._pipeline.submit(copy)

    def _let_end(self) -> None:
        if self._pipeline is not None:
            self._pipeline.let_end()


def _failure(direction: Direction, layer: int, copy: BlockCopy, error: Exception) -> TransferError:
    kind = DeviceFailedError if isinstance(error, DeviceFailedError) else TransferError
    failed = kind(
        f"{direction.value} failed at layer {layer}: {error}", blocks=tuple(copy.block_ids.tolist())
    )
    failed.__cause__ = error
    return failed
