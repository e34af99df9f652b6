"""Memory of a GPU, by CuPy: allocated, adopted from an engine, opened from another process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from tierkv.errors import ConfigError, LayoutError
from tierkv.gpu.cuda import CUDARuntimeError, Gpu
from tierkv.gpu.cuda_streams import CudaStream

DeviceArray = Any  # a cupy.ndarray


def copy_rectangle(
    *,
    target: tuple[int, int],
    source: tuple[int, int],
    row_bytes: int,
    rows: int,
    stream: CudaStream,
) -> None:
    """Copy `rows` rows between memory of the GPU and pinned memory. target, source: where the first
    row begins, and from there the next; the latter below 2 GiB. The GPU must be bound."""
    runtime.memcpy2DAsync(*target, *source, row_bytes, rows, runtime.memcpyDefault, stream.address)


class DeviceMemory:
    """`num_bytes` from cudaMalloc, given back when this and all its views are gone."""

    def __init__(self, gpu: Gpu, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with gpu.bound():
            self._memory: Any = cupy.cuda.Memory(max(num_bytes, 1))
        self.address = int(self._memory.ptr)

    def view(
        self, offset: int, shape: tuple[int, int], strides: tuple[int, int]
    ) -> npt.NDArray[np.uint8]:
        """A CuPy array of bytes within this memory, which it keeps alive."""
        pointer = cupy.cuda.MemoryPointer(self._memory, offset)
        array: npt.NDArray[np.uint8] = cupy.ndarray(shape, cupy.uint8, pointer, strides)
        return array

    def write(self, data: npt.NDArray[np.void]) -> None:
        """Put `data` at the start; blocks until it is there. The GPU must be bound."""
        assert data.nbytes <= self.num_bytes, "fits"
        runtime.memcpy(self.address, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)


def adopted_array(gpu: Gpu, tensor: object) -> DeviceArray:
    """A CuPy array over the memory of a tensor with `__cuda_array_interface__` or `__dlpack__`.

    Raises LayoutError if it lies on another GPU, and ConfigError if CuPy cannot have it, as types
    that it does not know.
    """
    with gpu.bound():
        address = _address(tensor)
        if address is not None:
            # Asked first: CuPy would copy a tensor of another GPU to this one, and say nothing.
            home: int = runtime.pointerGetAttributes(address).device
            if home != gpu.index:
                raise LayoutError(f"a tensor lies on GPU {home}, not {gpu.index}")
        try:
            return cupy.from_dlpack(tensor) if address is None else cupy.asarray(tensor)
        except CUDARuntimeError:
            raise
        except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"this tensor cannot be adopted ({error}): pass a view of its bytes (uint8)"
            ) from error


def _address(tensor: object) -> int | None:
    """By the CUDA array interface; None if the tensor has none, or cannot express itself in it."""
    try:
        address: int = tensor.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    except (AttributeError, TypeError, RuntimeError, KeyError):  # KeyError: torch, of an fp8 type
        return None
    return address


def byte_view(
    owner: object, address: int, shape: tuple[int, int], stride: int
) -> npt.NDArray[np.uint8]:
    """uint8 [num_blocks, block_bytes] at `address`, blocks `stride` bytes apart; keeps `owner`."""
    span = max((shape[0] - 1) * stride + shape[1], 1)
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, span, owner), 0)
    array: npt.NDArray[np.uint8] = cupy.ndarray(shape, cupy.uint8, pointer, (stride, 1))
    return array


def timed_copies(gpu: Gpu, device: int, host: int, num_bytes: int) -> dict[str, float]:
    """GB/s of one contiguous copy each way between a device and a pinned host address."""
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
    """The handle by which another process can open the allocation that starts at `address`."""
    return bytes(runtime.ipcGetMemHandle(address))


@contextmanager
def opened_ipc(gpu: Gpu, handles: Sequence[bytes]) -> Iterator[dict[bytes, int]]:
    """Map other processes' allocations; handle to address here. Unmapped at the end."""
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
