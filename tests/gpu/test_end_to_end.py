"""A whole node on the GPU: the same tokens and the same KV bytes as without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.e2e.exact import BLOCK_SIZE, Bytes, ExactNode, Truth, exact_node, text, truth
from tests.gpu.cuda import cupy_or_skip
from tierkv.clock import SystemClock
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Store

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

NEW = 12


class GpuModel:
    """Nodes of one model on the GPU, and the truth of the same model in planes of its own."""

    def __init__(self, cupy: ModuleType, kv_dtype: str) -> None:
        self._cupy = cupy
        config = ModelConfig(kv_dtype=kv_dtype, max_positions=4096)  # type: ignore[arg-type]
        self._model = ReferenceModel(config, BLOCK_SIZE, cupy)

    def node(
        self, store: Store | None = None, *, device_blocks: int = 64
    ) -> AbstractAsyncContextManager[ExactNode]:
        return exact_node(
            store,
            device_blocks=device_blocks,
            fetch_policy=FetchPolicy.WAIT_COMPLETE,
            device=CudaDevice(),
            model=self._model,
        )

    def truth(self, prompt: Sequence[int]) -> Truth:
        return truth(prompt, NEW, model=self._model, xp=self._cupy)


async def push_off_the_gpu(node: ExactNode, prompt: Sequence[int]) -> None:
    for seed in range(100, 140):
        await node.generate(text(400, seed), 1)
        on_device, _ = await node.where(prompt)
        if not on_device:
            return
    pytest.fail("the prompt stayed on the GPU")


def same_bytes(found: Sequence[Bytes], expected: Sequence[Bytes]) -> bool:
    return all(
        np.array_equal(ours, theirs[: len(ours)])
        for ours, theirs in zip(found, expected, strict=True)
    )


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def model(request: pytest.FixtureRequest) -> GpuModel:
    return GpuModel(cupy_or_skip(), request.param)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 250])
async def test_cold_warm_and_host_hits_agree_with_a_node_without_cache(
    model: GpuModel, length: int
) -> None:
    prompt = text(length)
    expected = model.truth(prompt)
    async with model.node() as node:
        cold = await node.generate(prompt, NEW)
        warm = await node.generate(prompt, NEW)
        assert cold.tokens == warm.tokens == expected.tokens
        assert warm.matched.device_tokens == length - 1
        assert same_bytes(await node.cached(prompt), expected.kv)
        await push_off_the_gpu(node, prompt)
        hit = await node.generate(prompt, NEW)
        assert hit.tokens == expected.tokens
        if length > BLOCK_SIZE:
            assert hit.matched.host_tokens > 0
        assert same_bytes(await node.cached(prompt), expected.kv)


async def test_blocks_outlive_a_sleep_in_which_the_gpus_memory_is_given_back(
    model: GpuModel,
) -> None:
    prompt = text(250)
    expected = model.truth(prompt)
    async with model.node(device_blocks=4096) as node:
        await node.generate(prompt, NEW)
        device = node.service.device
        assert isinstance(device, CudaDevice)
        awake, _ = device.gpu.memory_info()
        await node.service.sleep()
        asleep, _ = device.gpu.memory_info()
        assert asleep > awake
        await node.service.wake()
        hit = await node.generate(prompt, NEW)
        assert hit.tokens == expected.tokens
        assert hit.matched.host_tokens == len(prompt) - 1
        assert same_bytes(await node.cached(prompt), expected.kv)


async def test_a_prompt_is_handed_over_between_two_nodes_on_the_gpu(
    model: GpuModel, tmp_path: Path
) -> None:
    def store() -> Store:
        return open_store(f"file://{tmp_path}", StoreSettings(), SystemClock())

    prompt = text(250)
    expected = model.truth(prompt)
    async with model.node(store()) as node:
        await node.engine.prefill(node.job(prompt, NEW), "ticket")
    async with model.node(store()) as node:
        generation, _ = await node.engine.decode(node.job(prompt, NEW), "ticket")
        assert generation.tokens == expected.tokens
        assert generation.computed_tokens == 0
        assert same_bytes(await node.cached(prompt), expected.kv)
