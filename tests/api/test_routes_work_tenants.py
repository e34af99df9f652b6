"""The node's own model works for each tenant in that tenant's cache, and only there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.guarded import Callers, Guarded, callers_in, guarded
from tests.api.nodes import Answer
from tests.e2e.exact import truth
from tierkv.client.streams import EventReader
from tierkv.clock import SystemClock
from tierkv.http.callers import RoleName, ticket_name
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

Json = dict[str, Any]
NAMES = ("one", "two", "")  # "": who belongs to no tenant


@dataclass
class Cast:
    """tokens: of one, two, nobody in particular, and the administrator."""

    callers: Callers
    tokens: list[str]


@pytest.fixture
async def cast(tmp_path: Path) -> Cast:
    callers = await asyncio.to_thread(callers_in, tmp_path)
    tokens = [await callers.token(RoleName.WRITE, name) for name in NAMES]
    return Cast(callers, [*tokens, await callers.token(RoleName.ADMIN)])


class Caller:
    def __init__(self, on: Guarded, token: str) -> None:
        self._on = on
        self.headers = {"Authorization": f"Bearer {token}"}

    async def post(self, path: str, body: Json | None = None) -> Answer:
        return await self._on.client.ask("POST", path, json=body or {}, headers=self.headers)

    async def matched(self, prompt: Sequence[int]) -> Json:
        """Where its cache had the prompt; now it has it."""
        answer = await self.post("/v1/generate", {"tokens": list(prompt), "max_tokens": 1})
        assert answer.status == 200, answer.body
        assert answer.body["tokens"] == list(truth(list(prompt), 1).tokens)
        found: Json = answer.body["matched"]
        return found


@asynccontextmanager
async def node(cast: Cast, store: Store) -> AsyncIterator[tuple[Guarded, list[Caller]]]:
    """A node, and the cast as its callers."""
    # What storage has is a hit here however slow the machine is.
    policy = FetchPolicy.WAIT_COMPLETE
    async with guarded(cast.callers, store=store, fetch_policy=policy) as on:
        yield on, [Caller(on, token) for token in cast.tokens]
        assert on.node.service.verify() == []


def memory() -> MemoryStore:
    return MemoryStore(MemorySettings(), SystemClock())


def hits(tier: str, tokens: int) -> Json:
    return {"device": 0, "host": 0, "storage": 0, "direct": 0} | {tier: tokens}


MISS = hits("device", 0)
LENGTH = 40  # two blocks and a tail, of which the last token is always computed
CACHED = LENGTH - 1


@pytest.mark.parametrize(
    "num_prompts", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_generating_never_hits_what_another_tenant_has_on_any_tier_or_after_a_restart(
    num_prompts: int, cast: Cast
) -> None:
    def prompts(tier: int) -> list[list[int]]:
        first = tier * num_prompts  # no two begin alike, since a part of a block is a hit too
        return [[first + n, *range(LENGTH - 1)] for n in range(num_prompts)]

    store = memory()
    async with node(cast, store) as (_, (one, two, nobody, admin)):
        for prompt in prompts(0):
            assert await one.matched(prompt) == MISS
            assert await one.matched(prompt) == hits("device", CACHED)  # the paired check
            assert await two.matched(prompt) == MISS
            assert await nobody.matched(prompt) == MISS
        for prompt in prompts(1):
            await one.matched(prompt)
            assert (await admin.post("/v1/sleep", {"keep_blocks": True})).status == 200
            assert (await admin.post("/v1/wake")).status == 200
            assert await two.matched(prompt) == MISS
            assert await nobody.matched(prompt) == MISS
            assert await one.matched(prompt) == hits("host", CACHED)
        for prompt in prompts(2) + prompts(3):
            body = {"tokens": prompt}
            assert (await one.post("/v1/prefill", body)).status == 200
        while (await admin.post("/v1/reset")).body["held_copies"]:
            pass
        for prompt in prompts(2):
            assert await two.matched(prompt) == MISS
            assert await nobody.matched(prompt) == MISS
            assert await one.matched(prompt) == hits("storage", CACHED)
    async with node(cast, store) as (_, (one, two, nobody, admin)):
        for prompt in prompts(3):
            assert await two.matched(prompt) == MISS
            assert await nobody.matched(prompt) == MISS
            assert await one.matched(prompt) == hits("storage", CACHED)


async def test_a_tenants_ticket_is_there_for_that_tenant_alone_on_any_node(
    cast: Cast,
) -> None:
    prompt, other = list(range(LENGTH)), list(range(100, 100 + LENGTH))
    store = memory()
    async with AsyncExitStack() as stack:
        _, at_prefill = await stack.enter_async_context(node(cast, store))
        _, at_decode = await stack.enter_async_context(node(cast, store))
        for streams in (False, True):
            ticket = f"t{streams}"
            body = {"tokens": prompt, "ticket_id": ticket, "stream": streams}
            assert (await at_prefill[0].post("/v1/prefill", body)).status == 200
            claim = {"tokens": prompt, "ticket_id": ticket, "max_tokens": 4}
            for caller in at_decode[1:3]:
                refused = await caller.post("/v1/decode", claim | {"deadline_s": 1.0})
                assert (refused.status, refused.body["reason"]) == (503, "not_yet")
                computed = await caller.post(
                    "/v1/decode", claim | {"policy": "recompute", "deadline_s": 0.05}
                )
                assert computed.body["matched"]["storage"] == 0
                assert computed.body["producer"] is None
            await at_prefill[1].post("/v1/prefill", {"tokens": other, "ticket_id": ticket})
            for caller, tokens in ((at_decode[0], prompt), (at_decode[1], other)):
                claimed = await caller.post("/v1/decode", claim | {"tokens": tokens})
                assert claimed.status == 200, claimed.body
                assert claimed.body["ticket_id"] == ticket
                assert claimed.body["tokens"] == list(truth(tokens, 4).tokens)
                assert claimed.body["computed_tokens"] == 0


async def test_ids_cannot_be_made_that_are_another_tenants(cast: Cast) -> None:
    async with node(cast, memory()) as (on, (_, _, nobody, _)):
        space = on.node.space("one")
        for path, body in (
            ("/v1/generate", {"request_id": f"{space}/r"}),
            ("/v1/prefill", {"ticket_id": ticket_name("t", "one")}),
            ("/v1/decode", {"ticket_id": ticket_name("t", "one")}),
        ):
            answer = await nobody.post(path, {"prompt": "hello"} | body)
            assert (answer.status, answer.code) == (400, "bad_request"), path


# The same id again


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/prefill", "/v1/decode"])
async def test_asked_again_at_once_or_later_the_work_is_done_once_for_each_tenant(
    path: str, cast: Cast
) -> None:
    async with node(cast, memory()) as (on, (one, two, _, _)):
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
        assert on.node.answers.num_repeats == 20
        other = await two.post(path, body)
        assert other.status == 200
        assert other.body["total_s"] != first["total_s"]
        assert count.admitted_requests == before + 2
        refused = await one.post(path, body | {"prompt": "another"})
        assert (refused.status, refused.code) == (409, "duplicate_request")


async def test_a_stream_asked_for_again_has_the_same_tokens_and_the_same_end(
    cast: Cast,
) -> None:
    async with node(cast, memory()) as (on, (one, *_)):
        body = {"prompt": "hello", "request_id": "s", "max_tokens": 5, "stream": True}
        told = []
        for _ in range(2):
            raw = (await one.post("/v1/generate", body)).body
            events = list(EventReader().feed(raw))
            tokens = [
                token
                for event in events
                if event.name == "tokens"
                for token in msgspec.json.decode(event.data)["tokens"]
            ]
            told.append((tokens, events[-1].name, events[-1].data))
        assert told[0] == told[1]
        assert told[0][0] == list(truth(list(b"hello"), 5).tokens)
        assert told[0][1] == "done"
        assert on.node.service.stats().requests.admitted_requests == 1
        plain = await one.post("/v1/generate", body | {"stream": False})
        assert plain.body == msgspec.json.decode(told[0][2])


async def test_work_that_failed_is_done_again(cast: Cast) -> None:
    async with node(cast, memory()) as (_, (one, *_)):
        claim = {"prompt": "hello", "ticket_id": "t", "request_id": "d", "deadline_s": 1.0}
        assert (await one.post("/v1/decode", claim)).body["reason"] == "not_yet"
        await one.post("/v1/prefill", {"prompt": "hello", "ticket_id": "t"})
        assert (await one.post("/v1/decode", claim | {"deadline_s": 100.0})).status == 200
