"""What goes on beside a transfer: the engine's own copies, and a model's first layers."""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.gpu.cuda import WAIT_S, cupy_or_skip, opened
from tierkv.cache.layout import attention_layout
from tierkv.gpu.protocol import Direction
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda import new_stream
from tierkv.gpu.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

LAYOUT = attention_layout(
    num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=64
)


@pytest.fixture
def cupy() -> ModuleType:
    return cupy_or_skip()


@pytest.mark.parametrize("num_bytes", [8, 1 << 20])
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_copy_of_the_engines_own_does_not_wait_for_the_end_of_a_transfer(
    cupy: ModuleType, direction: Direction, num_bytes: int
) -> None:
    """A table that goes up beside a load, a token that comes down beside an offload."""
    device = CudaDevice()
    blocks = 128  # 1 GiB: 19 ms over PCIe 5
    runtime = cupy.cuda.runtime
    stream = cupy.cuda.Stream(non_blocking=True)
    small, there = cupy.cuda.alloc_pinned_memory(num_bytes), cupy.zeros(num_bytes, cupy.uint8)
    target, source, kind = there.data.ptr, small.ptr, runtime.memcpyHostToDevice
    if direction is Direction.OFFLOAD:
        target, source, kind = source, target, runtime.memcpyDeviceToHost
    ids = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    came_in = 0
    with opened(device, device.allocate_planes(LAYOUT, blocks), blocks, direction) as on:
        on.host.wait_until_pinned()
        for _ in range(10):
            end = on.submit(direction, ids, ids)[-1]
            time.sleep(0.003)
            runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)
            stream.synchronize()
            came_in += not end.is_done
            end.block_until_done(WAIT_S)
    assert came_in >= 8


def test_the_reference_model_computes_its_first_layers_while_the_last_are_loaded(
    cupy: ModuleType,
) -> None:
    config = ModelConfig(
        num_layers=8, num_heads=8, num_kv_heads=8, head_dim=128, kv_dtype="bfloat16"
    )
    model = ReferenceModel(config, LAYOUT.block_size, cupy)
    layout = model.layout
    device = CudaDevice()
    blocks = (1 << 30) // layout.block_bytes  # 19 ms over PCIe 5
    planes = device.allocate_planes(layout, blocks)
    every = np.arange(blocks, dtype=np.int32)
    slots = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    began, loaded = cupy.cuda.Event(), cupy.cuda.Event()
    reached: list[Any] = []  # what was computed before layer i
    arrived: list[Any] = []  # layer i is there

    def watch_end() -> None:
        watch.wait(events[-1], WAIT_S)
        loaded.record(watch.raw)

    def forward(*, waits: bool) -> None:
        def before_layer(layer: int) -> None:
            if waits:
                reached.append(cupy.cuda.Event())
                reached[-1].record()
                device.compute_stream.wait(events[layer], WAIT_S)
                arrived.append(cupy.cuda.Event())
                arrived[-1].record()

        with device.computing():
            model.forward(
                tokens=np.arange(1, dtype=np.int32),
                start=1000,
                block_table=np.arange(64),
                planes=planes.arrays,
                before_layer=before_layer,
            )

    def at_ms(event: object) -> float:
        return float(cupy.cuda.get_elapsed_time(began, event))

    with opened(device, planes, blocks, Direction.LOAD) as on:
        on.host.wait_until_pinned()
        watch = new_stream(device.gpu, is_urgent=False)
        events = on.submit(Direction.LOAD, every[:0], every[:0])
        forward(waits=False)  # compiles what it needs
        began.record(watch.raw)
        events = on.submit(Direction.LOAD, slots, every)
        thread = threading.Thread(target=watch_end)
        thread.start()
        forward(waits=True)
        thread.join(WAIT_S)
        device.gpu.synchronize()
    assert len(reached) == layout.num_layers > 1
    assert at_ms(reached[1]) < at_ms(loaded)  # layer 0 is computed before all is there
    assert at_ms(arrived[0]) < at_ms(loaded) / 2
    assert at_ms(arrived[-1]) > 0.95 * at_ms(loaded)  # and the last one is not begun before
