"""No tenant learns of another's cache, requests, pins, prefetches or tickets, on any tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.api.guarded import Callers, Guarded, bearer, guarded
from tests.api.nodes import Answer, Json, settings
from tests.e2e.exact import truth
from tests.gateway.scripted import in_front
from tierkv.api.node import Node
from tierkv.clock import SystemClock
from tierkv.gateway.settings import GatewaySection, GatewaySettings
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.callers import RoleName, ticket_name
from tierkv.refmodel.model import decode
from tierkv.storage.memory import MemorySettings, MemoryStore

NAMES = ("one", "two", "")  # "": a caller of no tenant
LENGTH = 40  # two blocks and a tail, of which the last token is always computed
CACHED = LENGTH - 1
PROMPT, OTHER_PROMPT = list(range(LENGTH)), list(range(100, 100 + LENGTH))


@dataclass
class Cast:
    """tokens: of one, two, a caller of no tenant, and the administrator."""

    callers: Callers
    tokens: Sequence[str]
    store: MemoryStore


@pytest.fixture
async def cast(callers: Callers, store: MemoryStore) -> Cast:
    tokens = [await callers.token(RoleName.WRITE, name) for name in NAMES]
    tokens.append(await callers.token(RoleName.ADMIN))
    return Cast(callers, tokens, store)


class Tenant:
    def __init__(self, on: Guarded, token: str) -> None:
        self._on = on
        self.headers = bearer(token)

    async def ask(self, method: str, path: str, body: Json | None = None) -> Answer:
        return await self._on.client.ask(method, path, json=body or {}, headers=self.headers)

    async def post(self, path: str, body: Json | None = None) -> Answer:
        return await self.ask("POST", path, body)

    async def matched(self, prompt: Sequence[int]) -> Json:
        """Return where its cache had the prompt; now it has the prompt."""
        answer = await self.post("/v1/generate", {"tokens": list(prompt), "max_tokens": 1})
        assert answer.status == 200, answer.body
        assert answer.body["tokens"] == list(truth(list(prompt), 1).tokens)
        found: Json = answer.body["matched"]
        return found

    async def lacks(self, tokens: list[int]) -> None:
        """Check that no tier has the prompt for this caller, which then computes the prompt."""
        assert await self.found(tokens) == (0, 0, 0)
        assert await self.matched(tokens) == MISS

    async def found(self, tokens: list[int]) -> tuple[int, int, int]:
        body = (await self.post("/v1/lookup", {"tokens": tokens})).body
        return body["device_tokens"], body["host_tokens"], body["storage_tokens"]

    async def forget_all(self) -> None:
        """Of an administrator: what a copy on its way down holds is forgotten when it is done."""
        while (await self.post("/v1/reset")).body["held_copies"]:
            pass


@asynccontextmanager
async def node(cast: Cast) -> AsyncIterator[tuple[Guarded, list[Tenant]]]:
    """A node over the cast's store, and the cast as its callers."""
    async with guarded(cast.callers, store=cast.store) as on:
        yield on, [Tenant(on, token) for token in cast.tokens]
        assert on.node.service.verify() == []


def hits(tier: str, tokens: int) -> Json:
    return {"device": 0, "host": 0, "storage": 0, "direct": 0} | {tier: tokens}


MISS = hits("device", 0)


