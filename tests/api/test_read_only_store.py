"""A store that is read but takes no writes is told of, with its own reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.api.nodes import here
from tests.latch import until
from tests.redis_server import RedisServer, redis_server
from tests.storage.values import content_of, get_one, put_one
from tierkv.clock import SystemClock
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.file import FileSettings
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.protocol import BreakerState, GetStatus, PutItem, PutStatus
from tierkv.storage.redis.url import RedisSettings

SETTINGS = StoreSettings(
    redis=RedisSettings(timeout_s=10.0, connect_timeout_s=10.0),
    resilience=ResilienceSettings(timeout_s=20.0, write_timeout_s=20.0, full_pause_s=0.0),
)
OF_SIZE = (
    "the server closes the connection when a value of 3000000 bytes is written: set its "
    "client-query-buffer-limit (and maxmemory-clients)"
)
ACL = "ACL SETUSER default"
BUFFER, CLIENTS = "CONFIG SET client-query-buffer-limit", "CONFIG SET maxmemory-clients"
FAULTS = {  # begin, end, reason
    "full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "OOM "),
    "no permission": (f"{ACL} -set", f"{ACL} +set", "NOPERM "),
    "no key to write to": (f"{ACL} resetkeys %R~*", f"{ACL} resetkeys ~*", "NOPERM "),
    "a replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "READONLY "),
    "a short query buffer": (f"{BUFFER} 1mb", f"{BUFFER} 1gb", OF_SIZE),
    "little memory for clients": (f"{CLIENTS} 1mb", f"{CLIENTS} 0", OF_SIZE),
}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server("--maxmemory-policy", "noeviction") as server:
        yield server


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_store_that_takes_no_writes_is_degraded_and_says_why_until_it_does(
    fault: str, server: RedisServer
) -> None:
    begin, end, reason = FAULTS[fault]
    store = open_guarded_store(server.url, SETTINGS, SystemClock())
    async with here(store=store) as on:

        async def told() -> tuple[str, str]:
            answer = await on.client.get("/readyz?verbose")
            assert answer.status == 200
            metrics = (await on.client.get("/metrics")).body.decode()
            takes_writes = 'tierkv_storage_takes_writes{tenant=""} 1' in metrics
            assert takes_writes == (answer.body["status"] == "ok")
            return answer.body["status"], answer.body["parts"]["storage"]["detail"]

        assert await put_one(store, "t:f:a:0", b"kept") is PutStatus.STORED
        await asyncio.to_thread(server.execute, *begin.split())
        for name in ("t:f:b:0", "t:f:c:0"):
            [put] = await store.put([PutItem(name, (content_of(name, 3_000_000),))])
            assert put.status is PutStatus.FULL
        status, detail = await told()
        assert status == "degraded"
        assert f"refuses writes: {reason}" in detail
        assert await get_one(store, "t:f:a:0", 4) == (GetStatus.HIT, b"kept")
        assert store.health.circuit is BreakerState.CLOSED
        await asyncio.to_thread(server.execute, *end.split())
        await until(lambda: not store.health.write_refusal, "nobody writes, and it is seen")
        assert (await told())[0] == "ok"
        assert await put_one(store, "t:f:d:0", b"x") is PutStatus.STORED


async def test_of_a_layered_store_the_part_that_takes_no_writes_is_named(
    server: RedisServer, tmp_path: Path
) -> None:
    near = f"file://{tmp_path}"
    files = FileSettings(capacity_bytes=1 << 20, min_free_bytes=1 << 60)
    settings = replace(SETTINGS, file=files)
    store = open_guarded_store(f"layered:{near}|{server.url}", settings, SystemClock())
    async with here(store=store) as on:
        assert await put_one(store, "t:f:a:0", b"kept") is PutStatus.STORED
        await until(lambda: bool(store.health.write_refusal), "the near copy is refused")
        answer = await on.client.get("/readyz?verbose")
        assert answer.body["status"] == "degraded"
        detail = answer.body["parts"]["storage"]["detail"]
        assert detail.startswith(f"{near} refuses writes: ")
        assert "capacity_bytes allows 1048576 bytes of values, min_free_bytes keeps" in detail
