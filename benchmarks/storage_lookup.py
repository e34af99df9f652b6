"""How long a store takes to say how much of a prompt it has: 1,000 names, by themselves and as a
node asks, with the peers of other tensor-parallel sizes that a miss is asked of too."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import numpy as np

from benchmarks.bench import Row, row
from tests.redis_groups import redis_cluster
from tests.redis_server import redis_server
from tierkv.cache.keys import Fingerprint, KeyRun, Names, Prompt
from tierkv.cache.layout import attention_layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.storage.factory import StoreSettings, open_guarded_store, open_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.protocol import PutItem, Store
from tierkv.storage.redis.store import RedisSettings
from tierkv.transfer.storage_io import Slice, Slices, StorageIO

NUM_BLOCKS = 1_000
BLOCK = 16
HEADS = 8
SETTINGS = StoreSettings(
    redis=RedisSettings(num_connections=2, write_connections=2, timeout_s=30.0),
    # What is not there is asked for again each time: it is the question that is measured.
    resilience=ResilienceSettings(timeout_s=30.0, negative_ttl_s=0.0),
)


async def measure_lookup(rounds: int) -> list[Row]:
    with redis_server() as server:
        rows = await _lookups(server.url, "1 server", rounds)
        rows += await _lookups_of_a_node(server.url, "1 server", rounds)
    with redis_cluster(3) as cluster:
        rows += await _lookups(cluster.url, "3 masters", rounds)
        rows += await _lookups_of_a_node(cluster.url, "3 masters", rounds)
    return rows


async def _lookups(url: str, what: str, rounds: int) -> list[Row]:
    names = [f"v:0123456789abcdef:{i:064x}:0of1" for i in range(NUM_BLOCKS)]
    store = open_store(url, SETTINGS, SystemClock())
    rows = []
    async with store.running():
        for there in (NUM_BLOCKS, 617):
            await _leave(store, names, there)
            label = f"lookup of 1,000, {there} there, {what}"
            rows += await _timed(lambda: store.exists(names), there, label, rounds)
    return rows


async def _lookups_of_a_node(url: str, what: str, rounds: int) -> list[Row]:
    layout = attention_layout(
        num_layers=2, num_kv_heads=HEADS, head_dim=8, dtype="float16", item_bytes=2,
        block_size=BLOCK,
    )  # fmt: skip
    who = Fingerprint("lookup", layout)
    keys = list(KeyRun.of(Prompt.of(range(NUM_BLOCKS * BLOCK), BLOCK), who.root()))
    names = Names("v", who.short)
    host = CpuHostSlots(layout, 1)
    store = open_guarded_store(url, SETTINGS, SystemClock())
    rows = []
    async with store.running():
        for there, peers in ((NUM_BLOCKS, (2, 4, 8)), (617, ()), (617, (2, 4, 8))):
            scheme = ShardScheme(layout, {"key": HEADS, "value": HEADS})
            slices = Slices(names, [Slice(Shard(0, 1), layout, host)], scheme, peers)
            io = StorageIO(store, names, layout, host, block_ttl_s=None, slices=slices)
            await _leave(store, [slices.names_of(key, 1)[0] for key in keys], there)
            label = f"node's lookup of 1,000, {there} there, {len(peers)} peer sizes, {what}"
            async with io.running():
                rows += await _timed(lambda io=io: io.count_present(keys), there, label, rounds)  # type: ignore[misc]
    return rows


async def _leave(store: Store, names: list[str], there: int) -> None:
    """Only the first `there` of `names` have a value."""
    await store.delete(names)
    await store.put([PutItem(name, (b"x",)) for name in names[:there]])


async def _timed(
    ask: Callable[[], Awaitable[int]], expected: int, label: str, rounds: int
) -> list[Row]:
    times = []
    for _ in range(rounds * 30):
        started = time.perf_counter()
        found = await ask()
        times.append((time.perf_counter() - started) * 1e3)
        assert found == expected, label
    p99 = float(np.percentile(times, 99))
    return [row(label, times, "ms"), row(f"  the same, p99, {label}", [p99], "ms")]
