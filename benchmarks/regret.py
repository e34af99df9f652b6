"""Fetch or compute: what requests take at real nodes whose Redis is far away, in real time.

    python benchmarks/regret.py [--quick] [--json] [--requests 40] [--compute 0.1 0.3 1 2.4]
        [--delays 0 0.02 0.06 0.09 0.3 0.6] [--model] [--stall 2]

A node is a process that is asked over HTTP; between it and a real Redis a proxy delays each answer.
For each time that an engine takes to compute 2,400 tokens, and each delay: a fetch that is waited
for whatever it takes, computing, and the requests of a node that decides (best_effort) and knows
nothing at first, from the tenth on. All prompts are in Redis. The engine tells nothing: it is
observed from admission to commit, which this benchmark asks for as an engine does. With --model the
node computes with the reference model instead, and its engine tells its speed. With --stall Redis
answers nobody for so many seconds when the 16th request begins; those from the 23rd on are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.api import SERVE
from benchmarks.bench import Row, row, show
from tests.redis_proxy import Proxy, redis_proxy
from tests.redis_server import RedisServer, redis_server

NUM_TOKENS, SIZE, LEARNING = 2400, 16, 10
STALLED_AT, FEW = 15, 7
REFERENCE = "import sys; from tierkv.cli import main; sys.argv[1:] = ['serve']; main()"


class Node:
    """One process. computes_s: what its engine takes for a whole prompt, None for a node that
    computes itself."""

    def __init__(self, url: str, http: aiohttp.ClientSession, computes_s: float | None) -> None:
        self.url, self.http, self.computes_s = url, http, computes_s

    async def post(self, path: str, **body: object) -> dict[str, Any]:
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def takes(self, number: int, *, uses_cache: bool = True) -> float:
        """How long a request takes until its prompt is committed; or, of a node that computes
        itself, has its first token."""
        loop = asyncio.get_running_loop()
        body = {"tokens": prompt_of(number), "use_cache": uses_cache}
        began = loop.time()
        if self.computes_s is None:
            await self.post("/v1/generate", max_tokens=1, **body)
            return loop.time() - began
        here = await self.post("/v1/requests", request_id=f"r{number}", max_new_tokens=0, **body)
        rest = NUM_TOKENS - here["cached_tokens"]
        await asyncio.sleep(self.computes_s * rest / NUM_TOKENS)
        await self.post(f"/v1/requests/r{number}/commit")
        took_s = loop.time() - began
        await self.post(f"/v1/requests/r{number}/finish")
        return took_s


def prompt_of(number: int) -> list[int]:
    return [(7 * at + number) % 251 for at in range(NUM_TOKENS)]


@asynccontextmanager
async def node(
    url: str, computes_s: float | None, policy: str = "best_effort", hidden: int = 64
) -> AsyncIterator[Node]:
    """A node that has nothing and knows nothing."""
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
        *(sys.executable, "-c", REFERENCE if computes_s is None else SERVE),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {f"TIERKV_{name}": str(value) for name, value in settings.items()},
    )
    try:
        assert child.stdout is not None, "it is a pipe"
        address = (await child.stdout.readline()).decode().split()[-1]
        async with aiohttp.ClientSession() as http:
            yield Node(address, http, computes_s)
    finally:
        child.terminate()
        await child.wait()


async def fill(redis: RedisServer, num_prompts: int, computes_s: float | None, hidden: int) -> None:
    redis.execute("FLUSHALL")
    async with node(redis.url, computes_s, hidden=hidden) as filler:
        for number in range(num_prompts):
            await filler.takes(number)


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
    async with node(redis.url, computes_s, hidden=hidden) as computing:
        took = [await computing.takes(at, uses_cache=False) for at in range(5)][1:]
    whole = row(f"computing: {statistics.median(took) * 1e3:.0f} ms", [s * 1e3 for s in took], "ms")
    rows = [whole]
    for proxy.latency_s in chosen.delays:
        about = f"{proxy.latency_s * 1e3:.0f} ms a call"
        async with node(proxy.url, computes_s, "wait_complete", hidden) as waiting:
            took = [await waiting.takes(at) for at in range(4)][1:]
        fetch = row(f"{about}: fetch, whatever it takes", [s * 1e3 for s in took], "ms")
        async with node(proxy.url, computes_s, hidden=hidden) as deciding:
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
            row(what, [mean_ms], "ms", against=best, most=1.1 + 20 / best.value),
            row(f"{about}: the first ten together", [sum(took[:LEARNING]) * 1e3], "ms"),
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
