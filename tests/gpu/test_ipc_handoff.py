"""A prompt from one process's GPU memory to another's, and from storage whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.cuda import cupy_or_skip
from tests.pd.direct_producer import claim, no_leases, producer
from tierkv.clock import SystemClock
from tierkv.gpu.protocol import Ids, SharedPlanes
from tierkv.pd.direct.landing import OpenPlanes
from tierkv.pd.settings import HandoffSettings
from tierkv.storage.factory import StoreSettings, open_store

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.gpu.cuda_world import CudaWorld, cuda_world
from tierkv.gpu.cuda import num_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

COUNT, BLOCKS = 649, 40  # in blocks of 16, and a tail
CACHE = {"device_blocks": 128, "host_blocks": 128}
FROM_DEVICE = {"device": BLOCKS, "storage": 1}
FROM_STORAGE = {"storage": BLOCKS + 1}


@pytest.fixture
def url(tmp_path: Path) -> str:
    cupy_or_skip()
    return f"file://{tmp_path / 'store'}"


@asynccontextmanager
async def claimer(url: str, gpu: int = 0, **fields: Any) -> AsyncIterator[CudaWorld]:
    settings = HandoffSettings(**({"lookup_deadline_s": 100.0, "claim_deadline_s": 100.0} | fields))
    store = open_store(url, StoreSettings(), SystemClock())
    async with cuda_world(store=store, handoff=settings, gpu=gpu, **CACHE) as node:
        yield node
        assert node.service.device.failure is None


def on_gpu(url: str, **fields: Any) -> Any:
    return producer(url, device="cuda", cache=CACHE, **fields)


def counts(node: CudaWorld) -> dict[str, int]:
    handoff = node.service.stats().handoff
    found = {
        "device": handoff.device_blocks,
        "memory": handoff.memory_blocks,
        "storage": node.storage_stats.fetched_blocks,
    }
    return {name: count for name, count in found.items() if count}


async def test_by_itself_a_prompt_goes_from_gpu_memory_to_gpu_memory(url: str) -> None:
    async with claimer(url) as node:
        with on_gpu(url) as other:
            for number in range(3):
                await asyncio.to_thread(other.publish, COUNT, f"t{number}")
                await claim(node, COUNT, f"t{number}")
                assert counts(node)["device"] == (number + 1) * BLOCKS
                node.service.reset()
            assert counts(node) == {"device": 3 * BLOCKS, "storage": 3}
            await no_leases(other)


async def test_a_prompt_goes_from_one_gpu_to_another(url: str) -> None:
    if num_gpus() < 2:
        pytest.skip("this machine has one GPU")
    async with claimer(url, gpu=1) as node:
        with on_gpu(url) as other:
            await asyncio.to_thread(other.publish, COUNT, "t")
            await claim(node, COUNT)
            assert counts(node) == FROM_DEVICE
            await no_leases(other)


def hooked(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Around each reading of others' planes."""
    copy = OpenPlanes.copy

    def one(self: OpenPlanes, shared: SharedPlanes, source_ids: Ids, target_ids: Ids) -> None:
        before()
        for _ in range(20):  # long enough to be caught in the middle
            copy(self, shared, source_ids, target_ids)
        after()

    monkeypatch.setattr(OpenPlanes, "copy", one)


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_producer_that_is_killed_is_no_loss(
    url: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with claimer(url) as node:
        with on_gpu(url) as other:
            await asyncio.to_thread(other.publish, COUNT, "t")
            killer = threading.Timer(0.003, other.popen.kill)
            before = {"before": other.kill, "during": killer.start}.get(when, lambda: None)
            after = {"during": killer.join, "after": other.kill}.get(when, lambda: None)
            hooked(monkeypatch, before, after)
            await claim(node, COUNT)
            assert counts(node) == FROM_STORAGE
            assert node.service.stats().handoff.failed_direct_reads == 1
        with on_gpu(url) as other:  # and the next one is read as ever
            monkeypatch.undo()
            node.service.reset()
            await asyncio.to_thread(other.publish, COUNT, "again")
            await claim(node, COUNT, "again")
            assert counts(node)["device"] == BLOCKS


async def test_a_producer_that_ends_in_order_while_it_is_open_here_harms_nobody(url: str) -> None:
    async with claimer(url) as node:
        with on_gpu(url) as other:
            await asyncio.to_thread(other.publish, COUNT, "t")
            await claim(node, COUNT)
            assert other.popen.stdin is not None
            other.popen.stdin.close()
            assert await asyncio.to_thread(other.popen.wait, 30) == 0
        node.service.reset()
        await claim(node, COUNT)
        assert counts(node) == {"device": BLOCKS, "storage": 1 + BLOCKS + 1}
