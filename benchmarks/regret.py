"""Fetch or compute: what requests take whose Redis is far away, in real time.

    python benchmarks/regret.py [--quick] [--json] [--requests 40] [--compute 0.1 0.3 1 2.4]
        [--delays 0 0.02 0.06 0.09 0.3 0.6] [--model] [--stall 2]

Between a service in this process and a real Redis a proxy delays each answer. For each time that an
engine takes to compute 2,400 tokens, and each delay: a fetch that is waited for whatever it takes,
computing, and the requests of a service that decides (best_effort) and knows nothing at first, from
the tenth on. All prompts are in Redis. The engine tells nothing: it is observed from admission to
commit. With --model a node, a process of its own, computes with the reference model instead, and
its engine tells its speed. With --stall Redis answers nobody for so many seconds when the 16th
request begins; those from the 23rd on are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.api import SERVE
from benchmarks.bench import Row, row, show
from tests.redis_proxy import Proxy, redis_proxy
from tests.redis_server import RedisServer, redis_server
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import attention_layout
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.storage.factory import StoreSettings, open_guarded_store

NUM_TOKENS, SIZE, LEARNING = 2400, 16, 10
STALLED_AT, FEW = 15, 7
FILL_S = 60.0
LAYOUT = attention_layout(
    num_layers=4, num_kv_heads=4, head_dim=16, dtype="float32", item_bytes=4, block_size=SIZE
)


class Requests(Protocol):
    """A service or a node that serves requests."""

    async def takes(self, number: int, *, uses_cache: bool = True) -> float:
        """Return the seconds from the request of prompt `number` to its computed prompt."""
        ...


class Engine:
    """A service, and an engine that takes `computes_s` seconds for a whole prompt."""

    def __init__(self, service: Service, computes_s: float) -> None:
        self._service, self._computes_s = service, computes_s

    async def takes(self, number: int, *, uses_cache: bool = True) -> float:
        began = time.monotonic()
        prompt = Prompt.of(pack(prompt_of(number)), SIZE)
        session = Session(
            self._service, RequestSpec(f"r{number}", prompt, 0, uses_cache=uses_cache)
        )
        request = await session.admit()
        await session.loaded_or_recovered(60.0)
        rest = NUM_TOKENS - request.cached_tokens
        await asyncio.sleep(self._computes_s * rest / NUM_TOKENS)
        await session.commit(prompt.tokens)
        took_s = time.monotonic() - began
        session.end()
        return took_s


class Node:
    """A process of `tierkv serve`, asked over HTTP."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http

    async def takes(self, number: int, *, uses_cache: bool = True) -> float:
        began = time.monotonic()
        body = {"tokens": prompt_of(number), "use_cache": uses_cache, "max_tokens": 1}
        async with self.http.post(f"{self.url}/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return time.monotonic() - began


def prompt_of(number: int) -> list[int]:
    return [(7 * at + number) % 251 for at in range(NUM_TOKENS)]


@asynccontextmanager
async def requests_at(
    url: str, computes_s: float | None, policy: str = "best_effort", hidden: int = 64
) -> AsyncIterator[Requests]:
    """Run a service, or a node where `computes_s` is None, that has nothing and knows nothing."""
    if computes_s is None:
        async with node(url, policy, hidden) as running:
            yield running
        return
    cache = CacheSettings(
        block_size=SIZE,
        device_blocks=1024,
        host_blocks=1024,
        host_write=WritePolicy.WRITE_THROUGH,
        storage_write=WritePolicy.WRITE_THROUGH,
        fetch_policy=FetchPolicy(policy),
        fetch_deadline_s=60.0,
    )
    store = open_guarded_store(url, StoreSettings(), SystemClock())
    who = Fingerprint("regret", LAYOUT)
    device = CpuDevice()
    try:
        service = Service(device, who, cache, HandoffSettings(), store)
        async with service.running():
            yield Engine(service, computes_s)
    finally:
        device.close()


@asynccontextmanager
async def node(url: str, policy: str, hidden: int) -> AsyncIterator[Node]:
    settings = {
        "CACHE__BLOCK_SIZE": SIZE,
        "CACHE__DEVICE_BLOCKS": 1024,
        "CACHE__HOST_BLOCKS": 1024,
        "CACHE__HOST_WRITE": "write_through",
        "CACHE__STORAGE_WRITE": "write_through",
        "CACHE__FETCH_POLICY": policy,
        "CACHE__FETCH_DEADLINE_S": 60,
        "MODEL__HIDDEN": hidden,
        "NODE__PORT": 0,
        "STORAGE__URL": url,
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVE),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {f"TIERKV_{name}": str(value) for name, value in settings.items()},
    )
    try:
        assert child.stdout is not None, "it is a pipe"
        address = (await child.stdout.readline()).decode().split()[-1]
        async with aiohttp.ClientSession() as http:
            yield Node(address, http)
    finally:
        child.terminate()
        await child.wait()


