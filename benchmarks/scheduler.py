"""What a request costs the event loop: admit, commit and end; and a step in which requests grow.

    python -m benchmarks.scheduler --quick --json --against OTHER_CHECKOUT

The device is the CPU with planes of a byte a token, so hardly a byte is moved. Measured is the CPU
time of the loop's thread, in microseconds a request: `new` prompts of 2,048 tokens on a full
device; `hit`, on the device; `host`, new ones that are copied to the host, too; `store`, new ones
for which an empty directory is asked; `extend`, for each request that grows by a block, 256 at a
time. With --against, rounds of both checkouts take turns, each in a process of its own, and the
ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.bench import row, show
from tests.sessions import begin_request

_BLOCK = 16
_TOKENS = 2048
_BATCH = 256


def _service(**settings: Any) -> Any:  # noqa: ANN401 - of whichever checkout is measured
    """Names are looked up where both checkouts have them."""
    module = importlib.import_module("tierkv.service.service")
    layout = importlib.import_module("tierkv.cache.layout")
    chosen = importlib.import_module("tierkv.sched.settings").CacheSettings
    write = type(chosen().host_write)[settings.pop("host_write", "NONE")]
    store = settings.pop("store", None)
    if store is not None:
        settings["fetch_policy"] = type(chosen().fetch_policy)["WAIT_COMPLETE"]
    device = importlib.import_module("tierkv.gpu.cpu").CpuDevice()
    handoff = importlib.import_module("tierkv.pd.settings").HandoffSettings()
    fingerprint = module.Fingerprint("bench", layout.layered(_BLOCK, [("latent", "uint8", 1)], 1))
    cache = chosen(block_size=_BLOCK, host_write=write, **settings)
    return module.Service(device, fingerprint, cache, handoff, store)


def _store(directory: str) -> Any:  # noqa: ANN401 - as above
    factory = importlib.import_module("tierkv.storage.factory")
    opens = getattr(factory, "open_guarded_store", None) or factory.open_resilient_store
    clock = importlib.import_module("tierkv.clock").SystemClock()
    return opens(f"file://{directory}", factory.StoreSettings(), clock)


def _prompts() -> Callable[[bytes], Any]:
    kind = importlib.import_module("tierkv.cache.keys").Prompt
    return lambda packed: kind.of(packed, _BLOCK)


async def _requests(service: Any, prompts: list[bytes]) -> float:  # noqa: ANN401
    """Microseconds a request, copies down included."""
    prompt_of = _prompts()
    started = time.thread_time()
    for at, packed in enumerate(prompts):
        request = await begin_request(service, str(at), prompt_of(packed), max_new_tokens=0)
        await service.scheduler.commit(request, packed)
        service.scheduler.end(request)
        await asyncio.sleep(0)  # as between two steps of an engine: copies go on
    return (time.thread_time() - started) / len(prompts) * 1e6


def _new(count: int) -> list[bytes]:
    """Token ids are below 2**31."""
    return [array("I", random.choices(range(1 << 31), k=_TOKENS)).tobytes() for _ in range(count)]


async def _measure_new(rounds: int) -> float:
    async with (service := _service(device_blocks=1024, host_blocks=16)).running():
        await _requests(service, _new(30))
        return await _requests(service, _new(rounds))


async def _measure_hit(rounds: int) -> float:
    async with (service := _service(device_blocks=1024, host_blocks=16)).running():
        [prompt] = _new(1)
        await _requests(service, [prompt])
        return await _requests(service, [prompt] * rounds)


async def _measure_host(rounds: int) -> float:
    service = _service(device_blocks=1024, host_blocks=2048, host_write="WRITE_THROUGH")
    async with service.running():
        await _requests(service, _new(30))
        return await _requests(service, _new(rounds))


async def _measure_store(rounds: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        store = _store(directory)
        service = _service(device_blocks=1024, host_blocks=1024, store=store)
        async with service.running():
            await _requests(service, _new(20))
            return await _requests(service, _new(rounds))


async def _measure_extend(rounds: int) -> float:
    async with (service := _service(device_blocks=_BATCH * 40, host_blocks=16)).running():
        prompt_of = _prompts()
        requests = [
            await begin_request(service, str(at), prompt_of(one[: 64 * 4]), max_new_tokens=0)
            for at, one in enumerate(_new(_BATCH))
        ]
        taken, grown = 0.0, 0
        for step in range(1, min(rounds // 10, 30) + 1):
            started = time.thread_time()
            for request in requests:
                await service.scheduler.growth.extend(request, step * _BLOCK)
            taken += time.thread_time() - started
            grown += len(requests)
        for request in requests:
            service.scheduler.end(request)
        return taken / grown * 1e6


_PARTS: dict[str, Callable[[int], Awaitable[float]]] = {
    "new": _measure_new,
    "hit": _measure_hit,
    "host": _measure_host,
    "store": _measure_store,
    "extend": _measure_extend,
}


def _round(num_requests: int) -> dict[str, float]:
    """One round of this process's checkout."""
    random.seed(1)
    found = {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for name, measure in _PARTS.items():
            gc.collect()
            gc.freeze()

            async def part(
                measure: Callable[[int], Awaitable[float]] = measure,
            ) -> float:
                return await measure(num_requests)

            found[name] = runner.run(part())
    return found


def _in_checkout(checkout: Path, num_requests: int) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TIERKV_COMPILED": "off"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(num_requests)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, cwd=checkout)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(_round(asked.child)))
        return
    here = Path(__file__).resolve().parent.parent
    checkouts = [here, *([asked.against.resolve()] if asked.against else [])]
    rounds: dict[Path, list[dict[str, float]]] = {one: [] for one in checkouts}
    for _ in range(3 if asked.quick else 9):
        for one in checkouts:
            rounds[one].append(_in_checkout(one, 100 if asked.quick else 300))
    rows = []
    for name in _PARTS:
        samples = [[found[name] for found in rounds[one]] for one in checkouts]
        other = [row(f"{name}, the other checkout", samples[1], "us")] if samples[1:] else []
        rows += [*other, row(name, samples[0], "us", against=other[0] if other else None)]
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
