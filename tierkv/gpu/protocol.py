"""The promises of every device: planes, host slots, ordered streams, pollable events, copy lanes.

A device may also show its planes to other processes of the machine.

"Submitted" and "done" are different words here. `submit` and `record` return at once with the work
merely submitted; only an event that reports `is_done` says that bytes have arrived. The CPU device
keeps all of this, including that copies finish later, in order per stream.
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
    """A point in a stream's work.

    line, position: events of one line are done in the order of their positions, so that of many
    only the first of each line need be looked at. One that stands alone is a line of its own.
    """

    @property
    def line(self) -> object: ...

    @property
    def position(self) -> int: ...

    @property
    def is_done(self) -> bool:
        """True if all work submitted before this point has finished. Never blocks.

        Raises:
            TransferError: work before this point has failed; DeviceFailedError if the device is
                lost.
        """

    def block_until_done(self, timeout_s: float) -> None:
        """Block the calling thread, which must not be the event loop's, until the event is done.

        Raises:
            GateTimeoutError: `timeout_s` seconds have passed.
            TransferError: as raised by `is_done`.
        """


class FailedEvent:
    """The event of what did not even begin."""

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
    """Work of the engine or of a lane, done in the order it was submitted."""

    def record(self) -> Event:
        """Return an event that is done when everything submitted to this stream so far is done."""

    def wait(self, event: Event, timeout_s: float) -> None:
        """Start nothing that is submitted after this call before `event` is done.

        On CUDA this returns at once and costs no host round trip. On a device whose compute runs on
        the calling thread (CPU) the caller is the stream, so this blocks for up to `timeout_s`
        seconds.
        """


class HostSlots(Protocol):
    """Pinned host memory as slots of one block each: uint8 [num_slots, block_bytes], C order."""

    @property
    def num_slots(self) -> int: ...

    @property
    def array(self) -> npt.NDArray[np.uint8]: ...

    def close(self) -> None:
        """Free the memory with the allocator that made it. A second close raises."""


class Planes(Protocol):
    """A device's copy of the layout: for each plane, uint8 [num_blocks, block_bytes] on the device.

    Arrays are NumPy's on the CPU and CuPy's on CUDA; an engine's kernels read and write them.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def arrays(self) -> Sequence[npt.NDArray[np.uint8]]: ...

    def close(self) -> None: ...


FEW_IDS = 256  # up to this number a loop in Python is faster than NumPy after a pause


class Direction(Enum):
    LOAD = "load"  # host slots to device blocks
    OFFLOAD = "offload"  # device blocks to host slots


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A validated list of blocks to copy: slot_ids[i] of the host with block_ids[i] of the device.

    Args:
        after: events that must be done before a device block is touched: the kernels that wrote the
            blocks (offload), or the last readers of the blocks to overwrite (load). Host slots of a
            load may be read at once.

    Raises:
        LayoutError: the numbers of ids differ, or a destination appears twice.
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
        """Ids of the written places: device blocks of a load, host slots of an offload."""
        return self.block_ids if self.direction is Direction.LOAD else self.slot_ids

    def __len__(self) -> int:
        return len(self.block_ids)


def _has_twice(ids: Ids) -> bool:
    if len(ids) <= FEW_IDS:
        return len(set(ids.tolist())) < len(ids)
    in_order = np.sort(ids)  # a third of what np.unique takes
    return bool((in_order[1:] == in_order[:-1]).any())


class Lane(Protocol):
    """One direction of one device. Copies run in the order they were submitted."""

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        """Start `copy`; return one event per layer of the layout, done in layer order.

        The last event is the end of the copy. An empty copy returns events that are done. The call
        takes microseconds, on any thread: a lane has a thread of its own for longer work.

        Raises:
            LayoutError: an id is out of range; nothing was submitted.
        """

    def close(self) -> None:
        """Wait for the work in flight, then release streams and staging memory."""


class Device(Protocol):
    """One accelerator (or the CPU) and its memory. Close it after all objects that it has made."""

    @property
    def name(self) -> str: ...

    @property
    def array_module(self) -> ModuleType:
        """The module of the planes' arrays: NumPy or CuPy."""

    @property
    def failure(self) -> str | None:
        """Why the device is lost to this process, for good; None while it works."""

    @property
    def status(self) -> str:
        """One line for people: what it is, what it is still busy opening, or its failure."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread computes on this device with `array_module`.

        Work runs in the order of `compute_stream`. Errors of the device become TransferError, or
        DeviceFailedError if it is lost.
        """

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        """Allocate planes of `num_blocks` blocks.

        Raises:
            ConfigError: the device has no room for them.
        """

    def allocate_host(self, layout: Layout, num_slots: int) -> HostSlots:
        """Allocate `num_slots` host slots.

        Raises:
            ConfigError: there is no memory for them.
        """

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane: ...

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        """Copy blocks within the device, after everything submitted to compute_stream so far.

        Any thread may call; the event loop's thread only for at most `quick_copy_bytes`.

        Args:
            planes: the planes of the blocks.
            source_ids: int32 [n].
            target_ids: int32 [n], distinct, without the source ids.
        """

    @property
    def quick_copy_bytes(self) -> int:
        """Bytes that `copy_blocks` copies before it returns, in the time of waking a thread."""

    @property
    def compute_stream(self) -> Stream:
        """The stream on which the engine's kernels run."""

    @property
    def sharing(self) -> Sharing | None:
        """The way other processes reach the planes; None if they cannot."""

    def close(self) -> None: ...


# Between processes of one machine


class SharedPlane(msgspec.Struct, frozen=True):
    """A plane that another process may open.

    It begins `offset` bytes into the memory of `handle`; block b begins at offset + b * stride.
    """

    handle: bytes
    offset: int
    stride: int


class SharedPlanes(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that another process on this machine needs to open planes.

    Attributes:
        owner: the process that has the planes.
        name: changes whenever the owner replaces its planes, since handles and addresses recur.
        place: UUID of the GPU, or "cpu".
    """

    owner: str
    name: str
    place: str
    num_blocks: int
    planes: tuple[SharedPlane, ...]


class PeerPlanes(Protocol):
    """Another process's planes, open here. For one thread at a time."""

    def copy(self, source_ids: Ids, target_ids: Ids) -> None:
        """Copy the other process's blocks source_ids[i] to this node's blocks target_ids[i].

        The target ids must be distinct. The call blocks the thread until no byte moves any more.

        Raises:
            TransferError: not every block came; the content of the targets is then undefined.
        """

    def close(self) -> None:
        """Unmap the other process's planes, which it still owns. No copy may be in flight."""


class Sharing(Protocol):
    """Operations of a device with planes of other processes. place: see SharedPlanes."""

    @property
    def place(self) -> str: ...

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        """Describe the planes for another process.

        Raises:
            ConfigError: no other process can open memory of their kind.
        """

    def open(self, own: Planes, shared: SharedPlanes) -> PeerPlanes:
        """Open another process's planes, to be copied to `own`, which has the same layout.

        Raises:
            ConfigError: no planes of that place can be read from here.
            TransferError: these planes cannot be read.
        """
