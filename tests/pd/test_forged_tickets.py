"""What stands in a store is anybody's: no ticket brings a decode node down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.e2e.exact import ExactNode, exact_pair, text, truth
from tests.pd.nodes import settings
from tests.redis_server import PATIENT, RedisServer, empty_redis, module_redis
from tests.storage.values import put_one
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, HandoffError
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.tickets import Ticket, Tickets
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.storage.factory import open_store

__all__ = ["empty_redis", "module_redis"]

PROMPT = text(40)
NEW = 4
TEN_YEARS_S = 10 * 365 * 86_400.0


@asynccontextmanager
async def published(server: RedisServer) -> AsyncIterator[tuple[ExactNode, ExactNode, Ticket]]:
    """A prefill node that has published PROMPT as `t`, and a decode node."""
    handoff = settings(direct=DirectPath.MEMORY)
    store = partial(open_store, server.url, PATIENT, SystemClock())
    async with exact_pair(store, handoff=handoff) as (prefill, decode):
        await prefill.engine.prefill(prefill.job(PROMPT, 1), "t")
        ticket = await tickets_of(prefill).read("t")
        assert ticket is not None
        yield prefill, decode, ticket
        await decode.settle()
        assert (await decode.generate(PROMPT, NEW)).tokens == truth(PROMPT, NEW).tokens


def tickets_of(node: ExactNode) -> Tickets:
    return node.service.require_handoff().tickets


async def put(node: ExactNode, ticket: Ticket) -> None:
    assert node.service.store is not None
    name = tickets_of(node).names.ticket("t")
    await put_one(node.service.store, name, ticket.encode(), ttl_s=60, keep_existing=False)


def changed(one: Any, **fields: Any) -> Any:
    """As somebody could write it who knows the format, but not as we would make it."""
    forged = msgspec.structs.replace(one)
    for name, value in fields.items():
        msgspec.structs.force_setattr(forged, name, value)
    return forged


ODD_TOKENS = [-1, VOCAB_SIZE, 2**31, 2**32, 2**63]
ODD_ADDRESSES: list[dict[str, Any]] = [
    {"port": -1},
    {"port": 0},
    {"port": 65_536},
    {"port": 2**40},
    {"host": ""},
    {"host": "a..b"},
    {"host": "a" * 70},
    {"host": "a\0b"},
    {"host": "producer.example"},
]


async def test_a_ticket_with_an_odd_address_or_first_token_is_damaged(
    empty_redis: RedisServer,
) -> None:
    async with published(empty_redis) as (prefill, decode, ticket):
        forged = [
            *(changed(ticket, direct=changed(ticket.direct, **fields)) for fields in ODD_ADDRESSES),
            *(changed(ticket, first_tokens=(token,)) for token in ODD_TOKENS),
        ]
        for one in forged:
            await put(prefill, one)
            with pytest.raises(HandoffError) as refused:
                await decode.engine.decode(decode.job(PROMPT, NEW), "t")
            assert refused.value.reason == "damaged", one


@pytest.mark.parametrize("after_s", [TEN_YEARS_S, 1e300])
async def test_a_ticket_that_ends_in_the_far_future_is_claimed_and_acknowledged(
    empty_redis: RedisServer, after_s: float
) -> None:
    async with published(empty_redis) as (prefill, decode, ticket):
        await put(prefill, changed(ticket, expires_at=ticket.expires_at + after_s))
        generation, _ = await decode.engine.decode(decode.job(PROMPT, NEW), "t")
        assert generation.tokens == truth(PROMPT, NEW).tokens
        await decode.settle()  # it has acknowledged
        acknowledged = tickets_of(decode).names.acknowledgement("t")
        left_ms = empty_redis.execute("PTTL", acknowledged)
        assert isinstance(left_ms, int)
        assert 0 < left_ms <= (600 + 120) * 1000  # as long as a ticket of ours


def test_tickets_do_not_live_longer_than_a_store_keeps_anything() -> None:
    with pytest.raises(ConfigError, match=r"handoff\.ticket_ttl_s"):
        HandoffSettings(ticket_ttl_s=TEN_YEARS_S, block_ttl_s=None)
    HandoffSettings(ticket_ttl_s=TEN_YEARS_S - 120, block_ttl_s=None)
