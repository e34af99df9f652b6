"""A ticket says that its prompt's blocks are stored: they are not asked for, and may be gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from tests.latch import finish, turns, until
from tests.pd import nodes
from tests.pd.nodes import claimed, publish, settings
from tests.sessions import claim_request
from tests.world import World
from tierkv.cache.node import Tier
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.gpu.protocol import Direction
from tierkv.pd.claims import ClaimPolicy
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.storage.base import StoreWrapper
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Capabilities, Store

T = TypeVar("T")
PROMPT = [token % 50 for token in range(4 * (GROUP_BLOCKS + 8) + 2)]  # two groups, and a tail
NUM_BLOCKS = len(PROMPT) // 4
ALL_KEYS = NUM_BLOCKS + 1


class Counted(StoreWrapper):
    """num_asked: names that somebody asked whether they are there."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.num_asked = 0

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.inner.running():
            yield

    async def exists(self, names: Sequence[str]) -> int:
        self.num_asked += len(names)
        return await super().exists(names)

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        return await ask(self.inner)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[World, World, Counted]]:
    """A prefill and a decode node, and the store as the decode node sees it."""
    inner = MemoryStore(MemorySettings(), SystemClock())
    counted, chosen = Counted(inner), settings(streams=False)
    room: dict[str, Any] = {"device_blocks": 3 * NUM_BLOCKS, "host_blocks": 3 * NUM_BLOCKS}
    async with nodes.pair(chosen, chosen, store=inner, seen_as=counted, **room) as both:
        yield *both, counted
        for node in both:
            await node.settle()
        assert not len(both[1].service.tiers.slots.lent(Tier.HOST))


async def test_it_is_not_asked_whether_what_a_ticket_names_is_stored() -> None:
    async with pair() as (prefill, decode, store):
        await publish(prefill, PROMPT, "ticket")
        request = await claimed(decode, PROMPT, new=0)
        assert request.cached_tokens == len(PROMPT)
        assert store.num_asked == 0
        decode.service.scheduler.end(request)


async def test_what_nobody_promised_is_asked_for() -> None:
    async with pair() as (prefill, decode, store):
        await publish(prefill, PROMPT, "ticket")
        assert (await decode.run(PROMPT)).storage_tokens == len(PROMPT) - 1
        assert store.num_asked == ALL_KEYS


@pytest.mark.parametrize("gone", [0, GROUP_BLOCKS - 1, GROUP_BLOCKS, NUM_BLOCKS])
async def test_a_block_that_went_although_it_was_promised_is_a_gap(gone: int) -> None:
    async with pair() as (prefill, decode, _):
        await publish(prefill, PROMPT, "ticket")
        await decode.the_store.delete([prefill.names(PROMPT)[gone]])
        with pytest.raises(HandoffError) as error:
            await claimed(decode, PROMPT, new=0)
        assert error.value.reason == "incomplete"
        assert f"only {4 * gone} of {len(PROMPT)}" in str(error.value)
        assert str(error.value).endswith("not in storage")
        await decode.settle()
        request = await claimed(decode, PROMPT, new=0, policy=ClaimPolicy.RECOMPUTE)
        assert request.cached_tokens == 4 * gone
        decode.service.scheduler.end(request)


async def test_a_claim_is_acknowledged_when_its_blocks_are_on_the_device() -> None:
    async with pair() as (prefill, decode, _):
        await publish(prefill, PROMPT, "ticket")
        handoff = decode.service.require_handoff()
        decode.latch.hold(Direction.LOAD)
        request, _ = await finish(
            claim_request(
                decode.service, "claim", "ticket", decode.prompt(PROMPT), max_new_tokens=0
            )
        )
        await turns(20)
        assert await handoff.tickets.read_acknowledgement("ticket") is None
        decode.latch.release()
        await until(lambda: decode.service.tiers.work.num_tasks == 0, "the acknowledgement")
        assert await handoff.tickets.read_acknowledgement("ticket") is not None
        decode.service.scheduler.end(request)


async def test_a_claim_whose_load_fails_is_acknowledged_all_the_same() -> None:
    async with pair() as (prefill, decode, _):
        await publish(prefill, PROMPT, "ticket")
        handoff = decode.service.require_handoff()
        decode.latch.fail_next(Direction.LOAD)
        request, _ = await finish(
            claim_request(
                decode.service, "claim", "ticket", decode.prompt(PROMPT), max_new_tokens=0
            )
        )
        await until(lambda: decode.service.tiers.work.num_tasks == 0, "the acknowledgement")
        assert await handoff.tickets.read_acknowledgement("ticket") is not None
        decode.service.scheduler.end(request)


async def test_where_other_sizes_have_stored_blocks_before_the_size_is_asked_for() -> None:
    async with pair() as (prefill, decode, store):
        await publish(prefill, PROMPT, "ticket")
        storage = decode.service.tiers.copies.storage
        assert storage is not None
        storage.slices.peer_tensor_parallel = (2,)
        storage.has_other_sizes = True
        request = await claimed(decode, PROMPT, new=0)
        assert request.cached_tokens == len(PROMPT)
        assert store.num_asked == ALL_KEYS
        decode.service.scheduler.end(request)