@pytest.mark.parametrize(
    "num_prompts", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_one_tenants_blocks_are_never_anothers_hit_on_any_tier_or_after_a_restart(
    num_prompts: int, cast: Cast
) -> None:
    def prompts(tier: int) -> list[list[int]]:
        first = tier * num_prompts  # no two begin alike, since a part of a block is a hit too
        return [[first + n, *range(LENGTH - 1)] for n in range(num_prompts)]

    async with node(cast) as (_, (one, two, nobody, admin)):
        for prompt in prompts(0):
            assert await one.matched(prompt) == MISS
            assert await one.matched(prompt) == hits("device", CACHED)  # the paired check
            await two.lacks(prompt)
            await nobody.lacks(prompt)
        for prompt in prompts(1):
            await one.matched(prompt)
            assert (await admin.post("/v1/sleep", {"keep_blocks": True})).status == 200
            assert (await admin.post("/v1/wake")).status == 200
            for other, reason in ((two, "never stored"), (admin, "fingerprint differs")):
                told = (await other.post("/v1/explain", {"tokens": prompt})).body
                assert (told["runs"], told["reason"]) == ([], reason)
                assert ("tenant" in told["detail"]) == (other is admin)
            await two.lacks(prompt)
            await nobody.lacks(prompt)
            assert await one.matched(prompt) == hits("host", CACHED)
        for prompt in prompts(2) + prompts(3):
            assert (await one.post("/v1/prefill", {"tokens": prompt})).status == 200
        await admin.forget_all()
        for prompt in prompts(2):
            await two.lacks(prompt)
            await nobody.lacks(prompt)
            assert await one.found(prompt) == (0, 0, LENGTH)
            assert await one.matched(prompt) == hits("storage", CACHED)
    async with node(cast) as (_, (one, two, nobody, _)):
        for prompt in prompts(3):
            await two.lacks(prompt)
            await nobody.lacks(prompt)
            assert await one.matched(prompt) == hits("storage", CACHED)


async def test_what_a_tenant_has_is_not_there_for_another(cast: Cast) -> None:
    async with node(cast) as (_, (one, two, nobody, _)):
        await one.post("/v1/prefill", {"tokens": PROMPT, "ticket_id": "t"})
        await one.ask("PUT", "/v1/pins/p", {"tokens": PROMPT})
        await one.post("/v1/prefetches", {"tokens": PROMPT, "request_id": "f"})
        private = (
            ("DELETE", "/v1/requests/r"),
            *(("GET", "/v1/pins/p"), ("DELETE", "/v1/pins/p")),
            *(("GET", "/v1/prefetches/f"), ("DELETE", "/v1/prefetches/f")),
            *(("GET", "/v1/tickets/t"), ("DELETE", "/v1/tickets/t")),
        )
        for other in (two, nobody):
            for method, path in private:
                answer = await other.ask(method, path)
                assert (answer.status, answer.code) == (404, "unknown_id"), (method, path)
            assert (await other.ask("GET", "/v1/pins")).body == {"pins": []}
        for method, path in private:
            if method == "GET":
                assert (await one.ask(method, path)).status == 200, path
        await one.ask("DELETE", "/v1/pins/p")


async def test_blocks_of_an_adapter_belong_to_the_tenant_of_their_node() -> None:
    """As all blocks of callers without a tenant."""
    plain = settings()
    chosen = replace(plain, cache=replace(plain.cache, tenant="own"))
    memory = MemoryStore(MemorySettings(), SystemClock())
    node = Node(chosen, device=CpuDevice(), store=memory)
    async with node.running():
        of_adapter = node.service.fingerprint_of(node.space("", "chat"))
        assert (of_adapter.tenant, of_adapter.adapter) == ("own", "chat")


async def test_ids_cannot_be_made_that_are_another_tenants(cast: Cast) -> None:
    async with node(cast) as (on, (_, _, nobody, _)):
        crafted = ticket_name("t", "one")
        for method, path, body in (
            ("POST", "/v1/generate", {"request_id": f"{on.node.space('one')}/r"}),
            ("POST", "/v1/prefill", {"ticket_id": crafted}),
            ("POST", "/v1/decode", {"ticket_id": crafted}),
            ("GET", f"/v1/tickets/{crafted}", {}),
        ):
            answer = await nobody.ask(method, path, {"prompt": "hello"} | body)
            assert (answer.status, answer.code) == (400, "bad_request"), path


async def test_a_tenants_ticket_is_there_for_that_tenant_alone_on_any_node(cast: Cast) -> None:
    async with AsyncExitStack() as stack:
        _, at_prefill = await stack.enter_async_context(node(cast))
        _, at_decode = await stack.enter_async_context(node(cast))
        for streams in (False, True):
            ticket = f"t{streams}"
            body = {"tokens": PROMPT, "ticket_id": ticket, "stream": streams}
            assert (await at_prefill[0].post("/v1/prefill", body)).status == 200
            claim = {"tokens": PROMPT, "ticket_id": ticket, "max_tokens": 4}
            for caller in at_decode[1:3]:
                refused = await caller.post("/v1/decode", claim | {"deadline_s": 1.0})
                assert (refused.status, refused.body["reason"]) == (503, "not_yet")
                computed = await caller.post(
                    "/v1/decode", claim | {"policy": "recompute", "deadline_s": 0.05}
                )
                assert computed.body["matched"]["storage"] == 0
                assert computed.body["producer"] is None
            await at_prefill[1].post("/v1/prefill", {"tokens": OTHER_PROMPT, "ticket_id": ticket})
            for caller, tokens in ((at_decode[0], PROMPT), (at_decode[1], OTHER_PROMPT)):
                claimed = await caller.post("/v1/decode", claim | {"tokens": tokens})
                assert claimed.status == 200, claimed.body
                assert claimed.body["ticket_id"] == ticket
                assert claimed.body["tokens"] == list(truth(tokens, 4).tokens)
                assert claimed.body["computed_tokens"] == 0


async def test_through_a_gateway_each_tenant_works_in_its_own_cache(cast: Cast) -> None:
    length = 100
    prompt = [65 + number % 26 for number in range(length)]
    async with AsyncExitStack() as stack:
        nodes = [(await stack.enter_async_context(node(cast)))[0] for _ in range(2)]
        section = GatewaySection(
            prefill=(nodes[0].url,), decode=(nodes[1].url,), forward_authorization=True
        )
        behind = in_front(GatewaySettings(gateway=section))
        _, caller = await stack.enter_async_context(behind)

        async def cached(token: str) -> int:
            body = {"prompt": decode(prompt), "max_tokens": 4, "temperature": 0}
            asked = await caller.ask(body, **bearer(token))
            assert asked.text == decode(list(truth(prompt, 4).tokens))
            assert asked.usage is not None
            found: int = asked.usage["prompt_tokens_details"]["cached_tokens"]
            return found

        for token in cast.tokens[:2]:
            assert await cached(token) == 0
            assert await cached(token) >= length - 1 - length % 16  # the paired check
        for on in nodes:
            used = {cached.space.name for cached in on.node.service.index.spaces.nodes()}
            assert used == {on.node.space(name) for name in NAMES[:2]}


# The same id again


@pytest.mark.promise("Requests with one idempotency key get the first result.")
@pytest.mark.parametrize("path", ["/v1/generate", "/v1/prefill", "/v1/decode"])
async def test_asked_again_at_once_or_later_the_work_is_done_once_for_each_tenant(
    path: str, cast: Cast
) -> None:
    async with node(cast) as (on, (one, two, _, _)):
        for caller in (one, two):
            await caller.post("/v1/prefill", {"prompt": "hello", "ticket_id": "t"})
        body: Json = {"prompt": "hello", "request_id": "same"}
        body |= {"ticket_id": "t"} if path == "/v1/decode" else {}
        count = on.node.service.stats().requests
        before = count.admitted_requests
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.post(path, body)) for _ in range(20)]
        first = tasks[0].result().body
        assert all(task.result().body == first for task in tasks)
        assert (await one.post(path, body)).body == first
        assert count.admitted_requests == before + 1
        other = await two.post(path, body)
        assert other.status == 200
        assert other.body["total_s"] != first["total_s"]
        assert count.admitted_requests == before + 2
        for change in ({"prompt": "another"}, {"seed": 5}):
            refused = await one.post(path, body | change)
            assert (refused.status, refused.code) == (409, "duplicate_request")


async def test_a_stream_asked_for_again_has_the_same_tokens_and_the_same_end(cast: Cast) -> None:
    async with node(cast) as (on, (one, *_)):
        body = {"prompt": "hello", "request_id": "s", "max_tokens": 5}
        told = []
        for _ in range(2):
            *events, end = await on.client.events("/v1/generate", body, headers=one.headers)
            assert {name for name, _ in events} == {"tokens"}
            told.append(([token for _, event in events for token in event["tokens"]], end))
        assert told[0] == told[1]
        assert on.node.service.stats().requests.admitted_requests == 1
        plain = await one.post("/v1/generate", body)
        assert told[0] == (list(truth(list(b"hello"), 5).tokens), ("done", plain.body))


async def test_work_that_failed_is_done_again(cast: Cast) -> None:
    async with node(cast) as (_, (one, *_)):
        claim = {"prompt": "hello", "ticket_id": "t", "request_id": "d", "deadline_s": 1.0}
        assert (await one.post("/v1/decode", claim)).body["reason"] == "not_yet"
        await one.post("/v1/prefill", {"prompt": "hello", "ticket_id": "t"})
        assert (await one.post("/v1/decode", claim | {"deadline_s": 100.0})).status == 200
