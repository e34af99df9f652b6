"""The CPU as a device: NumPy planes, and threads that copy.

The device behaves like a GPU: a submitted copy finishes later, copies of a lane run in order,
events are polled, and an error fails only the events after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import (
    ConfigError,
    DeviceFailedError,
    GateTimeoutError,
    LayoutError,
    TransferError,
)
from tierkv.gpu import process_memory
from tierkv.gpu.process_memory import CpuSharing
from tierkv.gpu.protocol import (
    FEW_IDS,
    BlockCopy,
    Direction,
    Event,
    HostSlots,
    Ids,
    Lane,
    Planes,
    Sharing,
    Stream,
)
from tierkv.gpu.room import HOST_SETTING, HOST_TIER, require_room, track
from tierkv.threads import start_thread

_PAGE = 4096
_DEVICE_SETTING = "cache.device_blocks"
# Average bytes of a run from which each run is copied by a slice of its own.
_MIN_RUN_BYTES = 64 << 10
# A copy up to this size is one call without the GIL, and its layers arrive together. A longer copy
# is made layer by layer.
_ONE_CALL_BYTES = 8 << 20
# 30 us at 8 GB/s, about the time that a thread would cost the event loop.
_QUICK_COPY_BYTES = 256 << 10
_AFTER_TIMEOUT_S = 600.0  # largest wait for the events before a copy


_Run = tuple[int, int, int]  # first slot, first block, number of blocks


class CpuEvent:
    """The event of a copy; the copying thread marks it as done, or as failed with an error."""

    def __init__(self) -> None:
        self._is_reached = False
        self._waiting: list[threading.Event] = []
        self._error: TransferError | None = None

    @property
    def line(self) -> object:
        return self

    @property
    def position(self) -> int:
        return 0

    @property
    def is_done(self) -> bool:
        if not self._is_reached:
            return False
        if self._error is not None:
            # Without with_traceback, each raise would add a traceback to the error.
            raise self._error.with_traceback(None)
        return True

    def block_until_done(self, timeout_s: float) -> None:
        if not self._is_reached:
            here = threading.Event()
            # Appended before the second check, so that no `reach` in between is missed.
            self._waiting.append(here)
            if not self._is_reached and not here.wait(timeout_s):
                raise GateTimeoutError(f"the copy did not finish within {timeout_s:g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def reach(self, error: TransferError | None = None) -> None:
        """Mark the event as done, or as failed with `error`. The copying thread calls this once."""
        self._error = error
        self._is_reached = True
        while self._waiting:
            self._waiting.pop().set()


def done_event() -> CpuEvent:
    """Return an event that is done already."""
    event = CpuEvent()
    event.reach()
    return event


class CallerStream:
    """The compute stream of the CPU.

    Its work runs on the calling thread, so that it is done at once.
    """

    def record(self) -> CpuEvent:
        return done_event()

    def wait(self, event: Event, timeout_s: float) -> None:
        event.block_until_done(timeout_s)


def _aligned(num_rows: int, row_bytes: int, setting: str) -> npt.NDArray[np.uint8]:
    """Return page-aligned zeros, uint8 [num_rows, row_bytes].

    The kernel allocates each page when the page is first used.
    """
    try:
        raw = np.zeros(num_rows * row_bytes + _PAGE, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than fit into an index
        raise ConfigError(
            f"{num_rows} blocks of {row_bytes} bytes do not fit into memory: lower {setting}"
        ) from error
    track(raw, raw.ctypes.data, raw.nbytes)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)


class CpuPlanes:
    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        require_room(num_blocks * layout.block_bytes, "the device's blocks", _DEVICE_SETTING)
        self._arrays: list[npt.NDArray[np.uint8]] | None = [
            _aligned(num_blocks, plane.block_bytes, _DEVICE_SETTING) for plane in layout.planes
        ]

    @property
    def arrays(self) -> Sequence[npt.NDArray[np.uint8]]:
        if self._arrays is None:
            raise LayoutError("these planes are closed")
        return self._arrays

    def close(self) -> None:
        if self._arrays is None:
            raise LayoutError("these planes are closed already")
        self._arrays = None


class CpuHostSlots:
    def __init__(self, layout: Layout, num_slots: int) -> None:
        require_room(num_slots * layout.block_bytes, HOST_TIER, HOST_SETTING)
        self._array: npt.NDArray[np.uint8] | None = _aligned(
            num_slots, layout.block_bytes, HOST_SETTING
        )
        self.num_slots = num_slots

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        if self._array is None:
            raise LayoutError("these host slots are closed")
        return self._array

    def close(self) -> None:
        if self._array is None:
            raise LayoutError("these host slots are closed already")
        self._array = None


class CpuLane:
    """A lane with one thread that copies.

    `submit` never releases Python's global lock (GIL): getting it back from another busy thread
    would cost the engine's thread 5 ms.

    Args:
        direction: direction of the copies.
        planes: the device blocks.
        host: the host slots.
        before_copy: called on the lane's thread before every copy; tests delay copies with it, or
            let them fail. None for no call.
    """

    def __init__(
        self,
        direction: Direction,
        planes: Planes,
        host: HostSlots,
        before_copy: Callable[[BlockCopy], None] | None,
    ) -> None:
        self._direction = direction
        self._planes = planes
        self._host = host
        self._before_copy = before_copy
        self._copies: SimpleQueue[tuple[BlockCopy, tuple[CpuEvent, ...]] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = start_thread(self._work, f"tierkv-{direction.value}")
        self._may_call = process_memory.is_possible()
        # The planes' arrays, and their addresses and strides.
        self._placed: Sequence[npt.NDArray[np.uint8]] = ()
        self._addresses = self._strides = np.zeros((0, 1), np.uint64)
        layout = planes.layout
        self._offsets, self._sizes = (
            np.array(of_planes, np.uint64)[:, None]
            for of_planes in (layout.offsets, [one.block_bytes for one in layout.planes])
        )
        self._shapes = [(planes.num_blocks, one.block_bytes) for one in layout.planes]

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        check_copy(copy, self._direction, self._planes.num_blocks, self._host.num_slots)
        if self._is_closed:
            raise DeviceFailedError("this lane is closed")
        num_layers = self._planes.layout.num_layers
        if self._is_one_call(copy):
            events = (CpuEvent(),) * num_layers
        else:
            events = tuple([CpuEvent() for _ in range(num_layers)])
        if len(copy):
            self._copies.put((copy, events))
        else:
            for event in dict.fromkeys(events):
                event.reach()
        return events

    def _is_one_call(self, copy: BlockCopy) -> bool:
        """Return whether to copy all layers in one call, so that they arrive at the same time."""
        if not self._may_call or len(copy) * self._planes.layout.block_bytes > _ONE_CALL_BYTES:
            return False
        try:
            arrays, host = self._planes.arrays, self._host.array
        except LayoutError:  # closed
            return False
        # Memory of a wrong shape is copied layer by layer: the error then names the layer.
        is_whole = host.shape[1] == self._planes.layout.block_bytes
        return is_whole and [one.shape for one in arrays] == self._shapes

    def _work(self) -> None:
        while (found := self._copies.get()) is not None:
            self._run(*found)

    def _run(self, copy: BlockCopy, events: tuple[CpuEvent, ...]) -> None:
        at = 0
        try:
            deadline = time.monotonic() + _AFTER_TIMEOUT_S
            for event in copy.after:
                event.block_until_done(max(deadline - time.monotonic(), 0.0))
            if self._before_copy is not None:
                self._before_copy(copy)
            if self._is_one_call(copy) and self._copies_at_once(copy):
                for event in dict.fromkeys(events):
                    event.reach()
                return
            runs = runs_of(copy)
            for at, event in enumerate(events):
                self._copy_layer(copy, runs, at)
                if event is not events[-1]:
                    event.reach()
            events[-1].reach()
        except Exception as error:  # noqa: BLE001 - waiters must get the error
            failed = TransferError(
                f"{self._direction.value} failed at layer {at}: {error}",
                blocks=tuple(copy.block_ids.tolist()),
            )
            failed.__cause__ = error
            for event in dict.fromkeys(events[at:]):
                event.reach(failed)

    def _copies_at_once(self, copy: BlockCopy) -> bool:
        arrays, host = self._planes.arrays, self._host.array
        if len(self._placed) != len(arrays) or any(map(is_not, self._placed, arrays)):
            self._placed = tuple(arrays)
            places = [(one.ctypes.data, one.strides[0]) for one in arrays]
            self._addresses, self._strides = np.array(places, np.uint64).T[:, :, None]
        slots, blocks = copy.slot_ids.astype(np.uint64), copy.block_ids.astype(np.uint64)
        there = slots * np.uint64(host.strides[0]) + np.uint64(host.ctypes.data) + self._offsets
        here = self._addresses + self._strides * blocks
        targets, sources = (here, there) if self._direction is Direction.LOAD else (there, here)
        sizes = np.broadcast_to(self._sizes, here.shape)
        try:
            process_memory.copy_here(targets.ravel(), sources.ravel(), sizes.ravel())
        except process_memory.NotPermittedError:
            self._may_call = False
        return self._may_call

    def _copy_layer(self, copy: BlockCopy, runs: Sequence[_Run], layer: int) -> None:
        layout, host = self._planes.layout, self._host.array
        for index in layout.planes_of_layer[layer]:
            start = layout.offsets[index]
            stop = start + layout.planes[index].block_bytes
            slots, plane = host[:, start:stop], self._planes.arrays[index]
            if len(runs) * _MIN_RUN_BYTES <= len(copy) * (stop - start):
                # 13 GB/s. Indexing with ids copies twice, through new memory: 7.5 GB/s.
                for slot, block, count in runs:
                    if self._direction is Direction.LOAD:
                        plane[block : block + count] = slots[slot : slot + count]
                    else:
                        slots[slot : slot + count] = plane[block : block + count]
            elif self._direction is Direction.LOAD:
                plane[copy.block_ids] = slots[copy.slot_ids]
            else:
                slots[copy.slot_ids] = plane[copy.block_ids]

    def close(self) -> None:
        """Wait until all submitted copies have ended, then end the thread.

        Further calls do nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._copies.put(None)
        self._thread.join()
        self._placed = ()


