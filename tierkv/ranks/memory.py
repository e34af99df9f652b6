"""Host slots that several ranks' processes share, and planes that an engine has allocated.

A block consists of the slices of all ranks, one after the other.

    host slot   | rank 0: its layers, in order | rank 1: its layers, in order | ...

The scheduler sees one block in one slot. Each rank copies its own slice, a contiguous range of the
slot. The layout of the whole block lists the layers of rank 1 after those of rank 0.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard
from tierkv.errors import ConfigError, LayoutError
from tierkv.gpu.cpu import CpuDevice, CpuHostSlots
from tierkv.gpu.protocol import HostSlots, Planes
from tierkv.gpu.room import HOST_SETTING, HOST_TIER, require_room, size, track
from tierkv.ranks.link import Hello, Link
from tierkv.threads import start_thread
from tierkv.transfer.storage_io import Slice

log = logging.getLogger(__name__)

_FILLED_AT_ONCE = 64 << 20

Bytes2D = npt.NDArray[np.uint8]


class SharedSlots(CpuHostSlots):
    """Host slots in shared memory (a file without a name), which several processes map.

    A process needs the file's descriptor to map it. The kernel frees the memory when the last
    process has ended.

    Attributes:
        array: uint8 [num_slots, n], the n bytes of each slot that this process uses, such as the
            slice of its rank.
        descriptor: the file's descriptor, which `close` closes.
    """

    def __init__(self, descriptor: int, num_slots: int, block_bytes: int, piece: slice) -> None:
        """Map the file of `descriptor`; this object closes the descriptor.

        Args:
            descriptor: descriptor of a file of at least `num_slots * block_bytes` bytes; also
                closed if the call raises.
            num_slots: number of slots in the file.
            block_bytes: bytes of a slot.
            piece: the range of bytes of each slot that this process uses.

        Raises:
            ConfigError: the file is too small, or this process has no free addresses.
        """
        self.num_slots = num_slots
        self.descriptor = descriptor
        self._closing = threading.Event()
        self._filling: threading.Thread | None = None
        try:
            num_bytes = num_slots * block_bytes
            require_room(num_bytes, HOST_TIER, HOST_SETTING, has_new_pages=False)
            # Stays mapped while an array uses it.
            mapped = mmap.mmap(descriptor, num_bytes)
        except ConfigError:
            os.close(descriptor)
            raise
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise ConfigError(f"the shared host slots cannot be mapped: {error}") from error
        self._mapped: mmap.mmap | None = mapped
        self._num_bytes = num_bytes
        whole = np.frombuffer(mapped, np.uint8).reshape(num_slots, block_bytes)
        self._array = whole[:, piece]

    def fill(self) -> None:
        """Start a thread that allocates the file's memory, from the first slot on.

        The slots can be used at once: the first write to a page allocates that page.

        Raises:
            ConfigError: no thread can be started.
        """
        assert self._mapped is not None, "these slots are open"
        track(self._mapped, np.frombuffer(self._mapped, np.uint8).ctypes.data, self._num_bytes)
        self._filling = start_thread(self._fill, "tierkv-fill")

    def _fill(self) -> None:
        for at in range(0, self._num_bytes, _FILLED_AT_ONCE):
            if self._closing.is_set():
                return
            try:
                num_bytes = min(_FILLED_AT_ONCE, self._num_bytes - at)
                os.posix_fallocate(self.descriptor, at, num_bytes)
            except OSError as error:
                log.error(
                    "%s of %s of memory to share cannot be allocated (%s), and a write to the rest "
                    "may end this process: lower %s",
                    size(self._num_bytes - at),
                    size(self._num_bytes),
                    error,
                    HOST_SETTING,
                )
                return

    def close(self) -> None:
        self._closing.set()
        if self._filling is not None:
            self._filling.join()
        super().close()
        self._mapped = None
        os.close(self.descriptor)


def shared_memory(num_bytes: int) -> int:
    """Create a memory file of `num_bytes`; its pages are allocated when they are written.

    Returns:
        The file's descriptor, which the caller must close.

    Raises:
        ConfigError: there is too little memory; the text names the limit and the bytes left.
    """
    require_room(num_bytes, HOST_TIER, HOST_SETTING)
    descriptor = os.memfd_create("tierkv-host-slots", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{size(num_bytes)} of memory to share cannot be allocated ({error}): "
            f"lower {HOST_SETTING}"
        ) from error
    return descriptor


def shared_slots(num_slots: int, block_bytes: int) -> SharedSlots:
    """Create host slots that other processes can map; a thread allocates their memory.

    Args:
        num_slots: number of slots.
        block_bytes: bytes of a slot.

    Returns:
        The slots. This process uses all bytes of each slot.

    Raises:
        ConfigError: there is too little memory.
    """
    descriptor = shared_memory(num_slots * block_bytes)
    slots = SharedSlots(descriptor, num_slots, block_bytes, slice(0, block_bytes))
    try:
        slots.fill()
    except BaseException:
        slots.close()
        raise
    return slots


class EnginePlanes:
    """Planes (device memory for blocks) that an engine has allocated.

    Args:
        layout: the planes of a block.
        arrays: for each plane, uint8 [num_blocks, the plane's block_bytes], C order, writeable.

    Raises:
        LayoutError: the arrays do not fit the layout.
    """

    def __init__(self, layout: Layout, arrays: Sequence[Bytes2D]) -> None:
        self.layout = layout
        self.num_blocks = len(arrays[0]) if arrays else 0
        self.arrays: Sequence[Bytes2D] = tuple(arrays)
        expected = [(self.num_blocks, plane.block_bytes) for plane in layout.planes]
        found = [array.shape for array in arrays]
        if found != expected:
            raise LayoutError(
                f"the engine's planes have the bytes per block {found}, but the layout's "
                f"have {expected}"
            )
        for array in arrays:
            if array.dtype != np.uint8 or not array.flags.c_contiguous or not array.flags.writeable:
                raise LayoutError("an engine's planes must be writable contiguous arrays of uint8")

    def close(self) -> None:
        self.arrays = ()


class EngineCpuDevice(CpuDevice):
    """The CPU as a device, for an engine in this process that has allocated its KV arrays itself.

    Args:
        arrays: for each plane, the engine's array, uint8 [num_blocks, the plane's block_bytes], C
            order, writeable.
    """

    def __init__(self, arrays: Sequence[Bytes2D]) -> None:
        super().__init__()
        self._engine_arrays = tuple(arrays)

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        """Return the arrays that the engine has allocated, as planes. Nothing is allocated.

        Args:
            layout: the planes of a block, which must match the engine's arrays.
            num_blocks: the number of blocks that the engine's arrays must have.

        Returns:
            The planes; the engine still owns their memory.

        Raises:
            ConfigError: the arrays have another number of blocks.
            LayoutError: the arrays differ from the layout in number or in bytes per block, or are
                not writable contiguous arrays of uint8.
        """
        planes = EnginePlanes(layout, self._engine_arrays)
        if planes.num_blocks != num_blocks:
            raise ConfigError(
                f"the engine's planes have {planes.num_blocks} blocks, but {num_blocks} are needed"
            )
        return planes


class SlotPieces:
    """The host slots of one rank, made of the rank's range of bytes in each slot of `host`.

    `host` must stay open while these slots are used.

    Args:
        host: the slots of all ranks.
        piece: the rank's range of bytes within each slot.
    """

    def __init__(self, host: HostSlots, piece: slice) -> None:
        self.num_slots = host.num_slots
        self._host, self._piece = host, piece

    @property
    def array(self) -> Bytes2D:
        return self._host.array[:, self._piece]

    def close(self) -> None: ...


class SharedCpuDevice(CpuDevice):
    """The CPU as a device, with host slots that other processes can map.

    If `shards` are given, storage has one value for each rank's slice of a block. The value's name
    contains the key of the whole block, so that nodes with the same fingerprint and another number
    of ranks can find it.

    Args:
        shards: layout of each rank's slice of a block, in the order of the slices in a slot; () if
            blocks are not split over ranks.
    """

    def __init__(self, shards: Sequence[Layout] = ()) -> None:
        super().__init__()
        self._shards = tuple(shards)

    def allocate_host(self, layout: Layout, num_slots: int) -> HostSlots:
        block_bytes = sum(shard.block_bytes for shard in self._shards) or layout.block_bytes
        return shared_slots(num_slots, block_bytes)

    def slices(self, host: HostSlots) -> list[Slice]:
        """Return each rank's slice of the slots of `host`, which `allocate_host` has returned."""
        size = len(self._shards)
        return [
            Slice(Shard(rank, size), layout, SlotPieces(host, piece))
            for rank, (layout, piece) in enumerate(
                zip(self._shards, pieces(self._shards), strict=True)
            )
        ]


