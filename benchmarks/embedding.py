"""What asking and polling an embedded service costs the engine's thread.

    python benchmarks/embedding.py

Alone, and beside a loop that other threads keep busy with admissions of long prompts. Times are of
single calls, in microseconds, on the thread that asks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from tierkv.cache.fingerprint import Fingerprint
from tierkv.cache.layout import attention_layout
from tierkv.embed import Embedded, EmbedSettings
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service

LAYOUT = attention_layout(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", item_bytes=4, block_size=16
)
NUM_CALLS = 5000
STEP_S = 0.001  # between two steps of the engine


def build() -> Service:
    settings = CacheSettings(block_size=16, device_blocks=16384, host_blocks=64)
    return Service(CpuDevice(), Fingerprint("m", LAYOUT), settings, HandoffSettings(), None)


def measure(cache: Embedded, tokens: bytes) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"lookup (submit)": [], "poll, empty": [], "poll, one": []}

    def timed(name: str, call: Callable[[], object]) -> object:
        started = time.perf_counter()
        result = call()
        took[name].append(time.perf_counter() - started)
        return result

    for _ in range(NUM_CALLS):
        timed("poll, empty", cache.poll)
        timed("lookup (submit)", lambda: cache.lookup(tokens))
        cache.wait(10.0)
        timed("poll, one", cache.poll)
    return took


def show(title: str, took: dict[str, list[float]]) -> None:
    print(title)
    for name, times in took.items():
        p50, p99, top = np.percentile(np.array(times) * 1e6, [50, 99, 100])
        print(f"  {name:18} p50 {p50:7.1f} us   p99 {p99:8.1f} us   max {top:9.1f} us")


def main() -> None:
    rng = np.random.default_rng(1)
    short = rng.integers(0, 1000, 64).astype("<i4").tobytes()
    with Embedded(build, EmbedSettings(max_calls=8)) as cache:
        show("an idle service, 64 tokens", measure(cache, short))
    with Embedded(build) as cache:
        stop = threading.Event()

        def others() -> None:
            number = 0
            while not stop.is_set():
                name = f"{threading.get_ident()}-{number}"
                tokens = rng.integers(0, 1000, 32768).astype("<i4").tobytes()
                cache.admit(name, tokens, max_new_tokens=0).wait(30)
                commit = cache.commit(name, tokens)
                cache.end(name).wait(30)
                commit.result()
                number += 1

        thread = threading.Thread(target=others)
        thread.start()
        took: list[float] = []
        polls: list[float] = []
        calls = []
        for _ in range(NUM_CALLS):
            started = time.perf_counter()
            calls.append(cache.lookup(short))
            middle = time.perf_counter()
            while calls and calls[0].is_done:
                calls.pop(0).result()
            took.append(middle - started)
            started = time.perf_counter()
            _ = [call.is_done for call in calls[:4]]
            polls.append(time.perf_counter() - started)
            time.sleep(STEP_S)
        stop.set()
        thread.join()
        show(
            "beside 32k-token requests, one after another",
            {"lookup (submit)": took, "looking at a call": polls},
        )


if __name__ == "__main__":
    main()