def runs_of(copy: BlockCopy) -> Sequence[_Run]:
    """Divide a copy into runs in which both the slots and the blocks are consecutive.

    Returns:
        For each run, ordered by slot: the first slot, the first block, and the number of blocks.
    """
    order = np.argsort(copy.slot_ids)
    slots, blocks = copy.slot_ids[order], copy.block_ids[order]
    ends = np.flatnonzero((np.diff(slots) != 1) | (np.diff(blocks) != 1)) + 1
    starts = [0, *ends.tolist()]
    counts = np.diff([*starts, len(copy)]).tolist()
    return [
        (int(slots[at]), int(blocks[at]), count) for at, count in zip(starts, counts, strict=True)
    ]


def check_copy(copy: BlockCopy, direction: Direction, num_blocks: int, num_slots: int) -> None:
    """Check that a lane can carry out a copy.

    Args:
        copy: the copy.
        direction: direction of the lane: LOAD or OFFLOAD.
        num_blocks: number of blocks on the lane's device.
        num_slots: number of the lane's host slots.

    Raises:
        LayoutError: the copy has the other direction, or the id of a block or slot is out of range.
    """
    if copy.direction is not direction:
        raise LayoutError(
            f"a copy of direction {copy.direction.value} was submitted to the "
            f"{direction.value} lane"
        )
    for ids, size, what in (
        (copy.block_ids, num_blocks, "block"),
        (copy.slot_ids, num_slots, "slot"),
    ):
        _check_inside(ids, size, what)


