"""What asking and polling an embedded service, or an EngineCache, costs the engine's thread.

    python benchmarks/embedding.py [--quick] [--json]

Alone, and beside a loop that another thread keeps busy with admissions of long prompts. Times are
of single calls on the thread that asks, beside what asyncio's own way into a loop of another thread
costs there (`run_coroutine_threadsafe`, with nothing to do on the other side).
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import uvloop

from benchmarks.bench import Row, row, show
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import Layout, attention_layout
from tierkv.embed import Embedded, EmbedSettings, EngineCache, NodeHost, WorkerPlanes
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.memory import EnginePlanes
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service

LAYOUT = attention_layout(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", item_bytes=4, block_size=16
)
WIDE = attention_layout(
    num_layers=32, num_kv_heads=8, head_dim=16, dtype="bfloat16", item_bytes=2, block_size=16
)
ROOT = Path(__file__).resolve().parents[1]
STEP_S = 0.001  # between two steps of the engine
POLL_S = 0.0002  # between two looks at what has come


def build() -> Service:
    settings = CacheSettings(block_size=16, device_blocks=16384, host_blocks=64)
    return Service(CpuDevice(), Fingerprint("m", LAYOUT), settings, HandoffSettings(), None)


class Times:
    """Seconds of single calls, by what was called."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[[], object]) -> object:
        started = time.perf_counter()
        result = call()
        self.of.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def rows(self, where: str, *, against: Row | None = None) -> list[Row]:
        rows = []
        for name, seconds in self.of.items():
            micros = [one * 1e6 for one in seconds]
            rows.append(row(f"{name}, {where}: p50", micros, "us", against=against))
            rows.append(row("  p99", [float(np.percentile(micros, 99))], "us"))
        return rows


@contextmanager
def another_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _nothing() -> None:
    pass


def plain_asyncio(count: int) -> list[Row]:
    times = Times()
    with another_loop() as loop:
        for _ in range(count):
            future = times.timed(
                "run_coroutine_threadsafe",
                lambda: asyncio.run_coroutine_threadsafe(_nothing(), loop),
            )
            future.result(10.0)  # type: ignore[attr-defined]
    return times.rows("idle")


def idle_service(count: int, tokens: bytes, against: Row) -> list[Row]:
    times = Times()
    with Embedded(build, EmbedSettings(max_calls=8)) as cache:
        for _ in range(count):
            times.timed("poll of nothing", cache.poll)
            times.timed("submit", lambda: cache.lookup(tokens))
            cache.wait(10.0)
            times.timed("poll of one", cache.poll)
    return times.rows("idle", against=against)


@contextmanager
def long_prompts(cache: Embedded) -> Iterator[None]:
    """Another thread admits, commits and ends prompts of 32k tokens, one after the other."""
    stop = threading.Event()

    def work() -> None:
        rng, number = np.random.default_rng(2), 0
        while not stop.is_set():
            tokens = rng.integers(0, 1000, 32768).astype("<i4").tobytes()
            name = f"long-{number}"
            cache.admit(name, tokens, max_new_tokens=0).wait(30)
            commit = cache.commit(name, tokens)
            cache.end(name).wait(30)
            commit.result()
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def busy_service(count: int, tokens: bytes, against: Row) -> list[Row]:
    times = Times()
    with Embedded(build) as cache, long_prompts(cache):
        calls = []
        for _ in range(count):
            calls.append(times.timed("submit", lambda: cache.lookup(tokens)))
            while calls and calls[0].is_done:  # type: ignore[attr-defined]
                calls.pop(0).result()  # type: ignore[attr-defined]
            times.timed("looking at a call", lambda: [one.is_done for one in calls[:4]])  # type: ignore[attr-defined]
            time.sleep(STEP_S)
    return times.rows("beside 32k-token requests", against=against)


def own_blocks(
    count: int, against: Row, *, layout: Layout = LAYOUT, node: NodeHost | None = None
) -> list[Row]:
    """An engine that owns its blocks saves prompts of 8 blocks, and loads each again. node: whose
    host tier it uses, instead of one of its own."""
    times, num_blocks = Times(), 8
    arrays = [np.zeros((num_blocks, one.block_bytes), np.uint8) for one in layout.planes]
    planes = WorkerPlanes(CpuDevice(), EnginePlanes(layout, arrays))
    with EngineCache(
        Fingerprint("m", layout),
        [layout],
        host_bytes=2048 * layout.block_bytes,
        cache=CacheSettings(block_size=layout.block_size),
        node=node,
        planes=planes,
    ) as cache:
        for at in range(count):
            prompt = Prompt.of([at] * (layout.block_size * num_blocks), layout.block_size)
            _save_and_load(cache, planes, times, str(at), prompt)
    where = "own" if node is None else "a node's"
    what = f"{where} host tier, {len(layout.planes)} planes"
    return times.rows(f"engine's own blocks, {what}", against=against)


@contextmanager
def node_process() -> Iterator[NodeHost]:
    """`tierkv serve --engine external`, which ends with the body."""
    with TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tierkv", "serve", "--engine", "external"]
        options = ["--engine-socket", f"{folder}/engines", "--storage", "none"]
        listening = ["--no-tcp", "--unix-socket", f"{folder}/http", "--log-level", "error"]
        process = subprocess.Popen(
            [*program, *options, *listening], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        try:
            yield NodeHost(f"{folder}/engines")
        finally:
            process.terminate()
            process.wait()


def _save_and_load(
    cache: EngineCache, planes: WorkerPlanes, times: Times, key: str, prompt: Prompt
) -> None:
    blocks = [list(range(prompt.num_blocks))]
    plan = times.timed("save", lambda: cache.save(key, prompt, blocks))
    times.timed("start_saves", lambda: planes.start_saves(plan))  # type: ignore[arg-type]
    while not times.timed("poll", cache.poll).stored:  # type: ignore[attr-defined]
        time.sleep(POLL_S)
    times.timed("first lookup", lambda: cache.lookup(key, prompt))
    while cache.lookup(key, prompt) is None:
        time.sleep(POLL_S)
    times.timed("lookup again", lambda: cache.lookup(key, prompt))
    plan = times.timed("load", lambda: cache.load(key, blocks))
    times.timed("start_loads", lambda: planes.start_loads(plan))  # type: ignore[arg-type]
    while not times.timed("poll", cache.poll).loaded:  # type: ignore[attr-defined]
        time.sleep(POLL_S)
    times.timed("poll of nothing", cache.poll)
    cache.release(key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    count = 1000 if options.quick else 5000
    tokens = np.random.default_rng(1).integers(0, 1000, 64).astype("<i4").tobytes()
    rows = plain_asyncio(count)
    rows += idle_service(count, tokens, rows[0])
    rows += busy_service(count, tokens, rows[0])
    rows += own_blocks(count // 5, rows[0])
    rows += own_blocks(count // 5, rows[0], layout=WIDE)
    with node_process() as node:
        rows += own_blocks(count // 5, rows[0], node=node)
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
