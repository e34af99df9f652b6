"""A cluster whose nodes come, go and die while a store is in use: what it knows keeps up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis

from tests.redis_groups import RedisCluster, redis_cluster
from tests.redis_server import RedisServer
from tests.storage.values import content_of, landing
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage import maintenance
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.protocol import (
    BreakerState,
    GetItem,
    GetStatus,
    PutItem,
    PutStatus,
    Store,
    Usage,
)
from tierkv.storage.redis.cluster import slot_of
from tierkv.storage.redis.store import RedisSettings

NAMES = [f"t:f:{index:03}:0" for index in range(50)]


@pytest.fixture(scope="module")
def module_cluster() -> Iterator[RedisCluster]:
    with redis_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(module_cluster: RedisCluster) -> RedisCluster:
    """The module's, with nothing in it; its slots are to be left where they were."""
    module_cluster.empty()
    return module_cluster


def opened(cluster: RedisCluster, settings: RedisSettings | None = None) -> Store:
    patient = RedisSettings(timeout_s=100.0, connect_timeout_s=50.0)
    return open_store(cluster.url, StoreSettings(redis=settings or patient), SystemClock())


async def filled(store: Store) -> None:
    puts = await store.put([PutItem(name, (content_of(name, 5_000),)) for name in NAMES])
    assert {put.status for put in puts} == {PutStatus.STORED}


def slots_of(server: RedisServer) -> set[int]:
    with redis.Redis(port=server.port, protocol=2) as client:
        entries = client.execute_command("CLUSTER", "SLOTS")
    found: set[int] = set()
    for first, last, master, *_ in entries:
        if master[1] == server.port:
            found |= {*range(first, last + 1)}
    return found


def id_of(server: RedisServer) -> str:
    reply = server.execute("CLUSTER", "MYID")
    assert isinstance(reply, bytes)
    return reply.decode()


def move_all(cluster: RedisCluster, source: RedisServer, target: RedisServer) -> None:
    """Slots with values one by one, as a resharding does; the others at once. Blocks."""
    slots = slots_of(source)
    full = slots & {slot_of(name) for name in NAMES}
    for slot in sorted(full):
        cluster.move_slots(range(slot, slot + 1), source, target)
    target_id = id_of(target)
    for server in (target, source):
        with redis.Redis(port=server.port, protocol=2) as client:
            pipe = client.pipeline(transaction=False)
            for slot in slots - full:
                pipe.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
            pipe.execute()


async def test_a_master_that_gives_up_and_takes_over_its_slots_fails_nobody(
    cluster: RedisCluster,
) -> None:
    """Its first slot leads to a node that is no master by the table; its last one away from one."""
    store = opened(cluster)
    leaving, staying = cluster.masters[:2]
    async with store.running():
        await filled(store)
        for source, target in ((leaving, staying), (staying, leaving)):
            async with asyncio.TaskGroup() as group:
                moving = group.create_task(asyncio.to_thread(move_all, cluster, source, target))

                async def use(moving: asyncio.Task[None] = moving) -> None:
                    while not moving.done():
                        landings = [landing(name, 5_000) for name in NAMES]
                        outcomes = await store.get_into([item for item, _ in landings])
                        assert {(one.status, one.reason) for one in outcomes} == {
                            (GetStatus.HIT, "")
                        }
                        assert await store.exists(NAMES) == len(NAMES)

                for _ in range(4):
                    group.create_task(use())


async def test_values_on_their_way_between_two_masters_are_listed(cluster: RedisCluster) -> None:
    """Neither describes one that has gone ahead: its slot is still the other's."""
    store = opened(cluster)
    name, stays = "t:f:moving:0", "t:f:000:0"
    slot = slot_of(name)
    source = next(server for server in cluster.masters if slot in slots_of(server))
    target = next(server for server in cluster.masters if server is not source)

    def move_the_values_only() -> None:
        target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", id_of(source))
        source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", id_of(target))
        source.execute("MIGRATE", "127.0.0.1", target.port, name, 0, 60_000)

    async with store.running():
        puts = await store.put([PutItem(name, (b"1234",), ttl_s=100.0), PutItem(stays, (b"5",))])
        assert {put.status for put in puts} == {PutStatus.STORED}
        await asyncio.to_thread(move_the_values_only)
        listed = {value.name: value for value in (await store.list("t:", limit=100)).values}
        assert (set(listed), listed[name].num_bytes) == ({name, stays}, 4)
        assert listed[name].expires_at is not None
        assert await store.usage("t:") == Usage(2, 5)
        assert await maintenance.remove(store, "t:") == 2
        for server in (source, target):
            await asyncio.to_thread(server.execute, "CLUSTER", "SETSLOT", slot, "STABLE")


