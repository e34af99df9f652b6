"""A rank of an engine as a process: `engine_rank.py PATH RANK FOLDER NUM_BLOCKS DEVICE`.

Its planes are files, or tensors on GPU number DEVICE that are written from and read into files. It
reads a `StepMessage` a line, and answers each with what has finished.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tests.latch import PATIENCE_S, CopyLatch, ManualEvent
from tests.world import GQA
from tierkv.embed import Finished, WorkerPlanes
from tierkv.gpu.cpu import CpuDevice
from tierkv.ranks.link import Plan
from tierkv.ranks.memory import EnginePlanes


class StepMessage(msgspec.Struct, kw_only=True):
    """after: the event, by name, that this step's kernels end with; none has ended already. ended:
    events that end now. holds: whether copies wait from now on. writes, reads: the planes, from or
    into the files."""

    saves: list[Plan] = []
    loads: list[Plan] = []
    after: str | None = None
    ended: list[str] = []
    holds: bool | None = None
    closes: bool = False
    writes: bool = False
    reads: bool = False


def shard_planes(folder: Path, rank: int, num_blocks: int) -> list[np.ndarray]:
    """uint8 [num_blocks, block_bytes] for each plane of GQA."""
    arrays = []
    for index, plane in enumerate(GQA.planes):
        path = folder / f"rank-{rank}-plane-{index}"
        shape = (num_blocks, plane.block_bytes)
        arrays.append(np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=shape))
    return list(arrays)


class _OnGpu:
    """Tensors in allocations of their own."""

    def __init__(self, index: int, files: Sequence[np.ndarray], latch: CopyLatch) -> None:
        import cupy  # noqa: PLC0415 - where there is a GPU

        from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415

        self._cupy, self._files = cupy, files
        self.device = CudaDevice(index, before_copy=latch)
        with cupy.cuda.Device(index):
            pointers = [cupy.cuda.MemoryPointer(cupy.cuda.Memory(one.nbytes), 0) for one in files]
            self._tensors = [
                cupy.ndarray(one.shape, cupy.uint8, pointer)
                for one, pointer in zip(files, pointers, strict=True)
            ]
        self.planes = self.device.adopt_planes(GQA, self._tensors)

    def write(self) -> None:
        with self.device.computing():
            for file, tensor in zip(self._files, self._tensors, strict=True):
                tensor[...] = self._cupy.asarray(file)

    def read(self) -> None:
        with self.device.computing():
            for file, tensor in zip(self._files, self._tensors, strict=True):
                file[:] = self._cupy.asnumpy(tensor)


def main(path: str, rank: str, folder: str, num_blocks: str, device: str) -> None:
    logging.basicConfig()
    latch, events = CopyLatch(), dict[str, ManualEvent]()
    files = shard_planes(Path(folder), int(rank), int(num_blocks))
    gpu = None if device == "cpu" else _OnGpu(int(device), files, latch)
    if gpu is None:
        planes = WorkerPlanes(CpuDevice(latch), EnginePlanes(GQA, files), rank=int(rank))
    else:
        planes = WorkerPlanes(gpu.device, gpu.planes, rank=int(rank))
    planes.connect(path, PATIENCE_S)
    for line in sys.stdin.buffer:
        step = msgspec.json.decode(line, type=StepMessage)
        if gpu is not None and step.writes:
            gpu.write()
        if gpu is not None and step.reads:
            gpu.read()
        if step.holds is not None:
            (latch.hold if step.holds else latch.release)()
        after = [] if step.after is None else [events.setdefault(step.after, ManualEvent())]
        for plan in step.loads:
            planes.start_loads(plan, after)
        for plan in step.saves:
            planes.start_saves(plan, after)
        for name in step.ended:
            events[name].finish()
        if step.closes:
            planes.close()
        answer: list[Finished] = planes.finished()
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
