"""A store that answers late is slow, not dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from tests.e2e.exact import exact_node, text, truth
from tests.redis_proxy import Proxy, redis_proxy
from tests.redis_server import RedisServer
from tests.storage.values import content_of, get_one, put_one
from tierkv.clock import SystemClock
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.storage.base import StoreWrapper
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import (
    BreakerState,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
)

T = TypeVar("T")
LATENCY_S = 0.5
NAMES = [f"t:f:{index:02}:0" for index in range(10)]


@asynccontextmanager
async def late_redis(server: RedisServer, delay_s: float) -> AsyncIterator[tuple[Proxy, str]]:
    async with redis_proxy(server.port) as proxy:
        proxy.delay_s = delay_s
        yield proxy, proxy.url


@pytest.mark.parametrize("is_late_at_first", [True, False])
async def test_a_store_that_takes_half_a_second_for_each_answer_is_used(
    is_late_at_first: bool,
    empty_redis: RedisServer,
) -> None:
    async with late_redis(empty_redis, LATENCY_S if is_late_at_first else 0.0) as (proxy, url):
        store = open_guarded_store(url, StoreSettings(), SystemClock())
        async with store.running():
            if not is_late_at_first:
                assert await put_one(store, "t:f:early:0", b"x") is PutStatus.STORED
                proxy.delay_s = LATENCY_S
                assert await store.exists(NAMES) == 0

            async def use(name: str) -> None:
                content = content_of(name, 10_000)
                assert await put_one(store, name, content) is PutStatus.STORED
                assert await get_one(store, name, 10_000) == (GetStatus.HIT, content)

            async with asyncio.TaskGroup() as group:
                for name in NAMES:
                    group.create_task(use(name))
            assert await store.exists(NAMES) == len(NAMES)
            assert store.health.circuit is BreakerState.CLOSED
            if is_late_at_first:
                assert store.health.num_opened == 0


class CountedTurns(StoreWrapper):
    """A slow store that counts how many answers were awaited one after the other.

    A question counts one turn more than the answers that had arrived before it. Operations that no
    request waits for are not counted.
    """

    delay_s = 0.15
    turns = 0

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        is_last_word = ":ack:" in items[0].name
        is_beat = ":producer:" in items[0].name and self.turns > 0
        if is_last_word or is_beat:
            return await self.inner.put(items)
        return await super().put(items)

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        return await self.inner.touch(names, ttl_s=ttl_s)

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        number = self.turns + 1
        await asyncio.sleep(self.delay_s)
        answer = await super()._ask(ask)
        self.turns = max(self.turns, number)
        return answer


async def test_a_hand_off_waits_for_few_answers_one_after_the_other() -> None:
    memory = MemoryStore(MemorySettings(), SystemClock())
    stores = [CountedTurns(memory), CountedTurns(memory)]
    settings = HandoffSettings(direct=DirectPath.OFF)
    async with (
        exact_node(stores[0], handoff=settings) as prefill,
        exact_node(stores[1], handoff=settings) as decode,
    ):
        prompt = text(400)
        await prefill.engine.prefill(prefill.job(prompt, 1), "t")
        # The owner of the id, the stored blocks and tails, then the blocks, the ticket and its open
        # ticket: 7 turns, more if blocks are stored while a long prompt is computed.
        assert stores[0].turns <= 9
        generation, _ = await decode.engine.decode(decode.job(prompt, 4), "t")
        assert generation.tokens == truth(prompt, 4).tokens
        assert stores[1].turns <= 2
