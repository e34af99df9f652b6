"""A GPU's streams and events, and kernels launched into them, by CuPy."""

from __future__ import annotations

import time
from functools import cache
from importlib import resources
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import driver as cupy_driver
from cupy.cuda import runtime

from tierkv.errors import DeviceFailedError, GateTimeoutError
from tierkv.gpu.cuda import Gpu
from tierkv.gpu.driver import DriverError
from tierkv.gpu.pending import PendingEvent
from tierkv.gpu.protocol import Event

_SUCCESS, _NOT_READY = 0, 600

Raw = Any  # an object of CuPy that is no array: stream, event, module


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
        self._waited_for: CudaEvent | None = None

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
        if event is not self._waited_for:  # layers that came in one unit have one event
            self.raw.wait_event(event.raw)
            self._waited_for = event

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


@cache
def _module() -> Raw:
    source = resources.files("tierkv.gpu").joinpath("csrc/planes.cu").read_text("utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))


class Argument:
    """A struct that kernels take by value: `values` may be changed between launches."""

    def __init__(self, struct: npt.NDArray[np.void]) -> None:
        self.values = struct
        self._places = np.array([struct.ctypes.data], np.uint64)
        self.address = int(self._places.ctypes.data)  # of the array of arguments, which is this one


class Kernel:
    """One kernel of csrc/planes.cu on one GPU; its only argument is a struct, passed by value."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        with gpu.bound():
            # CuPy compiles once per kind of GPU and source, keeps it on disk, and loads it per GPU.
            self._function: Any = _module().get_function(name).kernel

    def launch(
        self, argument: Argument, *, num_ctas: int, num_threads: int, stream: CudaStream
    ) -> None:
        """Launch; the argument may be changed as soon as this returns. The GPU must be bound."""
        cupy_driver.launchKernel(
            self._function.ptr,
            *(num_ctas, 1, 1),
            *(num_threads, 1, 1),
            0,
            stream.address,
            argument.address,
            0,
        )
