"""Which servers a URL names, whatever they are called."""

from __future__ import annotations

import pytest

from tierkv.errors import ConfigError
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import Address


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


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:" + "1" * 5_000,
        "redis://h/" + "1" * 5_000,
        "redis://:s3cret@[::1",
        "redis://:s3cret@[::1]x",
        "redis://:s3cret@[one]",
        "redis://:s3cret@::1",
        "redis://:s3cret@h?timout=3",
        "redis://:s3cret@h:6379,",
        "unix://:s3cret@/path?db=1&timeout=2",
    ],
)
def test_what_names_no_server_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert "s3cret" not in str(caught.value)
    assert len(str(caught.value)) < 1_000