def side_by_side(shards: Sequence[Layout]) -> Layout:
    """Return the layout of blocks that consist of one slice for each of `shards`, in order.

    Returns:
        The layout. The layers of each shard follow those of the shard before.

    Raises:
        LayoutError: there are no shards, or their block sizes differ.
    """
    if not shards or len({shard.block_size for shard in shards}) != 1:
        raise LayoutError(
            "side_by_side needs at least one shard, and all shards must have the same block size"
        )
    planes, first = [], 0
    for shard in shards:
        planes += [replace(plane, layer=first + plane.layer) for plane in shard.planes]
        first += shard.num_layers
    return Layout(shards[0].block_size, tuple(planes))


def pieces(shards: Sequence[Layout]) -> list[slice]:
    """Return the range of bytes of a host slot that belongs to each rank."""
    found, at = [], 0
    for shard in shards:
        found.append(slice(at, at + shard.block_bytes))
        at += shard.block_bytes
    return found


def digest_of(layouts: Sequence[Layout]) -> bytes:
    """Return the digest of a layout, or one digest for the layouts of several KV cache groups."""
    digests = [layout.digest for layout in layouts]
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def join(
    link: Link, rank: int, planes: Sequence[Planes]
) -> tuple[list[SharedSlots], int | None, bool]:
    """Connect this rank to the scheduler, and map the host slots that the scheduler shares.

    Args:
        link: the link to the scheduler.
        rank: number of this rank.
        planes: this rank's planes of each KV cache group.

    Returns:
        Three values. The first is the host slots of each group. The second is a file descriptor, or
            None if the scheduler sent none: keep it open while this rank may copy, so that other
            processes can find out when the copies are over. The third is True if this rank writes
            the slots, and False if another rank with the same bytes does.

    Raises:
        ConfigError: the scheduler refuses this rank, or the slots cannot be mapped.
        LinkClosedError: no answer came.
        StoreCorruptError: the answer cannot be read.
    """
    digest = digest_of([one.layout for one in planes])
    link.send(Hello(rank, planes[0].num_blocks, digest, os.getpid()))
    memory, descriptors = link.receive_memory()
    hosts: list[SharedSlots] = []
    left = deque(descriptors)
    try:
        for one in memory.regions:
            piece = slice(one.start, one.stop)
            hosts.append(SharedSlots(left.popleft(), one.num_slots, one.block_bytes, piece))
    except BaseException:
        for host in hosts:
            host.close()
        for descriptor in left:
            os.close(descriptor)
        raise
    return hosts, left.popleft() if memory.has_life else None, memory.saves
