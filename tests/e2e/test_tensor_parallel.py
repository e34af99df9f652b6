"""Nodes whose heads are split over ranks: the tokens of a single node, whoever computed what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.exact import (
    BLOCK_SIZE,
    CONFIG,
    MODEL,
    ExactNode,
    fresh_connections,
    text,
    truth,
)
from tests.latch import until
from tests.processes import node, stop
from tests.redis_server import RedisServer, empty_redis, module_redis
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint
from tierkv.clock import SystemClock
from tierkv.engine import Sampling
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.ranked import RankedDevice
from tierkv.refmodel.engine import EngineSettings, ReferenceEngine
from tierkv.refmodel.model import ReferenceModel
from tierkv.refmodel.model import decode as decode_text
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store
from tierkv.transfer.tier import StorageOptions

__all__ = ["empty_redis", "module_redis"]
pytestmark = pytest.mark.timeout(600)

PAIRS = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)]
LENGTHS = (1, 15, 16, 17, 33, 100)


class Breaking:
    """Before every copy of one rank: nothing, or an error."""

    def __init__(self) -> None:
        self.is_broken = False

    def __call__(self, copy: BlockCopy) -> None:
        if self.is_broken:
            raise RuntimeError(f"this rank lost its {copy.direction.value}")


@asynccontextmanager
async def split_node(
    ranks: int, store: Store | None, *, device_blocks: int = 64, breaking: Breaking | None = None
) -> AsyncIterator[ExactNode]:
    devices = [CpuDevice() for _ in range(ranks - 1)] + [CpuDevice(before_copy=breaking)]
    scheme = CONFIG.shards(BLOCK_SIZE)
    device = RankedDevice(devices, scheme) if ranks > 1 else devices[0]
    service = Service(
        device,
        Fingerprint("exact", MODEL.layout),
        CacheSettings(
            block_size=BLOCK_SIZE,
            device_blocks=device_blocks,
            host_blocks=256,
            host_write=WritePolicy.WRITE_BACK,
            tensor_parallel=ranks,
        ),
        HandoffSettings(),
        store,
        storage=StorageOptions(scheme=scheme, peer_tensor_parallel=(1, 2, 4)),
    )
    model = ReferenceModel(CONFIG, BLOCK_SIZE, tensor_parallel=ranks)
    engine = ReferenceEngine(service, model, EngineSettings())
    async with service.running(), engine.running():
        yield ExactNode(service, engine)
    device.close()


@asynccontextmanager
async def split_pair(first: int, second: int) -> AsyncIterator[tuple[ExactNode, ExactNode]]:
    store = MemoryStore(MemorySettings(), SystemClock())
    async with split_node(first, store) as p, split_node(second, store) as d:
        yield p, d


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_a_split_node_says_what_a_single_one_does_from_every_tier(ranks: int) -> None:
    async with split_node(ranks, None, device_blocks=24) as here:
        for turn in range(3):
            for seed in range(4):  # more than the device holds, so blocks go down and come back
                prompt = text(150, seed=seed)
                generation = await here.generate(prompt, 8)
                assert generation.tokens == truth(prompt, 8).tokens, (turn, seed)
        assert here.service.stats().loaded_bytes > 0
        assert here.service.verify() == []


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_a_hand_off_between_sizes_is_exact(first: int, second: int) -> None:
    async with split_pair(first, second) as (p, d):
        for length in LENGTHS:
            prompt = text(length, seed=length)
            for sampling in (Sampling(), Sampling(temperature=0.8, seed=3, top_k=50)):
                ticket = f"{length}-{sampling.seed}"
                await p.engine.prefill(p.job(prompt, 1, sampling), ticket)
                generation, _ = await d.engine.decode(d.job(prompt, 10, sampling), ticket)
                assert generation.tokens == truth(prompt, 10, sampling).tokens
                assert generation.computed_tokens == 0
        assert p.service.verify() == d.service.verify() == []


async def test_a_rank_that_fails_is_named_and_its_blocks_are_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaking = Breaking()
    async with split_node(2, None, device_blocks=24, breaking=breaking) as here:
        prompts = [text(150, seed=seed) for seed in range(4)]
        for prompt in prompts:
            await here.generate(prompt, 2)
        await until(lambda: here.service.tiers.work.num_tasks == 0, "an idle node")
        breaking.is_broken = True
        for prompt in prompts:
            generation = await here.generate(prompt, 5)
            assert generation.tokens == truth(prompt, 5).tokens
        assert here.engine.stats.failed_loads > 0
        assert "rank 1" in caplog.text
        breaking.is_broken = False
        for prompt in prompts:
            generation = await here.generate(prompt, 5)
            assert generation.tokens == truth(prompt, 5).tokens


# Real processes


def config(folder: Path, ranks: int) -> Path:
    path = folder / f"tp{ranks}.toml"
    path.write_text(
        f"[cache]\nblock_size = 16\ndevice_blocks = 256\nhost_blocks = 256\n"
        f"tensor_parallel = {ranks}\n"
    )
    return path


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.promise("Nodes of different tensor-parallel sizes read each other's blocks exactly.")
@pytest.mark.parametrize(("first", "second"), [(1, 2), (4, 2)])
async def test_processes_of_different_sizes_hand_over_exactly(
    first: int, second: int, empty_redis: RedisServer, tmp_path: Path
) -> None:
    url = empty_redis.url
    async with AsyncExitStack() as stack:
        connector = fresh_connections()
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        p, d = [
            await stack.enter_async_context(
                node(role, role=role, config=config(tmp_path, n), storage=url, folder=tmp_path)
            )
            for role, n in (("prefill", first), ("decode", second))
        ]
        for length in (1, 16, 33, 250):
            prompt = text(length, seed=length)
            body = {"prompt": decode_text(prompt), "ticket_id": str(length)}
            await post(http, f"{p.url}/v1/prefill", body)
            answer = await post(http, f"{d.url}/v1/decode", body | {"max_tokens": 8})
            assert tuple(answer["tokens"]) == truth(prompt, 8).tokens
            assert answer["computed_tokens"] == 0
        async with http.get(f"{d.url}/readyz?verbose") as response:
            assert response.status == 200
            parts = (await response.json())["parts"]
            assert ("ranks" in parts) == (second > 1)
            if second > 1:
                assert parts["ranks"] == {"status": "ok", "detail": f"all {second} ranks respond"}
        assert await stop(p.process) == await stop(d.process) == 0
