"""URLs of stores, and the errors for URLs that name no store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.clock import SystemClock
from tierkv.errors import ConfigError
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.mooncake.client import MooncakeSettings
from tierkv.storage.protocol import Store
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
