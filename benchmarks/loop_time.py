"""How long each operation holds the event loop in one go, by the length of the prompt.

    python -m benchmarks.loop_time --quick --json

Measured is the processor time of the loop's thread in the longest turn of an operation, in
milliseconds, and of all its turns. `engine` rows are the service's side of an `EngineCache`, with
a Redis of its own; `service` rows are those of a node. Blocks have 16 tokens of a byte each, so
hardly a byte is moved. An operation whose longest turn grows with the prompt delays every other
request of its process by as much.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import uvloop

from benchmarks.bench import Row, row, show
from tests.loop_turns import LoopTurns
from tests.redis_server import redis_server
from tests.sessions import begin_request, claim_request, publish_request
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import CacheGroup, GroupKind
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import Layout, layered
from tierkv.clock import SystemClock
from tierkv.embed.host_side import Copied, EngineCacheSettings, HostSide, HostSizes
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.redis.store import RedisSettings

T = TypeVar("T")

_BLOCK = 16
_TARGET_MS = 50.0
_PATIENT = StoreSettings(
    redis=RedisSettings(timeout_s=100.0, connect_timeout_s=50.0),
    resilience=ResilienceSettings(timeout_s=100.0, negative_ttl_s=0.0),
)
_HANDOFF = HandoffSettings(
    publish_deadline_s=300.0, claim_deadline_s=300.0, lookup_deadline_s=300.0
)


@dataclass
class Figures:
    """Longest turn and all turns, in milliseconds, of each operation and length."""

    longest: dict[str, list[float]] = field(default_factory=dict)
    total: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Return the longest turn of each operation, beside the target, and all its turns."""
        rows: list[Row] = []
        for what, samples in self.longest.items():
            rows.append(row(f"longest turn: {what}", [max(samples)], "ms", most=_TARGET_MS))
            rows.append(row(f"all turns: {what}", [sum(self.total[what])], "ms"))
        return rows

    async def of(self, what: str, work: Awaitable[T]) -> T:
        """Await `work`, and note its turns under `what`."""
        gc.collect()  # garbage is not collected while turns are measured
        turns = LoopTurns()
        with turns.measured():
            result = await work
            for _ in range(3):
                await asyncio.sleep(0)  # what the operation left to the next turns
        self.longest.setdefault(what, []).append(turns.longest_s * 1e3)
        self.total.setdefault(what, []).append(turns.total_s * 1e3)
        return result


async def _now(work: Callable[[], T]) -> T:
    return work()


def _layout() -> Layout:
    return layered(_BLOCK, [("latent", "uint8", 1)], 1)


def _prompt(num_tokens: int) -> Prompt:
    tokens = random.choices(range(1 << 31), k=num_tokens)
    return Prompt.of(array("i", tokens).tobytes(), _BLOCK)


def _cache(num_blocks: int) -> CacheSettings:
    return CacheSettings(
        block_size=_BLOCK,
        device_blocks=num_blocks,
        host_blocks=num_blocks,
        host_write=WritePolicy.WRITE_THROUGH,
        fetch_policy=FetchPolicy.WAIT_COMPLETE,
        fetch_deadline_s=300.0,
    )


