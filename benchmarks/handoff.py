"""How long a decode node waits after the prefill is done, and what a hand-off costs beyond storage.

    python benchmarks/handoff.py [--quick] [--json] [--tokens 10000]
    python benchmarks/handoff.py --part storage [--device cuda]
    python benchmarks/handoff.py --part direct [--device cuda --store files --ways memory device]

Prefill and decode nodes are processes of their own, on Redis and on a directory. "After the
prefill" runs from the first token on the prefill node to the first token that the decode node
computes itself, on one clock. Streaming and publish-after-prefill take turns, each with a new
prompt; the claim waits from the start of the prefill on in both.

The second part moves a prompt of 512 KiB blocks, not computed by any model, from device to device
by publish and claim; the same bytes from and into pinned host slots by the storage path alone, with
header and checksum, and from device to device by that path and the lanes alone, without index,
scheduler and ticket; and by bare puts and gets of the store. The third claims such a prompt through
storage, from the producer's memory, from its host tier over TCP (Mooncake's transfer engine), and
from its device to the claimer's own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Row, row, show
from tests.redis_server import RedisServer, redis_server
from tests.sessions import begin_request, claim_request, publish_request
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey, pack
from tierkv.cache.layout import layered
from tierkv.clock import SystemClock
from tierkv.engine import GenerateRequest
from tierkv.gpu import open_device
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings, ReferenceEngine
from tierkv.refmodel.model import ReferenceModel
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import GetItem, GetStatus, PutItem, PutStatus
from tierkv.storage.redis.store import RedisSettings
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO

BLOCK = 16
BULK_BLOCK, BULK_TOKEN_BYTES = 64, 8192  # 512 KiB blocks
PART_BLOCKS = 32  # in one call of the storage path; two are under way, as in benchmarks/storage.py
MOST_OF_PUBLISH_AFTER_PREFILL = 0.25
MOST_OF_RAW = 1.10
PATH_STEPS = {  # of one part after the other, two parts at a time
    "flush": ("flush",),
    "fetch": ("fetch",),
    "offload, flush": ("offload", "flush"),
    "fetch, load": ("fetch", "load"),
}
HANDOFF = HandoffSettings(
    publish_deadline_s=60, claim_deadline_s=120, lookup_deadline_s=10, direct=DirectPath.OFF
)
WAYS: dict[str, dict[str, Any]] = {
    "bulk": {},
    "memory": {"direct": DirectPath.MEMORY},
    "network": {"direct": DirectPath.NETWORK, "direct_host": "127.0.0.1"},
    "device": {"direct": DirectPath.DEVICE},
}
WAY_NAMES = {
    "memory": "from the producer's host memory",
    "network": "over TCP",
    "device": "from device to device",
}


def now_s() -> float:
    """Seconds on the clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, num_tokens)]


def sizes_of(num_tokens: int) -> list[int]:
    """How many tokens each of a prompt's blocks has; the last one is its tail, if there is one."""
    return [min(BULK_BLOCK, num_tokens - at) for at in range(0, num_tokens, BULK_BLOCK)]


# The nodes


class EngineNode:
    """A node with the reference model."""

    def __init__(self, service: Service, engine: ReferenceEngine) -> None:
        self.service = service
        self.engine = engine

    async def do(self, work: dict[str, Any]) -> dict[str, float]:
        marks: list[float] = []
        tokens = pack(prompt_of(work["seed"], work["num_tokens"]))
        job = GenerateRequest(work["id"], tokens, 2, on_tokens=lambda *_: marks.append(now_s()))
        if work["do"] == "prefill":
            await self.engine.prefill(job, work["id"])
        else:
            await self.engine.decode(job, work["id"])
        return {"at": marks[-1], "done": now_s()}


