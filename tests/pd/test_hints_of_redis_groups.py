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
from tests.storage.test_notify import live, opened
from tierkv.storage.protocol import Listener, Notifier

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def group() -> Iterator[SentinelGroup]:
    with sentinel_group() as running:
        yield running


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(3) as running:
        yield running


async def _tell_until_heard(teller: Notifier, topic: str, listener: Listener) -> None:
    while True:
        await teller.notify(topic, "again")
        if await listener.next(0.2) == "again":
            return


@pytest.mark.parametrize("kind", ["cluster", "group"])
async def test_every_topic_is_heard_whichever_node_its_slot_is_on(
    kind: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(kind).url
    topics = [f"tierkv:ticket:{number}" for number in range(20)]
    async with opened(url, url) as [(_, teller), (_, hearer)]:
        for topic in topics:
            with hearer.listen(topic) as listener:
                await live(listener)
                # Again, as the nodes of a new cluster pass on nothing before they know each other.
                await finish(_tell_until_heard(teller, topic, listener))


async def test_hints_come_back_after_a_failover(group: SentinelGroup) -> None:
    topic = "tierkv:ticket:1"
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
