"""Time to the first token of long prompts on a GPU: computed, from Host, half from Host.

    python benchmarks/gpu_ttft.py [--json] [--tokens 2048 32768 65536] [--reps 7]

Needs a CUDA GPU of 48 GB or more, CuPy and PyTorch. An 8B decoder (gpu_decoder.py) with random
weights over a whole Service: each hit is admitted, matched, loaded layer by layer through its
LayerGate, and its last token computed. The limit is one contiguous pinned copy of the bytes that a
hit loads, in the same run, in turn. No first token comes before the pass of one token is over
either, so a second share is of whichever is longer: that copy, or a hit on the device, which loads
nothing. A figure is wall time, its median over repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import uvloop

from benchmarks.bench import Row, row, show
from benchmarks.gpu_decoder import BLOCK_SIZE, DIM, KV_HEADS, LAYERS, Decoder, OneToken
from benchmarks.gpu_decoder import check_attention as check
from tierkv.cache.fingerprint import Fingerprint
from tierkv.cache.keys import Prompt
from tierkv.cache.layout import attention_layout
from tierkv.cache.node import Tier
from tierkv.cache.tokens import pack
from tierkv.cache.write_policy import WritePolicy
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
    count: int = 0
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # of the last run, on its stream
    admission_ms: float = 0.0  # of the last request

    @property
    def exposed_ms(self) -> float:
        """How long the last run's kernels stood still for layers that had not arrived."""
        torch.cuda.synchronize()
        return float(sum(before.elapsed_time(after) for before, after in self.waits))

    async def admitted(self, tokens: Tokens, *, uses_cache: bool = True) -> Request:
        self.count += 1
        prompt = Prompt(pack(tokens), BLOCK_SIZE)
        return await self.service.admit(
            f"r{self.count}", prompt, max_new_tokens=0, uses_cache=uses_cache
        )

    def end(self, request: Request) -> None:
        self.service.end(request, after=(self.service.device.compute_stream.record(),))

    def run(self, request: Request, on_device: Tokens, one_token: OneToken | None) -> int:
        """On the compute thread: everything that is not cached; the first token."""
        compute = self.service.device.compute_stream

        def before_layer(layer: int) -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            request.gate.wait_on(compute, layer, PATIENCE_S)
            after.record()
            self.waits.append((before, after))

        self.waits = []
        with torch.cuda.stream(self.stream):
            start = request.cached_tokens
            rest = on_device[start:]
            table = torch.from_numpy(request.block_table.astype(np.int64)).to("cuda")
            if one_token is not None:
                assert len(rest) == 1, f"{len(rest)} tokens are not cached"
                return one_token.forward(rest, table, before_layer)
            return self.decoder.forward(rest, start, table, before_layer)

    async def first_token(
        self, tokens: Tokens, *, uses_cache: bool = True, one_token: OneToken | None = None
    ) -> tuple[float, int, int]:
        """Seconds, the token, and how many of `tokens` had to be loaded from Host."""
        on_device = torch.from_numpy(tokens).to("cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        request = await self.admitted(tokens, uses_cache=uses_cache)
        self.admission_ms = (time.perf_counter() - began) * 1e3
        token = await asyncio.to_thread(self.run, request, on_device, one_token)
        took = time.perf_counter() - began
        loaded = request.matched.host_tokens
        self.end(request)
        return took, token, loaded

    async def cache(self, tokens: Tokens) -> None:
        """Compute and commit, and wait until Host has it."""
        request = await self.admitted(tokens)
        await asyncio.to_thread(self.run, request, torch.from_numpy(tokens).to("cuda"), None)
        after = (self.service.device.compute_stream.record(),)
        await self.service.commit(request, pack(tokens), after=after)
        self.end(request)
        await self.settled()

    async def settled(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.service.tiers.num_tasks:  # noqa: ASYNC110 - it has no event
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
    with torch.cuda.stream(b.stream):
        one_token = OneToken(b.decoder, num_tokens - 1, -(-num_tokens // BLOCK_SIZE))
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
        samples.setdefault("exposed by a hit", []).append(b.exposed_ms)
        samples.setdefault("admission", []).append(b.admission_ms)
        num_bytes = loaded * LAYOUT.block_bytes // BLOCK_SIZE
        assert num_bytes > (num_tokens - 3 * BLOCK_SIZE) * LAYOUT.block_bytes // BLOCK_SIZE
        samples.setdefault("limit", []).append(limit(num_bytes) * 1e3)
        await b.leave_device()
        await add("hit on Host, no graphs", b.first_token(tokens), "no graphs")
        if rep <= 3:
            await b.leave_device()
            half_loaded = await add("half a hit", b.first_token(other), "half")
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
    no_graphs = samples["hit on Host, no graphs"]
    rows.append(
        row(f"{name}, first token, hit on Host, no CUDA graphs", no_graphs, "ms", against=base)
    )
    best = [min(took) for took in zip(samples["hit on Host"], no_graphs, strict=True)]
    device = samples["on the device already"]
    rows += [
        row(f"{name}, share of the limit", _shares(samples["limit"], best), "%"),
        row(f"{name}, first token, on the device already", device, "ms"),
        row(
            f"{name}, share of the longer of the limit and a hit on the device",
            _shares([max(both) for both in zip(samples["limit"], device, strict=True)], best),
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
        check()
        rows.append(row("parameters", [decoder.num_parameters / 1e9], "billion"))
        b = Bench(service, decoder, stream)
        for num_tokens in lengths:
            rows += await of_length(b, num_tokens, reps)
            service.reset()
            torch.cuda.empty_cache()
    device.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 32768, 65536])
    parser.add_argument("--reps", type=int, default=7)
    chosen = parser.parse_args()
    show(uvloop.run(measure(chosen.tokens, chosen.reps)), as_json=chosen.json)


if __name__ == "__main__":
    main()
