"""The store on a Redis cluster: where names go, and what happens when slots and masters move."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from click.testing import CliRunner
from redis.crc import key_slot

from tests.redis_groups import RedisCluster, redis_cluster, sentinel_group, wait_until
from tests.redis_server import RedisServer, redis_server
from tests.storage.values import cancelled_after, content_of, get_one, landing, put_one
from tierkv.cli.storage import storage
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus
from tierkv.storage.redis.cluster import masters, parse_slots, redirection, slot_of
from tierkv.storage.redis.resp import Refused
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import Address

PATIENT = RedisSettings(timeout_s=100.0, connect_timeout_s=50.0)
NAMES = [f"t:f:{index:04}:0" for index in range(400)]
HERE = Address("127.0.0.1", 1)
# The goals themselves on request, as in test_reliability.py; else what only a hang takes.
STRICT = bool(os.environ.get("TIERKV_STRICT_TIMES"))
SLACK = 1.0 if STRICT else 20.0


def cluster_store(url: str, settings: RedisSettings = PATIENT) -> RedisStore:
    return RedisStore(parse_redis_url(url), settings, SystemClock())


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
        ([None, 7, b"id", [b"ip", b"10.0.0.7"]], "127.0.0.1"),  # not to be named: as we came
        ([b"a.example", 7, b"id", [b"ip", b"10.0.0.7"]], "a.example"),
        ([b"?", 7, b"id", []], "127.0.0.1"),
        ([b"?", 7], "127.0.0.1"),
    ],
)
def test_a_master_that_has_no_name_is_called_by_its_address(told: list[object], host: str) -> None:
    assert parse_slots([[0, 16_383, told]], HERE)[0] == Address(host, 7)


@pytest.mark.parametrize(
    "reply", [[], b"x", [[0, 5, []]], [[0, 5, [b"b", 65_536]]], [[0, 16_384, [b"b", 1]]]]
)
def test_a_slot_table_that_helps_nobody_is_refused(reply: object) -> None:
    with pytest.raises(StoreUnavailableError):
        parse_slots(reply, HERE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(3) as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: RedisCluster) -> AsyncIterator[RedisStore]:
    cluster.empty()
    store = cluster_store(cluster.url)
    async with store.running():
        yield store


async def filled(store: RedisStore) -> None:
    puts = await store.put([PutItem(name, (content_of(name, 5_000),)) for name in NAMES])
    assert {put.status for put in puts} == {PutStatus.STORED}


async def check_all(store: RedisStore) -> Counter[GetStatus]:
    """Read every value; a hit with other bytes is a failure of the test."""
    landings = [landing(name, 5_000) for name in NAMES]
    outcomes = await store.get_into([item for item, _ in landings])
    for (item, [buffer]), outcome in zip(landings, outcomes, strict=True):
        if outcome.status is GetStatus.HIT:
            assert buffer == content_of(item.name, 5_000)
    return Counter(outcome.status for outcome in outcomes)


async def test_values_spread_over_all_masters(store: RedisStore, cluster: RedisCluster) -> None:
    await filled(store)
    counts = [await asyncio.to_thread(server.execute, "DBSIZE") for server in cluster.masters]
    assert sum(int(str(count)) for count in counts) == len(NAMES)
    assert all(int(str(count)) > 50 for count in counts)
    assert await check_all(store) == {GetStatus.HIT: len(NAMES)}


@pytest.mark.parametrize("kind", ["hostname", "unknown-endpoint"])
async def test_a_cluster_that_does_not_tell_its_addresses_is_used_and_resharded(
    cluster: RedisCluster, kind: str
) -> None:
    def prefer(kind: str) -> None:
        for server in cluster.masters:
            server.execute("CONFIG", "SET", "cluster-preferred-endpoint-type", kind)

    cluster.empty()
    await asyncio.to_thread(prefer, kind)
    try:
        store = cluster_store(cluster.url)
        async with store.running():
            await filled(store)
            resharding = asyncio.to_thread(cluster.move_slots, range(100), *cluster.masters[:2])
            async with asyncio.TaskGroup() as group:
                task = group.create_task(resharding)
                while not task.done():
                    assert await check_all(store) == {GetStatus.HIT: len(NAMES)}
            assert await store.exists(NAMES) == len(NAMES)
    finally:
        await asyncio.to_thread(prefer, "ip")
        await asyncio.to_thread(cluster.move_slots, range(100), *cluster.masters[1::-1])


async def reshard(cluster: RedisCluster, start: int, count: int) -> None:
    """Move slots away from the first master, which has the lowest, and back."""
    first, second = cluster.masters[:2]
    slots = range(start, start + count)
    await asyncio.to_thread(cluster.move_slots, slots, first, second)
    await asyncio.to_thread(cluster.move_slots, slots, second, first)


@pytest.mark.parametrize(
    ("trials", "count"),
    [(1, 150), pytest.param(20, 1_500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
async def test_resharding_shows_in_no_answer(
    store: RedisStore, cluster: RedisCluster, trials: int, count: int
) -> None:
    await filled(store)
    for trial in range(trials):
        async with asyncio.TaskGroup() as group:
            moving = group.create_task(reshard(cluster, trial * 50, count))
            rounds = 0
            while not moving.done():
                assert await check_all(store) == {GetStatus.HIT: len(NAMES)}
                fresh = f"t:new:{trial}-{rounds}:0"
                assert await put_one(store, fresh, b"x") is PutStatus.STORED
                assert await store.exists([*NAMES, fresh]) == len(NAMES) + 1
                rounds += 1
        assert rounds


async def test_cancels_in_a_cluster_mix_up_no_replies(store: RedisStore) -> None:
    await filled(store)
    for round_number in range(100):
        items = [landing(name, 5_000)[0] for name in NAMES[:50]]
        await cancelled_after(round_number % 40, store.get_into(items))
        name = NAMES[round_number]
        assert await get_one(store, name, 5_000) == (GetStatus.HIT, content_of(name, 5_000))


def promoted_at(cluster: RedisCluster) -> float:
    """When the first master's replica is master. Blocks."""
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
            settings = RedisSettings() if STRICT else PATIENT  # who dies is not noticed by these
            store = cluster_store(cluster.url, settings)
            async with store.running():
                await filled(store)
                for master in cluster.masters:
                    await asyncio.to_thread(master.execute, "WAIT", 1, 5_000)
                await asyncio.sleep(1.2)  # a failover is refused to replicas that are too new
                cluster.masters[0].kill()
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
    # What the cluster needs to see that a master is dead and to elect another is its own: a node
    # timeout, the replica's delay of 0.5 to 1 s, and two gossips, which a busy machine holds up.
    assert max(ours) <= 0.4 * SLACK
    assert max(recoveries) <= 3.0 * SLACK


