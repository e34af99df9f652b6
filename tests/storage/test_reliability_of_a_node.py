"""The storage rows of the reliability table from the side of a node.

A request, the index and the probes meet a Redis that dies, freezes, or loses or changes values.
Tests with many repetitions are marked slow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.api.nodes import process
from tests.e2e.exact import text, truth
from tests.layouts import LAYOUTS
from tests.redis_server import RedisServer, redis_server
from tests.storage.test_reliability import SLACK, STRICT, trials
from tests.storage.values import redis_store
from tests.stored import stored_keys
from tests.world import BLOCK, GQA, World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey
from tierkv.cache.layout import Layout
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.refmodel.model import decode as decode_text
from tierkv.sched.settings import CacheSettings
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.protocol import GetStatus, PutStatus
from tierkv.transfer.storage_io import StorageIO

TOKENS = list(range(12 * BLOCK))


def node_over(
    server: RedisServer, storage_write: WritePolicy = WritePolicy.WRITE_THROUGH
) -> AbstractAsyncContextManager[World]:
    """Return a service like a node's: every block is stored at once in Redis behind a breaker."""
    return world(
        store=open_guarded_store(server.url, StoreSettings(), SystemClock()),
        device_blocks=64,
        host_blocks=64,
        storage_write=storage_write,
        fetch_policy=CacheSettings().fetch_policy,
    )


def believed_stored(here: World) -> int:
    nodes = here.service.index.spaces.nodes()
    return sum(int(node.stored_in(0, node.num_blocks).sum()) for node in nodes)


@trials(3, 200)
async def test_row_1_a_server_killed_during_a_write_leaves_blocks_that_count_as_not_stored(
    count: int,
) -> None:
    for _ in range(count):
        with redis_server() as server:
            async with node_over(server) as here:
                request = await here.admit(TOKENS)
                await here.prefill(request, TOKENS)
                await asyncio.sleep(random.uniform(0, 0.01))
                server.kill()
                killed_at = time.monotonic()
                await here.ended(request)
                # Time for an answer and a new connection.
                assert time.monotonic() - killed_at <= 0.6 * SLACK
                stats = here.storage_stats
                assert believed_stored(here) <= stats.flushed_blocks
                # The service answers from its own memory.
                started = time.monotonic()
                matched = await here.run(TOKENS)
                assert matched.device_tokens >= 11 * BLOCK
                assert time.monotonic() - started <= 1.0 * SLACK
                assert here.free_device_blocks == 64 - 12


@trials(3, 200)
async def test_row_2_a_server_killed_during_a_read_leaves_a_request_that_computes(
    count: int,
) -> None:
    slowest = 0.0
    for _ in range(count):
        with redis_server() as server:
            async with node_over(server) as here:
                await here.run(TOKENS)
                assert here.service.reset() == 0
                admitting = asyncio.ensure_future(here.admit(TOKENS))
                await asyncio.sleep(random.uniform(0, 0.004))
                server.kill()
                killed_at = time.monotonic()
                request = await admitting
                slowest = max(slowest, time.monotonic() - killed_at)
                assert request.cached_tokens in range(len(TOKENS))
                await here.prefill(request, TOKENS)  # checks fetched blocks, computes the others
                here.check_kv(request, TOKENS, len(TOKENS))
                await here.ended(request)
                assert here.free_device_blocks == 64 - 12
    assert slowest <= 0.3 * SLACK


