"""GPUs, streams, events and kernels of CUDA, through CuPy; errors of CuPy become TierKVErrors.

Only this module and `cuda_memory` import CuPy. CuPy's functions have no type annotations; the
functions of these two modules have them.
"""

from __future__ import annotations

import threading
import time
from functools import cache
from importlib import resources
from types import ModuleType, TracebackType
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from tierkv.errors import ConfigError, DeviceFailedError, GateTimeoutError, TransferError
from tierkv.gpu.driver import DriverError, load_driver
from tierkv.gpu.protocol import Event

CUDARuntimeError = runtime.CUDARuntimeError
CUDADriverError = cupy_driver.CUDADriverError
ARRAY_MODULE: ModuleType = cupy

CudaError = Any  # CUDARuntimeError, CUDADriverError or DriverError, which have a `status`

# After one of these errors the GPU no longer works for this process: none usable (46),
# uncorrectable memory (214), NVLink (220), contained by the GPU (226), the kernel faults 700, 702,
# 710, 714 to 719 and 721, a destroyed context (709), and the unknown error (999). Other codes
# between them are mistakes in a call: memory that is registered already (712) or not at all (713),
# too many peers (711), too large a cooperative launch (720).
_STICKY = frozenset({46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 999})


class _ThreadState(threading.local):
    has_context = False


_thread = _ThreadState()


class Gpu:
    """One GPU and its primary context.

    Attributes:
        failure: the reason why this process can no longer use the GPU; None while the GPU works.

    Raises:
        ConfigError: there is no such GPU.
    """

    def __init__(self, index: int) -> None:
        count = num_gpus()
        if not 0 <= index < count:
            raise ConfigError(
                f"there is no GPU {index}: this process sees {count} GPUs (check "
                "CUDA_VISIBLE_DEVICES)"
            )
        self.index = index
        self.failure: str | None = None
        with self.bound():
            properties = runtime.getDeviceProperties(index)
            runtime.deviceSynchronize()
        self.model = str(properties["name"].decode())
        self.pci_bus_id = str(runtime.deviceGetPCIBusId(index)).lower()

    def bound(self) -> Bound:
        """Return a context in which this GPU is bound: it is the calling thread's current GPU.

        In the context, errors of CUDA become TransferError, or DeviceFailedError if this process
        can no longer use the GPU.
        """
        return Bound(self, closes=False)

    def bound_to_close(self) -> Bound:
        """Return a context for closing objects of this GPU, even if the GPU has failed.

        This GPU is the thread's current GPU in the context, and errors of CUDA become
        TransferError. If this process can no longer use the GPU, nothing is raised: entering the
        context succeeds, and an error of CUDA ends the `with` block silently.
        """
        return Bound(self, closes=True)

    def give_thread_a_context(self) -> None:
        """Make this GPU the current one of the calling thread, if the thread has not used CUDA yet.

        Otherwise the thread's first CUDA call would make a context on GPU 0.
        """
        if not _thread.has_context:
            runtime.setDevice(self.index)
            _thread.has_context = True

    def translated(self, error: CudaError) -> TransferError:
        """Return the TransferError for an error of CUDA.

        After some errors this process can no longer use the GPU: then `failure` is set, and the
        result is a DeviceFailedError.
        """
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
        """Return the free bytes and all bytes of the GPU's memory."""
        with self.bound():
            free, total = runtime.memGetInfo()
        return int(free), int(total)

    def synchronize(self) -> None:
        with self.bound():
            runtime.deviceSynchronize()


class Bound:
    """A context in which a GPU is the calling thread's current one.

    Errors of CUDA inside the context are raised as errors of tierkv. A generator instead of this
    class would delay every copy by 14 us.
    """

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
        # Making an unused GPU current again would make a context of 0.5 GB there.
        if self._before != gpu.index and load_driver().has_context(self._before):
            runtime.setDevice(self._before)
        if isinstance(error, (CUDARuntimeError, CUDADriverError, DriverError)):
            failure = gpu.translated(error)
            if not (self._closes and isinstance(failure, DeviceFailedError)):
                raise failure from error
            return True
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            raise TransferError(f"GPU {gpu.index} has too little free memory: {error}") from error
        return False


