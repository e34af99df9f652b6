"""Through a gateway that hands its callers' tokens on, each tenant works in its own cache."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from tests.api.guarded import callers_in, guarded
from tests.e2e.exact import truth
from tests.gateway.scripted import Caller, listener
from tierkv.clock import SystemClock
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.server import listening
from tierkv.gateway.settings import GatewaySection, GatewaySettings
from tierkv.http.callers import RoleName
from tierkv.refmodel.model import decode
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore

LENGTH = 100


async def test_a_prompt_is_cached_for_the_tenant_that_asked_and_for_no_other(
    tmp_path: Path,
) -> None:
    callers = await asyncio.to_thread(callers_in, tmp_path)
    tokens = [await callers.token(RoleName.WRITE, name) for name in ("one", "two")]
    store, policy = MemoryStore(MemorySettings(), SystemClock()), FetchPolicy.WAIT_COMPLETE
    prompt = [65 + number % 26 for number in range(LENGTH)]
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(guarded(callers, store=store, fetch_policy=policy))
            for _ in range(2)
        ]
        section = GatewaySection(
            prefill=(nodes[0].url,), decode=(nodes[1].url,), forward_authorization=True
        )
        gateway = Gateway(GatewaySettings(gateway=section))
        url = await stack.enter_async_context(listening(gateway, listener()))
        await stack.enter_async_context(gateway.running())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        caller = Caller(url, session)

        async def cached(token: str) -> int:
            body = {"prompt": decode(prompt), "max_tokens": 4, "temperature": 0}
            asked = await caller.ask(body, Authorization=f"Bearer {token}")
            assert asked.status == 200, asked.body
            assert asked.text == decode(list(truth(prompt, 4).tokens))
            assert asked.usage is not None
            found: int = asked.usage["prompt_tokens_details"]["cached_tokens"]
            return found

        one, two = tokens
        assert await cached(one) == 0
        assert await cached(one) >= LENGTH - 1 - LENGTH % 16  # the paired check
        assert await cached(two) == 0
        assert await cached(two) >= LENGTH - 1 - LENGTH % 16
        for node in nodes:
            spaces = {node.node.space(name) for name in ("one", "two")}
            used = {cached.space.name for cached in node.node.service.index.spaces.nodes()}
            assert used == spaces
