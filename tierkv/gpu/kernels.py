"""The kernels of csrc/planes.cu for one set of planes, with their arguments and launch sizes."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.gpu.cuda import Argument, CudaStream, Gpu, Kernel
from tierkv.gpu.cuda_memory import CudaPlanes, DeviceMemory
from tierkv.gpu.plane_memory import PlaneMemory
from tierkv.gpu.protocol import Ids
from tierkv.gpu.units import MAX_BLOCKS, Unit

TILE_BYTES = 4096
NUM_THREADS = 512
_WARPS = NUM_THREADS // 32
_SMALL_BYTES = 32 << 20  # up to this size, a kernel uses all of the GPU
# The structs of csrc/planes.cu.
_TILE = np.dtype([("first", "<u8"), ("stride", "<i8"), ("block_byte", "<u4"), ("num_bytes", "<u4")])
_UNIT = np.dtype(
    [
        ("tiles", "<u8"),
        ("staging", "<u8"),
        ("num_tiles", "<u4"),
        ("num_blocks", "<u4"),
        ("row_bytes", "<u4"),
        ("first_byte", "<u4"),
        ("block_ids", "<i4", MAX_BLOCKS),
    ]
)
_UNIT_HEAD = struct.Struct("<QQIIII")  # the fields before block_ids
_PAIRS = np.dtype(
    [
        ("tiles", "<u8"),
        ("num_tiles", "<u4"),
        ("num_blocks", "<u4"),
        ("source_ids", "<i4", MAX_BLOCKS // 2),
        ("target_ids", "<i4", MAX_BLOCKS // 2),
    ]
)


def tile_table(layout: Layout, memory: tuple[PlaneMemory, ...]) -> npt.NDArray[np.void]:
    """Return a table by which the kernels find the pieces (tiles) of a block in the planes.

    A tile is up to TILE_BYTES bytes of one plane. The tiles cover every byte of a block once, in
    the layout's order.

    Args:
        layout: layout of a block.
        memory: addresses of each plane.
    """
    rows = [
        (place.address + at, place.stride, start + at, min(TILE_BYTES, plane.block_bytes - at))
        for plane, start, place in zip(layout.planes, layout.offsets, memory, strict=True)
        for at in range(0, plane.block_bytes, TILE_BYTES)
    ]
    return np.array(rows, _TILE)


def launch_nothing(gpu: Gpu, stream: CudaStream) -> None:
    """Launch a kernel that copies no bytes, so that the stream gets a GPU hardware queue.

    Args:
        gpu: the GPU.
        stream: the stream to which the kernel is submitted.
    """
    kernel = Kernel(gpu, "scatter")
    with gpu.bound():
        kernel.launch(
            Argument(np.zeros((), _UNIT)), num_ctas=1, num_threads=NUM_THREADS, stream=stream
        )


class PlaneKernels:
    """The GPU kernels that copy blocks between planes and staging memory, and within planes.

    Only one thread at a time may use this object, inside a `with gpu.bound():` block.

    Args:
        gpu: the GPU.
        planes: the planes.
        num_ctas: limit of the thread blocks of a launch; four times this number for launches that
            copy few bytes.
    """

    def __init__(self, gpu: Gpu, planes: CudaPlanes, *, num_ctas: int) -> None:
        self._num_ctas = num_ctas
        self._kernels = {name: Kernel(gpu, name) for name in ("gather", "scatter", "within")}
        table = tile_table(planes.layout, planes.memory)
        self._table = DeviceMemory(gpu, table.nbytes)
        with gpu.bound():
            self._table.write(table)
        self._starts = table["block_byte"].astype(np.int64)
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        self._num_tiles = len(table)
        self._unit = Argument(np.zeros((), _UNIT))
        self._unit_head = self._unit.values.data
        self._unit_blocks = self._unit.values["block_ids"]
        self._pairs = Argument(np.zeros((), _PAIRS))

    def gather(self, unit: Unit, block_ids: Ids, staging: int, stream: CudaStream) -> None:
        """Copy bytes of blocks from the planes to rows of staging memory.

        Args:
            unit: says which bytes of each block to copy.
            block_ids: int32 [n], the blocks; block i is copied to row i.
            staging: address of row 0.
            stream: the stream to which the kernel is submitted.
        """
        self._move("gather", unit, block_ids, staging, stream)

    def scatter(self, unit: Unit, block_ids: Ids, staging: int, stream: CudaStream) -> None:
        """Copy rows of staging memory to blocks of the planes.

        Args:
            unit: says which bytes of each block to copy.
            block_ids: int32 [n], the blocks, distinct; row i is copied to block i.
            staging: address of row 0.
            stream: the stream to which the kernel is submitted.
        """
        self._move("scatter", unit, block_ids, staging, stream)

    def _move(
        self, name: str, unit: Unit, block_ids: Ids, staging: int, stream: CudaStream
    ) -> None:
        first, stop = self._tiles_of(unit)
        _UNIT_HEAD.pack_into(
            self._unit_head,
            0,
            self._table.address + first * _TILE.itemsize,
            staging,
            *(stop - first, len(block_ids), unit.row_bytes, unit.first_byte),
        )
        self._unit_blocks[: len(block_ids)] = block_ids
        self._launch(name, self._unit, (stop - first) * len(block_ids), stream)

    def _tiles_of(self, unit: Unit) -> tuple[int, int]:
        """Return the rows [first, stop) of the kernels' table that cover the unit's bytes."""
        ends = (unit.first_byte, unit.first_byte + unit.num_bytes)
        if ends not in self._found:  # the cache has about as many entries as layers
            first, stop = np.searchsorted(self._starts, ends).tolist()
            self._found[ends] = (first, stop)
        return self._found[ends]

    def within(self, source_ids: Ids, target_ids: Ids, stream: CudaStream) -> None:
        """Copy block source_ids[i] to block target_ids[i] for all i.

        Args:
            source_ids: int32 [n], blocks to read.
            target_ids: int32 [n], blocks to write: distinct, and none of the source ids.
            stream: the stream to which the kernels are submitted.
        """
        most, pairs = MAX_BLOCKS // 2, self._pairs.values
        pairs["tiles"] = self._table.address
        pairs["num_tiles"] = self._num_tiles
        for start in range(0, len(source_ids), most):
            count = len(source_ids[start : start + most])
            pairs["num_blocks"] = count
            pairs["source_ids"][:count] = source_ids[start : start + most]
            pairs["target_ids"][:count] = target_ids[start : start + most]
            self._launch("within", self._pairs, count * self._num_tiles, stream)

    def _launch(self, name: str, argument: Argument, num_tiles: int, stream: CudaStream) -> None:
        is_small = num_tiles * TILE_BYTES <= _SMALL_BYTES
        self._kernels[name].launch(
            argument,
            num_ctas=min(
                -(-num_tiles // _WARPS), 4 * self._num_ctas if is_small else self._num_ctas
            ),
            num_threads=NUM_THREADS,
            stream=stream,
        )