async def fill(redis: RedisServer, num_prompts: int, computes_s: float | None, hidden: int) -> None:
    """Store all blocks of the prompts, one prompt at a time: the queue of writes is bounded."""
    redis.execute("FLUSHALL")
    async with requests_at(redis.url, computes_s, hidden=hidden) as filler:
        for number in range(num_prompts):
            await filler.takes(number)
            async with asyncio.timeout(FILL_S):
                while int(str(redis.execute("DBSIZE"))) < (number + 1) * NUM_TOKENS // SIZE:  # noqa: ASYNC110 - a server
                    await asyncio.sleep(0.01)


async def measured(
    redis: RedisServer,
    proxy: Proxy,
    chosen: argparse.Namespace,
    computes_s: float | None,
    hidden: int,
) -> list[Row]:
    """Of one engine: computing, and for each delay fetching and a node that decides."""
    num_requests = chosen.requests
    await fill(
        redis, num_prompts=num_requests, computes_s=None if computes_s is None else 0, hidden=hidden
    )
    proxy.latency_s = 0.0
    async with requests_at(redis.url, computes_s, hidden=hidden) as computing:
        took = [await computing.takes(at, uses_cache=False) for at in range(5)][1:]
    whole = row(f"computing: {statistics.median(took) * 1e3:.0f} ms", [s * 1e3 for s in took], "ms")
    rows = [whole]
    for proxy.latency_s in chosen.delays:
        about = f"{proxy.latency_s * 1e3:.0f} ms a call"
        async with requests_at(proxy.url, computes_s, "wait_complete", hidden) as waiting:
            took = [await waiting.takes(at) for at in range(4)][1:]
        fetch = row(f"{about}: fetch, whatever it takes", [s * 1e3 for s in took], "ms")
        async with requests_at(proxy.url, computes_s, hidden=hidden) as deciding:
            took = []
            for at in range(num_requests):
                if chosen.stall and at == STALLED_AT:
                    redis.execute("CLIENT", "PAUSE", int(chosen.stall * 1e3))
                took.append(await deciding.takes(at))
        first = STALLED_AT + FEW if chosen.stall else LEARNING
        best = min(fetch, whole, key=lambda one: one.value)
        mean_ms = statistics.mean(took[first:]) * 1e3
        what = f"{about}: mean after {first}, worst {max(took[first:]) * 1e3:.0f}"
        rows += [
            fetch,
            row(what, [mean_ms], "ms", against=best, most=1.15 + 50 / best.value),
            row(f"{about}: the first ten together", [sum(took[:LEARNING]) * 1e3], "ms"),
            row(
                f"{about}: mean of all {num_requests}",
                [statistics.mean(took) * 1e3],
                "ms",
                against=best,
                most=1.05,
            ),
        ]
        if chosen.stall:
            stalled = [s * 1e3 for s in took[STALLED_AT:first]]
            rows.append(row(f"{about}: the seven from the stall on", [sum(stalled)], "ms"))
    return rows


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--compute", type=float, nargs="*", default=[0.1, 0.3, 1.0, 2.4])
    delays = [0.0, 0.02, 0.06, 0.09, 0.3, 0.6]
    parser.add_argument("--delays", type=float, nargs="*", default=delays)
    parser.add_argument("--stall", type=float, default=0.0, help="seconds; 30 requests or more")
    parser.add_argument("--model", action="store_true", help="the node computes itself")
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 512], help="of its model")
    parser.add_argument("--quick", action="store_true", help="20 requests, 300 ms, two delays")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.requests, chosen.delays, chosen.compute, chosen.hidden = 20, [0.0, 0.2], [0.3], [64]
    engines: list[tuple[float | None, int]] = [(compute_s, 64) for compute_s in chosen.compute]
    if chosen.model:
        engines = [(None, hidden) for hidden in chosen.hidden]
    rows: list[Row] = []
    with redis_server() as redis:
        async with redis_proxy(redis.port) as proxy:
            for computes_s, hidden in engines:
                rows += await measured(redis, proxy, chosen, computes_s, hidden)
    show(rows, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
