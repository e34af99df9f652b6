"""CUDA through CuPy: a GPU's context, streams, events, memory and launches, with errors of ours.

The one file that knows CuPy, which has no types; everything it hands out is typed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from tierkv.errors import (
    ConfigError,
    DeviceFailedError,
    GateTimeoutError,
    LayoutError,
    TransferError,
)
from tierkv.gpu.driver import DriverError, load_driver
from tierkv.gpu.pending import PendingEvent
from tierkv.gpu.protocol import Event

CUDARuntimeError = runtime.CUDARuntimeError
CUDADriverError = cupy_driver.CUDADriverError
ARRAY_MODULE: ModuleType = cupy

CudaError = Any  # CUDARuntimeError, CUDADriverError or DriverError: what has a `status`

_SUCCESS, _NOT_READY = 0, 600
# After one of these nothing works on the GPU any more in this process: uncorrectable memory (214),
# NVLink (220), the kernel faults 700 and 702, 709, 710 to 721, and the unknown (999).
_STICKY = frozenset({46, 214, 220, 700, 702, 709, *range(710, 722), 999})

DeviceArray = Any  # a cupy.ndarray
Raw = Any  # an object of CuPy that is no array: stream, event, module


class _ThreadState(threading.local):
    has_context = False


_thread = _ThreadState()


class Gpu:
    """One GPU and its primary context. `failure` says why it is lost, None while it works.

    Raises ConfigError if there is no such GPU.
    """

    def __init__(self, index: int) -> None:
        count = num_gpus()
        if not 0 <= index < count:
            raise ConfigError(f"there is no GPU {index}: this process sees {count}")
        self.index = index
        self.failure: str | None = None
        with self.bound():
            properties = runtime.getDeviceProperties(index)
            runtime.deviceSynchronize()
        self.model = str(properties["name"].decode())
        self.num_multiprocessors = int(properties["multiProcessorCount"])
        self.pci_bus_id = str(runtime.deviceGetPCIBusId(index)).lower()

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Within it the calling thread uses this GPU, and CUDA's errors come out as TransferError
        (DeviceFailedError if the GPU is lost)."""
        if self.failure is not None:
            raise DeviceFailedError(self.failure)
        try:
            with self._current():
                yield
        except (CUDARuntimeError, CUDADriverError, DriverError) as error:
            raise self.translated(error) from error
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise TransferError(f"GPU {self.index} has not enough memory: {error}") from error

    @contextmanager
    def bound_to_close(self) -> Iterator[None]:
        """Like `bound`, but what fails because the GPU is lost is not raised: its memory is gone
        with it, and closing must go on to what is left."""
        try:
            with self._current():
                yield
        except (CUDARuntimeError, CUDADriverError, DriverError) as error:
            failure = self.translated(error)
            if not isinstance(failure, DeviceFailedError):
                raise failure from error

    @contextmanager
    def _current(self) -> Iterator[None]:
        before: int = runtime.getDevice()
        if before != self.index:
            runtime.setDevice(self.index)
            _thread.has_context = True
        else:
            self.give_thread_a_context()
        try:
            yield
        finally:
            # To go back to a GPU that nobody has used would make a context there, of 0.5 GB.
            if before != self.index and load_driver().has_context(before):
                runtime.setDevice(before)

    def give_thread_a_context(self) -> None:
        """A new thread has none before its first call to the runtime, which makes one on GPU 0 if
        nothing else was said."""
        if not _thread.has_context:
            runtime.setDevice(self.index)
            _thread.has_context = True

    def translated(self, error: CudaError) -> TransferError:
        """What to raise for an error of CUDA; a sticky one marks this GPU as lost for ever."""
        status: int = error.status
        if self.failure is None and status not in _STICKY:
            return TransferError(f"GPU {self.index}: {error}")
        if self.failure is None:
            self.failure = (
                f"GPU {self.index} is lost to this process ({error}): restart the process; "
                "if it happens again, look for Xid messages in the kernel log"
            )
        return DeviceFailedError(self.failure)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        with self.bound():
            free, total = runtime.memGetInfo()
        return int(free), int(total)

    def synchronize(self) -> None:
        with self.bound():
            runtime.deviceSynchronize()


