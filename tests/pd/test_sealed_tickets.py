"""Where the store is not trusted, tickets and what goes with them count only with the key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.latch import finish
from tests.pd.nodes import ROOM, claim, publish, refused, settings, ticket_of
from tests.storage.values import put_one
from tests.world import World, tokens, world
from tierkv.clock import SystemClock
from tierkv.pd.settings import DirectPath
from tierkv.pd.tickets import Acknowledgement, Standing
from tierkv.storage.codec import SmallCodec, TenantCodecs, Trust
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.transfer.tier import StorageOptions

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
PROMPT = tokens(9)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemorySettings(), SystemClock())


@pytest.fixture(params=[Trust.SIGNED, Trust.SEALED])
def trust(request: pytest.FixtureRequest) -> Trust:
    chosen: Trust = request.param
    return chosen


@asynccontextmanager
async def node(store: MemoryStore, trust: Trust, key: bytes | None = KEY) -> AsyncIterator[World]:
    options = StorageOptions(codecs=TenantCodecs(trust, key), small=SmallCodec(trust, key))
    handoff = settings(direct=DirectPath.AUTO)
    async with world(store=store, handoff=handoff, storage=options, **ROOM) as here:
        yield here


@asynccontextmanager
async def published(store: MemoryStore, trust: Trust) -> AsyncIterator[tuple[World, World]]:
    async with node(store, trust) as prefill, node(store, trust) as decode:
        await publish(prefill, PROMPT)
        yield prefill, decode


async def is_damaged(decode: World) -> None:
    assert (await refused(decode, PROMPT)).reason == "damaged"
    status = await finish(decode.service.ticket_state("ticket"))
    assert status.state is Standing.DAMAGED


async def put(store: MemoryStore, name: str, value: bytes) -> None:
    await put_one(store, name, value, keep_existing=False)


async def get(store: MemoryStore, name: str) -> bytes:
    value = await store.get(name, max_bytes=1 << 20)
    assert value is not None
    return value


def ticket_name(world: World, ticket: str = "ticket") -> str:
    return world.service.require_handoff().tickets.names.ticket(ticket)


async def test_a_prompt_is_handed_over_through_a_store_that_is_not_trusted(
    store: MemoryStore, trust: Trust
) -> None:
    async with published(store, trust) as (prefill, decode):
        value = await get(store, ticket_name(prefill))
        assert value.startswith(b"TKVS")
        assert (b"fingerprint" in value) == (trust is Trust.SIGNED)
        await claim(decode, PROMPT)
        status = await finish(decode.service.ticket_state("ticket"))
        assert status.state is Standing.ACKNOWLEDGED


@pytest.mark.promise("A ticket written without the key is not used.")
async def test_a_ticket_that_somebody_without_the_key_wrote_is_not_used(
    store: MemoryStore, trust: Trust
) -> None:
    """Word for word what the producer would have written, where nothing is sealed."""
    async with published(store, trust) as (prefill, decode):
        ticket, name = await ticket_of(prefill), ticket_name(prefill)
        mine = SmallCodec(trust, OTHER_KEY).seal_small(name, ticket.encode())
        for forged in (ticket.encode(), mine, b"", b"TKVS"):
            await put(store, name, forged)
            await is_damaged(decode)


async def test_a_ticket_that_was_changed_or_filed_under_another_name_is_not_used(
    store: MemoryStore, trust: Trust
) -> None:
    async with published(store, trust) as (prefill, decode):
        name = ticket_name(prefill)
        value = await get(store, name)
        for at in (0, 5, 7, 20, len(value) // 2, len(value) - 1):
            changed = bytearray(value)
            changed[at] ^= 1
            await put(store, name, bytes(changed))
            await is_damaged(decode)
        await publish(prefill, PROMPT, "other")
        await put(store, name, await get(store, ticket_name(prefill, "other")))
        await is_damaged(decode)
        await put(store, name, value)
        await claim(decode, PROMPT)


async def test_an_acknowledgement_or_a_lease_without_the_key_says_nothing(
    store: MemoryStore, trust: Trust
) -> None:
    async with published(store, trust) as (prefill, _):
        tickets, ticket = prefill.service.require_handoff().tickets, await ticket_of(prefill)
        lease, names = tickets.lease, tickets.names
        forged = Acknowledgement(
            ticket_id="ticket", created_at=ticket.created_at, claimer="me", claimed_at=0.0
        )
        await put(store, names.acknowledgement("ticket"), forged.encode())
        assert await finish(tickets.read_acknowledgement("ticket")) is None
        with lease.held():
            await finish(lease.written())
            assert await finish(lease.is_alive(lease.incarnation))
        await put(store, names.producer("somebody"), b"99999999999.000")
        assert not await finish(lease.is_alive("somebody"))


@pytest.mark.parametrize("other", [(Trust.TRUSTED, None), (Trust.SEALED, OTHER_KEY)])
async def test_nodes_that_do_not_share_the_key_share_no_ticket(
    store: MemoryStore, trust: Trust, other: tuple[Trust, bytes | None]
) -> None:
    async with node(store, trust) as prefill, node(store, *other) as decode:
        await publish(prefill, PROMPT)
        await is_damaged(decode)
