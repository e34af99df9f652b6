"""CuPy and the driver over the stand-in of stand_in.py: the names that tierkv uses, and no others.

For a process of its own: `install()` comes before anything imports CuPy.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.gpu.stand_in import INVALID_VALUE, NOT_READY, NOT_REGISTERED, CUDAError, Gpu, Steps

_current = threading.local()


class _OutOfMemoryError(MemoryError):
    pass


class _Pointer:
    """What CuPy calls a MemoryPointer."""

    def __init__(self, memory: Any, offset: int) -> None:
        self.memory, self.address = memory, memory.ptr + offset


class _Unowned:
    def __init__(self, address: int, size: int, owner: object) -> None:
        self.ptr, self.owner = address, owner


class _View:
    """Keeps what it shows, for as long as NumPy keeps it."""

    def __init__(self, shape: Any, strides: Any, pointer: _Pointer) -> None:
        self.pointer = pointer
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "|u1",
            "data": (pointer.address, False),
            "strides": strides,
        }


def _array(shape: Any, _dtype: Any, pointer: _Pointer, strides: Any) -> Any:
    return np.asarray(_View(shape, strides, pointer))


def install(seed: int) -> Gpu:
    """Put all of it in the place of CuPy and of the driver, for the rest of this process."""
    gpu = Gpu(random.Random(seed))
    for module in _modules(gpu):
        sys.modules[module.__name__] = module
    library = Library(gpu)
    real = ctypes.CDLL

    def opened(name: str | None, *rest: Any, **options: Any) -> Any:
        return library if name == "libcuda.so.1" else real(name, *rest, **options)

    ctypes.CDLL = opened  # type: ignore[misc, assignment]
    return gpu


class Tensor:
    """An engine's, uint8 [num_blocks, block_bytes], at an address of the GPU's memory, and at once
    what CuPy makes of it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.shape, self.strides, self.ndim, self.dtype = shape, (shape[1], 1), 2, np.dtype("u1")
        self.device, self.data = SimpleNamespace(id=0), SimpleNamespace(ptr=address)
        self.__cuda_array_interface__ = {"data": (address, False)}


def _modules(gpu: Gpu) -> list[ModuleType]:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    runtime, driver = _runtime(gpu), _driver(gpu)
    memory = ModuleType("cupy.cuda.memory")
    vars(memory).update(OutOfMemoryError=_OutOfMemoryError)
    vars(cuda).update(
        runtime=runtime,
        driver=driver,
        memory=memory,
        Memory=_memory(gpu),
        MemoryPointer=_Pointer,
        UnownedMemory=_Unowned,
        Event=_event(gpu, runtime),
        Stream=_stream(gpu, runtime),
    )
    vars(cupy).update(
        cuda=cuda,
        uint8=np.uint8,
        ndarray=_array,
        from_dlpack=np.from_dlpack,
        asarray=lambda tensor: tensor,
        RawModule=_module(driver),
    )
    return [cupy, cuda, runtime, driver, memory]


def _memory(gpu: Gpu) -> type:
    class Memory:
        ptr = 0

        def __init__(self, size: int) -> None:
            gpu.check("malloc")
            self.ptr, self.size = gpu.allocate(size), size

        def __del__(self) -> None:
            if self.ptr:
                gpu.free(self.ptr)

    return Memory


def _event(gpu: Gpu, runtime: Any) -> type:
    class Event:
        ptr = 0

        def __init__(self, **_: Any) -> None:
            gpu.check("event")
            self.ptr = gpu.new_id()
            runtime.events[self.ptr] = False

        def record(self, stream: Any) -> None:
            gpu.check("record")

            def steps() -> Steps:
                runtime.events[self.ptr] = True
                yield from ()

            gpu.submit(stream.ptr, steps())

    return Event


def _stream(gpu: Gpu, runtime: Any) -> type:
    class Stream:
        null: Any

        def __init__(self, **_: Any) -> None:
            gpu.check("stream")
            self.ptr = gpu.new_id()

        def wait_event(self, event: Any) -> None:
            gpu.check("wait")
            gpu.submit(self.ptr, iter(()), lambda: bool(runtime.events[event.ptr]))

        def synchronize(self) -> None:
            gpu.check("synchronize")
            gpu.wait_until_idle(self.ptr)

    Stream.null = Stream()
    Stream.null.ptr = 0
    return Stream


def _module(driver: Any) -> type:
    class Function:
        def __init__(self, name: str) -> None:
            self.kernel, self.ptr = self, len(driver.kernels)
            driver.kernels.append(name)

    class RawModule:
        def __init__(self, **_: Any) -> None:
            pass

        def get_function(self, name: str) -> Function:
            return Function(name)

    return RawModule