class CudaEvent:
    """A point in a CUDA stream. Keeps its answer once it is done.

    line, position: events of one line are done in the order of their positions.
    """

    __slots__ = ("_gpu", "_is_done", "line", "position", "raw")

    def __init__(self, gpu: Gpu, raw: Raw, line: object, position: int) -> None:
        self._gpu = gpu
        self.raw = raw
        self.line = line
        self.position = position
        self._is_done = False

    @property
    def is_done(self) -> bool:
        if self._is_done:
            return True
        if self._gpu.failure is not None:
            raise DeviceFailedError(self._gpu.failure)
        self._gpu.give_thread_a_context()
        status: int = runtime.eventQuery(self.raw.ptr)  # which raises nothing
        if status not in {_SUCCESS, _NOT_READY}:
            raise self._gpu.translated(DriverError("cudaEventQuery", status))
        self._is_done = status == _SUCCESS
        return self._is_done

    def block_until_done(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        nap_s = 20e-6
        while not self.is_done:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise GateTimeoutError(f"the GPU did not get there within {timeout_s:g} s")
            time.sleep(min(nap_s, left_s))
            nap_s = min(nap_s * 1.5, 1e-3)


class CudaStream:
    """A stream of one GPU: `raw` is CuPy's. Usable from any thread, whatever GPU it has bound."""

    def __init__(self, gpu: Gpu, raw: Raw) -> None:
        self._gpu = gpu
        self.raw = raw
        self.address = int(raw.ptr)
        self._line = object()
        self._num_events = 0

    def record(self) -> CudaEvent:
        with self._gpu.bound():
            return self.record_bound()

    def record_bound(self) -> CudaEvent:
        """The same where the GPU is bound already."""
        event = cupy.cuda.Event(block=False, disable_timing=True)
        event.record(self.raw)
        self._num_events += 1
        return CudaEvent(self._gpu, event, self._line, self._num_events)

    def wait(self, event: Event, timeout_s: float) -> None:
        """See Stream.wait. Blocks the caller for what has not reached a stream of CUDA's: a copy
        that is still being submitted, and events of other devices."""
        deadline = time.monotonic() + timeout_s
        if isinstance(event, PendingEvent):
            event = event.wait_until_submitted(timeout_s)
        if isinstance(event, CudaEvent):
            with self._gpu.bound():
                self.wait_bound(event)
        else:
            event.block_until_done(max(deadline - time.monotonic(), 0.0))

    def wait_bound(self, event: CudaEvent) -> None:
        """The same for CUDA's own events, where the GPU is bound already."""
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        with self._gpu.bound():
            self.raw.synchronize()


def new_stream(gpu: Gpu, *, is_urgent: bool) -> CudaStream:
    """A stream that does not wait for the legacy default stream. is_urgent: its kernels start
    before those of other streams when both could."""
    with gpu.bound():
        return CudaStream(gpu, cupy.cuda.Stream(non_blocking=True, priority=-5 if is_urgent else 0))


def adopted_stream(gpu: Gpu, address: int) -> CudaStream:
    """The stream whose cudaStream_t is `address`, 0 being the legacy default stream. Its owner
    keeps it alive."""
    with gpu.bound():
        return CudaStream(gpu, _foreign(gpu, address) if address else cupy.cuda.Stream.null)


class _Foreign:
    """A stream as CUDA's stream protocol shows it to CuPy."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _foreign(gpu: Gpu, address: int) -> Raw:
    try:
        from_external = cupy.cuda.Stream.from_external
    except AttributeError:  # CuPy 13 and before
        return cupy.cuda.ExternalStream(address, gpu.index)
    return from_external(_Foreign(address))


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
    except (AttributeError, TypeError, RuntimeError):
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


@cache
def _module() -> Raw:
    source = resources.files("tierkv.gpu").joinpath("csrc/planes.cu").read_text("utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))


class Kernel:
    """One kernel of csrc/planes.cu on one GPU; its only argument is a struct, passed by value."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        with gpu.bound():
            # CuPy compiles once per kind of GPU and source, keeps it on disk, and loads it per GPU.
            self._function: Any = _module().get_function(name).kernel

    def launch(
        self, argument: npt.NDArray[np.void], *, num_ctas: int, num_threads: int, stream: CudaStream
    ) -> None:
        """Launch; the argument may be changed as soon as this returns. The GPU must be bound."""
        pointers = np.array([argument.ctypes.data], np.uint64)
        cupy_driver.launchKernel(
            self._function.ptr,
            *(num_ctas, 1, 1),
            *(num_threads, 1, 1),
            0,
            stream.address,
            pointers.ctypes.data,
            0,
        )


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


def gpu_uuid(index: int) -> str:
    return bytes(runtime.getDeviceProperties(index)["uuid"]).hex()


def is_reachable(gpu: Gpu, uuid: str) -> bool:
    """Whether kernels on `gpu` can read the memory of the GPU of this UUID: it is the same one, or
    visible to this process and a peer of it."""
    if gpu_uuid(gpu.index) == uuid:
        return True
    others = [index for index in range(num_gpus()) if gpu_uuid(index) == uuid]
    return any(runtime.deviceCanAccessPeer(gpu.index, other) for other in others)


def num_gpus() -> int:
    """How many GPUs this process sees. Raises ConfigError if CUDA cannot be used at all."""
    try:
        return int(runtime.getDeviceCount())
    except CUDARuntimeError as error:
        raise ConfigError(f"no CUDA device can be used: {error}") from error


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


def versions() -> tuple[int, int]:
    """The CUDA versions of the driver and of the runtime in use, as 1000 * major + 10 * minor."""
    return int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
