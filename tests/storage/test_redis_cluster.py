"""The store on a Redis cluster: hash slots and masters that move, leave and die."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import pytest
import redis
from redis.crc import key_slot

from tests.redis_groups import RedisCluster, redis_cluster, sentinel_group, wait_until
from tests.redis_server import RedisServer
from tests.storage.values import PATIENT, content_of, get_one, landing, put_one, redis_store
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage import maintenance
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.protocol import BreakerState, GetStatus, PutItem, PutStatus, Usage
from tierkv.storage.redis.cluster import masters, parse_slots, redirection, slot_of
from tierkv.storage.redis.resp import Refused
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.wire import Address

NAMES = [f"t:f:{index:04}:0" for index in range(400)]
FEW = NAMES[:50]
HERE = Address("127.0.0.1", 1)
# Strict bounds on request, as in test_reliability.py; otherwise bounds that only a hang exceeds.
STRICT = bool(os.environ.get("TIERKV_STRICT_TIMES"))
SLACK = 1.0 if STRICT else 20.0


def test_slots_are_those_that_redis_computes() -> None:
    for name in (*NAMES, "a", "tierkv:" + "f" * 64):
        assert slot_of(name) == key_slot(name.encode())


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("MOVED 3999 127.0.0.1:6381", (3999, Address("127.0.0.1", 6381), False)),
        ("ASK 0 ::1:7", (0, Address("::1", 7), True)),
        ("MOVED 1 :6381", (1, Address("127.0.0.1", 6381), False)),
        ("MOVED 1 ?:6381", None),
        ("ASK 1 ?:6381", (1, Address("127.0.0.1", 6381), True)),
        ("MOVED x 127.0.0.1:6381", None),
        ("MOVED 16384 127.0.0.1:6381", None),
        ("MOVED 3999", None),
        ("MOVED 3999 127.0.0.1:65536", None),
        ("MOVED 3999 127.0.0.1:0", None),
        ("MOVED 3999 127.0.0.1:" + "9" * 5_000, None),
        ("MOVED " + "9" * 5_000 + " 127.0.0.1:6381", None),
        ("ERR no such thing", None),
    ],
)
def test_redirections_are_understood(message: str, says: tuple[int, Address, bool] | None) -> None:
    found = redirection(Refused(message), HERE)
    assert (None if found is None else (found.slot, found.address, found.is_ask)) == says


def test_a_slot_table_names_each_master_once() -> None:
    table = parse_slots([[0, 99, [b"b", 2, b"id"], [b"r", 9]], [100, 16_383, [b"", 1]]], HERE)
    assert (table[0], table[99], table[100]) == (Address("b", 2), Address("b", 2), HERE)
    assert masters(table) == [HERE, Address("b", 2)]


@pytest.mark.parametrize(
    ("told", "host"),
    [
        ([b"?", 7, b"id", [b"ip", b"10.0.0.7"]], "10.0.0.7"),
        # No host that may be named: the address that was asked.
        ([None, 7, b"id", [b"ip", b"10.0.0.7"]], "127.0.0.1"),
        ([b"a.example", 7, b"id", [b"ip", b"10.0.0.7"]], "a.example"),
        ([b"?", 7, b"id", []], "127.0.0.1"),
        ([b"?", 7], "127.0.0.1"),
    ],
)
def test_a_master_that_has_no_name_is_called_by_its_address(told: list[object], host: str) -> None:
    assert parse_slots([[0, 16_383, told]], HERE)[0] == Address(host, 7)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ([], "knows no master with slots"),  # a cluster that nobody has made
        (b"x", "is not part of a cluster"),
        ([[0, 5, []]], "sent an unexpected answer"),
        ([[0, 5, [b"b", 65_536]]], "sent an unexpected answer"),
        ([[0, 16_384, [b"b", 1]]], "reports slots 0 to 16384"),
    ],
)
def test_a_slot_table_that_helps_nobody_is_refused(reply: object, says: str) -> None:
    with pytest.raises(StoreUnavailableError, match=says):
        parse_slots(reply, HERE)


async def filled(store: RedisStore, names: Sequence[str] = NAMES) -> None:
    puts = await store.put([PutItem(name, (content_of(name, 5_000),)) for name in names])
    assert {put.status for put in puts} == {PutStatus.STORED}


async def check_all(store: RedisStore) -> Counter[GetStatus]:
    """Read every value and count the statuses; a hit with wrong bytes fails the test."""
    landings = [landing(name, 5_000) for name in NAMES]
    outcomes = await store.get_into([item for item, _ in landings])
    for (item, [buffer]), outcome in zip(landings, outcomes, strict=True):
        if outcome.status is GetStatus.HIT:
            assert buffer == content_of(item.name, 5_000)
    return Counter(outcome.status for outcome in outcomes)


async def reshard(cluster: RedisCluster, start: int, count: int) -> None:
    """Move slots from the first master, which has the lowest ones, to the second and back."""
    first, second = cluster.masters[:2]
    slots = range(start, start + count)
    await asyncio.to_thread(cluster.move_slots, slots, first, second)
    await asyncio.to_thread(cluster.move_slots, slots, second, first)


@pytest.mark.parametrize(
    ("endpoint", "trials", "count"),
    [
        ("ip", 1, 150),
        ("hostname", 1, 100),
        ("unknown-endpoint", 1, 100),
        pytest.param("ip", 20, 1_500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_resharding_shows_in_no_answer_however_the_cluster_names_its_servers(
    empty_cluster: RedisCluster, endpoint: str, trials: int, count: int
) -> None:
    def prefer(kind: str) -> None:
        for server in empty_cluster.masters:
            server.execute("CONFIG", "SET", "cluster-preferred-endpoint-type", kind)

    await asyncio.to_thread(prefer, endpoint)
    try:
        store = redis_store(empty_cluster.url)
        async with store.running():
            await filled(store)
            for trial in range(trials):
                async with asyncio.TaskGroup() as group:
                    moving = group.create_task(reshard(empty_cluster, trial * 50, count))
                    rounds = 0
                    while not moving.done():
                        assert await check_all(store) == {GetStatus.HIT: len(NAMES)}
                        fresh = f"t:new:{trial}-{rounds}:0"
                        assert await put_one(store, fresh, b"x") is PutStatus.STORED
                        assert await store.exists([*NAMES, fresh]) == len(NAMES) + 1
                        rounds += 1
                assert rounds
    finally:
        await asyncio.to_thread(prefer, "ip")


async def kill_first_master(cluster: RedisCluster) -> None:
    """Kill a master when its replica has its values."""
    for master in cluster.masters:
        await asyncio.to_thread(master.execute, "WAIT", 1, 5_000)
    await asyncio.sleep(1.2)  # a replica that is too new may not take over
    cluster.masters[0].kill()


def promoted_at(cluster: RedisCluster) -> float:
    """Wait until the first master's replica is master, and return the time. Blocks the thread."""
    wait_until(lambda: is_master(cluster.replicas[0]), "a replica that takes over")
    return time.monotonic()


