"""GPU memory through CuPy, and planes in GPU memory.

Planes are allocated, adopted from an engine in this process, or opened from another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from tierkv.cache.layout import Layout, Plane
from tierkv.errors import ConfigError, DeviceFailedError, LayoutError, TransferError
from tierkv.gpu.cuda import CUDARuntimeError, CudaStream, Gpu
from tierkv.gpu.driver import DriverError, load_driver
from tierkv.gpu.plane_memory import PlaneMemory, rectangles_of
from tierkv.gpu.protocol import SharedPlane

DeviceArray = Any  # a cupy.ndarray


def copy_rectangle(
    *,
    target: tuple[int, int],
    source: tuple[int, int],
    row_bytes: int,
    rows: int,
    stream: CudaStream,
) -> None:
    """Submit a copy of `rows` rows of bytes, at constant distances in source and target.

    Source and target are GPU memory or pinned host memory. The GPU must be the thread's current
    one: call this inside `with gpu.bound():`.

    Args:
        target: address of the first row to write, and bytes from the start of a row to the start of
            the next (below 2 GiB).
        source: the same two numbers for the rows to read.
        row_bytes: bytes of a row.
        rows: number of rows.
        stream: the stream to which the copy is submitted.
    """
    runtime.memcpy2DAsync(*target, *source, row_bytes, rows, runtime.memcpyDefault, stream.address)


class DeviceMemory:
    """GPU memory from cudaMalloc.

    The memory is freed when this object is deleted; arrays from `byte_view` keep their owner.

    Attributes:
        num_bytes: size of the memory in bytes.
        address: address of the first byte.
    """

    def __init__(self, gpu: Gpu, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with gpu.bound():
            self._memory: Any = cupy.cuda.Memory(max(num_bytes, 1))
        self.address = int(self._memory.ptr)

    def write(self, data: npt.NDArray[np.void]) -> None:
        """Copy `data` to the start of this memory, and wait until the copy has ended.

        The GPU must be the thread's current one: call this inside `with gpu.bound():`.
        """
        assert data.nbytes <= self.num_bytes, "the data must fit into the memory"
        runtime.memcpy(self.address, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)


def adopted_array(gpu: Gpu, tensor: object) -> DeviceArray:
    """Return a CuPy array that shares the memory of an engine's tensor.

    Args:
        gpu: the GPU that must have the tensor.
        tensor: an object with `__cuda_array_interface__` or `__dlpack__`.

    Raises:
        LayoutError: the tensor is on another GPU.
        ConfigError: CuPy cannot use the memory, for example because of its type.
    """
    with gpu.bound():
        address = _address(tensor)
        if address is not None:
            # Checked first, since CuPy would silently copy a tensor of another GPU to this one.
            home: int = runtime.pointerGetAttributes(address).device
            if home != gpu.index:
                raise LayoutError(f"a tensor is on GPU {home}, not on GPU {gpu.index}")
        try:
            return cupy.from_dlpack(tensor) if address is None else cupy.asarray(tensor)
        except CUDARuntimeError:
            raise
        except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"this tensor cannot be used as planes ({error}): pass a view of its bytes (uint8)"
            ) from error


def _address(tensor: object) -> int | None:
    try:
        address: int = tensor.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    # KeyError: from torch, for an fp8 type.
    except (
        AttributeError,
        TypeError,
        RuntimeError,
        KeyError,
    ):
        return None
    return address


def byte_view(
    owner: object, address: int, shape: tuple[int, int], stride: int
) -> npt.NDArray[np.uint8]:
    """Return a CuPy array of bytes in memory that another object owns.

    Args:
        owner: the object that owns the memory; the array refers to it, so that it is not deleted.
        address: address of block 0.
        shape: number of blocks, and bytes of a block.
        stride: bytes from one block to the next.
    """
    span = max((shape[0] - 1) * stride + shape[1], 1)
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, span, owner), 0)
    array: npt.NDArray[np.uint8] = cupy.ndarray(shape, cupy.uint8, pointer, (stride, 1))
    return array


def timed_copies(gpu: Gpu, device: int, host: int, num_bytes: int) -> dict[str, float]:
    """Measure a contiguous copy in each direction.

    Args:
        gpu: the GPU.
        device: address of GPU memory.
        host: address of pinned host memory.
        num_bytes: number of bytes to copy.

    Returns:
        The speeds in GB/s, by "host to device" and "device to host".
    """
    speeds = {}
    ways = {
        "host to device": (device, host, runtime.memcpyHostToDevice),
        "device to host": (host, device, runtime.memcpyDeviceToHost),
    }
    with gpu.bound():
        for way, (target, source, kind) in ways.items():
            for _ in range(2):  # the first one warms up
                began = time.perf_counter()
                runtime.memcpyAsync(target, source, num_bytes, kind, 0)
                runtime.streamSynchronize(0)
                speeds[way] = num_bytes / (time.perf_counter() - began) / 1e9
    return speeds


def ipc_handle(address: int) -> bytes:
    """Return the CUDA IPC handle with which another process opens the allocation at `address`."""
    return bytes(runtime.ipcGetMemHandle(address))


@contextmanager
def opened_ipc(gpu: Gpu, handles: Sequence[bytes]) -> Iterator[dict[bytes, int]]:
    """Map allocations of other processes into this process while the context is active.

    Args:
        gpu: the GPU that maps them.
        handles: the CUDA IPC handle of each allocation.

    Yields:
        The address of each allocation in this process, by its handle.
    """
    opened: dict[bytes, int] = {}
    try:
        with gpu.bound():
            for handle in handles:
                if handle not in opened:
                    opened[handle] = int(
                        runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
                    )
        yield opened
    finally:
        with gpu.bound_to_close():
            for address in opened.values():
                runtime.ipcCloseMemHandle(address)


_ALIGNMENT = 512  # of a plane, in bytes
_GIB = 1 << 30


class CudaPlanes:
    """A layout's planes in GPU memory.

    Attributes:
        arrays: CuPy arrays, uint8 [num_blocks, block_bytes], one for each plane.
        memory: addresses of each plane, in the layout's order.
        rectangles: groups of planes with equal distances in memory. One command of the copy engine
            can copy a block's bytes in all planes of a group. () if a block would need more than
            four commands.
    """

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        arrays: Sequence[npt.NDArray[np.uint8]],
        memory: Sequence[PlaneMemory],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = tuple(memory)
        self.rectangles = rectangles_of(layout, memory, num_blocks)
        self._arrays: tuple[npt.NDArray[np.uint8], ...] | None = tuple(arrays)
        self._on_close = on_close

    @property
    def arrays(self) -> Sequence[npt.NDArray[np.uint8]]:
        if self._arrays is None:
            raise LayoutError("these planes are closed")
        return self._arrays

    @property
    def is_closed(self) -> bool:
        return self._arrays is None

    def close(self) -> None:
        """Release the memory, which is freed once no array refers to it. No copy may be running.

        Raises:
            LayoutError: the planes are closed already.
        """
        if self._arrays is None:
            raise LayoutError("these planes are closed already")
        self._arrays = None
        if self._on_close is not None:
            self._on_close()


def allocated_planes(gpu: Gpu, layout: Layout, num_blocks: int) -> CudaPlanes:
    """Return planes in newly allocated GPU memory with undefined content.

    Args:
        gpu: the GPU.
        layout: layout of a block.
        num_blocks: number of blocks.

    Raises:
        ConfigError: the GPU has too little free memory.
        DeviceFailedError: this process can no longer use the GPU.
    """
    sizes = [num_blocks * plane.block_bytes for plane in layout.planes]
    *offsets, at = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    try:
        memory = DeviceMemory(gpu, at)
    except DeviceFailedError:
        raise
    except TransferError as error:
        raise ConfigError(
            f"{num_blocks} blocks need {at / _GIB:.1f} GiB of GPU memory, which cannot "
            f"be allocated ({error}): lower cache.device_blocks"
        ) from error
    allocation = range(memory.address, memory.address + memory.num_bytes)
    places = [
        PlaneMemory(memory.address + offset, plane.block_bytes, allocation)
        for offset, plane in zip(offsets, layout.planes, strict=True)
    ]
    return _views(layout, num_blocks, places, [memory] * len(places), None)


def adopted_planes(gpu: Gpu, layout: Layout, tensors: Sequence[object]) -> CudaPlanes:
    """Use an engine's KV tensors as planes, without a copy.

    Args:
        gpu: the GPU of the tensors.
        layout: layout of a block.
        tensors: one tensor for each plane of the layout, with `__cuda_array_interface__` or DLPack.
            The first dimension is the block. The bytes of one block must be contiguous; there may
            be gaps between blocks, and the other dimensions may be in any order.

    Raises:
        LayoutError: a tensor does not fit the layout, or is on another GPU.
        ConfigError: CuPy cannot use a tensor.
    """
    if len(tensors) != len(layout.planes):
        raise LayoutError(
            f"the layout has {len(layout.planes)} planes, but {len(tensors)} tensors were given"
        )
    arrays = [adopted_array(gpu, tensor) for tensor in tensors]
    for plane, array in zip(layout.planes, arrays, strict=True):
        if not array.ndim:
            raise LayoutError(
                f"{_name(plane)} has no dimensions: the first dimension must be the block"
            )
    num_blocks = int(arrays[0].shape[0])
    memory = []
    for plane, array in zip(layout.planes, arrays, strict=True):
        if array.device.id != gpu.index:
            raise LayoutError(f"{_name(plane)} is on GPU {array.device.id}, not on GPU {gpu.index}")
        if array.shape[0] != num_blocks:
            raise LayoutError(
                f"{_name(plane)} has {array.shape[0]} blocks, but other planes have {num_blocks}"
            )
        _check_block(plane, array)
        address = int(array.data.ptr)
        memory.append(PlaneMemory(address, int(array.strides[0]), _allocation(gpu, address)))
    return _views(layout, num_blocks, memory, arrays, None)


def _allocation(gpu: Gpu, address: int) -> range:
    with gpu.bound():
        try:
            start, size = load_driver().allocation_of(address)
        except DriverError:
            return range(0)
    return range(start, start + size)


def _check_block(plane: Plane, array: DeviceArray) -> None:
    inside = sorted(
        (stride, size)
        for stride, size in zip(array.strides[1:], array.shape[1:], strict=True)
        if size > 1
    )
    num_bytes = array.dtype.itemsize
    for stride, size in inside:
        if stride != num_bytes:
            raise LayoutError(f"{_name(plane)}: the bytes of a block must be contiguous")
        num_bytes *= size
    if num_bytes != plane.block_bytes:
        raise LayoutError(
            f"{_name(plane)} has {num_bytes} bytes per block, but the layout has "
            f"{plane.block_bytes}"
        )
    if array.shape[0] > 1 and array.strides[0] < num_bytes:
        raise LayoutError(f"{_name(plane)}: blocks must not overlap")


def _name(plane: Plane) -> str:
    return f"layer {plane.layer} {plane.role}"


def _views(
    layout: Layout,
    num_blocks: int,
    memory: Sequence[PlaneMemory],
    owners: Sequence[object],
    on_close: Callable[[], None] | None,
) -> CudaPlanes:
    arrays = [
        byte_view(owner, place.address, (num_blocks, plane.block_bytes), place.stride)
        for owner, place, plane in zip(owners, memory, layout.planes, strict=True)
    ]
    return CudaPlanes(layout, num_blocks, arrays, memory, on_close)


# Between processes


def shared_planes(gpu: Gpu, planes: CudaPlanes) -> tuple[SharedPlane, ...]:
    """Return the data with which another process of this machine opens each of these planes.

    The memory must come from cudaMalloc, and must not be freed before the other process has closed
    the planes.

    Args:
        gpu: the GPU that has the planes.
        planes: the planes.

    Raises:
        TransferError: the memory does not come from cudaMalloc.
    """
    shared = []
    with gpu.bound():
        for place in planes.memory:
            start, _ = load_driver().allocation_of(place.address)  # or raises CUDA's error
            shared.append(SharedPlane(ipc_handle(start), place.address - start, place.stride))
    return tuple(shared)


def _check_within(plane: Plane, place: PlaneMemory, num_blocks: int) -> None:
    # A kernel that reads beyond an allocation makes the GPU unusable for this process.
    end = place.address + (num_blocks - 1) * place.stride + plane.block_bytes
    is_within = place.address in place.allocation and end <= place.allocation.stop
    if place.stride < plane.block_bytes or num_blocks < 1 or not is_within:
        raise LayoutError(f"{_name(plane)} is outside the shared memory")


def opened_planes(
    gpu: Gpu, layout: Layout, num_blocks: int, shared: Sequence[SharedPlane]
) -> CudaPlanes:
    """Open another process's planes through CUDA IPC; `close` unmaps them.

    The processes must order their accesses by messages: notify the other process of a copy only
    after the copy has ended.

    Args:
        gpu: the GPU of this process that reads or writes the planes.
        layout: layout of a block.
        num_blocks: number of blocks of each plane.
        shared: the other process's data about each plane.

    Raises:
        LayoutError: the number of planes differs, or a plane reaches beyond its memory.
        TransferError: CUDA cannot open the memory.
    """
    if len(shared) != len(layout.planes):
        raise LayoutError(
            f"the layout has {len(layout.planes)} planes, but {len(shared)} were shared"
        )
    with ExitStack() as stack:
        opened = stack.enter_context(opened_ipc(gpu, [plane.handle for plane in shared]))
        places = [(opened[one.handle] + one.offset, one.stride) for one in shared]
        memory = [PlaneMemory(*place, _allocation(gpu, place[0])) for place in places]
        for plane, place in zip(layout.planes, memory, strict=True):
            _check_within(plane, place, num_blocks)
        stay_open = stack.pop_all()
    return _views(layout, num_blocks, memory, shared, stay_open.close)
