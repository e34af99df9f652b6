"""A whole node on the GPU: the same tokens and the same KV bytes as without a cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from tests.e2e.exact import text
from tests.gpu.cuda import cupy_or_skip
from tests.sessions import begin_request
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.clock import SystemClock
from tierkv.engine import GenerateRequest, Generation, Sampling
from tierkv.pd.settings import HandoffSettings
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings, ReferenceEngine
from tierkv.refmodel.model import ReferenceModel, sample
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Store

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

BLOCK_SIZE, NEW = 16, 12
Bytes = npt.NDArray[np.uint8]


class GpuNode:
    """Service and engine over one GPU; the truth comes from the same model in planes of its own."""

    def __init__(self, cupy: ModuleType, kv_dtype: str) -> None:
        self.cupy = cupy
        config = ModelConfig(kv_dtype=kv_dtype, max_positions=4096)  # type: ignore[arg-type]
        self.model = ReferenceModel(config, BLOCK_SIZE, cupy)
        self._count = 0

    @asynccontextmanager
    async def running(
        self, store: Store | None = None, *, device_blocks: int = 64, host_blocks: int = 512
    ) -> AsyncIterator[GpuNode]:
        device = CudaDevice()
        self.service = Service(
            device,
            Fingerprint("exact", self.model.layout),
            CacheSettings(
                block_size=BLOCK_SIZE,
                device_blocks=device_blocks,
                host_blocks=host_blocks,
                host_write=WritePolicy.WRITE_BACK,
                fetch_policy=FetchPolicy.WAIT_COMPLETE,
            ),
            HandoffSettings(),
            store,
        )
        self.engine = ReferenceEngine(self.service, self.model, EngineSettings())
        async with self.service.running(), self.engine.running():
            yield self
        device.close()

    def job(self, prompt: Sequence[int], num_tokens: int = NEW) -> GenerateRequest:
        self._count += 1
        return GenerateRequest(f"request-{self._count}", pack(list(prompt)), num_tokens)

    async def generate(self, prompt: Sequence[int], num_tokens: int = NEW) -> Generation:
        return await self.engine.generate(self.job(prompt, num_tokens))

    async def cached(self, prompt: Sequence[int]) -> list[Bytes]:
        """KV bytes by token that the cache hands to a request for `prompt`."""
        self._count += 1
        request = await begin_request(
            self.service,
            f"probe-{self._count}",
            Prompt.of(list(prompt), BLOCK_SIZE),
            max_new_tokens=0,
        )
        try:
            await request.gate.all_layers(100.0)
            arrays = self.service.planes.arrays
            return self.rows(arrays, request.block_table, request.cached_tokens)
        finally:
            self.service.scheduler.end(request)

    def rows(
        self, planes: Sequence[Bytes], table: npt.NDArray[np.integer], num: int
    ) -> list[Bytes]:
        return [
            self.cupy.asnumpy(plane)[table].reshape(len(table) * BLOCK_SIZE, -1)[:num]
            for plane in planes
        ]

    def truth(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], list[Bytes]]:
        num_blocks = -(-(len(prompt) + NEW) // BLOCK_SIZE)
        planes = [
            self.cupy.full((num_blocks, plane.block_bytes), 0xFF, np.uint8)
            for plane in self.model.layout.planes
        ]
        table = np.arange(num_blocks)
        out: list[int] = []
        feed, start = np.array(prompt, np.int32), 0
        while len(out) < NEW:
            logits = self.model.forward(
                tokens=feed,
                start=start,
                block_table=table,
                planes=planes,
                before_layer=lambda _: None,
            )
            start += len(feed)
            out.append(sample(logits, Sampling(), start))
            feed = np.array(out[-1:], np.int32)
        return tuple(out), self.rows(planes, table, len(prompt))

    async def push_off_the_gpu(self, prompt: Sequence[int]) -> None:
        for seed in range(100, 140):
            await self.generate(text(400, seed), 1)
            match = self.service.index.match(Prompt.of(list(prompt), BLOCK_SIZE))
            if match.device_blocks == 0:
                return
        pytest.fail("the prompt stayed on the GPU")


def same_bytes(found: Sequence[Bytes], expected: Sequence[Bytes]) -> bool:
    return all(
        np.array_equal(ours, theirs[: len(ours)])
        for ours, theirs in zip(found, expected, strict=True)
    )


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def node(request: pytest.FixtureRequest) -> GpuNode:
    return GpuNode(cupy_or_skip(), request.param)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 250])
async def test_cold_warm_and_host_hits_agree_with_a_node_without_cache(
    node: GpuNode, length: int
) -> None:
    prompt = text(length)
    tokens, kv = node.truth(prompt)
    async with node.running():
        cold = await node.generate(prompt)
        warm = await node.generate(prompt)
        assert cold.tokens == warm.tokens == tokens
        assert warm.matched.device_tokens == length - 1
        assert same_bytes(await node.cached(prompt), kv)
        await node.push_off_the_gpu(prompt)
        hit = await node.generate(prompt)
        assert hit.tokens == tokens
        if length > BLOCK_SIZE:
            assert hit.matched.host_tokens > 0
        assert same_bytes(await node.cached(prompt), kv)


async def test_blocks_outlive_a_sleep_in_which_the_gpus_memory_is_given_back(
    node: GpuNode,
) -> None:
    prompt = text(250)
    tokens, kv = node.truth(prompt)
    async with node.running(device_blocks=4096):
        await node.generate(prompt)
        device = node.service.device
        assert isinstance(device, CudaDevice)
        awake, _ = device.gpu.memory_info()
        await node.service.sleep()
        asleep, _ = device.gpu.memory_info()
        assert asleep > awake
        await node.service.wake()
        hit = await node.generate(prompt)
        assert hit.tokens == tokens
        assert hit.matched.host_tokens == len(prompt) - 1
        assert same_bytes(await node.cached(prompt), kv)


async def test_a_prompt_is_handed_over_between_two_nodes_on_the_gpu(
    node: GpuNode, tmp_path: Path
) -> None:
    def store() -> Store:
        return open_store(f"file://{tmp_path}", StoreSettings(), SystemClock())

    prompt = text(250)
    tokens, kv = node.truth(prompt)
    async with node.running(store()):
        await node.engine.prefill(node.job(prompt), "ticket")
    async with node.running(store()):
        generation, _ = await node.engine.decode(node.job(prompt), "ticket")
        assert generation.tokens == tokens
        assert generation.computed_tokens == 0
        assert same_bytes(await node.cached(prompt), kv)
