"""A ticket says that its prompt's blocks are stored: they are not asked for, and may be gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.latch import finish, turns, until
from tests.pd import nodes
from tests.pd.nodes import claimed, publish, refused, settings
from tests.sessions import claim_request
from tests.world import World
from tierkv.cache.node import Tier
from tierkv.gpu.protocol import Direction
from tierkv.pd.claims import ClaimPolicy
from tierkv.sched.copies import GROUP_BLOCKS

PROMPT = [token % 50 for token in range(4 * (GROUP_BLOCKS + 8) + 2)]  # two groups, and a tail
NUM_BLOCKS = len(PROMPT) // 4
ALL_KEYS = NUM_BLOCKS + 1


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[World, World, list[str]]]:
    """The prefill node has published; the names that the decode node asks its store for."""
    room: dict[str, Any] = {"device_blocks": 3 * NUM_BLOCKS, "host_blocks": 3 * NUM_BLOCKS}
    chosen, asked = settings(streams=False), list[str]()
    async with nodes.pair(chosen, chosen, **room) as (prefill, decode):
        exists = decode.the_store.exists

        async def noted(names: Sequence[str]) -> int:
            asked.extend(names)
            return await exists(names)

        decode.the_store.exists = noted  # type: ignore[method-assign]
        await publish(prefill, PROMPT)
        yield prefill, decode, asked
        for node in (prefill, decode):
            await node.settle()
        assert not len(decode.service.tiers.slots.lent(Tier.HOST))


async def test_it_is_not_asked_whether_what_a_ticket_names_is_stored() -> None:
    async with pair() as (_, decode, asked):
        request = await claimed(decode, PROMPT, new=0)
        assert request.cached_tokens == len(PROMPT)
        assert asked == []
        decode.service.scheduler.end(request)


async def test_what_nobody_promised_is_asked_for() -> None:
    async with pair() as (_, decode, asked):
        assert (await decode.run(PROMPT)).storage_tokens == len(PROMPT) - 1
        assert len(asked) == ALL_KEYS


@pytest.mark.parametrize("gone", [0, GROUP_BLOCKS - 1, GROUP_BLOCKS, NUM_BLOCKS])
async def test_a_block_that_went_although_it_was_promised_is_a_gap(gone: int) -> None:
    async with pair() as (prefill, decode, _):
        await decode.the_store.delete([prefill.names(PROMPT)[gone]])
        error = await refused(decode, PROMPT, new=0)
        assert error.reason == "incomplete"
        assert f"only {4 * gone} of {len(PROMPT)}" in str(error)
        assert str(error).endswith("not in storage")
        request = await claimed(decode, PROMPT, new=0, policy=ClaimPolicy.RECOMPUTE)
        assert request.cached_tokens == 4 * gone
        decode.service.scheduler.end(request)


@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "failed"])
async def test_a_claim_is_acknowledged_when_the_load_of_its_blocks_has_ended(fails: bool) -> None:
    async with pair() as (_, decode, _):
        tickets = decode.service.require_handoff().tickets
        decode.latch.hold(Direction.LOAD)
        if fails:
            decode.latch.fail_next(Direction.LOAD)
        request, _ = await finish(
            claim_request(
                decode.service, "claim", "ticket", decode.prompt(PROMPT), max_new_tokens=0
            )
        )
        await turns(20)
        assert await tickets.read_acknowledgement("ticket") is None
        decode.latch.release()
        await until(lambda: decode.service.tiers.work.num_tasks == 0, "the acknowledgement")
        assert await tickets.read_acknowledgement("ticket") is not None
        decode.service.scheduler.end(request)


async def test_where_other_sizes_have_stored_blocks_before_the_size_is_asked_for() -> None:
    async with pair() as (_, decode, asked):
        storage = decode.service.tiers.copies.storage
        assert storage is not None
        storage.slices.peer_tensor_parallel = (2,)
        storage.has_other_sizes = True
        request = await claimed(decode, PROMPT, new=0)
        assert request.cached_tokens == len(PROMPT)
        assert len(asked) == ALL_KEYS
        decode.service.scheduler.end(request)
