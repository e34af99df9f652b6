"""Tickets and leases go by the store's clock: nodes with wrong clocks hand prompts over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clocks import ShiftedClock
from tests.latch import turns, until
from tests.pd.nodes import TOKENS, claim, publish, settings
from tests.pd.test_streaming import claim as claim_early
from tests.pd.test_streaming import prefilling
from tests.redis_server import (
    PATIENT,
    RedisServer,
    empty_redis,  # noqa: F401 - a fixture
    module_redis,  # noqa: F401 - a fixture
)
from tests.world import World, world
from tierkv.errors import HandoffError
from tierkv.pd.tickets import Standing, status_of
from tierkv.storage.factory import open_store

AHEAD_S = 660.0  # more than a ticket lives


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of each kind of store that tells its time."""
    if request.param == "file":
        return f"file://{tmp_path / 'store'}"
    server: RedisServer = request.getfixturevalue("empty_redis")
    return server.url


@asynccontextmanager
async def nodes(url: str, there_s: float, here_s: float, **fields: Any) -> AsyncIterator[Any]:
    """A prefill node whose clock is `there_s` ahead, and a decode node with `here_s`.

    fields: of the HandoffSettings of both.
    """
    there, here = (
        world(
            store=open_store(url, PATIENT, ShiftedClock(ahead_s)),
            handoff=settings(**fields),
            device_blocks=64,
            host_blocks=64,
        )
        for ahead_s in (there_s, here_s)
    )
    async with there as prefill, here as decode:
        yield prefill, decode


def skew_s(node: World) -> float | None:
    [state] = node.service.storage_state()
    return state.clock_skew_s


@pytest.mark.parametrize(("there_s", "here_s"), [(0, -AHEAD_S), (-AHEAD_S, AHEAD_S)])
async def test_a_prompt_is_claimed_whatever_the_clocks_of_both_nodes_say(
    url: str, there_s: float, here_s: float
) -> None:
    async with nodes(url, there_s, here_s) as (prefill, decode):
        await publish(prefill)
        await claim(decode)
        assert decode.service.stats().handoff.claims_without_ticket == 0
        assert skew_s(prefill) == pytest.approx(there_s, abs=1)
        assert skew_s(decode) == pytest.approx(here_s, abs=1)


@pytest.mark.parametrize("here_s", [AHEAD_S, -AHEAD_S])
async def test_a_stream_and_its_lease_are_alive_whatever_the_claimers_clock_says(
    url: str, here_s: float
) -> None:
    async with nodes(url, 0, here_s) as (prefill, decode), prefilling(prefill, TOKENS) as here:
        await here.compute(20)
        await here.stored(5)
        tickets = decode.service.require_handoff().tickets
        while (found := await status_of(tickets, "t")).state is Standing.NOT_YET:
            await turns(3)  # the open ticket is written beside the blocks, so maybe after them
        assert found.state is Standing.OPEN
        await here.rest()
        await decode.ended(await claim_early(decode, TOKENS))


@pytest.mark.parametrize("here_s", [0, AHEAD_S, -AHEAD_S])
async def test_a_ticket_expires_by_the_stores_clock_and_the_refusal_says_so(
    url: str, here_s: float
) -> None:
    async with nodes(url, AHEAD_S, here_s, ticket_ttl_s=0.2) as (prefill, decode):
        published = await publish(prefill)
        tickets = decode.service.require_handoff().tickets
        await until(lambda: tickets.now() > published.ticket.expires_at, "the ticket's end")
        why = "by the store's clock: prefill"
        if here_s:
            which = "ahead of" if here_s > 0 else "behind"
            why = rf"by the store's clock \(this machine's clock is 660 s {which} it\): prefill"
        with pytest.raises(HandoffError, match=why) as caught:
            await claim(decode)
        assert caught.value.reason == "expired"
