"""Memory that is not the service's own: host slots that processes share, planes of an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError, LayoutError
from tierkv.gpu.cpu import CpuDevice, CpuHostSlots
from tierkv.gpu.protocol import Planes

Bytes2D = npt.NDArray[np.uint8]


class SharedSlots(CpuHostSlots):
    """Host slots in a memory file without a name: who has its descriptor can map it, and when the
    last process that has is gone, killed or not, so is the memory.

    array: uint8 [num_slots, piece of a block's bytes that is this process's].
    """

    def __init__(self, descriptor: int, num_slots: int, block_bytes: int, piece: slice) -> None:
        """Takes the descriptor over. Raises ConfigError if the file is too small."""
        self.num_slots = num_slots
        try:
            if os.fstat(descriptor).st_size < num_slots * block_bytes:
                raise ConfigError("the shared host slots are smaller than was said")
            # Lives as long as an array on it does.
            mapped = mmap.mmap(descriptor, num_slots * block_bytes)
        finally:
            os.close(descriptor)
        whole = np.frombuffer(mapped, np.uint8).reshape(num_slots, block_bytes)
        self._array = whole[:, piece]


def shared_memory(num_bytes: int) -> int:
    """The descriptor of a new memory file. Raises ConfigError if there is no room."""
    descriptor = os.memfd_create("tierkv-host-slots", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # or a later write would die of SIGBUS
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"no {num_bytes} bytes of memory to share: set fewer blocks") from error
    return descriptor


class EnginePlanes:
    """Planes in an engine's own memory: for each plane, uint8 [num_blocks, block_bytes], C order.

    Raises LayoutError if the arrays do not fit the layout.
    """

    def __init__(self, layout: Layout, arrays: Sequence[Bytes2D]) -> None:
        self.layout = layout
        self.num_blocks = len(arrays[0]) if arrays else 0
        self.arrays: Sequence[Bytes2D] = tuple(arrays)
        expected = [(self.num_blocks, plane.block_bytes) for plane in layout.planes]
        found = [array.shape for array in arrays]
        if found != expected:
            raise LayoutError(f"the engine's planes are {found}, the layout's {expected}")
        for array in arrays:
            if array.dtype != np.uint8 or not array.flags.c_contiguous or not array.flags.writeable:
                raise LayoutError("an engine's planes are writable contiguous arrays of uint8")

    def close(self) -> None:
        self.arrays = ()


class EngineCpuDevice(CpuDevice):
    """The CPU, for an engine in this process that has its KV in `arrays` already."""

    def __init__(self, arrays: Sequence[Bytes2D]) -> None:
        super().__init__()
        self._engine_arrays = tuple(arrays)

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        planes = EnginePlanes(layout, self._engine_arrays)
        if planes.num_blocks != num_blocks:
            raise ConfigError(f"the engine has {planes.num_blocks} blocks, not {num_blocks}")
        return planes