async def test_sentinels_lead_to_the_master_that_takes_over() -> None:
    with sentinel_group() as group:
        store = cluster_store(group.url, RedisSettings(timeout_s=5.0, connect_timeout_s=2.0))
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
            await asyncio.to_thread(  # each sentinel hears of it in its own time
                wait_until, lambda: group.master_port() == group.replica.port, "a new master"
            )
            assert await store.get("t:f:a:0", max_bytes=10) == b"before"
            assert await store.get("t:f:b:0", max_bytes=10) == b"after"
            while page.cursor is not None:  # which was the other server's
                page = await store.list("t:l", limit=1_000, cursor=page.cursor)
                listed |= {value.name for value in page.values}
            assert len(listed) == 3_000


@pytest.mark.parametrize("command", ["ls", "du"])
def test_a_look_at_one_server_of_a_cluster_says_that_it_is_one(
    cluster: RedisCluster, command: str
) -> None:
    one = f"redis://127.0.0.1:{cluster.masters[0].port}"
    looked = CliRunner().invoke(storage, [command, one, "--prefix", "t:f"], catch_exceptions=False)
    assert looked.exit_code == 0
    assert f"{one}/0 is one server of a cluster" in looked.stderr
    assert "is one server" not in looked.stdout
    whole = CliRunner().invoke(storage, [command, cluster.url, "--prefix", "t:f"])
    assert "is one server" not in whole.stderr


def test_a_look_at_a_single_server_says_nothing_of_clusters() -> None:
    with redis_server() as server:
        looked = CliRunner().invoke(storage, ["ls", server.url], catch_exceptions=False)
    assert looked.exit_code == 0
    assert "cluster" not in looked.stderr