async def test_a_node_that_left_the_cluster_is_not_believed() -> None:
    with redis_cluster(3) as cluster:
        await use_a_cluster_that_a_node_leaves(cluster)


async def use_a_cluster_that_a_node_leaves(cluster: RedisCluster) -> None:
    store = opened(cluster)
    leaving, *others = cluster.masters

    def leave() -> None:
        move_all(cluster, leaving, others[0])
        gone = id_of(leaving)
        for server in others:
            server.execute("CLUSTER", "FORGET", gone)
        leaving.execute("CLUSTER", "RESET", "HARD")

    async with store.running():
        await filled(store)
        await asyncio.to_thread(leave)
        async with asyncio.timeout(20):
            for _ in range(3):  # whatever it asks, and whenever it asks it
                while True:
                    with suppress(StoreUnavailableError):
                        if await store.exists(NAMES) == len(NAMES):
                            break
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.3)
        assert (await store.usage("t:")).num_values == len(NAMES)
        await store.ping()
    again = opened(cluster)  # its URL still names the node first
    async with again.running():
        assert await again.exists(NAMES) == len(NAMES)


async def test_a_cluster_that_nobody_has_made_is_said_to_be_none() -> None:
    with redis_cluster(1) as cluster:
        await asyncio.to_thread(cluster.masters[0].execute, "CLUSTER", "RESET", "HARD")
        with pytest.raises(StoreUnavailableError, match="knows no master with slots"):
            async with opened(cluster).running():
                raise AssertionError("it opens")


async def test_the_breaker_closes_when_a_replica_has_taken_over_though_nobody_asks() -> None:
    """While it is open only pings reach the cluster, so they must find the new master."""
    with redis_cluster(3, has_replicas=True) as cluster:
        inner = opened(cluster, RedisSettings(timeout_s=1.0, connect_timeout_s=1.0))
        settings = ResilienceSettings(timeout_s=1.2, probe_interval_s=0.3, negative_ttl_s=0.0)
        store = GuardedStore(inner, settings, SystemClock())

        def has_open_circuit() -> bool:
            return store.health.circuit is not BreakerState.CLOSED

        async with store.running():
            await filled(inner)
            for master in cluster.masters:
                await asyncio.to_thread(master.execute, "WAIT", 1, 5_000)
            await asyncio.sleep(1.2)  # a failover is refused to replicas that are too new
            cluster.masters[0].kill()
            async with asyncio.timeout(40):
                while not has_open_circuit():
                    with suppress(StoreUnavailableError):
                        await store.exists(NAMES)
                    await asyncio.sleep(0.01)
                while has_open_circuit():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await store.exists(NAMES) == len(NAMES)
            assert (await store.usage("t:")).num_values == len(NAMES)
            landed = bytearray(5_000)
            [outcome] = await store.get_into([GetItem(NAMES[0], (memoryview(landed),))])
            assert outcome.status is GetStatus.HIT
            assert landed == content_of(NAMES[0], 5_000)


async def test_a_listing_goes_on_where_it_was_though_a_master_has_left_meanwhile() -> None:
    """One whose turn is over: of the others, whose values stay where they are, none is skipped."""
    with redis_cluster(3) as cluster:
        await list_a_cluster_that_a_master_leaves(cluster)


async def list_a_cluster_that_a_master_leaves(cluster: RedisCluster) -> None:
    store = opened(cluster)
    first, second, third = sorted(cluster.masters, key=lambda server: server.port)
    of_second = {name for name in NAMES if slot_of(name) in slots_of(second)}
    of_third = {name for name in NAMES if slot_of(name) in slots_of(third)}
    async with store.running():
        await filled(store)
        page = await store.list("t:", limit=10)
        listed = {value.name for value in page.values}
        while not listed & of_second:
            page = await store.list("t:", limit=10, cursor=page.cursor)
            listed |= {value.name for value in page.values}
        await asyncio.to_thread(move_all, cluster, first, third)
        anywhere = [f"t:g:{index:03}:0" for index in range(100)]
        while await asyncio.to_thread(first.num_connections):  # until the store has left it
            await store.exists(anywhere)
        while page.cursor is not None:
            page = await store.list("t:", limit=10, cursor=page.cursor)
            listed |= {value.name for value in page.values}
    assert of_second | of_third <= listed