def gpu_uuid(index: int) -> str:
    # Cython reads the string up to a zero byte, which may be missing.
    return bytes(runtime.getDeviceProperties(index)["uuid"])[:16].hex()


def is_reachable(gpu: Gpu, uuid: str) -> bool:
    """Return whether kernels on `gpu` can read the memory of another GPU.

    Args:
        gpu: the GPU that reads.
        uuid: UUID of the GPU with the memory, 32 hex digits; it may be that of `gpu`.

    Returns:
        True if both are the same GPU, or if this process sees the other GPU and it is a CUDA peer
            of `gpu`.
    """
    if gpu_uuid(gpu.index) == uuid:
        return True
    others = [index for index in range(num_gpus()) if gpu_uuid(index) == uuid]
    return any(runtime.deviceCanAccessPeer(gpu.index, other) for other in others)


def num_gpus() -> int:
    """Return the number of GPUs that this process sees.

    Raises:
        ConfigError: this process cannot use CUDA at all.
    """
    try:
        return int(runtime.getDeviceCount())
    except CUDARuntimeError as error:
        raise ConfigError(f"no CUDA device can be used: {error}") from error


def versions() -> tuple[int, int]:
    """Return the CUDA versions of driver and runtime, each as 1000 * major + 10 * minor."""
    return int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())


