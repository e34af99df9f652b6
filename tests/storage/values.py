"""Values for tests of stores, functions to read them back, and a clock that a test sets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faulty import FaultyStore
from tierkv.clock import Clock, SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places
from tierkv.storage.protocol import GetItem, GetStatus, PutItem, PutStatus, Store
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url

# Deadlines so long that a busy machine does not miss them.
PATIENT = RedisSettings(timeout_s=100.0, connect_timeout_s=50.0)
TWENTY = [f"t:f:{index:02}:0" for index in range(20)]


@dataclass
class TurnedClock:
    """A clock whose time a test sets."""

    now: float = 1_800_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def content_of(name: str, num_bytes: int) -> bytes:
    return random.Random(name).randbytes(num_bytes)


def redis_store(url: str, settings: RedisSettings = PATIENT) -> RedisStore:
    return RedisStore(parse_redis_url(url), settings, SystemClock())


def tls_words(certificates: Path, port: int) -> list[str]:
    """Return options of a Redis server with TLS that requires client certificates."""
    certificate, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    # fmt: off
    return [
        "--tls-port", str(port), "--tls-ca-cert-file", certificate,
        "--tls-cert-file", certificate, "--tls-key-file", key,
    ]
    # fmt: on


def memory() -> FaultyStore:
    return FaultyStore(MemoryStore(MemorySettings(), SystemClock()))


def guarded(inner: Store, clock: Clock | None = None, **settings: float) -> GuardedStore:
    """Return a guard around `inner`, with deadlines that a busy machine does not miss."""
    chosen = {"timeout_s": 20.0, "write_timeout_s": 20.0} | settings
    return GuardedStore(inner, ResilienceSettings(**chosen), clock or SystemClock())  # type: ignore[arg-type]


def landing(name: str, *sizes: int) -> tuple[GetItem, list[bytearray]]:
    buffers = [bytearray(size) for size in sizes]
    return GetItem(name, tuple(memoryview(buffer) for buffer in buffers)), buffers


class Routed(Places):
    """A `Places` with a common store and stores for some routes, attached by `running()`."""

    def __init__(self, own: Mapping[str, Store], common: Store) -> None:
        super().__init__(common)
        self._stores = own

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running():
            for route, store in self._stores.items():
                await self.attach(store, route)
            yield


class Taken:
    """A digest that records the bytes it receives."""

    def __init__(self) -> None:
        self.content = b""

    def update(self, piece: memoryview, /) -> None:
        self.content += piece


async def put_one(store: Store, name: str, content: bytes, **options: float | bool) -> PutStatus:
    item = PutItem(
        name,
        (content,),
        ttl_s=options.get("ttl_s"),
        keep_existing=bool(options.get("keep_existing", True)),
        only_new=bool(options.get("only_new", False)),
    )
    [outcome] = await store.put([item])
    return outcome.status


async def get_one(store: Store, name: str, num_bytes: int) -> tuple[GetStatus, bytes]:
    item, [buffer] = landing(name, num_bytes)
    [outcome] = await store.get_into([item])
    return outcome.status, bytes(buffer)


async def refused(asking: Awaitable[object]) -> str:
    with pytest.raises(StoreUnavailableError) as caught:
        await asking
    return str(caught.value)


async def cancelled_after(ticks: int, work: Coroutine[object, object, object]) -> None:
    """Run `work`, cancel it after `ticks` turns of the event loop, and wait until it has ended."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()


async def fill(store: Store) -> None:
    """Put a value of 500 bytes under each of the twenty names."""
    puts = await store.put([PutItem(name, (content_of(name, 500),)) for name in TWENTY])
    assert {put.status for put in puts} == {PutStatus.STORED}


async def check(store: Store) -> None:
    """Read the values that `fill` has put, and check their bytes."""
    landings = [landing(name, 500) for name in TWENTY]
    outcomes = await store.get_into([item for item, _ in landings])
    assert {outcome.status for outcome in outcomes} == {GetStatus.HIT}
    for item, [buffer] in landings:
        assert buffer == content_of(item.name, 500)
