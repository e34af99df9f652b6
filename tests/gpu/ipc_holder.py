"""A process that has planes on GPU 0 and lets others open them: a command per line of stdin.

    python -m tests.gpu.ipc_holder

{"layout": of ALL_LAYOUTS, "blocks": how many, "memory": "own", "pool", "async"} makes them anew,
with the bytes of `content`, and answers with what `share` gives.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.gpu.cuda import Bytes2D
from tests.layouts import ALL_LAYOUTS
from tests.preloaded import ForkedProgram
from tierkv.cache.layout import Layout
from tierkv.gpu.protocol import SharedPlane


def content(layout: Layout, num_blocks: int) -> Bytes2D:
    """uint8 [num_blocks, block_bytes]."""
    rng = np.random.default_rng(num_blocks)
    return rng.integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)


class Holder:
    """The process, as a test sees it."""

    def __init__(self) -> None:
        self.popen = ForkedProgram("tests.gpu.ipc_holder")

    def make(self, layout: str, blocks: int, memory: str = "own") -> tuple[SharedPlane, ...]:
        """Raises RuntimeError with the error of a share that failed."""
        work = {"layout": layout, "blocks": blocks, "memory": memory}
        self.popen.stdin.write(json.dumps(work).encode() + b"\n")
        answer = json.loads(self.popen.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return tuple(
            SharedPlane(base64.b64decode(handle), offset, stride)
            for handle, offset, stride in answer["planes"]
        )


@contextmanager
def holder() -> Iterator[Holder]:
    running = Holder()
    try:
        yield running
    finally:
        running.popen.kill()
        running.popen.communicate()


def _main() -> None:
    import cupy  # noqa: PLC0415 - the class above is for processes that may have none

    from tests.gpu.cuda import write_blocks  # noqa: PLC0415
    from tierkv.errors import ConfigError  # noqa: PLC0415
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415

    device = CudaDevice()
    sharing = device.sharing
    planes = None
    pools = {"pool": cupy.cuda.MemoryPool(), "async": cupy.cuda.MemoryAsyncPool()}
    for line in sys.stdin:
        work = json.loads(line)
        if planes is not None:
            planes.close()
        layout = ALL_LAYOUTS[work["layout"]]
        if work["memory"] == "own":
            planes = device.allocate_planes(layout, work["blocks"])
        else:
            with cupy.cuda.using_allocator(pools[work["memory"]].malloc):
                shapes = [(work["blocks"], plane.block_bytes) for plane in layout.planes]
                tensors = [cupy.empty(shape, cupy.uint8) for shape in shapes]
            planes = device.adopt_planes(layout, tensors)
        write_blocks(cupy, planes, content(layout, work["blocks"]))
        try:
            shared = [
                (base64.b64encode(one.handle).decode(), one.offset, one.stride)
                for one in sharing.share(planes)
            ]
            print(json.dumps({"planes": shared}), flush=True)  # noqa: T201 - it is its answer
        except ConfigError as error:
            print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
