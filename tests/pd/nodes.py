"""A prefill node and a decode node with one store, and a prompt that goes from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.latch import finish
from tests.sessions import claim_request, publish_request
from tests.world import World, tokens, world
from tierkv.cache.keys import Fingerprint
from tierkv.clock import Clock, SystemClock
from tierkv.errors import HandoffError
from tierkv.pd.handoff import Published
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Request
from tierkv.storage.memory import MemorySettings, MemoryStore

BLOCK = 4
ROOM: dict[str, Any] = {"device_blocks": 64, "host_blocks": 64}
TOKENS = tokens(42)  # ten blocks, and a tail


def settings(**fields: Any) -> HandoffSettings:
    """Through storage alone, unless `fields` say otherwise, and with patience."""
    patient = {"publish_deadline_s": 100.0, "claim_deadline_s": 100.0, "lookup_deadline_s": 100.0}
    return HandoffSettings(**({"direct": DirectPath.OFF} | patient | fields))


@asynccontextmanager
async def pair(
    there: HandoffSettings | None = None,
    here: HandoffSettings | None = None,
    *,
    clock: Clock | None = None,
    who: Fingerprint | None = None,
    store: MemoryStore | None = None,
    **cache: Any,
) -> AsyncIterator[tuple[World, World]]:
    """there, here: of the prefill and of the decode node. who: the decode node, if another than
    the prefill node. cache: CacheSettings of it."""
    shared = store or MemoryStore(MemorySettings(), clock or SystemClock())
    chosen = ROOM | cache
    room = {"device_blocks": max(64, chosen["device_blocks"]), "host_blocks": chosen["host_blocks"]}
    async with (
        world(store=shared, handoff=there or settings(), **room) as prefill,
        world(store=shared, handoff=here or settings(), who=who, **chosen) as decode,
    ):
        yield prefill, decode


async def computed(node: World, prompt: Sequence[int]) -> Request:
    """A request that runs, with all of its prompt computed."""
    request = await node.admit(prompt)
    await node.prefill(request, prompt)
    return request


async def publish(node: World, prompt: Sequence[int] = TOKENS, ticket: str = "ticket") -> Published:
    request = await computed(node, prompt)
    published = await finish(publish_request(node.service, request, ticket, [42, 43]))
    await node.ended(request)
    return published


async def claimed(
    node: World,
    prompt: Sequence[int] = TOKENS,
    ticket: str = "ticket",
    *,
    name: str = "claim",
    new: int = 1,
    **options: Any,
) -> Request:
    """Its blocks are on the device, every byte right."""
    request, _ = await finish(
        claim_request(
            node.service, name, ticket, node.prompt(prompt), max_new_tokens=new, **options
        )
    )
    await finish(request.gate.all_layers(100.0))
    node.check_kv(request, prompt, request.cached_tokens)
    return request


async def claim(
    node: World, prompt: Sequence[int] = TOKENS, ticket: str = "ticket", **options: Any
) -> None:
    """All of it; nothing is left afterwards."""
    request = await claimed(node, prompt, ticket, **options)
    assert request.cached_tokens == len(prompt)
    await node.ended(request)


async def refused(
    node: World, prompt: Sequence[int] = TOKENS, ticket: str = "ticket", **options: Any
) -> HandoffError:
    """Why the claim is refused; nothing is left afterwards."""
    with pytest.raises(HandoffError) as error:
        await claimed(node, prompt, ticket, **options)
    await node.settle()
    assert node.service.stats().running_requests == 0
    return error.value


async def ticket_of(node: World, ticket: str = "ticket") -> Ticket:
    found = await finish(node.service.require_handoff().tickets.read(ticket))
    assert found is not None
    return found


def leases(node: World) -> int:
    """How much of the node's memory is held for others to read."""
    return node.service.require_handoff().source.num_leases
