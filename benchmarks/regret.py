"""Fetch or compute: what requests take on a real node whose store answers late, in real time.

    python benchmarks/regret.py [--quick] [--json] [--requests 40] [--compute 0.1 0.32 1]
        [--delays 0 0.02 0.06 0.09 0.15 0.2 0.3 0.6]

For each time that an engine takes to compute 2,400 tokens, and each delay of a call to the store: a
fetch that is waited for whatever it takes, computing, and the requests of a node that decides
(best_effort), whose engine tells its speed or tells nothing, from the tenth on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from benchmarks.bench import row, show
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import attention_layout
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetItem, GetOutcome

NUM_TOKENS = 2400
SIZE, LEARNING = 16, 10
LAYOUT = attention_layout(
    num_layers=2, num_kv_heads=1, head_dim=64, dtype="float16", item_bytes=2, block_size=SIZE
)


class LateStore(MemoryStore):
    """A memory store that takes `delay_s` longer for what a fetch asks of it."""

    delay_s = 0.0

    async def exists(self, names: Sequence[str]) -> int:
        await asyncio.sleep(self.delay_s)
        return await super().exists(names)

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        await asyncio.sleep(self.delay_s)
        return await super().get_into(items)


def prompt_of(number: int) -> Prompt:
    start = 10_000 * number
    return Prompt.of(list(range(start, start + NUM_TOKENS)), SIZE)


@asynccontextmanager
async def node(policy: FetchPolicy, delay_s: float, num_prompts: int) -> AsyncIterator[Service]:
    """A node whose store has every prompt, and which has none and knows nothing."""
    clock = SystemClock()
    store = LateStore(MemorySettings(), clock)
    settings = CacheSettings(
        block_size=SIZE,
        device_blocks=1024,
        host_blocks=1024,
        host_write=WritePolicy.WRITE_THROUGH,
        storage_write=WritePolicy.WRITE_THROUGH,
        fetch_policy=policy,
        fetch_deadline_s=60.0,
    )
    who = Fingerprint("regret", LAYOUT)
    service = Service(CpuDevice(), who, settings, HandoffSettings(), store, clock=clock)
    async with service.running():
        for number in range(num_prompts):
            prompt = prompt_of(number)
            request = await service.admit(f"f{number}", prompt, max_new_tokens=0, uses_cache=False)
            await service.commit(request, prompt.tokens)
            service.end(request)
            while service.tiers.work.num_tasks:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.001)
        service.reset()
        store.delay_s = delay_s
        yield service


async def takes(service: Service, number: int, compute_s: float, *, tells: bool) -> float:
    """How long a request takes until its prompt is committed. compute_s: of a whole one."""
    loop, prompt = asyncio.get_running_loop(), prompt_of(number)
    began = loop.time()
    request = await service.admit(f"r{number}", prompt, max_new_tokens=0)
    await request.gate.all_layers(20.0)
    rest = NUM_TOKENS - request.cached_tokens
    rest_s = compute_s * rest / NUM_TOKENS
    await asyncio.sleep(rest_s)
    if tells and rest:
        service.note_prefill(rest, rest_s)
    await service.commit(request, prompt.tokens)
    took_s = loop.time() - began
    service.end(request)
    return took_s


async def run(delay_s: float, num_requests: int, compute_s: float, *, tells: bool) -> list[float]:
    async with node(FetchPolicy.BEST_EFFORT, delay_s, num_requests) as service:
        numbers = range(num_requests)
        return [await takes(service, number, compute_s, tells=tells) for number in numbers]


async def fetched(delay_s: float) -> float:
    async with node(FetchPolicy.WAIT_COMPLETE, delay_s, 3) as service:
        return statistics.median([await takes(service, at, 0.0, tells=False) for at in range(3)])


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--compute", type=float, nargs="*", default=[0.1, 0.32, 1.0])
    delays = [0.0, 0.02, 0.06, 0.09, 0.15, 0.2, 0.3, 0.6]
    parser.add_argument("--delays", type=float, nargs="*", default=delays)
    parser.add_argument("--quick", action="store_true", help="20 requests, 320 ms, two delays")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    num_requests, delays, computing = chosen.requests, chosen.delays, chosen.compute
    if chosen.quick:
        num_requests, delays, computing = 20, [0.0, 0.2], [0.32]
    rows = []
    fetches = [await fetched(delay_s) for delay_s in delays]
    for compute_s in computing:
        compute = row(f"compute {compute_s * 1e3:.0f} ms", [compute_s * 1e3], "ms")
        rows.append(compute)
        for delay_s, fetch_s in zip(delays, fetches, strict=True):
            about = f"{delay_s * 1e3:.0f} ms a call"
            fetch = row(f"{about}: fetch, whatever it takes", [fetch_s * 1e3], "ms")
            best = min(fetch, compute, key=lambda one: one.value)
            rows.append(fetch)
            for tells in (True, False):
                took = await run(delay_s, num_requests, compute_s, tells=tells)
                what = (
                    f"{about}: {'told its speed' if tells else 'observed'}, mean from the 10th on"
                )
                most = 1.1 + 20 / best.value  # 1.1 x the better one, and 20 ms
                mean_ms = statistics.mean(took[LEARNING:]) * 1e3
                rows.append(row(what, [mean_ms], "ms", against=best, most=most))
                first = f"{about}: the first ten together"
                rows.append(row(first, [sum(took[:LEARNING]) * 1e3], "ms"))
    show(rows, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
