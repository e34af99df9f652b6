"""URLs of stores, and a node's settings of its storage, from TOML and the environment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tierkv.api.node import Node
from tierkv.api.routes_status import Health, health_of
from tierkv.api.settings import NodeSettings
from tierkv.clock import SystemClock
from tierkv.config import load
from tierkv.errors import ConfigError, TierKVError
from tierkv.gpu.cpu import CpuDevice
from tierkv.storage.codec import SealedCodec, SignedCodec, SmallCodec, Trust
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.mooncake.client import MooncakeSettings
from tierkv.storage.protocol import BreakerState, Store
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import Address


def opened(url: str) -> Store:
    return open_store(url, StoreSettings(), SystemClock())


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("memory://", MemoryStore, "memory://"),
        ("file:///var/cache/tierkv", FileStore, "file:///var/cache/tierkv"),
        ("file:///var/a%20b", FileStore, "file:///var/a%20b"),
        ("file:kv", FileStore, f"file://{Path.cwd()}/kv"),
        ("file:./kv/../kv", FileStore, f"file://{Path.cwd()}/kv"),
        ("redis://cache", RedisStore, "redis://cache:6379/0"),
        ("redis://cache:7000/3", RedisStore, "redis://cache:7000/3"),
        ("redis://[::1]:7000", RedisStore, "redis://[::1]:7000/0"),
        ("rediss://me:s3cret@cache", RedisStore, "rediss://cache:6379/0"),
        ("redis+cluster://a,b:7", RedisStore, "redis+cluster://a:6379,b:7"),
        ("redis+sentinel://u:p@a,b/m/2", RedisStore, "redis+sentinel://a:26379,b:26379/m/2"),
        ("unix:///run/redis.sock", RedisStore, "unix:///run/redis.sock"),
        ("unix:///run/my%20redis.sock", RedisStore, "unix:///run/my redis.sock"),
        ("unix://:s3cret@/run/redis.sock?db=2", RedisStore, "unix:///run/redis.sock?db=2"),
        ("layered:file:///a|redis://:p@b", LayeredStore, "layered:file:///a|redis://b:6379/0"),
    ],
)
def test_a_url_names_its_store(url: str, kind: type, shown: str) -> None:
    store = opened(url)
    assert isinstance(store, kind)
    assert store.url == shown


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ("[::1]", [("::1", 6379)]),
        ("[::1],[::2]:7001", [("::1", 6379), ("::2", 7001)]),
        ("kv.example:7000,[::1]:7001", [("kv.example", 7000), ("::1", 7001)]),
        ("[::1]:7001,10.0.0.1", [("::1", 7001), ("10.0.0.1", 6379)]),
    ],
)
def test_hosts_of_a_cluster_can_be_of_ipv6_and_others_in_one_list(
    hosts: str, addresses: list[tuple[str, int]]
) -> None:
    parsed = parse_redis_url(f"redis+cluster://user:pass%40@{hosts}")
    assert parsed.addresses == tuple(Address(host, port) for host, port in addresses)
    assert (parsed.username, parsed.password) == ("user", "pass@")


# fmt: off
NO_STORES = (
    "", "redis", "/var/cache", "http://cache", "memory://x", "memory:", "redis+other://a/b",
    "redis+cluster://a/1", "redis+cluster://a,b?x=1", "redis+sentinel://a", "redis+sentinel://a/kv?x=1",
    "file:", "file://host/path", "file:///a?b", "file:///a#b", "file:///a%00b", "file:///a?capacity=1",
    "redis://", "redis:cache", "redis://a,b", "redis://:6379", "redis://cache:port", "redis://cache:70000",
    "redis://cache:0", "redis://cache/db", "redis://cache/-1", "redis://cache/0?ssl=1", "redis://cache#0",
    "redis://cache?db=1", "redis://[::1", "redis://h:" + "1" * 5_000, "redis://h/" + "1" * 5_000,
    "unix://", "unix://host/socket", "unix:///socket?db=x", "unix:///socket?x=1", "unix:///socket?1",
    "unix:///socket?db=1&x=1", "mooncake://", "mooncake://a", "mooncake://a:b", "mooncake://a:1/x",
    "mooncake://host:1?x=1", "layered:memory://", "layered:a|b", "layered:memory://|x|y",
    "mirrored:memory://|memory://",
)
WITH_PASSWORDS = (
    "rdis://:s3cret@cache", "redis://:s3cret@cache:port", "redis://:s3cret@cache:1:s3cret",
    "redis://:12/s3cret@cache", "redis://:s3cret@cache/x", "redis://:s3cret@", "unix://:s3cret@host/x",
    "rediss://:s3cret@cache?x", "redis://:s3cret@[::1", "redis://:s3cret@[::1]x", "redis://:s3cret@[one]",
    "redis://:s3cret@::1", "redis://:s3cret@h?timout=3", "redis://:s3cret@h:6379,",
    "unix://:s3cret@/path?db=1&timeout=2",
)
# fmt: on


def test_a_url_that_names_no_store_is_refused_with_what_is_accepted() -> None:
    for url in NO_STORES:
        with pytest.raises(ConfigError, match=r"accepted: |use memory://") as caught:
            opened(url)
        assert len(str(caught.value)) < 1_000


def test_no_error_quotes_a_password() -> None:
    for url in WITH_PASSWORDS:
        with pytest.raises(ConfigError) as caught:
            opened(url)
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cret" not in str(error)
            error = error.__cause__


@pytest.mark.parametrize(
    "make",
    [
        lambda: MemorySettings(capacity_bytes=-1),
        lambda: FileSettings(num_threads=0),
        lambda: FileSettings(sweep_interval_s=0),
        lambda: FileSettings(capacity_bytes=0),
        lambda: FileSettings(min_free_bytes=-1),
        lambda: LayeredSettings(near_ttl_s=0),
        lambda: MooncakeSettings(connect_timeout_s=-1),
        lambda: MooncakeSettings(num_threads=0),
        lambda: MooncakeSettings(replicas=0),
        lambda: MooncakeSettings(protocol="udp"),
        lambda: ResilienceSettings(timeout_s=0.0),
        lambda: ResilienceSettings(max_reads=0),
        lambda: ResilienceSettings(negative_ttl_s=-1.0),
        lambda: ResilienceSettings(full_pause_s=-1),
        lambda: RedisSettings(write_connections=0),
        lambda: RedisSettings(num_connections=0),
        lambda: RedisSettings(timeout_s=0),
        lambda: RedisSettings(connect_timeout_s=float("nan")),
        lambda: RedisSettings(slowest_bytes_per_s=float("inf")),
    ],
)
def test_settings_that_cannot_be_are_refused(make: type) -> None:
    with pytest.raises(ConfigError):
        make()


# The storage section of a node's settings

KEY = "ab" * 32


def settings_in(folder: Path, toml: str = "", **environ: str) -> NodeSettings:
    path = folder / "node.toml"
    path.write_text(toml)
    return load(NodeSettings, path, environ)


async def test_a_node_opens_its_store_behind_a_breaker_with_deadlines_of_250_ms(
    tmp_path: Path,
) -> None:
    chosen = await asyncio.to_thread(
        settings_in, tmp_path, f'[storage]\nurl = "file://{tmp_path}/store"\n[node]\nport = 0'
    )
    node = Node(chosen, environ={})
    async with node.running():
        assert isinstance(node.service.store, GuardedStore)
        [state] = node.service.storage_state()
        assert state.circuit == BreakerState.CLOSED.value
        async with asyncio.timeout(20):
            while (await health_of(node))["storage"][0].value != "ok":
                pass  # a busy machine may miss the deadline
        await node.service.attach_storage("memory://")
        [state] = node.service.storage_state()
        assert (state.url, state.circuit) == ("memory://", BreakerState.CLOSED.value)
        node.service.detach_storage()
        assert (await health_of(node))["storage"] == (Health.OK, "no storage tier")
    storage = chosen.storage
    assert storage.redis.timeout_s == storage.redis.connect_timeout_s == 2.5
    assert storage.resilience.timeout_s > storage.redis.timeout_s, "whose errors say more"


def test_every_kind_of_store_has_its_table(tmp_path: Path) -> None:
    found = settings_in(
        tmp_path,
        """
        [storage]
        url = "layered:file:///near|redis://far:6379/0"
        peer_tensor_parallel = [1, 2]
        tenants = { 0123456789abcdef = "redis://other:6379/0" }
        [storage.mooncake]
        replicas = 2
        [storage.layered]
        near_ttl_s = 60
        [storage.resilience]
        timeout_s = 0.7
        [storage.redis.tls]
        ca = "/etc/ca.pem"
        """,
        TIERKV_STORAGE__RESILIENCE__PROBE_INTERVAL_S="0.5",
    ).storage
    assert found.mooncake.replicas == 2
    assert found.layered.near_ttl_s == 60
    assert found.resilience.timeout_s == 0.7
    assert found.resilience.probe_interval_s == 0.5
    assert found.peer_tensor_parallel == (1, 2)
    assert found.tenants == {"0123456789abcdef": "redis://other:6379/0"}


def test_the_key_comes_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    signed = settings_in(tmp_path, f'[storage]\ntrust = "signed"\nkey_file = "{file}"').storage
    assert isinstance(signed.codecs()("f" * 16), SignedCodec)
    sealed = settings_in(tmp_path, '[storage]\ntrust = "sealed"', TIERKV_STORAGE__KEY=KEY).storage
    assert sealed.trust is Trust.SEALED
    assert isinstance(sealed.codecs()("f" * 16), SealedCodec)
    assert KEY not in repr(sealed)
    value = sealed.small_codec().seal_small("tierkv:ticket:1", b"a ticket")
    assert SmallCodec(Trust.SEALED, bytes.fromhex(KEY)).unseal_small("tierkv:ticket:1", value)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('trust = "signed"', "key_file"),
        (f'key = "{KEY}"', "set storage.trust"),
        (f'trust = "sealed"\nkey = "{KEY}"\nkey_file = "x"', "both"),
        ('trust = "maybe"', "trust"),
        ("peer_tensor_parallel = [0]", "peer_tensor_parallel"),
        ("[storage.mooncake]\nreplica = 1", "storage.mooncake.replica"),
    ],
)
def test_what_cannot_be_is_refused_and_named(toml: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        settings_in(tmp_path, "[storage]\n" + toml)


@pytest.mark.parametrize("content", ["", "xyz", "ab" * 31, "ä" * 64])
def test_a_key_that_is_none_is_refused_without_repeating_it(content: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    found = settings_in(tmp_path, f'[storage]\ntrust = "signed"\nkey_file = "{file}"').storage
    with pytest.raises(ConfigError) as caught:
        found.codecs()
    assert not content or content not in str(caught.value)


def test_ranks_that_the_device_does_not_have_are_refused(tmp_path: Path) -> None:
    split = settings_in(tmp_path, '[cache]\ntensor_parallel = 2\n[storage]\nurl = "none"')
    assert Node(split, environ={}).service.ranks is not None
    with pytest.raises(ConfigError, match="tensor_parallel is 2, but the device has 1"):
        Node(split, environ={}, device=CpuDevice())
    with pytest.raises(TierKVError, match="cannot be spread"):
        Node(settings_in(tmp_path, "[cache]\ntensor_parallel = 3"), environ={"HOME": "/"})
