"""CUDA through CuPy: a GPU, its context, and its errors as ours.

This, cuda_streams.py and cuda_memory.py are what knows CuPy, which has no types; everything they
hand out is typed.
"""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType
from typing import Any

import cupy
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from tierkv.errors import ConfigError, DeviceFailedError, TransferError
from tierkv.gpu.driver import DriverError, load_driver

CUDARuntimeError = runtime.CUDARuntimeError
CUDADriverError = cupy_driver.CUDADriverError
ARRAY_MODULE: ModuleType = cupy

CudaError = Any  # CUDARuntimeError, CUDADriverError or DriverError: what has a `status`

# After one of these nothing works on the GPU any more in this process: none usable (46),
# uncorrectable memory (214), NVLink (220), contained by the GPU (226), the kernel faults 700, 702,
# 710, 714 to 719 and 721, a destroyed context (709), and the unknown (999). Those between them are
# mistakes in a call: memory that is registered already (712) or not at all (713), too many peers
# (711), too large a cooperative launch (720).
_STICKY = frozenset({46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 999})


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
        self.pci_bus_id = str(runtime.deviceGetPCIBusId(index)).lower()

    def bound(self) -> Bound:
        """Within it the calling thread uses this GPU, and CUDA's errors come out as TransferError
        (DeviceFailedError if the GPU is lost)."""
        return Bound(self, closes=False)

    def bound_to_close(self) -> Bound:
        """Like `bound`, but what fails because the GPU is lost is not raised: its memory is gone
        with it, and closing must go on to what is left."""
        return Bound(self, closes=True)

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


class Bound:
    """See Gpu.bound. A class, for it is on the way to the first byte of every copy, where Python
    has not run for a while: two generators took 14 us longer."""

    __slots__ = ("_before", "_closes", "_gpu")

    def __init__(self, gpu: Gpu, *, closes: bool) -> None:
        self._gpu = gpu
        self._closes = closes
        self._before = gpu.index

    def __enter__(self) -> None:
        gpu = self._gpu
        if gpu.failure is not None and not self._closes:
            raise DeviceFailedError(gpu.failure)
        try:
            self._before = runtime.getDevice()
            if self._before != gpu.index:
                runtime.setDevice(gpu.index)
                _thread.has_context = True
            else:
                gpu.give_thread_a_context()
        except CUDARuntimeError as error:
            failure = gpu.translated(error)
            if not (self._closes and isinstance(failure, DeviceFailedError)):
                raise failure from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        gpu = self._gpu
        # To go back to a GPU that nobody has used would make a context there, of 0.5 GB.
        if self._before != gpu.index and load_driver().has_context(self._before):
            runtime.setDevice(self._before)
        if isinstance(error, (CUDARuntimeError, CUDADriverError, DriverError)):
            failure = gpu.translated(error)
            if not (self._closes and isinstance(failure, DeviceFailedError)):
                raise failure from error
            return True
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            raise TransferError(f"GPU {gpu.index} has not enough memory: {error}") from error
        return False


def gpu_uuid(index: int) -> str:
    # Cython ends it at a zero, and where there is none only at the next one behind it.
    return bytes(runtime.getDeviceProperties(index)["uuid"])[:16].hex()


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


def versions() -> tuple[int, int]:
    """The CUDA versions of the driver and of the runtime in use, as 1000 * major + 10 * minor."""
    return int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
