"""Two GPUs in one process: each object works on its own GPU, both at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

import numpy as np
import pytest

from tests.gpu.cuda import WAIT_S, cupy_or_skip, opened, run_python
from tests.layouts import LAYOUTS
from tierkv.cache.layout import attention_layout
from tierkv.errors import LayoutError
from tierkv.gpu.protocol import Direction

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

LAYOUT = attention_layout(
    num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=64
)
BLOCKS = 64


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    module = cupy_or_skip()
    if module.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    yield module
    module.cuda.Device(0).use()  # a thread that has used only the second one stays there


def test_both_move_their_own_blocks_at_the_same_time(cupy: ModuleType) -> None:
    rng = np.random.default_rng(1)
    every = np.arange(BLOCKS, dtype=np.int32)
    into = every + np.int32(BLOCKS)
    with ExitStack() as stack:
        both = []
        for device in [CudaDevice(index) for index in range(2)]:
            planes = device.allocate_planes(LAYOUT, 2 * BLOCKS)
            on = stack.enter_context(opened(device, planes, 2 * BLOCKS))
            on.host.array[:BLOCKS] = rng.integers(0, 256, (BLOCKS, LAYOUT.block_bytes), np.uint8)
            both.append(on)
        for _ in range(30):
            ends = []
            orders = [rng.permutation(BLOCKS).astype(np.int32) for _ in both]
            for on, order in zip(both, orders, strict=True):
                on.host.array[BLOCKS:] = 0
                loaded = on.submit(Direction.LOAD, every, order)
                ends.append(on.submit(Direction.OFFLOAD, into, order, loaded[-1])[-1])
            for end in ends:
                end.block_until_done(WAIT_S)
            for on in both:
                assert np.array_equal(on.host.array[BLOCKS:], on.host.array[:BLOCKS])
        for on in both:
            where = cupy.cuda.runtime.pointerGetAttributes(on.planes.memory[0].address)
            assert where.device == on.device.gpu.index


def test_a_tensor_of_another_gpu_is_refused(cupy: ModuleType) -> None:
    device = CudaDevice(1)
    layout = LAYOUTS["mla"]
    with cupy.cuda.Device(0):
        tensors = [cupy.zeros((4, plane.block_bytes), cupy.uint8) for plane in layout.planes]
    with pytest.raises(LayoutError, match="GPU 0"):
        device.adopt_planes(layout, tensors)
    device.close()


_SECOND_ONLY = r"""
import asyncio
import numpy as np
from tests.layouts import LAYOUTS
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.driver import load_driver
from tierkv.transfer.mover import Mover

device = CudaDevice(1)
planes, host = device.allocate_planes(LAYOUTS["gqa"], 64), device.allocate_host(LAYOUTS["gqa"], 64)
host.array[:] = 5
ids = np.arange(32, dtype=np.int32)

async def move():
    mover = Mover(device, planes, host)
    async with mover.running():
        load = mover.load(ids, ids)
        gate = mover.gate([load])
        await asyncio.to_thread(gate.wait_on, device.compute_stream, 0, 20.0)
        await load.done()
        await mover.offload(ids + 32, ids).done()
        await mover.copy_within(ids[:4], ids[:4] + 32).done()

asyncio.run(move())
with device.computing():
    assert int(planes.arrays[0].max()) == 5
assert load_driver().has_context(1)
assert not load_driver().has_context(0), "the first GPU got a context, of 0.5 GB"
host.close()
planes.close()
device.close()
print("only there")
"""


def test_work_on_the_second_gpu_makes_no_context_on_the_first(cupy: ModuleType) -> None:
    assert "only there" in run_python(_SECOND_ONLY)