def _driver(gpu: Gpu) -> ModuleType:
    driver: Any = ModuleType("cupy.cuda.driver")
    driver.kernels = []

    def launch(function: int, *arguments: int) -> None:
        *grid, _, stream, parameters, _ = arguments
        gpu.check("launch")
        assert all(size > 0 for size in grid), "CUDA refuses an empty grid"
        address = ctypes.c_uint64.from_address(parameters).value
        gpu.submit(stream, gpu.kernel(driver.kernels[function], address))

    driver.CUDADriverError = CUDAError
    driver.launchKernel = launch
    return driver  # type: ignore[no-any-return]


def _runtime(gpu: Gpu) -> ModuleType:
    runtime: Any = ModuleType("cupy.cuda.runtime")
    runtime.events = {}  # whether they are done; none is recorded twice

    def device_synchronize() -> None:
        gpu.check("synchronize")
        gpu.wait_until_idle()

    def event_query(event: int) -> int:
        return gpu.lost or (0 if runtime.events[event] else NOT_READY)

    def properties(_index: int) -> dict[str, Any]:
        gpu.check("properties")
        return {"name": b"stand-in", "multiProcessorCount": 4, "uuid": bytes(range(1, 20))}

    def write(target: int, source: int, size: int, _kind: int) -> None:
        gpu.check("memcpy")
        ctypes.memmove(target, source, size)

    def rectangle(
        target: int, pitch: int, source: int, width: int, row_bytes: int, rows: int, *rest: int
    ) -> None:
        gpu.check("copy")
        for address, step in ((target, pitch), (source, width)):
            if not gpu.is_reachable(address, (rows - 1) * step + row_bytes):
                raise CUDAError(INVALID_VALUE)  # CUDA refuses to cross allocations
        places = ((target + row * pitch, source + row * width) for row in range(rows))
        gpu.submit(rest[-1], gpu.pieces([(*place, row_bytes) for place in places]))

    def copy(target: int, source: int, size: int, _kind: int, stream: int) -> None:
        gpu.check("copy")
        gpu.submit(stream, gpu.pieces([(target, source, size)]))

    def set_device(index: int) -> None:
        _current.device = index

    vars(runtime).update(
        CUDARuntimeError=CUDAError,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDefault=4,
        getDevice=lambda: getattr(_current, "device", 0),
        setDevice=set_device,
        getDeviceCount=lambda: 1,
        getDeviceProperties=properties,
        deviceSynchronize=device_synchronize,
        deviceGetPCIBusId=lambda _index: "0000:01:00.0",
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        memGetInfo=lambda: (1 << 30, 1 << 30),
        eventQuery=event_query,
        memcpy=write,
        memcpyAsync=copy,
        memcpy2DAsync=rectangle,
        streamSynchronize=gpu.wait_until_idle,
        pointerGetAttributes=lambda _address: SimpleNamespace(device=0),
    )
    return runtime  # type: ignore[no-any-return]


class Library:
    """The driver's, as tierkv.gpu.driver calls it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def cuMemcpyBatchAsync_v2(self, *arguments: Any) -> int:  # noqa: N802 - CUDA's name
        targets, sources, sizes, count, _, _, _, stream = arguments
        columns = [
            list((ctypes.c_uint64 * count.value).from_address(one.value))
            for one in (targets, sources, sizes)
        ]
        pieces = list(zip(*columns, strict=True))
        self._gpu.random.shuffle(pieces)
        status = self._gpu.status("copy")
        if not status:
            self._gpu.submit(stream.value, self._gpu.pieces(pieces))
        return status

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        status = self._gpu.status("copy")
        if not status:
            piece = (target.value, source.value, size.value)
            self._gpu.submit(stream.value, self._gpu.pieces([piece]))
        return status

    def cuMemHostRegister_v2(self, address: Any, size: Any, _flags: Any) -> int:  # noqa: N802
        return self._gpu.status("register") or self._gpu.register(address.value, size.value)

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        found = self._gpu.registered.pop(address.value, None)
        return self._gpu.status("unregister") or (NOT_REGISTERED if found is None else 0)

    def cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> int:  # noqa: N802
        found = self._gpu.allocation_of(address.value)
        if found is None:
            return INVALID_VALUE
        for told, value in zip((start, size), found, strict=True):
            ctypes.cast(told, ctypes.POINTER(ctypes.c_uint64)).contents.value = value
        return 0

    def cuDevicePrimaryCtxGetState(self, *_: Any) -> int:  # noqa: N802
        return 0