class BulkNode:
    """A node whose device holds what it holds: for bytes, not for tokens. path: to its store, with
    pinned host slots of its own, between which and a device of its own `mover` copies."""

    def __init__(self, service: Service, path: StorageIO, mover: Mover) -> None:
        self.service = service
        self.path = path
        self.mover = mover

    async def do(self, work: dict[str, Any]) -> dict[str, float]:
        """Answers with seconds taken, and those of all threads of this process on a processor."""
        before = time.process_time()
        found = await self._do(work)
        return found | {"cpu": time.process_time() - before}

    async def _do(self, work: dict[str, Any]) -> dict[str, float]:
        prompt = Prompt.of(prompt_of(work["seed"], work["num_tokens"]), BULK_BLOCK)
        service, name = self.service, work["id"]
        started = now_s()
        if work["do"] == "publish":
            request = await begin_request(service, name, prompt, max_new_tokens=0)
            await service.scheduler.commit(request, prompt.tokens)
            started = now_s()
            await publish_request(service, request, name, [1])
        elif work["do"] == "claim":
            request, _ = await claim_request(service, name, name, prompt, max_new_tokens=0)
            await request.gate.all_layers(60)
        elif work["do"] in PATH_STEPS:
            return await self._by_path(work)
        else:
            return await self._raw(work)
        taken = now_s() - started
        service.scheduler.end(request)
        while service.tiers.work.num_tasks:
            await service.tiers.work.next_change()
        if work["do"] == "claim":
            service.reset()  # the next one finds room: what eviction costs is not the way's
        counts = service.stats().handoff
        direct = counts.device_blocks + counts.memory_blocks + counts.network_blocks
        return {"taken": taken, "direct": direct}

    async def _by_path(self, work: dict[str, Any]) -> dict[str, float]:
        sizes = sizes_of(work["num_tokens"])
        count = len(sizes)
        keys = [
            StoredKey(
                hashlib.sha256(f"{work['seed']}:{i}".encode()).digest(),
                num_tokens,
                is_tail=num_tokens < BULK_BLOCK,
            )
            for i, num_tokens in enumerate(sizes)
        ]
        parts = iter([slice(at, at + PART_BLOCKS) for at in range(0, count, PART_BLOCKS)])
        slots = np.arange(count, dtype=np.int32)
        steps = PATH_STEPS[work["do"]]

        async def move() -> None:
            for part in parts:
                here = slots[part]
                if "offload" in steps:
                    await self.mover.offload(here, here).done()
                if "flush" in steps:
                    put = await self.path.flush(keys[part], here)
                    assert {one.status for one in put} == {PutStatus.STORED}, put
                if "fetch" in steps:
                    got = await self.path.fetch(keys[part], here)
                    assert {one.status for one in got} == {GetStatus.HIT}, got
                if "load" in steps:
                    await self.mover.load(here, here).done()

        started = now_s()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(move())
        return {"taken": now_s() - started}

    async def _raw(self, work: dict[str, Any]) -> dict[str, float]:
        store = self.service.store
        assert store is not None, "a benchmark's node has a store"
        sizes = sizes_of(work["num_tokens"])
        names = [f"tierkv:raw:{work['seed']}:{i}" for i in range(len(sizes))]
        # As much memory as blocks have, not a few buffers that stay in the processor's cache; and
        # all values at once, so that the store never waits.
        slots = np.ones((len(names), BULK_BLOCK * BULK_TOKEN_BYTES), np.uint8)
        memory = [
            slot[: num_tokens * BULK_TOKEN_BYTES]
            for slot, num_tokens in zip(slots, sizes, strict=True)
        ]
        started = now_s()
        if work["do"] == "raw-put":
            items = [PutItem(n, (m.data,), ttl_s=600) for n, m in zip(names, memory, strict=True)]
            put = await store.put(items)
            taken = now_s() - started
            assert all(one.status is PutStatus.STORED for one in put)
        else:
            got = await store.get_into(
                [GetItem(n, (m.data,)) for n, m in zip(names, memory, strict=True)]
            )
            taken = now_s() - started
            assert all(one.status is GetStatus.HIT for one in got)
        return {"taken": taken}


