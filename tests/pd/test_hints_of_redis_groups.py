"""Hints through a Redis Cluster, and through a master that sentinels watch, even after it died."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.latch import finish, until
from tests.redis_groups import (
    RedisCluster,
    SentinelGroup,
    redis_cluster,
    sentinel_group,
    wait_until,
)
from tests.redis_server import PATIENT
from tests.sessions import claim_request, publish_request
from tests.storage.test_notify import live, opened
from tests.world import world
from tierkv.clock import SystemClock
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.storage.factory import open_store
from tierkv.storage.protocol import Listener, Notifier

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(3) as running:
        yield running


@pytest.fixture(scope="module")
def group() -> Iterator[SentinelGroup]:
    with sentinel_group() as running:
        yield running


@pytest.fixture(params=["cluster", "sentinel"])
def url(request: pytest.FixtureRequest) -> str:
    kind = "cluster" if request.param == "cluster" else "group"
    found: RedisCluster | SentinelGroup = request.getfixturevalue(kind)
    return found.url


async def _tell_until_heard(teller: Notifier, topic: str, listener: Listener) -> None:
    while True:
        await teller.notify(topic, "again")
        if await listener.next(0.2) == "again":
            return


async def test_every_topic_is_heard_whichever_node_its_slot_is_on(url: str) -> None:
    topics = [f"tierkv:ticket:{number}" for number in range(20)]
    async with opened(url, url) as [(_, teller), (_, hearer)]:
        for topic in topics:
            with hearer.listen(topic) as listener:
                await live(listener)
                # Again, as the nodes of a new cluster pass on nothing before they know each other.
                await finish(_tell_until_heard(teller, topic, listener))


async def test_a_claim_hears_of_its_ticket(url: str) -> None:
    """Without hints it would look after 5 ms, 10 ms, ...; with them it looks once a second."""
    settings = HandoffSettings(
        direct=DirectPath.OFF,
        publish_deadline_s=100.0,
        claim_deadline_s=100.0,
        lookup_deadline_s=100.0,
    )

    def store() -> object:
        return open_store(url, PATIENT, SystemClock())

    tokens = list(range(21))
    async with (
        world(store=store(), handoff=settings) as prefill,  # type: ignore[arg-type]
        world(store=store(), handoff=settings) as decode,  # type: ignore[arg-type]
    ):
        claim = asyncio.create_task(
            claim_request(decode.service, "c", "t", decode.prompt(tokens), max_new_tokens=1)
        )
        request = await prefill.admit(tokens)
        await prefill.prefill(request, tokens)
        await finish(publish_request(prefill.service, request, "t", [42]))
        claimed, _ = await finish(claim)
        await finish(claimed.gate.all_layers(100.0))
        decode.check_kv(claimed, tokens, 21)
        decode.service.scheduler.end(claimed)
        prefill.service.scheduler.end(request)
        await decode.settle()
        await prefill.settle()


async def test_hints_come_back_after_a_failover() -> None:
    topic = "tierkv:ticket:1"
    context = sentinel_group()
    group = await asyncio.to_thread(context.__enter__)
    try:
        async with opened(group.url, group.url) as [(_, teller), (_, hearer)]:
            with hearer.listen(topic) as listener:
                await live(listener)
                group.master.popen.kill()
                await until(lambda: not listener.is_live, "a listener that knows it is deaf")
                await asyncio.to_thread(
                    wait_until, lambda: group.master_port() == group.replica.port, "a failover"
                )
                async with asyncio.timeout(30):
                    await _tell_until_heard(teller, topic, listener)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
