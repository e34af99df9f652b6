"""A prompt of any length, sampled in any way, over any store and by any path: the single node's
tokens, and nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.exact import BLOCK_SIZE, ExactNode, exact_pair, text, truth
from tests.latch import turns, until
from tests.pd.nodes import settings
from tests.redis_server import PATIENT, RedisServer, empty_redis, module_redis
from tests.world import background_tasks
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.engine import GenerateRequest, Sampling
from tierkv.errors import HandoffError
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.settings import DirectPath
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import open_store

__all__ = ["empty_redis", "module_redis"]

NEW = 4
GREEDY, SEEDED = Sampling(), Sampling(temperature=0.9, seed=2**63, top_k=40)
EVERY = tuple(range(1, 2 * BLOCK_SIZE + 3))
# A chunk of the prefill is 256 tokens.
BOUNDARIES = (1, 15, 16, 17, 32, 33, 254, 255, 256, 257, 258, 272, 273)
WAYS: dict[str, dict[str, Any]] = {
    "device": {"direct": DirectPath.DEVICE},
    "memory": {"direct": DirectPath.MEMORY},
    "network": {"direct": DirectPath.NETWORK, "direct_host": "127.0.0.1"},
}


@pytest.fixture
def server(empty_redis: RedisServer) -> Iterator[RedisServer]:
    """With nothing in it; at the end nothing is left that lives for ever."""
    yield empty_redis
    names = empty_redis.execute("KEYS", "*")
    assert isinstance(names, list)
    assert [name for name in names if empty_redis.execute("PTTL", name) == -1] == []
    assert [name for name in names if b":open:" in name or b":producer:" in name] == []


@functools.cache
def right(length: int, seed: int, sampling: Sampling) -> tuple[int, ...]:
    return truth(text(length, seed=seed), NEW, sampling).tokens


def pair(
    url: str, handoff: dict[str, Any] | None = None, **cache: Any
) -> AbstractAsyncContextManager[tuple[ExactNode, ExactNode]]:
    """handoff: fields of HandoffSettings. cache: of CacheSettings."""
    # The model here is so small that computing beats any store: fetch all the same.
    cache["fetch_policy"] = FetchPolicy.WAIT_COMPLETE
    store = partial(open_store, url, PATIENT, SystemClock())
    return exact_pair(store, handoff=settings(**(handoff or {})), **cache)


async def hand_over(
    nodes: tuple[ExactNode, ExactNode],
    length: int,
    sampling: Sampling,
    ticket: str,
    seed: int | None = None,
) -> None:
    """The claim waits before the prefill begins."""
    prefill, decode = nodes
    seed = length if seed is None else seed
    prompt = text(length, seed=seed)
    async with asyncio.TaskGroup() as group:
        job = decode.job(prompt, NEW, sampling)
        claiming = group.create_task(decode.engine.decode(job, ticket, deadline_s=200))
        group.create_task(prefill.engine.prefill(prefill.job(prompt, 1, sampling), ticket))
    generation, found = claiming.result()
    assert generation.tokens == right(length, seed, sampling), (length, sampling)
    assert generation.computed_tokens == 0
    assert found is not None


def url_of(kind: str, server: RedisServer, folder: Path) -> str:
    return server.url if kind == "redis" else f"file://{folder / 'store'}"


@pytest.mark.promise("A hand-off gives one node's tokens at any prompt length.")
@pytest.mark.parametrize(
    ("kind", "streams", "lengths", "sampling"),
    [
        ("redis", True, EVERY, SEEDED),
        ("file", False, EVERY, GREEDY),
        ("redis", False, BOUNDARIES, GREEDY),
        ("file", True, BOUNDARIES, SEEDED),
    ],
)
async def test_any_length_is_handed_over_exactly(
    server: RedisServer,
    tmp_path: Path,
    kind: str,
    streams: bool,
    lengths: Sequence[int],
    sampling: Sampling,
) -> None:
    async with pair(url_of(kind, server, tmp_path), {"streams": streams}) as nodes:
        for length in lengths:
            await hand_over(nodes, length, sampling, f"{length}")


@pytest.mark.promise("A hand-off gives one node's tokens at any prompt length.")
@pytest.mark.parametrize(
    ("way", "kind"), [("device", "redis"), ("memory", "file"), ("network", "redis")]
)
async def test_any_length_is_exact_by_each_direct_way(
    server: RedisServer, tmp_path: Path, kind: str, way: str
) -> None:
    if way == "network":
        pytest.importorskip("mooncake.engine", reason="Mooncake's package cannot be loaded")
    async with pair(url_of(kind, server, tmp_path), WAYS[way]) as nodes:
        for at, length in enumerate(BOUNDARIES):
            await hand_over(nodes, length, (GREEDY, SEEDED)[at % 2], f"{length}")
        came = nodes[1].service.stats().handoff
        assert getattr(came, f"{way}_blocks") > 0


ODD = [
    "a" * 4096,
    "../../etc/passwd",
    "a:b:partial:3",
    "a\r\nDEL x",
    "\0",
    "名前 🜁",
    " ",
    "%s{}*?[a]",
]


@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_a_tickets_id_may_be_any_text(server: RedisServer, tmp_path: Path, kind: str) -> None:
    async with pair(url_of(kind, server, tmp_path)) as nodes:
        for at, ticket in enumerate(ODD):
            await hand_over(nodes, 17 + at, GREEDY, ticket)


async def test_two_claims_of_one_ticket_at_once_both_have_every_token(server: RedisServer) -> None:
    async with pair(server.url) as (prefill, decode), pair(server.url) as (third, _):
        prompt = text(100, seed=100)
        async with asyncio.TaskGroup() as group:
            claims = [
                group.create_task(
                    node.engine.decode(node.job(prompt, NEW, SEEDED), "one", deadline_s=60)
                )
                for node in (decode, decode, third)
            ]
            group.create_task(prefill.engine.prefill(prefill.job(prompt, 1, SEEDED), "one"))
        for claim in claims:
            assert claim.result()[0].tokens == right(100, 100, SEEDED)


@pytest.mark.parametrize("policy", [ClaimPolicy.WHOLE, ClaimPolicy.RECOMPUTE])
async def test_a_ticket_sampled_in_another_way_stays_for_who_may_claim_it(
    server: RedisServer, policy: ClaimPolicy
) -> None:
    async with pair(server.url) as (prefill, decode):
        prompt = text(40, seed=40)
        await prefill.engine.prefill(prefill.job(prompt, 1, SEEDED), "one")
        with pytest.raises(HandoffError, match="temperature") as error:
            await decode.engine.decode(decode.job(prompt, NEW, GREEDY), "one", policy=policy)
        assert error.value.reason == "incompatible"
        await decode.settle()
        state = await decode.service.ticket_state("one")
        assert state.claimer is None
        job = decode.job(prompt, NEW, SEEDED)
        assert (await decode.engine.decode(job, "one"))[0].tokens == right(40, 40, SEEDED)


@pytest.mark.promise("Many hand-offs at once are exact and leave nothing.")
@pytest.mark.parametrize(
    "count", [30, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_many_hand_offs_at_once_are_exact_and_leave_nothing(
    server: RedisServer, count: int
) -> None:
    async with pair(server.url) as nodes:  # whatever is opened once for all
        await hand_over(nodes, 20, GREEDY, "warm")
    server.execute("FLUSHALL")
    await turns(20)
    open_before, tasks = len(os.listdir("/proc/self/fd")), background_tasks()
    async with pair(server.url, device_blocks=1024) as nodes:
        running = background_tasks()
        async with asyncio.TaskGroup() as group:
            for n in range(count):
                length, sampling = 20 + n % 50, SEEDED if n % 2 else GREEDY
                group.create_task(hand_over(nodes, length, sampling, f"many{n}", seed=n))
        for node in nodes:
            await node.settle()
        assert background_tasks() <= running | {"tierkv-redis-subscribe"}
        assert nodes[0].service.require_handoff().tickets.lease.num_held == 0
    assert background_tasks() == tasks
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before, "closed files")


async def test_what_a_decode_node_made_of_a_claim_is_there_for_the_prefill_node(
    server: RedisServer,
) -> None:
    async with pair(server.url, storage_write=WritePolicy.WRITE_THROUGH) as (
        prefill,
        decode,
    ):
        prompt = text(75, seed=8)
        tokens = right(75, 8, GREEDY)
        await hand_over((prefill, decode), 75, GREEDY, "turn1", seed=8)
        await prefill.settle()
        await decode.settle()
        talk = [*prompt, *tokens, *text(20, seed=9)]
        job = GenerateRequest("turn 2", prefill.job(talk, 1).tokens, 1)
        prefilled = await prefill.engine.prefill(job, "turn2")
        assert prefilled.generation.matched.total_tokens == len(prompt) + NEW - 1
        assert prefilled.generation.matched.storage_tokens > 0
        assert prefilled.generation.tokens == truth(talk, 1).tokens
        await prefill.settle()
