"""An engine that owns its KV on GPUs: in this process, or a rank in each of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.embed.engine import until
from tests.embed.tp_engine import engine
from tests.gpu.cuda import blocks_of, cupy_or_skip, held, write_blocks
from tests.latch import PATIENCE_S
from tests.world import BLOCK
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import attention_layout
from tierkv.embed import EngineCache, EngineCacheSettings, RankSocket, WorkerPlanes
from tierkv.gpu.protocol import Planes
from tierkv.ranks.link import Plan
from tierkv.sched.settings import CacheSettings

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

LAYOUT = attention_layout(
    num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=16
)
NUM_BLOCKS, SAVED = 512, 256  # blocks of 2 MiB: 512 MiB are saved, and loaded into others
TOKENS = list(range(3 * BLOCK + 1))
HERE, THERE = [0, 1, 2, 3], [8, 9, 10, 11]


@pytest.fixture
def cupy() -> ModuleType:
    return cupy_or_skip()


@pytest.mark.promise("Ranks on GPUs move their own tensors through shared host slots.")
@pytest.mark.parametrize("gpus", [["0"], ["0", "0"], ["0", "1"]])
def test_ranks_in_other_processes_save_and_load_their_own_tensors(
    cupy: ModuleType, tmp_path: Path, gpus: list[str]
) -> None:
    if int(max(gpus)) >= cupy.cuda.runtime.getDeviceCount():
        pytest.skip("needs two GPUs")
    first, second = TOKENS[: 2 * BLOCK], list(range(900, 900 + 2 * BLOCK))
    with engine(tmp_path, gpus, workers_first=True) as on:
        on.compute(TOKENS, HERE)
        on.save("a", TOKENS, HERE)
        assert on.lookup("b", TOKENS).num_tokens == len(TOKENS)
        on.load("b", THERE)
        assert on.hold(TOKENS, THERE)
        on.compute(second, [0, 1])  # a plan comes before what it saves has been written
        on.step(saves=[on.plan_to_save("c", first, [0, 1])], after="step")
        on.compute([7 * token for token in first], [0, 1])
        on.step(ended=["step"])
        on.until(lambda: ("c", 2) in on.seen.stored)


def tensors(cupy: ModuleType) -> list[object]:
    """Each in an allocation of its own, as an engine's are."""
    sizes = [(NUM_BLOCKS, plane.block_bytes) for plane in LAYOUT.planes]
    memory = [cupy.cuda.Memory(rows * width) for rows, width in sizes]
    return [
        cupy.ndarray(shape, cupy.uint8, cupy.cuda.MemoryPointer(one, 0))
        for shape, one in zip(sizes, memory, strict=True)
    ]


@pytest.mark.promise("An engine's step waits on its stream, not on the host.")
@pytest.mark.parametrize("through", ["process", "socket"])
def test_an_engine_s_steps_are_ordered_by_its_stream_and_never_wait_for_a_copy(
    cupy: ModuleType, tmp_path: Path, through: str
) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    device = CudaDevice(compute_stream=stream.ptr)
    planes = device.adopt_planes(LAYOUT, tensors(cupy))
    ranks = WorkerPlanes(device, planes)
    path = str(tmp_path / "s")
    reporting = [ranks] if through == "socket" else []
    with EngineCache(
        Fingerprint("model", LAYOUT),
        [LAYOUT],
        host_bytes=4 * SAVED * LAYOUT.block_bytes,
        cache=CacheSettings(block_size=LAYOUT.block_size),
        planes=ranks if through == "process" else None,
        ranks=RankSocket(path, [LAYOUT]) if through == "socket" else None,
        settings=EngineCacheSettings(save_blocks=SAVED, max_promised=1.0),
    ) as cache:
        if through == "socket":
            ranks.connect(path)
            until(lambda: ranks.is_attached)
        rng = np.random.default_rng(3)
        old, new = (
            rng.integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8) for _ in range(2)
        )
        write_blocks(cupy, planes, old)
        tokens = rng.integers(0, 1 << 30, SAVED * LAYOUT.block_size).tolist()
        prompt = Prompt(pack(tokens), LAYOUT.block_size)
        rows = [
            cupy.asarray(new[:, start : start + plane.block_bytes])
            for plane, start in zip(LAYOUT.planes, LAYOUT.offsets, strict=True)
        ]
        cupy.cuda.runtime.deviceSynchronize()
        with held(cupy, stream) as release, stream:
            for array, row in zip(planes.arrays, rows, strict=True):
                array[...] = row  # this step's kernels, which have not run yet
            plan = cache.save("a", prompt, [list(range(SAVED))])
            assert plan is not None
            started = time.monotonic()
            ranks.start_saves(plan)
            took_s = time.monotonic() - started
            for _ in range(200):
                assert ranks.finished() == []
            release()
        until_polled(cache, reporting, "stored")
        until(lambda: cache.lookup("b", prompt) is not None)
        there = list(range(SAVED, 2 * SAVED))
        plan = cache.load("b", [there])
        assert plan is not None
        assert took_s < 0.05
        seen = [cupy.zeros((SAVED, plane.block_bytes), cupy.uint8) for plane in LAYOUT.planes]
        with held(cupy, stream) as release, stream:
            ranks.start_loads(plan)  # after the step, which is held
            started = time.monotonic()
            wait_for_layers(ranks, plan, planes, seen)
            waited_s = time.monotonic() - started
            release()
        assert waited_s < 0.5, "the engine waits on its stream, not on the host"
        until_polled(cache, reporting, "loaded")
        stream.synchronize()
        assert np.array_equal(blocks_of(cupy, planes)[SAVED:], new[:SAVED])
        for plane, start, read in zip(LAYOUT.planes, LAYOUT.offsets, seen, strict=True):
            assert np.array_equal(read.get(), new[:SAVED, start : start + plane.block_bytes])
        ranks.close()
    planes.close()
    device.close()


def wait_for_layers(ranks: WorkerPlanes, plan: Plan, planes: Planes, seen: list[Any]) -> None:
    """A step's layers: each waits for its KV, and reads it. By copies alone: a kernel that is new
    to the GPU would wait for the one that holds the stream."""
    for layer, indices in enumerate(LAYOUT.planes_of_layer):
        ranks.wait_layer(plan.number, layer, PATIENCE_S)
        for index in indices:
            seen[index][...] = planes.arrays[index][SAVED:]


def until_polled(cache: EngineCache, ranks: Sequence[WorkerPlanes], what: str) -> None:
    """Until there is one of `stored` or `loaded`. ranks: those that report by the engine."""

    def has_come() -> bool:
        polled = cache.poll([report for rank in ranks for report in rank.finished()])
        assert all(failed == () for _, failed in polled.loaded)
        return bool(getattr(polled, what))

    until(has_come)
