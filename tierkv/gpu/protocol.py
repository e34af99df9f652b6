"""The protocol of devices: planes, host slots, streams, events, and lanes for copies.

A plane is the device memory for one role (key, value, ...) of one layer. A lane is a queue of
copies in one direction between planes and host slots. Some devices can also share planes with other
processes on the machine.

`Lane.submit` and `Stream.record` return before the work is done, and return events. Bytes have
arrived only when `is_done` of the event is True. The CPU device behaves in the same way: copies
finish later, and in order within a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import LayoutError

Ids = npt.NDArray[np.int32]


class Event(Protocol):
    """A point in the work of a stream.

    Events with the same `line` are done in the order of their `position`, so it is enough to poll
    the first of them. `line` identifies a stream. An event without an order relative to other
    events has a `line` of its own.
    """

    @property
    def line(self) -> object: ...

    @property
    def position(self) -> int: ...

    @property
    def is_done(self) -> bool:
        """True if all work that was submitted before this point has finished. Never blocks.

        Raises:
            TransferError: work before this point has failed; DeviceFailedError if the process can
                no longer use the device.
        """

    def block_until_done(self, timeout_s: float) -> None:
        """Block the calling thread until the event is done.

        Never call it on an event loop's thread.

        Raises:
            GateTimeoutError: the event was not done after `timeout_s` seconds.
            TransferError: work before this point has failed.
        """


class FailedEvent:
    """The event of work that could not be submitted; `is_done` and `block_until_done` raise."""

    position = 0

    def __init__(self, error: BaseException) -> None:
        self._error = error

    @property
    def line(self) -> object:
        return self

    @property
    def is_done(self) -> bool:
        raise self._error

    def block_until_done(self, timeout_s: float) -> None:  # noqa: ARG002 - the protocol's
        raise self._error


class Stream(Protocol):
    """A queue of GPU work of an engine or of a lane; the work runs in the order of submission."""

    def record(self) -> Event:
        """Return an event that is done when all work submitted to this stream so far is done."""

    def wait(self, event: Event, timeout_s: float) -> None:
        """Let work that is submitted to this stream after the call start only when `event` is done.

        On CUDA the GPU waits for the event; the call blocks only until the event's copy is
        submitted to the GPU. On the CPU, where the engine computes on the calling thread, the call
        blocks until the event is done.

        Args:
            event: the event to wait for.
            timeout_s: largest time for which the call blocks, in seconds.

        Raises:
            GateTimeoutError: the call could not return within `timeout_s` seconds.
            TransferError: the work of `event` has failed.
        """


class HostSlots(Protocol):
    """Host memory, divided into slots of one block each; pinned if the device is a GPU."""

    @property
    def num_slots(self) -> int: ...

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory, uint8 [num_slots, block_bytes], C order.

        Raises:
            LayoutError: the slots are closed.
        """

    def close(self) -> None:
        """Free the memory.

        Raises:
            LayoutError: the slots are closed already.
        """


