"""A store that was away, or lost a lease, makes nobody take a living producer for a lost one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from msgspec.structs import replace

from tests.e2e.exact import ExactNode, exact_pair, text, truth
from tests.latch import until
from tests.pd.nodes import settings
from tests.redis_server import RedisServer, redis_server
from tierkv.cache.keys import Prompt
from tierkv.clock import SystemClock
from tierkv.pd import claims
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.redis.store import RedisSettings

PROMPT = text(100)
NEW = 4
PRODUCER = "a-producer-that-lives"
# The store is to be missed soon, and not because a machine stood still.
UNHURRIED = StoreSettings(
    redis=RedisSettings(timeout_s=1.0, connect_timeout_s=1.0),
    resilience=ResilienceSettings(timeout_s=1.1, failures_to_open=2),
)
LONGER_S = 1.5  # above the second between two looks, and what a slow machine needs


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@dataclass(frozen=True)
class Waiting:
    """A claim that waits, as the test plays its producer."""

    claim: asyncio.Task[None]
    decode: ExactNode
    lease: str

    async def until_store(self, *, is_there: bool) -> None:
        service = self.decode.service
        await until(lambda: service.storage_state()[0].is_degraded is not is_there, "the breaker")


@asynccontextmanager
async def waiting(server: RedisServer, *, lease_s: float) -> AsyncIterator[Waiting]:
    """At the end the producer says that it lives, and completes its ticket."""
    handoff = settings(producer_lease_s=lease_s)
    store = partial(open_guarded_store, server.url, UNHURRIED, SystemClock())
    async with exact_pair(store, handoff=handoff) as (prefill, decode):
        await prefill.engine.prefill(prefill.job(PROMPT, 1), "t")
        tickets = prefill.service.require_handoff().tickets
        ticket = await tickets.read("t")
        assert ticket is not None
        prompt = Prompt.of(PROMPT, ticket.block_size)
        lease = tickets.names.producer(PRODUCER)
        await tickets.forget("t")
        await tickets.put(replace(tickets.new_open("t", prompt), incarnation=PRODUCER))
        server.execute("SET", lease, "lives")

        async def claim() -> None:
            job = decode.job(PROMPT, NEW)
            generation, _ = await decode.engine.decode(job, "t", deadline_s=60)
            assert generation.tokens == truth(PROMPT, NEW).tokens

        task = asyncio.create_task(claim())
        await until(lambda: decode.service.index.match(prompt).num_blocks > 0, "first blocks")
        yield Waiting(task, decode, lease)
        assert not task.done()
        server.execute("SET", lease, "lives")
        await until(lambda: not prefill.service.storage_state()[0].is_degraded, "the breaker")
        await tickets.put(ticket)
        await task


async def test_who_could_not_say_that_it_lives_has_a_leases_time_to_say_so(
    server: RedisServer,
) -> None:
    lease_s = 6.0  # renewed after 2 s: so much patience has every claim
    async with waiting(server, lease_s=lease_s) as here:
        server.pause()
        await here.until_store(is_there=False)
        server.resume()
        server.execute("DEL", here.lease)
        await here.until_store(is_there=True)
        await asyncio.sleep(lease_s / 3 + claims._GRACE_S + LONGER_S)  # noqa: SLF001


async def test_a_lease_that_the_store_lost_may_come_back_with_the_next_beat(
    server: RedisServer,
) -> None:
    async with waiting(server, lease_s=60) as here:
        server.execute("DEL", here.lease)
        await asyncio.sleep(claims._GRACE_S + LONGER_S)  # noqa: SLF001