class PendingEvent:
    """The end of a copy, as an event that exists before the copy is submitted to CUDA.

    The lane's thread submits the copy later, and then sets the CUDA event with `submitted`.

    Args:
        progress: a condition that all events of a lane share. The lane's thread notifies it after a
            call of `submitted` or `failed`, to wake the threads that wait for the submission.
        line: a key that all events of a lane share. A poller handles the events of one lane in the
            order of `position`.
        position: number of the event among the lane's events.
    """

    __slots__ = ("_error", "_event", "_progress", "line", "position")

    def __init__(self, progress: threading.Condition, line: object, position: int) -> None:
        self._progress = progress
        self._event: Event | None = None
        self._error: TransferError | None = None
        self.line = line
        self.position = position

    def submitted(self, event: Event) -> None:
        """Set the CUDA event that is done when the copy is done.

        The thread that submits copies calls either this method or `failed`, once, while it has the
        lock of the condition `progress`.
        """
        self._event = event

    def failed(self, error: TransferError) -> None:
        self._error = error

    @property
    def is_done(self) -> bool:
        if self._event is not None:
            return self._event.is_done
        if self._error is not None:
            # Without with_traceback, each raise would add a traceback to the error.
            raise self._error.with_traceback(None)
        return False

    def wait_until_submitted(self, timeout_s: float) -> Event:
        """Block until the copy is submitted, and return its CUDA event.

        Raises:
            GateTimeoutError: the copy was not submitted within `timeout_s` seconds.
            TransferError: the copy could not be submitted.
        """
        if self._event is None:
            with self._progress:
                self._progress.wait_for(
                    lambda: self._event is not None or self._error is not None, timeout_s
                )
        if self._event is not None:
            return self._event
        if self._error is not None:
            raise self._error.with_traceback(None)
        raise GateTimeoutError(f"the copy was not submitted within {timeout_s:g} s")

    def block_until_done(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        event = self.wait_until_submitted(timeout_s)
        event.block_until_done(max(deadline - time.monotonic(), 0.0))


_SUCCESS, _NOT_READY = 0, 600

Raw = Any  # a stream, event or module of CuPy


class CudaEvent:
    """A point in a CUDA stream; done when the GPU has done the stream's work before it."""

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
        status: int = runtime.eventQuery(self.raw.ptr)  # returns the status, raises nothing
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
                raise GateTimeoutError(f"the GPU did not finish the copy within {timeout_s:g} s")
            time.sleep(min(nap_s, left_s))
            nap_s = min(nap_s * 1.5, 200e-6)


class CudaStream:
    """A stream of one GPU. Thread-safe; the calling thread's current GPU may be another one.

    Attributes:
        raw: CuPy's stream.
        address: the cudaStream_t.
    """

    def __init__(self, gpu: Gpu, raw: Raw) -> None:
        self._gpu = gpu
        self.raw = raw
        self.address = int(raw.ptr)
        self._line = object()
        self._num_events = 0
        self._waited_for: CudaEvent | None = None

    def record(self) -> CudaEvent:
        with self._gpu.bound():
            return self.record_bound()

    def record_bound(self) -> CudaEvent:
        """Record an event that is done when all work submitted to this stream so far is done.

        The caller must have made this GPU the thread's current one, with `Gpu.bound()`.
        """
        event = cupy.cuda.Event(block=False, disable_timing=True)
        event.record(self.raw)
        self._num_events += 1
        return CudaEvent(self._gpu, event, self._line, self._num_events)

    def wait(self, event: Event, timeout_s: float) -> None:
        """Let work that is submitted to this stream after the call start only when `event` is done.

        The call itself blocks in two cases. If the event's copy is not submitted to the GPU yet,
        the call blocks until it is submitted. If the event belongs to a device of another kind, the
        call blocks until the event is done.

        Args:
            event: the event to wait for.
            timeout_s: largest time for which the call blocks, in seconds.

        Raises:
            GateTimeoutError: the call could not return within `timeout_s` seconds.
            TransferError: the work of `event` has failed.
        """
        deadline = time.monotonic() + timeout_s
        if isinstance(event, PendingEvent):
            event = event.wait_until_submitted(timeout_s)
        if isinstance(event, CudaEvent):
            with self._gpu.bound():
                self.wait_bound(event)
        else:
            event.block_until_done(max(deadline - time.monotonic(), 0.0))

    def wait_bound(self, event: CudaEvent) -> None:
        """Let work that is submitted to this stream later start only after `event`; return at once.

        The caller must have made this GPU the thread's current one, with `Gpu.bound()`.
        """
        if event is not self._waited_for:  # layers of one unit have the same event
            self.raw.wait_event(event.raw)
            self._waited_for = event

    def synchronize(self) -> None:
        with self._gpu.bound():
            self.raw.synchronize()


def new_stream(gpu: Gpu, *, is_urgent: bool) -> CudaStream:
    """Return a new stream that does not wait for the legacy default stream.

    Args:
        gpu: the GPU.
        is_urgent: True to let the GPU start the stream's kernels before kernels that are queued in
            streams without this setting.
    """
    with gpu.bound():
        return CudaStream(gpu, cupy.cuda.Stream(non_blocking=True, priority=-5 if is_urgent else 0))


def adopted_stream(gpu: Gpu, address: int) -> CudaStream:
    """Wrap a CUDA stream that another object owns and must keep until this stream is unused.

    Args:
        gpu: the GPU of the stream.
        address: the cudaStream_t; 0 for the legacy default stream.
    """
    with gpu.bound():
        return CudaStream(gpu, _foreign(gpu, address) if address else cupy.cuda.Stream.null)


class _Foreign:
    """A CUDA stream in the form in which CuPy accepts streams of other libraries."""

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


@cache
def _module() -> Raw:
    source = resources.files("tierkv.gpu").joinpath("csrc/planes.cu").read_text("utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))


class Argument:
    """The argument of a kernel: a struct that is passed by value.

    Attributes:
        values: the struct; it may be changed after each launch.
        address: address of the array of argument pointers that a launch needs.
    """

    def __init__(self, struct: npt.NDArray[np.void]) -> None:
        self.values = struct
        self._places = np.array([struct.ctypes.data], np.uint64)
        # Address of an array with the address of the kernel's only argument.
        self.address = int(self._places.ctypes.data)


class Kernel:
    """A kernel of csrc/planes.cu on one GPU.

    Its only argument is a struct that is passed by value.
    """

    def __init__(self, gpu: Gpu, name: str) -> None:
        with gpu.bound():
            # CuPy compiles a source once for each kind of GPU and keeps the result on disk.
            self._function: Any = _module().get_function(name).kernel

    def launch(
        self, argument: Argument, *, num_ctas: int, num_threads: int, stream: CudaStream
    ) -> None:
        """Launch the kernel on the calling thread's current GPU, which `Gpu.bound` sets.

        Args:
            argument: the kernel's argument, which may be changed as soon as this call returns.
            num_ctas: number of thread blocks.
            num_threads: number of threads of each thread block.
            stream: the stream to which the kernel is submitted.
        """
        cupy_driver.launchKernel(
            self._function.ptr,
            *(num_ctas, 1, 1),
            *(num_threads, 1, 1),
            0,
            stream.address,
            argument.address,
            0,
        )
