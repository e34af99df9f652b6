"""Time to the first token of long prompts on a GPU: computed, from Host, half from Host.

    python benchmarks/gpu_ttft.py [--json] [--quick] [--tokens 2048 32768 65536] [--reps 7]

Needs a CUDA GPU of 48 GB or more, CuPy and PyTorch. An 8B decoder (gpu_decoder.py) with random
weights over a whole Service: each hit is admitted, matched, loaded layer by layer through its
LayerGate, and its last token computed (gpu_one_token.py). The limit is one contiguous pinned copy
of the bytes that a hit loads, in the same run, in turn. No first token comes before the last layer
and the choice of the token have followed the last byte, nor before the pass of one token is over:
so a second share is of the copy and that end, or of a hit on the device, which loads nothing,
whichever is longer. A figure is wall time, its median over repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import statistics
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import uvloop

from benchmarks.bench import Row, row, show
from benchmarks.gpu_decoder import BLOCK_SIZE, DIM, KV_HEADS, LAYERS, Decoder, check_attention
from benchmarks.gpu_one_token import OneToken, check_one_token
from tests.sessions import begin_request
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import attention_layout
from tierkv.cache.node import Tier
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import Request
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service

torch: ModuleType = importlib.import_module("torch")

PATIENCE_S = 60.0
LAYOUT = attention_layout(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    dtype="bfloat16",
    item_bytes=2,
    block_size=BLOCK_SIZE,
)
Tokens = Any  # np.ndarray of int64


@dataclass
class Bench:
    service: Service
    decoder: Decoder
    stream: Any  # PyTorch's, which is the device's compute stream
    cupy_stream: Any  # the same one
    engine: ThreadPoolExecutor  # one thread, where that stream is PyTorch's current one
    count: int = 0
    # Before and after each wait of the last run that measured them, on its stream.
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    admission_ms: float = 0.0  # of the last request

    @property
    def exposed_ms(self) -> float:
        """How long kernels stood still for layers that had not arrived, when last measured."""
        torch.cuda.synchronize()
        return float(sum(before.elapsed_time(after) for before, after in self.waits))

    async def admitted(self, tokens: Tokens, *, uses_cache: bool = True) -> Request:
        self.count += 1
        prompt = Prompt(pack(tokens), BLOCK_SIZE)
        return await begin_request(
            self.service, f"r{self.count}", prompt, max_new_tokens=0, uses_cache=uses_cache
        )

    def end(self, request: Request) -> None:
        self.service.scheduler.end(request, after=(self.service.device.compute_stream.record(),))

    async def computed(
        self,
        request: Request,
        tokens: Tokens,
        one_token: OneToken | None = None,
        *,
        measures_waits: bool = False,
    ) -> int:
        """Everything that is not cached; the first token."""
        call = partial(self._compute, request, tokens, one_token, measures_waits=measures_waits)
        return await asyncio.get_running_loop().run_in_executor(self.engine, call)

    def _compute(
        self,
        request: Request,
        tokens: Tokens,
        one_token: OneToken | None,
        *,
        measures_waits: bool,
    ) -> int:
        """On the engine's thread."""
        compute = self.service.device.compute_stream

        def wait(layer: int) -> None:
            request.gate.wait_on(compute, layer, PATIENCE_S)

        def measured_wait(layer: int) -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            wait(layer)
            after.record()
            self.waits.append((before, after))

        before_layer = measured_wait if measures_waits else wait
        if measures_waits:
            self.waits = []
        start = request.cached_tokens
        if one_token is not None:
            assert start == len(tokens) - 1, f"{start} tokens are cached"
            return one_token.forward(int(tokens[-1]), request.block_table, before_layer)
        rest = torch.from_numpy(tokens[start:]).to("cuda")
        table = torch.from_numpy(request.block_table.astype(np.int64)).to("cuda")
        return self.decoder.forward(rest, start, table, before_layer)

    async def first_token(
        self,
        tokens: Tokens,
        *,
        uses_cache: bool = True,
        one_token: OneToken | None = None,
        measures_waits: bool = False,
    ) -> tuple[float, int, int]:
        """Seconds, the token, and how many of `tokens` had to be loaded from Host."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        request = await self.admitted(tokens, uses_cache=uses_cache)
        self.admission_ms = (time.perf_counter() - began) * 1e3
        token = await self.computed(request, tokens, one_token, measures_waits=measures_waits)
        took = time.perf_counter() - began
        loaded = request.matched.host_tokens
        self.end(request)
        return took, token, loaded

    async def cache(self, tokens: Tokens) -> None:
        """Compute and commit, and wait until Host has it."""
        request = await self.admitted(tokens)
        await self.computed(request, tokens)
        after = (self.service.device.compute_stream.record(),)
        await self.service.scheduler.commit(request, pack(tokens), after=after)
        self.end(request)
        await self.settled()

    async def settled(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.service.tiers.work.num_tasks:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.002)

    async def leave_device(self) -> None:
        """Only Host has what is cached, except one block: a tier has one slot at least."""
        await self.settled()
        await self.service.resize(Tier.DEVICE, 1)
        await self.service.resize(Tier.DEVICE, self.service.settings.device_blocks)


class Limit:
    """One contiguous copy from pinned memory."""

    def __init__(self, num_bytes: int) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def __call__(self, num_bytes: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began


async def of_length(b: Bench, num_tokens: int, reps: int) -> list[Row]:
    rng = np.random.default_rng(num_tokens)
    tokens = rng.integers(0, 128_000, num_tokens)
    other = np.concatenate([tokens[: num_tokens // 2], rng.integers(0, 128_000, num_tokens // 2)])
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    with torch.cuda.stream(b.stream):
        one_token = OneToken(b.decoder, num_tokens - 1, num_blocks, b.cupy_stream)
    limit = Limit(num_tokens * LAYOUT.block_bytes // BLOCK_SIZE)
    await b.cache(tokens)
    samples: dict[str, list[float]] = {}
    answers: dict[str, set[int]] = {}

    async def add(name: str, measured: Awaitable[tuple[float, int, int]], of: str) -> int:
        took, token, loaded = await measured
        samples.setdefault(name, []).append(took * 1e3)
        answers.setdefault(of, set()).add(token)
        return loaded

    async def load_only(of: Tokens) -> float:
        began = time.perf_counter()
        request = await b.admitted(of)
        await request.gate.all_layers(PATIENCE_S)
        took = time.perf_counter() - began
        b.end(request)
        return took

    for rep in range(reps + 1):
        if rep == 1:
            samples.clear()  # the first round warms up
        if rep <= 2:
            await add("computed", b.first_token(tokens, uses_cache=False), "computed")
        await b.first_token(tokens, one_token=one_token)
        hit = b.first_token(tokens, one_token=one_token)
        await add("on the device already", hit, "hit")
        await b.leave_device()
        hit = b.first_token(tokens, one_token=one_token)
        loaded = await add("hit on Host", hit, "hit")
        samples.setdefault("admission", []).append(b.admission_ms)
        num_bytes = loaded * LAYOUT.block_bytes // BLOCK_SIZE
        assert num_bytes > (num_tokens - 3 * BLOCK_SIZE) * LAYOUT.block_bytes // BLOCK_SIZE
        samples.setdefault("limit", []).append(limit(num_bytes) * 1e3)
        with torch.cuda.stream(b.stream):
            samples.setdefault("end", []).append(one_token.end_ms())
        await b.leave_device()
        await b.first_token(tokens, one_token=one_token, measures_waits=True)
        samples.setdefault("exposed by a hit", []).append(b.exposed_ms)
        if rep <= 3:
            await b.leave_device()
            half = b.first_token(other, measures_waits=True)
            half_loaded = await add("half a hit", half, "half")
            samples.setdefault("exposed", []).append(b.exposed_ms)
            await add("half on the device already", b.first_token(other), "half")
            await b.leave_device()
            samples.setdefault("load of half", []).append(await load_only(other) * 1e3)
            assert abs(half_loaded - num_tokens // 2) <= BLOCK_SIZE, "half of it was cached"
    # The same kernels over the same bytes give the same token, loaded or not.
    assert all(len(tokens) == 1 for tokens in answers.values()), f"a torn load: {answers}"
    return _rows(f"{num_tokens // 1024}k", samples)


def _rows(name: str, samples: dict[str, list[float]]) -> list[Row]:
    rows = []
    base = row(f"{name}, limit: a contiguous copy of the hit's bytes", samples["limit"], "ms")
    rows.append(base)
    hit = row(f"{name}, first token, hit on Host", samples["hit on Host"], "ms", against=base)
    rows.append(hit)
    took, device, copied = (
        samples["hit on Host"],
        samples["on the device already"],
        samples["limit"],
    )
    floor = [
        max(copy + end, pass_)
        for copy, end, pass_ in zip(copied, samples["end"], device, strict=True)
    ]
    rows += [
        row(f"{name}, share of the limit", _shares(copied, took), "%"),
        row(f"{name}, first token, on the device already", device, "ms"),
        row(f"{name}, last layer and choice of the token, on the GPU", samples["end"], "ms"),
        row(
            f"{name}, share of the limit and these, or of a hit on the device",
            _shares(floor, took),
            "%",
        ),
        row(f"{name}, hit on Host: its admission", samples["admission"], "ms"),
        row(f"{name}, hit on Host: kernels waited for layers", samples["exposed by a hit"], "ms"),
    ]
    rows.append(row(f"{name}, first token, computed", samples["computed"], "ms", against=hit))
    exposed = statistics.median(samples["exposed"])
    load = statistics.median(samples["load of half"])
    rows.append(row(f"{name}, half a hit: first token", samples["half a hit"], "ms"))
    rows.append(
        row(
            f"{name}, half a hit: with the half on the device",
            samples["half on the device already"],
            "ms",
        )
    )
    rows.append(row(f"{name}, half a hit: its load alone", samples["load of half"], "ms"))
    rows.append(row(f"{name}, half a hit: kernels waited for layers", samples["exposed"], "ms"))
    hidden = 100 * (1 - exposed / load)
    rows.append(row(f"{name}, half a hit: share of the load hidden", [hidden], "%"))
    return rows


def _shares(least: list[float], took: list[float]) -> list[float]:
    return [100 * one / other for one, other in zip(least, took, strict=True)]


async def measure(lengths: list[int], reps: int) -> list[Row]:
    stream = torch.cuda.Stream()
    device = CudaDevice(compute_stream=stream.cuda_stream)
    num_blocks = 3 * max(lengths) // BLOCK_SIZE // 2 + 64
    service = Service(
        device,
        Fingerprint("8b", LAYOUT),
        CacheSettings(
            block_size=BLOCK_SIZE,
            device_blocks=num_blocks,
            host_blocks=num_blocks,
            host_write=WritePolicy.WRITE_THROUGH,
        ),
        HandoffSettings(),
        None,
    )
    rows = []
    async with service.running():
        decoder = Decoder(service.planes.arrays)
        check_attention()
        with torch.cuda.stream(stream):
            error = check_one_token(decoder, device.compute_stream.raw)
        rows.append(row("parameters", [decoder.num_parameters / 1e9], "billion"))
        rows.append(row("pass of one token, apart from PyTorch's", [100 * error], "%"))
        with ThreadPoolExecutor(1, initializer=lambda: torch.cuda.set_stream(stream)) as engine:
            b = Bench(service, decoder, stream, device.compute_stream.raw, engine)
            for num_tokens in lengths:
                rows += await of_length(b, num_tokens, reps)
                service.reset()
                torch.cuda.empty_cache()
    device.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the shortest prompt: a minute")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--reps", type=int)
    chosen = parser.parse_args()
    tokens = chosen.tokens or ([2048] if chosen.quick else [2048, 32768, 65536])
    reps = chosen.reps or (3 if chosen.quick else 7)
    show(uvloop.run(measure(tokens, reps)), as_json=chosen.json)


if __name__ == "__main__":
    main()