@asynccontextmanager
async def node(
    kind: str, url: str, num_tokens: int, device: str
) -> AsyncIterator[EngineNode | BulkNode]:
    # A busy machine shows in the times, not as a failure.
    settings = StoreSettings(redis=RedisSettings(timeout_s=10.0))
    store = open_store(url, settings, SystemClock())
    handoff = _replace(HANDOFF, streams=kind != "plain", **WAYS.get(kind, {}))
    if kind in WAYS:
        blocks = num_tokens // BULK_BLOCK + 8
        layout = layered(BULK_BLOCK, [("latent", "bfloat16", BULK_TOKEN_BYTES // 8)], 8)
        cache = CacheSettings(block_size=BULK_BLOCK, device_blocks=blocks, host_blocks=blocks)
        service = Service(open_device(device), Fingerprint("bulk", layout), cache, handoff, store)
        own = open_device(device)
        host = own.allocate_host(layout, blocks)
        host.array.fill(1)  # touched, as pinned memory is
        mover = Mover(own, own.allocate_planes(layout, blocks), host)
        names = Names("tierkv", "path")
        path = StorageIO(store, names, layout, host, block_ttl_s=600)
        async with service.running(), path.running(), mover.running():
            yield BulkNode(service, path, mover)
        return
    config = ModelConfig(max_positions=num_tokens + 64)
    model = ReferenceModel(config, BLOCK)
    blocks = 3 * (num_tokens // BLOCK + 8)
    cache = CacheSettings(block_size=BLOCK, device_blocks=blocks, host_blocks=blocks)
    service = Service(CpuDevice(), Fingerprint("bench", model.layout), cache, handoff, store)
    engine = ReferenceEngine(service, model, EngineSettings())
    async with service.running(), engine.running():
        yield EngineNode(service, engine)


def _replace(settings: HandoffSettings, **changes: object) -> HandoffSettings:
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return HandoffSettings(**(fields | changes))


async def serve(kind: str, url: str, num_tokens: int, device: str) -> None:
    """Carry out each line of stdin; answer with one of stdout."""
    async with node(kind, url, num_tokens, device) as here:
        print(json.dumps({}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await here.do(json.loads(line))), flush=True)


# The measurements


class Child:
    """A node in a process of its own."""

    def __init__(self, kind: str, url: str, num_tokens: int, device: str) -> None:
        command = [sys.executable, __file__, "--node", kind, "--url", url, "--device", device]
        self.popen = subprocess.Popen(
            [*command, "--tokens", str(num_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.answer()

    def begin(self, **work: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(work) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError("a node died: see its traceback above")
        found: dict[str, float] = json.loads(line)
        return found

    def ask(self, **work: object) -> dict[str, float]:
        self.begin(**work)
        return self.answer()

    def close(self) -> None:
        self.popen.communicate(timeout=60)


@contextmanager
def children(url: str, num_tokens: int, *kinds: str, device: str = "cpu") -> Iterator[list[Child]]:
    found: list[Child] = []
    try:
        for kind in kinds:
            found += [Child(kind, url, num_tokens, device)]
        yield found
        for child in found:
            child.close()
    finally:
        for child in found:
            child.popen.kill()


def after_prefill(url: str, where: str, num_tokens: int, rounds: int) -> list[Row]:
    waits: dict[str, list[float]] = {"plain": [], "stream": []}
    prefills: list[float] = []
    with children(url, num_tokens, "plain", "stream", "stream") as (plain, stream, decode):
        for child in (plain, stream, decode):  # everything is imported and connected
            child.ask(do="prefill", id=f"warm{id(child)}", seed=id(child), num_tokens=200)
        for number in range(rounds):
            for kind, prefill in (("plain", plain), ("stream", stream)):
                work = {"id": f"{kind}{number}", "seed": 2 * number + (kind == "plain")}
                started = now_s()
                decode.begin(do="decode", num_tokens=num_tokens, **work)
                prefill.begin(do="prefill", num_tokens=num_tokens, **work)
                first, own = prefill.answer()["at"], decode.answer()["at"]
                waits[kind].append((own - first) * 1e3)
                prefills.append(first - started)
    before = row(f"{where}: after the prefill, published then", waits["plain"], "ms")
    return [
        row(f"{where}: prefill of {num_tokens} tokens", prefills, "s"),
        before,
        row(
            f"{where}: after the prefill, streamed",
            waits["stream"],
            "ms",
            against=before,
            most=MOST_OF_PUBLISH_AFTER_PREFILL,
        ),
    ]


def beyond_storage(redis: RedisServer, num_tokens: int, rounds: int, device: str) -> list[Row]:
    steps = {
        "bare": (("raw-put", 0), ("raw-get", 1)),
        "path": (("flush", 0), ("fetch", 1)),
        "path and lanes": (("offload, flush", 0), ("fetch, load", 1)),
        "handed over": (("publish", 0), ("claim", 1)),
    }
    taken: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with children(redis.url, num_tokens, "bulk", "bulk", device=device) as nodes:
        for number in range(rounds + 1):  # the first warms up
            work = {"id": f"bulk{number}", "seed": number, "num_tokens": num_tokens}
            # In no fixed order, and each writes into the same state: what one leaves in caches and
            # in the kernel's lists is the next one's, and fresh memory slower than what was freed.
            for way in random.sample(list(steps), len(steps)):
                redis.execute("FLUSHALL", "SYNC")
                both = {}
                for do, at in steps[way]:
                    answer = nodes[at].ask(do=do, **work)
                    both[do] = answer["taken"] * 1e3
                    if number:
                        cpu.setdefault(do, []).append(answer["cpu"] * 1e3)
                if number:
                    for what, ms in (both | {way: sum(both.values())}).items():
                        taken.setdefault(what, []).append(ms)
    what = f"of {num_tokens} tokens"
    bare = row(f"redis: puts and gets {what}, no checksums", taken["bare"], "ms")
    path = row(f"redis: from and into slots {what}, checksums", taken["path"], "ms", against=bare)
    lanes = row(
        "redis: the same bytes alone, through the device's lanes",
        taken["path and lanes"],
        "ms",
        against=bare,
    )
    moved, handed = f"redis: publish and claim {what}", taken["handed over"]
    each = {
        way: [mine / other for mine, other in zip(handed, taken[way], strict=True)]
        for way in ("path and lanes", "path")
    }
    return [
        bare,
        path,
        lanes,
        row(moved, handed, "ms", against=lanes, most=MOST_OF_RAW),
        row(moved, handed, "ms", against=path),
        row(moved, handed, "ms", against=bare),
        # On a machine that is shared the limit itself moves from one round to the next.
        *(row(f"{moved}, each round to {way}", ratios, "x") for way, ratios in each.items()),
        *(row(f"redis: {do} {what}", taken[do], "ms") for way in steps.values() for do, _ in way),
        # Where a machine's cores are few, this is what there is to share.
        *(
            row(f"redis: {do} {what}, CPU", cpu[do], "ms")
            for way in steps.values()
            for do, _ in way
        ),
    ]


OPENS = """
import sys
from tierkv.errors import ConfigError
from tierkv.gpu import open_device
try:
    open_device(sys.argv[1])
except ConfigError as error:
    sys.exit(str(error))
"""


def can_be_opened(device: str) -> bool:
    """Says why not, where it cannot. In a process of its own: one that has a GPU open is in the way
    of what is measured there."""
    command = [sys.executable, "-c", OPENS, device]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"skipped: {done.stderr.strip()}", file=sys.stderr)
    return not done.returncode


def can_be_measured(way: str) -> bool:
    """Says why not, where it cannot."""
    if way == "network":
        try:
            importlib.import_module("mooncake.engine")
        except ImportError as error:
            print(f"skipped: {WAY_NAMES[way]}: no Mooncake's package ({error})", file=sys.stderr)
            return False
    return True


def by_way(url: str, options: argparse.Namespace, rounds: int) -> list[Row]:
    direct = [way for way in options.ways if can_be_measured(way)]
    num_tokens, ways = options.tokens, ["bulk", *direct]
    taken: dict[str, list[float]] = {way: [] for way in ways}
    pairs = [kind for way in ways for kind in (way, way)]
    blocks = num_tokens // BULK_BLOCK
    with children(url, num_tokens, *pairs, device=options.device) as nodes:
        for number in range(rounds + 1):  # the first warms up
            for at, way in enumerate(ways):
                here, there = nodes[2 * at : 2 * at + 2]
                work = {"id": f"{way}{number}", "seed": 100 * at + number}
                here.ask(do="publish", num_tokens=num_tokens, **work)
                found = there.ask(do="claim", num_tokens=num_tokens, **work)
                assert found["direct"] == (way != "bulk") * blocks * (number + 1), found
                if number:
                    taken[way].append(found["taken"] * 1e3)
    what = f"claim of {num_tokens} tokens, {blocks * BULK_BLOCK * BULK_TOKEN_BYTES >> 20} MiB"
    storage = row(f"{what}: through {options.store}", taken["bulk"], "ms")
    return [storage] + [
        row(f"{what}: {WAY_NAMES[way]}", taken[way], "ms", against=storage) for way in direct
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round of each, of 2,000 tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--part", choices=["all", "storage", "direct"], default="all")
    parser.add_argument("--tokens", type=int, help="10,000, or 2,000 of --quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of the second and third part's nodes")
    parser.add_argument("--store", choices=["redis", "files"], default="redis", help="the same")
    parser.add_argument("--ways", nargs="+", choices=[*WAY_NAMES], default=[*WAY_NAMES])
    parser.add_argument("--node", choices=["plain", "stream", *WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or (2_000 if options.quick else 10_000)
    if options.node:
        uvloop.run(serve(options.node, options.url, options.tokens, options.device))
        return
    rounds = 1 if options.quick else options.rounds
    rows: list[Row] = []
    if options.device != "cpu" and not can_be_opened(options.device):
        show(rows, as_json=options.json)
        return
    if options.part == "direct" and options.store == "files":
        with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as directory:
            show(by_way(Path(directory).as_uri(), options, rounds), as_json=options.json)
        return
    with redis_server() as redis:
        if options.part == "all":
            rows += after_prefill(redis.url, "redis", options.tokens, rounds)
            redis.execute("FLUSHALL")
        if options.part in {"all", "storage"}:
            rows += beyond_storage(redis, options.tokens, 5 * rounds, options.device)
            redis.execute("FLUSHALL")
        if options.part in {"all", "direct"}:
            rows += by_way(redis.url, options, rounds)
    if options.part == "all":
        with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as directory:
            rows += after_prefill(Path(directory).as_uri(), "files", options.tokens, rounds)
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