def check_copy_within(source_ids: Ids, target_ids: Ids, num_blocks: int) -> None:
    """Check the ids of a copy of blocks within the device.

    Args:
        source_ids: int32 [n], blocks to read.
        target_ids: int32 [n], blocks to write.
        num_blocks: number of blocks of the device.

    Raises:
        LayoutError: the numbers of ids differ, a target appears twice or is also a source, or an id
            is out of range.
    """
    if source_ids.shape != target_ids.shape:
        raise LayoutError("a copy needs the same number of sources and targets")
    sources, targets = source_ids.tolist(), target_ids.tolist()
    if not set(sources).isdisjoint(targets):
        raise LayoutError("a block cannot be both source and target of one copy")
    if len(set(targets)) != len(targets):
        raise LayoutError("a destination appears twice in one copy")
    _check_inside(source_ids, num_blocks, "block")
    _check_inside(target_ids, num_blocks, "block")


def _check_inside(ids: Ids, size: int, what: str) -> None:
    if len(ids) <= FEW_IDS:  # NumPy would release the GIL, and take longer
        few = ids.tolist()
        is_outside = bool(few) and (min(few) < 0 or max(few) >= size)
    else:
        is_outside = int(ids.min()) < 0 or int(ids.max()) >= size
    if is_outside:
        raise LayoutError(f"a {what} id is outside 0..{size - 1}")


class CpuDevice:
    """The CPU as a device; the protocol `Device` describes the methods.

    Args:
        before_copy: called before every copy of a lane; tests delay copies with it, or let them
            fail. None for no call.
    """

    def __init__(self, before_copy: Callable[[BlockCopy], None] | None = None) -> None:
        self.name = "cpu"
        self.array_module = np
        self.failure: str | None = None
        self.status = "cpu"
        self.quick_copy_bytes = _QUICK_COPY_BYTES
        self.compute_stream: Stream = CallerStream()
        self.sharing: Sharing | None = CpuSharing() if process_memory.is_possible() else None
        self._before_copy = before_copy

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        return CpuPlanes(layout, num_blocks)

    def allocate_host(self, layout: Layout, num_slots: int) -> HostSlots:
        return CpuHostSlots(layout, num_slots)

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        return CpuLane(direction, planes, host, self._before_copy)

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        check_copy_within(source_ids, target_ids, planes.num_blocks)
        event = CpuEvent()
        try:
            for plane in planes.arrays:
                plane[target_ids] = plane[source_ids]
        except Exception as error:  # noqa: BLE001 - the waiter must get the error
            blocks = tuple(target_ids.tolist())
            event.reach(TransferError(f"copy within the device failed: {error}", blocks=blocks))
        else:
            event.reach()
        return event

    def close(self) -> None:
        """Do nothing: the device itself has no memory and no thread."""
