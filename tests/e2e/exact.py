"""A node without HTTP, and the bytes and tokens that a single node without a cache would have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from tests.latch import until
from tests.sessions import begin_request
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.engine import GenerateRequest, Generation, Sampling
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device
from tierkv.pd.settings import HandoffSettings
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings, ReferenceEngine
from tierkv.refmodel.model import ReferenceModel, encode, sample
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.protocol import Store

BLOCK_SIZE = 16
CONFIG = ModelConfig(max_positions=16_384)
MODEL = ReferenceModel(CONFIG, BLOCK_SIZE)
Bytes = npt.NDArray[np.uint8]


def fresh_connections() -> aiohttp.TCPConnector:
    """One for each request: while `truth` computes, the test's loop stands still, and a node closes
    what has been idle for 10 s; a POST over what was kept would find it closed."""
    return aiohttp.TCPConnector(force_close=True)


@dataclass(frozen=True)
class Truth:
    """What a single node computes from the first token on, in planes of its own.

    kv: for each plane, uint8 [tokens, bytes of a token], of the prompt.
    """

    tokens: tuple[int, ...]
    kv: list[Bytes]


def truth(
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling | None = None,
    *,
    model: ReferenceModel = MODEL,
    xp: ModuleType = np,
) -> Truth:
    """xp: the model's array module."""
    sampling = sampling or Sampling()
    total = len(prompt) + num_tokens
    num_blocks = -(-total // BLOCK_SIZE)
    planes = [xp.full((num_blocks, p.block_bytes), 0xFF, np.uint8) for p in model.layout.planes]
    table = np.arange(num_blocks)
    out: list[int] = []
    feed, start = np.array(prompt, np.int32), 0
    while True:
        logits = model.forward(
            tokens=feed,
            start=start,
            block_table=table,
            planes=planes,
            before_layer=lambda _: None,
        )
        start += len(feed)
        out.append(sample(logits, sampling, start))
        if len(out) >= num_tokens:
            break
        feed = np.array(out[-1:], np.int32)
    return Truth(tuple(out), [rows_of(plane, table, len(prompt)) for plane in planes])


def rows_of(plane: Any, table: npt.NDArray[np.integer], num_tokens: int) -> Bytes:
    """uint8 [num_tokens, bytes of a token] of the tokens that `table` places in `plane`."""
    if not isinstance(plane, np.ndarray):
        plane = plane.get()  # from the GPU
    rows: Bytes = plane[table].reshape(len(table) * BLOCK_SIZE, -1)
    return rows[:num_tokens].copy()


class ExactNode:
    """Service and engine; `generate` as an engine's user would, `cached` reads bytes back."""

    def __init__(self, service: Service, engine: ReferenceEngine) -> None:
        self.service = service
        self.engine = engine
        self._count = 0

    def job(
        self, prompt: Sequence[int], num_tokens: int, sampling: Sampling | None = None
    ) -> GenerateRequest:
        self._count += 1
        return GenerateRequest(
            f"request-{self._count}", pack(prompt), num_tokens, sampling or Sampling()
        )

    async def generate(
        self, prompt: Sequence[int], num_tokens: int, sampling: Sampling | None = None
    ) -> Generation:
        return await self.engine.generate(self.job(prompt, num_tokens, sampling))

    async def cached(self, prompt: Sequence[int]) -> list[Bytes]:
        """The KV bytes that the cache hands to a request for `prompt`, from wherever they are."""
        self._count += 1
        request = await begin_request(
            self.service,
            f"probe-{self._count}",
            Prompt.of(list(prompt), BLOCK_SIZE),
            max_new_tokens=0,
        )
        try:
            await request.gate.all_layers(10)
            count = request.cached_tokens
            arrays = self.service.planes.arrays
            return [rows_of(array, request.block_table, count) for array in arrays]
        finally:
            self.service.scheduler.end(request)

    async def settle(self) -> None:
        """Nothing runs any more, and the books are right."""
        await until(lambda: self.service.tiers.work.num_tasks == 0, "an idle node")
        assert self.service.stats().running_requests == 0
        assert self.service.verify() == []

    async def where(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Blocks of `prompt` on the device and on the host only."""
        match = self.service.index.match(Prompt.of(list(prompt), BLOCK_SIZE))
        return match.device_blocks, match.host_blocks


@asynccontextmanager
async def exact_node(
    store: Store | None,
    *,
    device_blocks: int = 256,
    host_blocks: int = 512,
    host_write: WritePolicy = WritePolicy.WRITE_BACK,
    storage_write: WritePolicy = WritePolicy.NONE,
    fetch_policy: FetchPolicy = FetchPolicy.BEST_EFFORT,
    device: Device | None = None,
    handoff: HandoffSettings | None = None,
    model: ReferenceModel = MODEL,
) -> AsyncIterator[ExactNode]:
    """A running node; its books must be in order at the end, as `Service.running` checks."""
    device = device or CpuDevice()
    service = Service(
        device,
        Fingerprint("exact", model.layout),
        CacheSettings(
            block_size=BLOCK_SIZE,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            host_write=host_write,
            storage_write=storage_write,
            fetch_policy=fetch_policy,
        ),
        handoff or HandoffSettings(),
        store,
    )
    engine = ReferenceEngine(service, model, EngineSettings())
    async with service.running(), engine.running():
        yield ExactNode(service, engine)
    device.close()


@asynccontextmanager
async def exact_pair(
    open_store: Callable[[], Store], **settings: Any
) -> AsyncIterator[tuple[ExactNode, ExactNode]]:
    """A prefill and a decode node, each with a store of its own to one place, at rest at the end.

    settings: as of `exact_node`, of both.
    """
    async with (
        exact_node(open_store(), **settings) as prefill,
        exact_node(open_store(), **settings) as decode,
    ):
        yield prefill, decode
        await prefill.settle()
        await decode.settle()


def text(length: int, seed: int = 0) -> list[int]:
    """`length` tokens of words; another seed, another text from the first word on."""
    words = [
        *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
        *("while", "seven", "wizards", "sip", "black", "tea"),
    ]
    rng = np.random.default_rng(seed)
    prose = " ".join(words[i] for i in rng.integers(0, len(words), length))
    return [int(token) for token in encode(prose)[:length]]
