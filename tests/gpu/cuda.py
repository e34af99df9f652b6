"""A GPU for tests, lanes of it, and a latch that holds a stream of it until the test lets go."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from tierkv.cache.layout import Layout
from tierkv.gpu.protocol import BlockCopy, Direction, Event, Ids, Lane, Planes
from tierkv.gpu.units import Order

if TYPE_CHECKING:  # they need CuPy
    from tierkv.gpu.cuda_device import CudaDevice
    from tierkv.gpu.cuda_memory import CudaPlanes
    from tierkv.gpu.pinned import PinnedSlots

Bytes2D = npt.NDArray[np.uint8]
ROOT = Path(__file__).parents[2]
WAIT_S = 30.0

_HOLD = r"""
// Spins until the word in mapped host memory is no longer 0: holds its stream for as long.
extern "C" __global__ void hold(const volatile int* word) {
    while (*word == 0) __nanosleep(1000);
}
"""


def cupy_or_skip() -> ModuleType:
    module: ModuleType = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    return module


@cache
def _hold_kernel(cupy: ModuleType) -> Any:
    return cupy.RawKernel(_HOLD, "hold")


@contextmanager
def held(cupy: ModuleType, stream: object) -> Iterator[Callable[[], None]]:
    """`stream` (CuPy's) does nothing from now on until what is yielded is called, and never longer
    than the body. Nothing is collected meanwhile: to free GPU memory, of an earlier test say, waits
    for every kernel, this one too."""
    memory = cupy.cuda.alloc_pinned_memory(4)
    word = np.frombuffer(memory, np.int32, 1)
    word[0] = 0

    def release() -> None:
        word[0] = 1

    kernel = _hold_kernel(cupy)
    gc.collect()
    gc.disable()
    kernel((1,), (1,), (np.uint64(memory.ptr),), stream=stream)
    try:
        yield release
    finally:
        release()
        gc.enable()


@dataclass
class Lanes:
    """What `opened` has opened."""

    device: CudaDevice
    planes: CudaPlanes
    host: PinnedSlots
    lanes: dict[Direction, Lane]

    def submit(self, way: Direction, slots: Ids, blocks: Ids, *after: Event) -> tuple[Event, ...]:
        return self.lanes[way].submit(BlockCopy(way, slots, blocks, after))

    def copy(self, way: Direction, slots: Ids, blocks: Ids) -> None:
        """And wait for it."""
        self.submit(way, slots, blocks)[-1].block_until_done(WAIT_S)


@contextmanager
def opened(
    device: CudaDevice,
    planes: CudaPlanes,
    num_slots: int,
    *ways: Direction,
    order: Order | None = None,
) -> Iterator[Lanes]:
    """Host slots and lanes of the device, of both ways unless some are named; afterwards all is
    closed, the planes and the device too."""
    with ExitStack() as stack:
        stack.callback(device.close)
        stack.callback(planes.close)
        host = device.allocate_host(planes.layout, num_slots)
        stack.callback(host.close)
        lanes: dict[Direction, Lane] = {}
        for way in ways or Direction:
            if order is None:
                lanes[way] = device.open_lane(way, planes, host)
            else:
                lanes[way] = device.open_ordered_lane(way, planes, host, order)
            stack.callback(lanes[way].close)
        yield Lanes(device, planes, host, lanes)


def write_plane(cupy: ModuleType, planes: Planes, index: int, rows: Bytes2D) -> None:
    planes.arrays[index][...] = cupy.asarray(rows)
    cupy.cuda.runtime.deviceSynchronize()


def read_plane(cupy: ModuleType, planes: Planes, index: int) -> Bytes2D:
    cupy.cuda.runtime.deviceSynchronize()
    rows: Bytes2D = cupy.asnumpy(planes.arrays[index])
    return rows


def blocks_of(cupy: ModuleType, planes: Planes) -> Bytes2D:
    """Every block in the order of a host slot, uint8 [num_blocks, block_bytes]."""
    return np.concatenate(
        [read_plane(cupy, planes, index) for index in range(len(planes.layout.planes))], axis=1
    )


def write_blocks(cupy: ModuleType, planes: Planes, blocks: Bytes2D) -> None:
    layout: Layout = planes.layout
    for index, (plane, start) in enumerate(zip(layout.planes, layout.offsets, strict=True)):
        write_plane(cupy, planes, index, blocks[:, start : start + plane.block_bytes])


def run_python(script: str, *arguments: str) -> str:
    """What it prints, in a process of its own; an error of it is one of the test."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
