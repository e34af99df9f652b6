"""How a gateway reaches real nodes: TLS of an own authority, mutual TLS, Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.guarded import Authority, callers_in, guarded
from tests.api.nodes import here
from tests.e2e.exact import text, truth
from tests.gateway.scripted import Asked, Caller, in_front, stage
from tests.latch import PATIENCE_S
from tests.redis_server import redis_server
from tierkv.api.settings import Role
from tierkv.clock import SystemClock
from tierkv.gateway.settings import (
    DeadlineSection,
    GatewaySection,
    GatewaySettings,
    HealthSection,
    LimitsSection,
)
from tierkv.http.callers import RoleName
from tierkv.http.settings import TlsSection
from tierkv.refmodel.model import decode as decode_text
from tierkv.storage.factory import StoreSettings, open_guarded_store

PROMPT, LONG = text(100), text(500)
BODY = {"prompt": decode_text(PROMPT), "max_tokens": 8}


@asynccontextmanager
async def before(**section: Any) -> AsyncIterator[Caller]:
    """Who calls a gateway in front of real nodes."""
    settings = GatewaySettings(
        gateway=GatewaySection(**section),
        limits=LimitsSection(max_attempts=2),
        health=HealthSection(probe_interval_s=0.05, eject_s=0.05),
        deadlines=DeadlineSection(lookup_s=PATIENCE_S),  # who has computed a prompt goes on with it
    )
    async with in_front(settings) as (_, caller):
        yield caller


def is_right(asked: Asked) -> bool:
    return asked.is_whole and asked.text == decode_text(truth(PROMPT, 8).tokens)


async def test_a_node_whose_authority_is_named_is_reached_and_no_other(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = TlsSection(cert=str(ours.issue("node")))
    async with guarded(None, tls=tls) as on:
        async with before(both=on.url, node_ca=str(ours.path)) as caller:
            assert is_right(await caller.ask(BODY))
        for section in ({"node_ca": str(other.path)}, {}):
            async with before(both=on.url, **section) as caller:
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        asked = await caller.ask(BODY)
                        assert asked.status == 503
                        # "overloaded" of a gateway whose own loop was late meanwhile.
                        assert asked.body["code"] in ("no_nodes", "overloaded")
                        if "certificate" in asked.body["detail"]:  # it has heard from the node
                            break


async def test_a_node_that_asks_for_a_certificate_gets_the_gateways(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    node, mine = authority.issue("node"), authority.issue("gateway")
    callers = await asyncio.to_thread(callers_in, tmp_path)
    await callers.certificate("CN:gateway", RoleName.WRITE)
    tls = TlsSection(cert=str(node), client_ca=str(authority.path))
    ca = str(authority.path)
    async with guarded(callers, tls=tls) as on:
        async with before(both=on.url, node_ca=ca, node_cert=str(mine)) as caller:
            assert is_right(await caller.ask(BODY))
        async with before(both=on.url, node_ca=ca) as caller:
            assert (await caller.ask(BODY)).status == 503


async def test_a_node_is_reached_over_its_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    async with guarded(None, unix_socket=path) as on:
        async with before(both=f"unix:{path}") as caller:
            assert is_right(await caller.ask(BODY))
            assert is_right(await caller.ask(BODY | {"stream": True}))
        await on.node.service.scheduler.until_idle()


async def test_connections_to_nodes_are_used_again() -> None:
    async with stage(prefill=0, decode=0, both=1) as on:
        for number in range(20):
            assert (await on.caller.ask({"prompt": f"prompt {number}"})).is_whole
        # One more may have been made for a probe that came while a prompt was under way.
        assert len(on.both[0].peers) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_node_that_never_ends_its_answer_does_not_hold_the_caller_up(stream: bool) -> None:
    async with stage(prefill=0, decode=0, both=1) as on:
        on.both[0].lingers = True
        async with asyncio.timeout(5):
            assert (await on.caller.ask({"prompt": "hello", "stream": stream})).is_whole


async def test_without_a_store_to_hand_over_through_the_answer_is_that_of_one_node() -> None:
    with redis_server() as server:
        stores = [open_guarded_store(server.url, StoreSettings(), SystemClock()) for _ in range(2)]
        async with (
            here(Role.PREFILL, store=stores[0]) as prefill,
            here(Role.DECODE, store=stores[1]) as decode,
            before(prefill=prefill.client.url, decode=decode.client.url) as caller,
        ):
            server.kill()
            asked = await caller.ask({**BODY, "prompt": decode_text(LONG)})
            assert asked.text == decode_text(truth(LONG, 8).tokens)
            computed = [node.node.engine.stats.computed_tokens for node in (prefill, decode)]
            # The decode node knows that the store is dead and computes at once.
            assert len(LONG) <= sum(computed) < 2 * len(LONG) + 64