@asynccontextmanager
async def _service(url: str, num_tokens: int) -> AsyncIterator[Service]:
    store = open_guarded_store(url, _PATIENT, SystemClock())
    settings = _cache(2 * num_tokens // _BLOCK + 256)
    service = Service(CpuDevice(), Fingerprint("bench", _layout()), settings, _HANDOFF, store)
    async with service.running():
        yield service


async def _settled(service: Service) -> None:
    while service.tiers.work.num_tasks:
        await service.tiers.work.next_change()


async def _of_services(figures: Figures, url: str, num_tokens: int) -> None:
    """Measure what a node's requests do, on a prefill and a decode node."""
    prompt, end = _prompt(num_tokens), f"service, {num_tokens:,} tokens"
    async with _service(url, num_tokens) as prefill:
        await figures.of(f"lookup of a miss, {end}", prefill.lookup(prompt))
        asked = prefill.explain_with_storage(prompt, deadline_s=300.0)
        await figures.of(f"explain a miss, {end}", asked)
        beginning = begin_request(prefill, "a", prompt, max_new_tokens=0)
        request = await figures.of(f"admit a miss, {end}", beginning)
        await figures.of(f"commit, {end}", prefill.scheduler.commit(request, prompt.tokens))
        await figures.of(f"publish, {end}", publish_request(prefill, request, "ticket", (1,)))
        await figures.of(f"end, {end}", _now(lambda: prefill.scheduler.end(request)))
        await figures.of(f"copies down, {end}", _settled(prefill))
        again = await figures.of(
            f"admit a hit, {end}", begin_request(prefill, "b", prompt, max_new_tokens=0)
        )
        prefill.scheduler.end(again)
        await figures.of(f"lookup of a hit, {end}", prefill.lookup(prompt))
        asked = prefill.explain_with_storage(prompt, deadline_s=300.0)
        await figures.of(f"explain a hit, {end}", asked)
        await figures.of(f"stats, {end}", _now(prefill.stats))
        keys = prefill.tiers.copies.prompt_keys
        await figures.of(f"keys of a prompt that is cached, {end}", _now(lambda: keys(prompt)))
        other = _prompt(num_tokens)
        await figures.of(f"keys of another prompt, {end}", _now(lambda: keys(other)))
    async with _service(url, num_tokens) as decode:
        claiming = claim_request(decode, "c", "ticket", prompt, max_new_tokens=0, deadline_s=300.0)
        claimed, _ = await figures.of(f"claim, {end}", claiming)
        decode.scheduler.end(claimed)
        await _settled(decode)
        await figures.of(f"DELETE of all blocks, {end}", decode.free())
    async with _service(url, num_tokens) as decode:
        fetched = await figures.of(f"prefetch, {end}", decode.fetched(RequestSpec("d", prompt, 0)))
        fetched.release()
        await figures.of(
            f"DELETE of all blocks and storage, {end}", decode.free(clears_storage=True)
        )


async def _of_engines(
    figures: Figures, url: str, num_tokens: int, groups: list[CacheGroup], label: str
) -> None:
    """Measure the service's side of what an engine asks for."""
    prompt, end = _prompt(num_tokens), f"{label}, {num_tokens:,} tokens"
    num_blocks = num_tokens // _BLOCK
    fingerprint = Fingerprint("bench", _layout())
    sizes = HostSizes.for_blocks(fingerprint, groups, 2 * num_blocks + 1024)
    settings = EngineCacheSettings()

    @asynccontextmanager
    async def opened() -> AsyncIterator[HostSide]:
        store = open_guarded_store(url, _PATIENT, SystemClock())
        service = Service(
            CpuDevice(),
            sizes.fingerprint,
            sizes.settings(_cache(1)),
            _HANDOFF,
            store,
            other_groups=sizes.other_groups(),
        )
        async with service.running():
            side = HostSide(service, sizes, settings)
            yield side
            await side.release_all()

    async with opened() as side:
        empty = await figures.of(f"lookup of a miss, {end}", side.promise(prompt, None, 30.0))
        await side.free(empty)
        names = [[at.to_bytes(8, "big") for at in range(num_blocks)] for _ in groups]
        named = side.promise(_prompt(num_tokens), None, 30.0, None, names)
        await side.free(await figures.of(f"lookup of a miss with names, {end}", named))
        for first in range(0, num_blocks, settings.save_blocks):
            stop = min(first + settings.save_blocks, num_blocks)
            most = [stop - first for _ in groups]
            slots = await figures.of(f"slots for a save, {end}", side.reserve(most))
            copied = [
                Copied(number, range(first, stop), array("i", some))
                for number, some in enumerate(slots)
            ]
            await figures.of(f"save, {end}", side.keep([(prompt, copied)]))
        whole = Prompt(prompt.tokens[: num_blocks * prompt.block_token_bytes], _BLOCK)
        promise = await figures.of(f"lookup of a hit, {end}", side.promise(whole, None, 30.0))
        await figures.of(f"end of a load, {end}", side.loaded(promise, ()))

        async def publish() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(side.publish(7, whole, f"ticket of {label}"))
                await asyncio.sleep(0)
                await side.finish(7, (1,))

        await figures.of(f"publish, {end}", publish())
    async with opened() as side:
        work = side.promise(whole, f"ticket of {label}", 30.0)
        promise = await figures.of(f"lookup with a ticket, {end}", work)
        await side.loaded(promise, ())
    async with opened() as side:
        promise = await figures.of(
            f"lookup of what storage has, {end}", side.promise(whole, None, 30.0)
        )
        await side.loaded(promise, ())
        await figures.of(f"reset, {end}", side.forget())


async def _measure(sizes: list[int]) -> Figures:
    figures = Figures()
    main = CacheGroup(_layout())
    window = CacheGroup(_layout(), GroupKind.WINDOW, window=1024)
    for num_tokens in sizes:
        with redis_server() as server:
            await _of_services(figures, server.url, num_tokens)
        for groups, label in (([main], "engine"), ([main, window], "engine with windows")):
            with redis_server() as server:
                await _of_engines(figures, server.url, num_tokens, groups, label)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 and 32,000 tokens alone")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    random.seed(1)
    sizes = [1_000, 32_000] if asked.quick else [1_000, 32_000, 1_000_000]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_measure(sizes))
    show(figures.rows(), as_json=asked.json)


if __name__ == "__main__":
    main()