class Planes(Protocol):
    """Device memory for blocks: an array for each plane of the layout.

    The arrays are NumPy's on the CPU and CuPy's on CUDA. An engine's kernels read and write them.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def arrays(self) -> Sequence[npt.NDArray[np.uint8]]:
        """The memory of each plane, uint8 [num_blocks, the plane's block_bytes].

        Raises:
            LayoutError: the planes are closed.
        """

    def close(self) -> None:
        """Free the memory.

        Raises:
            LayoutError: the planes are closed already.
        """


FEW_IDS = 256  # up to this number of ids, a loop in Python is faster than NumPy


class Direction(Enum):
    LOAD = "load"  # host slots to device blocks
    OFFLOAD = "offload"  # device blocks to host slots


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy between host slots and device blocks: slot_ids[i] and block_ids[i] belong together.

    Args:
        direction: LOAD copies slots to blocks, OFFLOAD blocks to slots.
        slot_ids: int32 [n], host slots.
        block_ids: int32 [n], device blocks.
        after: events that must be done before a device block is read or written. For an offload:
            those of the kernels that wrote the blocks. For a load: those of the kernels that read
            the blocks to be overwritten. The host slots of a load may be read before
            these events are done.

    Raises:
        LayoutError: the numbers of slots and blocks differ, or a destination appears twice.
    """

    direction: Direction
    slot_ids: Ids
    block_ids: Ids
    after: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if self.slot_ids.shape != self.block_ids.shape or self.slot_ids.ndim != 1:
            raise LayoutError("a copy needs the same number of slots and blocks")
        if _has_twice(self.target_ids):
            raise LayoutError("a destination appears twice in one copy")

    @property
    def target_ids(self) -> Ids:
        """Ids of the destinations: device blocks of a load, host slots of an offload."""
        return self.block_ids if self.direction is Direction.LOAD else self.slot_ids

    def __len__(self) -> int:
        return len(self.block_ids)


def _has_twice(ids: Ids) -> bool:
    if len(ids) <= FEW_IDS:
        return len(set(ids.tolist())) < len(ids)
    in_order = np.sort(ids)  # takes a third of the time of np.unique
    return bool((in_order[1:] == in_order[:-1]).any())


class Lane(Protocol):
    """A queue of copies in one direction of one device, done in the order of their submission."""

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        """Submit `copy`; return one event for each layer of the layout.

        The events are done in the order of the layers, the last one at the end of the copy. The
        events of a copy without blocks are done at once. Thread-safe; takes microseconds, since a
        thread of the lane does longer work.

        Raises:
            LayoutError: an id is out of range; nothing was submitted.
            DeviceFailedError: the lane is closed, or the process can no longer use the device.
        """

    def close(self) -> None:
        """Wait until all submitted copies have ended, then free streams and staging memory."""


class Device(Protocol):
    """One GPU, or the CPU, and its memory. Close it after all objects that it has made."""

    @property
    def name(self) -> str: ...

    @property
    def array_module(self) -> ModuleType:
        """The module of the planes' arrays: NumPy or CuPy."""

    @property
    def failure(self) -> str | None:
        """The reason why this process can no longer use the device; None while the device works."""

    @property
    def status(self) -> str:
        """The device's name or failure, for logs and status pages, as one line of text.

        A device that is still pinning the host slots, or cannot pin all of them, reports this in
        the line.
        """

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread uses `array_module` on this device.

        The work runs on `compute_stream`. Errors of the device become TransferError, or
        DeviceFailedError if the process can no longer use the device.
        """

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        """Allocate device memory for blocks.

        Args:
            layout: layout of a block.
            num_blocks: number of blocks.

        Raises:
            ConfigError: the device has too little memory.
        """

    def allocate_host(self, layout: Layout, num_slots: int) -> HostSlots:
        """Allocate host slots.

        Args:
            layout: layout of a block.
            num_slots: number of slots, each for one block.

        Raises:
            ConfigError: the machine has too little memory.
        """

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        """Open a lane for copies in one direction; the caller must close it.

        Args:
            direction: LOAD copies slots to blocks, OFFLOAD blocks to slots.
            planes: planes that this device has made.
            host: host slots for blocks of the same layout.

        Raises:
            LayoutError: the planes are closed, or belong to another device.
            ConfigError: the host slots cannot be pinned.
        """

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        """Copy blocks within the device, after all earlier work of `compute_stream`.

        Thread-safe. On an event loop's thread, copy at most `quick_copy_bytes` bytes.

        Args:
            planes: the planes of the blocks.
            source_ids: int32 [n], blocks to read.
            target_ids: int32 [n], blocks to write: distinct, and none of the source ids.

        Returns:
            The event of the copy's end.

        Raises:
            LayoutError: the ids are wrong, or the planes are closed or belong to another device.
            TransferError: the copy cannot be submitted.
        """

    @property
    def quick_copy_bytes(self) -> int:
        """Largest number of bytes that `copy_blocks` may copy on an event loop's thread."""

    @property
    def compute_stream(self) -> Stream:
        """The stream on which the engine's kernels run."""

    @property
    def sharing(self) -> Sharing | None:
        """The operations by which processes share planes with each other; None if they cannot."""

    def close(self) -> None: ...


# Between processes of one machine


class SharedPlane(msgspec.Struct, frozen=True):
    """The data with which another process opens a plane.

    Attributes:
        handle: identifies the memory: a CUDA IPC handle, or a process id on the CPU.
        offset: bytes from the start of that memory to block 0.
        stride: bytes from one block to the next.
    """

    handle: bytes
    offset: int
    stride: int


class SharedPlanes(msgspec.Struct, frozen=True, kw_only=True):
    """The data with which another process of this machine opens a set of planes.

    Attributes:
        owner: name of the process that has the planes.
        name: name of this set of planes; the owner uses a new name when it replaces the planes.
        place: UUID of the GPU, or "cpu".
        num_blocks: number of blocks.
        planes: the planes, in the layout's order.
    """

    owner: str
    name: str
    place: str
    num_blocks: int
    planes: tuple[SharedPlane, ...]


class PeerPlanes(Protocol):
    """Planes of another process that this process has opened.

    Only one thread at a time may use them.
    """

    def copy(self, source_ids: Ids, target_ids: Ids) -> None:
        """Copy blocks of the other process to blocks of this process.

        Block until the copy has ended.

        Args:
            source_ids: int32 [n], blocks of the other process.
            target_ids: int32 [n], blocks of this process, distinct.

        Raises:
            TransferError: a block did not arrive; the content of all targets is then undefined.
        """

    def close(self) -> None:
        """Unmap the planes, which the other process still owns. No copy may be running."""


class Sharing(Protocol):
    """The operations by which processes of one machine share planes.

    The property `place` is the UUID of this device's GPU, or "cpu".
    """

    @property
    def place(self) -> str: ...

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        """Return the data with which another process opens each of these planes.

        Raises:
            ConfigError: no other process can open memory of this kind.
        """

    def open(self, own: Planes, shared: SharedPlanes) -> PeerPlanes:
        """Open another process's planes, so that blocks can be copied from them.

        Args:
            own: planes of this process with the same layout, to which blocks will be copied.
            shared: the data that the other process has sent about its planes.

        Raises:
            ConfigError: this process cannot read memory of the other process's GPU or kind of
                allocation.
            TransferError: the data in `shared` is wrong, or the planes cannot be opened.
        """