def is_master(server: RedisServer) -> bool:
    role = server.execute("ROLE")
    assert isinstance(role, list)
    return bool(role[0] == b"master")


@pytest.mark.parametrize(
    "trials", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_a_master_that_dies_costs_answers_only_until_its_replica_takes_over(
    trials: int,
) -> None:
    recoveries, ours = [], []
    for _ in range(trials):
        with redis_cluster(3, has_replicas=True) as cluster:
            # With patience, timeouts do not reveal a dead server.
            store = redis_store(cluster.url, RedisSettings() if STRICT else PATIENT)
            async with store.running():
                await filled(store)
                await kill_first_master(cluster)
                killed_at = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    promotion = group.create_task(asyncio.to_thread(promoted_at, cluster))
                    failed = True
                    while failed:
                        counts = await check_all(store)
                        assert counts[GetStatus.MISS] == counts[GetStatus.DAMAGED] == 0
                        failed = counts[GetStatus.HIT] < len(NAMES)
                        await asyncio.sleep(0.01)
                    recovered_at = time.monotonic()
                recoveries.append(recovered_at - killed_at)
                ours.append(recovered_at - promotion.result())
                assert await store.exists(NAMES) == len(NAMES)
                puts = await store.put([PutItem(f"t:g:{i}:0", (b"x",)) for i in range(100)])
                assert {put.status for put in puts} == {PutStatus.STORED}
    print(  # noqa: T201 - for docs
        f"recovered after {min(recoveries):.2f} to {max(recoveries):.2f} s, "
        f"{max(ours):.2f} s of that at most after the replica had taken over"
    )
    # The cluster itself needs time to detect that a master is dead and to elect another: a node
    # timeout, the replica's delay of 0.5 to 1 s, and two gossip rounds.
    assert max(ours) <= 0.4 * SLACK
    assert max(recoveries) <= 3.0 * SLACK


async def test_sentinels_lead_to_the_master_that_takes_over() -> None:
    with sentinel_group() as group:
        store = redis_store(group.url, RedisSettings(timeout_s=5.0, connect_timeout_s=2.0))
        async with store.running():
            assert await put_one(store, "t:f:a:0", b"before") is PutStatus.STORED
            await store.put([PutItem(f"t:l:{index}:0", (b"x",)) for index in range(3_000)])
            page = await store.list("t:l", limit=1_000)
            listed = {value.name for value in page.values}
            await asyncio.to_thread(group.master.execute, "WAIT", 1, 5_000)
            group.master.kill()
            async with asyncio.timeout(30):
                while await put_one(store, "t:f:b:0", b"after") is not PutStatus.STORED:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(  # each Sentinel finds out at another time
                wait_until, lambda: group.master_port() == group.replica.port, "a new master"
            )
            assert await store.get("t:f:a:0", max_bytes=10) == b"before"
            assert await store.get("t:f:b:0", max_bytes=10) == b"after"
            while page.cursor is not None:  # the cursor of the other server
                page = await store.list("t:l", limit=1_000, cursor=page.cursor)
                listed |= {value.name for value in page.values}
            assert len(listed) == 3_000


# Nodes that join, leave and die while the store is in use


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


def begin_to_move(slot: int, source: RedisServer, target: RedisServer) -> None:
    target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", id_of(source))
    source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", id_of(target))


def move_all(cluster: RedisCluster, source: RedisServer, target: RedisServer) -> None:
    """Move all slots of a server: slots with values one by one, the other slots at once.

    Blocks the thread.
    """
    slots = slots_of(source)
    full = slots & {slot_of(name) for name in FEW}
    for slot in sorted(full):
        cluster.move_slots(range(slot, slot + 1), source, target)
    target_id = id_of(target)
    for server in (target, source):
        with redis.Redis(port=server.port, protocol=2) as client:
            pipe = client.pipeline(transaction=False)
            for slot in slots - full:
                pipe.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
            pipe.execute()


async def test_values_on_their_way_between_two_masters_are_listed(
    empty_cluster: RedisCluster,
) -> None:
    """The old master has the slot but not the value, and the new one the value but not the slot."""
    cluster = empty_cluster
    store = redis_store(cluster.url)
    name, stays = "t:f:moving:0", "t:f:000:0"
    slot = slot_of(name)
    theirs = next(n for n in (f"t:list:{i}:0" for i in itertools.count()) if slot_of(n) == slot)
    source = next(server for server in cluster.masters if slot in slots_of(server))
    target = next(server for server in cluster.masters if server is not source)

    def move_the_values_only() -> None:
        source.execute("RPUSH", theirs, "another program's")
        begin_to_move(slot, source, target)
        for key in (name, theirs):
            source.execute("MIGRATE", "127.0.0.1", target.port, key, 0, 60_000)

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
        leaving, *others = cluster.masters

        def leave() -> None:
            move_all(cluster, leaving, others[0])
            gone = id_of(leaving)
            for server in others:
                server.execute("CLUSTER", "FORGET", gone)
            leaving.execute("CLUSTER", "RESET", "HARD")

        store = redis_store(cluster.url)
        async with store.running():
            await filled(store, FEW)
            await asyncio.to_thread(leave)
            async with asyncio.timeout(20):
                for _ in range(3):  # for any operation, at any time
                    while True:
                        with suppress(StoreUnavailableError):
                            if await store.exists(FEW) == len(FEW):
                                break
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(0.3)
            assert (await store.usage("t:")).num_values == len(FEW)
            await store.ping()
        again = redis_store(cluster.url)  # the URL still names the removed node first
        async with again.running():
            assert await again.exists(FEW) == len(FEW)


@pytest.mark.slow
async def test_the_breaker_closes_when_a_replica_has_taken_over_though_nobody_asks() -> None:
    """An open breaker passes only pings to the cluster, so a ping must find the new master."""
    with redis_cluster(3, has_replicas=True) as cluster:
        inner = redis_store(cluster.url, RedisSettings(timeout_s=1.0, connect_timeout_s=1.0))
        settings = ResilienceSettings(timeout_s=1.2, probe_interval_s=0.3, negative_ttl_s=0.0)
        store = GuardedStore(inner, settings, SystemClock())

        def has_open_circuit() -> bool:
            return store.health.circuit is not BreakerState.CLOSED

        async with store.running():
            await filled(inner, FEW)
            await kill_first_master(cluster)
            async with asyncio.timeout(40):
                while not has_open_circuit():
                    with suppress(StoreUnavailableError):
                        await store.exists(FEW)
                    await asyncio.sleep(0.01)
                while has_open_circuit():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await store.exists(FEW) == len(FEW)
            assert (await store.usage("t:")).num_values == len(FEW)
            assert await get_one(store, FEW[0], 5_000) == (
                GetStatus.HIT,
                content_of(FEW[0], 5_000),
            )
