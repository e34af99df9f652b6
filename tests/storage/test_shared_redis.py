"""Values of other programs in the same Redis, and a Redis user with the fewest permissions."""

from __future__ import annotations

import asyncio

import pytest

from tests.redis_groups import RedisCluster
from tests.redis_server import RedisServer
from tests.storage.test_redis_cluster import begin_to_move
from tests.storage.values import PATIENT, content_of, get_one, put_one
from tierkv.clock import SystemClock
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.storage import maintenance
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import GetStatus, PutStatus, Store, Usage
from tierkv.storage.redis.cluster import slot_of

OURS = [f"t:f:{index:02}:0" for index in range(30)]
# Keys that Redis accepts and that are not valid names of values.
STRANGE = (
    b"t:f:..:0",
    b"t:f:../../x",
    b"t:f:a\r\nDEL t:f:00:0\r\n",
    b"t:f:\0",
    b"t:f:*",
    b"t:f:[0-9]",
    b"t:f:?",
    b"t:f:\\",
    b"t:f:\xff\xfe",
    b"t:f:" + b"x" * 10_240,
    "t:f:\N{ARABIC-INDIC DIGIT ONE}".encode(),
)
BESIDE = (b"t", b"tt:f:00:0", b"other:f:00:0", b"T:f:00:0", b"t2:f:00:0")
COMMANDS = ("get", "set", "exists", "unlink", "pexpire", "ping")
OF_CLUSTERS = ("cluster|slots", "asking")


@pytest.fixture(params=["redis", "cluster"])
def servers(request: pytest.FixtureRequest) -> list[RedisServer]:
    if request.param == "redis":
        return [request.getfixturevalue("empty_redis")]
    cluster: RedisCluster = request.getfixturevalue("empty_cluster")
    return cluster.masters


def opened(servers: list[RedisServer], login: str = "") -> Store:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    scheme = "redis" if len(servers) == 1 else "redis+cluster"
    return open_store(f"{scheme}://{login}{hosts}", StoreSettings(redis=PATIENT), SystemClock())


def give_rights(servers: list[RedisServer], *more: str) -> None:
    """Give the user `limited` the documented rights and `more`. Blocks the thread."""
    rights = ("reset", "on", ">pw", "~t:*", *(f"+{command}" for command in (*COMMANDS, *more)))
    for server in servers:
        server.execute("ACL", "SETUSER", "limited", *rights)


def owner_of(servers: list[RedisServer], key: bytes) -> RedisServer:
    """Return the server that stores `key`. Blocks the thread."""
    slot = servers[0].execute("CLUSTER", "KEYSLOT", key) if len(servers) > 1 else 0
    assert isinstance(slot, int)
    return servers[slot * len(servers) // 16_384]


async def test_keys_of_others_are_neither_listed_nor_counted_nor_removed(
    servers: list[RedisServer],
) -> None:
    def plant() -> None:
        for key in (*STRANGE, *BESIDE):
            owner_of(servers, key).execute("SET", key, "theirs")
        owner_of(servers, b"t:f:list:0").execute("RPUSH", b"t:f:list:0", "theirs")

    def left() -> list[bytes]:
        keys = (*STRANGE, *BESIDE, b"t:f:list:0")
        return [key for key in keys if owner_of(servers, key).execute("EXISTS", key)]

    await asyncio.to_thread(plant)
    store = opened(servers)
    async with store.running():
        for name in OURS:
            await put_one(store, name, b"ours")
        assert await store.usage("t:f:") == Usage(len(OURS), 4 * len(OURS))
        assert {v.name for v in (await store.list("t:", limit=10_000)).values} == set(OURS)
        assert (await get_one(store, "t:f:list:0", 1))[0] is GetStatus.DAMAGED
        with pytest.raises(StoreCorruptError, match="not a string"):
            await store.get("t:f:list:0", max_bytes=10)
        found = await maintenance.verify(store, "t:")
        assert (found.num_others, found.damaged) == (len(OURS), [])
        assert await maintenance.remove(store, "t:") == len(OURS)
        assert await store.exists(OURS[:1]) == 0
    assert len(await asyncio.to_thread(left)) == len(STRANGE) + len(BESIDE) + 1


async def test_the_rights_that_are_documented_are_enough_and_end_at_the_prefix(
    servers: list[RedisServer],
) -> None:
    """A cluster needs the commands `cluster|slots` and `asking` in addition."""
    more = () if len(servers) == 1 else OF_CLUSTERS
    await asyncio.to_thread(give_rights, servers, *more)
    await asyncio.to_thread(lambda: owner_of(servers, b"u:f:a:0").execute("SET", "u:f:a:0", "x"))
    store = opened(servers, "limited:pw@")
    async with store.running():
        content = content_of("a", 4_000_000)
        for name in OURS:
            assert await put_one(store, name, name.encode(), ttl_s=100.0) is PutStatus.STORED
        assert await put_one(store, "t:f:big:0", content) is PutStatus.STORED
        assert await get_one(store, "t:f:big:0", 4_000_000) == (GetStatus.HIT, content)
        assert await store.exists(OURS) == len(OURS)
        assert await store.touch(OURS, ttl_s=50.0) == len(OURS)
        assert await put_one(store, OURS[0], b"new", keep_existing=False) is PutStatus.STORED
        assert await store.get(OURS[0], max_bytes=3) == b"new"
        assert await put_one(store, "u:f:b:0", b"x") is PutStatus.FULL
        assert (await get_one(store, "u:f:a:0", 1))[0] is GetStatus.FAILED
        for refused in (store.delete(["u:f:a:0"]), store.list("t:", limit=5)):
            with pytest.raises(StoreUnavailableError, match="permission"):
                await refused
        await asyncio.to_thread(give_rights, servers, *more, "scan")
        with pytest.raises(StoreUnavailableError, match=r"refused STRLEN or PTTL: .*permission"):
            await store.usage("t:f:")
        await asyncio.to_thread(give_rights, servers, *more, "scan", "strlen", "pttl")
        assert (await store.usage("t:f:")).num_values == len(OURS) + 1
        assert await store.delete(OURS) == len(OURS)
    assert await asyncio.to_thread(
        lambda: owner_of(servers, b"u:f:a:0").execute("GET", "u:f:a:0") == b"x"
    )


async def test_a_node_of_a_cluster_that_is_named_alone_says_how_to_name_it(
    empty_cluster: RedisCluster,
) -> None:
    store = opened(empty_cluster.masters[:1])
    async with store.running():
        with pytest.raises(StoreUnavailableError, match=r"use a redis\+cluster:// URL"):
            await store.exists(OURS)


async def test_a_slot_on_its_way_is_followed_with_the_documented_rights(
    empty_cluster: RedisCluster,
) -> None:
    servers = empty_cluster.masters
    name = "t:f:moving:0"
    slot = slot_of(name)
    source = owner_of(servers, name.encode())
    target = servers[(servers.index(source) + 1) % len(servers)]

    def begin() -> None:
        give_rights(servers, *OF_CLUSTERS)
        begin_to_move(slot, source, target)

    def end() -> None:
        for server in servers:
            server.execute("CLUSTER", "SETSLOT", slot, "STABLE")

    await asyncio.to_thread(begin)
    try:
        store = opened(servers, "limited:pw@")
        async with store.running():
            assert await put_one(store, name, b"asked") is PutStatus.STORED
            assert await get_one(store, name, 5) == (GetStatus.HIT, b"asked")
            assert await store.delete([name]) == 1
    finally:
        await asyncio.to_thread(end)