@trials(60, 1_000)
async def test_row_3_a_frozen_server_costs_requests_that_hit_locally_nothing(
    count: int, empty_redis: RedisServer
) -> None:
    async with node_over(empty_redis, WritePolicy.NONE) as here:
        await here.run(TOKENS)

        async def hits(seen: list[float]) -> None:
            for _ in range(20):
                started = time.perf_counter()
                request = await here.admit(TOKENS)
                seen.append(time.perf_counter() - started)
                assert request.matched.device_tokens >= 11 * BLOCK
                await here.ended(request)

        # Alternately, so that other work on the machine slows both alike.
        healthy: list[float] = []
        frozen: list[float] = []
        for _ in range(count // 20):
            await hits(healthy)
            empty_redis.pause()
            try:
                await hits(frozen)
            finally:
                empty_redis.resume()
        share = 99 if STRICT else 50  # with few requests, the p99 is one that the machine delayed
        took_s = [float(np.percentile(seen, share)) for seen in (healthy, frozen)]
        print(f"p{share} {took_s[0] * 1e3:.2f} ms, frozen {took_s[1] * 1e3:.2f} ms")  # noqa: T201 - for docs
        assert took_s[1] <= 1.2 * SLACK * took_s[0] + 0.001


@trials(1, 100)
async def test_row_3_a_frozen_server_leaves_a_node_ready_but_degraded_until_it_is_back(
    count: int, empty_redis: RedisServer, tmp_path: Path
) -> None:
    prompt = text(100)
    expected = truth(prompt, 4).tokens
    said = decode_text(prompt)
    body = {"prompt": said, "max_tokens": 4}
    async with process(tmp_path, "--storage", empty_redis.url) as here:

        async def storage_part() -> tuple[int, str, str]:
            answer = await here.client.get("/readyz?verbose")
            part = answer.body["parts"]["storage"]
            return answer.status, part["status"], part["detail"]

        async def metrics() -> str:
            return bytes((await here.client.get("/metrics")).body).decode()

        for trial in range(count):
            assert (await storage_part())[:2] == (200, "ok")
            empty_redis.pause()
            try:
                slowest, requests = 0.0, 0
                while "is not used" not in (await storage_part())[2]:
                    started = time.monotonic()
                    answer = await here.client.post(
                        "/v1/generate", body | {"prompt": f"{trial}-{requests} {said}"}
                    )
                    slowest = max(slowest, time.monotonic() - started)
                    assert answer.status == 200
                    requests += 1
                assert requests <= 5  # each takes one deadline, as do the readiness probes
                assert slowest <= 1.0 * SLACK
                assert (await storage_part())[:2] == (200, "degraded")
                assert 'tierkv_circuit_state{state="closed",tenant=""} 0.0' in await metrics()
                answer = await here.client.post("/v1/generate", body)
                assert tuple(answer.body["tokens"]) == expected
            finally:
                empty_redis.resume()
            healed_at = time.monotonic()
            while (await storage_part())[:2] != (200, "ok"):
                assert time.monotonic() - healed_at <= 2.0 * SLACK
                await asyncio.sleep(0.02)
            assert 'tierkv_circuit_state{state="closed",tenant=""} 1.0' in await metrics()
        here.terminate()
        assert await here.ended() == 0


# Values in the store that differ from those that were written


class Blocks:
    """The blocks of one prompt in host slots, and a `StorageIO` that stores and fetches them."""

    def __init__(self, server: RedisServer, layout: Layout, num_tokens: int) -> None:
        self.server = server
        who = Fingerprint("model", layout)
        self.host = CpuHostSlots(layout, 64)
        self.host.array[:] = np.random.default_rng(5).integers(1, 256, self.host.array.shape)
        self.names = Names("tierkv", who.short)
        self.store = redis_store(server.url)
        self.io = StorageIO(self.store, self.names, layout, self.host, block_ttl_s=100.0)
        self.keys = stored_keys(who.root(), Prompt.of(range(num_tokens), layout.block_size))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.store.running(), self.io.running():
            yield

    async def execute(self, *command: str | bytes | int) -> object:
        return await asyncio.to_thread(self.server.execute, *command)

    async def flush(self, keys: list[StoredKey], start: int = 0) -> None:
        outcomes = await self.io.flush(keys, np.arange(start, start + len(keys), dtype=np.int32))
        assert {o.status for o in outcomes} <= {PutStatus.STORED, PutStatus.EXISTED}

    async def fetch(self, key: StoredKey, slot: int = 60) -> GetStatus:
        [outcome] = await self.io.fetch([key], np.array([slot], np.int32))
        return outcome.status


@pytest.mark.parametrize("damage", ["a flipped bit", "a cut"])
@trials(50, 5_000)
async def test_row_5_a_damaged_value_in_redis_is_found_counted_and_deleted(
    count: int, damage: str, empty_redis: RedisServer
) -> None:
    ground = Blocks(empty_redis, GQA, BLOCK)
    [key] = ground.keys
    name = ground.names.name(key)
    async with ground.running():
        for trial in range(count):
            await ground.flush([key])
            value = await ground.store.get(name, max_bytes=1 << 20)
            assert value is not None
            at = random.randrange(8 * len(value))
            if damage == "a cut":
                await ground.execute("SET", name, value[: at // 8])
            else:
                byte = bytes([value[at // 8] ^ 1 << at % 8])
                await ground.execute("SETRANGE", name, at // 8, byte)
            assert await ground.fetch(key) is GetStatus.DAMAGED
            assert ground.io.stats.damaged_blocks == trial + 1
            assert await ground.execute("EXISTS", name) == 0


@trials(40, 10_000)
async def test_row_7_what_redis_evicts_meanwhile_is_the_end_of_the_prefix_and_never_a_hole(
    count: int,
) -> None:
    layout = LAYOUTS["gqa"]
    gaps = 0
    with redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random") as server:
        ground = Blocks(server, layout, 16 * layout.block_size)
        filler = redis_store(server.url)
        async with ground.running(), filler.running():

            async def press() -> None:
                while True:
                    await ground.execute("SET", f"other:{random.randrange(64)}", bytes(100_000))

            pressing = asyncio.ensure_future(press())
            try:
                for _ in range(count):
                    await ground.flush(ground.keys)
                    present = await ground.io.count_present(ground.keys)
                    target = np.arange(32, 32 + present, dtype=np.int32)
                    outcomes = await ground.io.fetch(ground.keys[:present], target)
                    usable = next(
                        (i for i, o in enumerate(outcomes) if o.status is not GetStatus.HIT),
                        present,
                    )
                    gaps += usable < present
                    for slot in range(usable):
                        assert np.array_equal(ground.host.array[32 + slot], ground.host.array[slot])
                    assert {o.status for o in outcomes} <= {GetStatus.HIT, GetStatus.MISS}
            finally:
                pressing.cancel()
                await asyncio.wait([pressing])
        evicted = await asyncio.to_thread(server.execute, "INFO", "stats")
        assert isinstance(evicted, dict)
        assert evicted["evicted_keys"] > 0
    print(f"{gaps} of {count} had a value go between question and answer")  # noqa: T201 - for docs
