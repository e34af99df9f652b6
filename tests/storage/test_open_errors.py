"""A store that cannot be opened is refused with one sentence that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.redis_groups import SentinelGroup, sentinel_group
from tests.redis_server import RedisServer, free_port, redis_server
from tests.storage.values import tls_words
from tierkv.clock import SystemClock
from tierkv.errors import TierKVError
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.redis.store import RedisSettings
from tierkv.storage.redis.url import TlsFiles


async def refusal(url: str, tls: TlsFiles | None = None, *, timeout_s: float = 10.0) -> str:
    """Return the error of a store that cannot be opened, after a check for Python internals."""
    patient = RedisSettings(timeout_s=timeout_s, connect_timeout_s=timeout_s, tls=tls or TlsFiles())
    guarded = ResilienceSettings(timeout_s=timeout_s)  # for each store of a layered one
    settings = StoreSettings(redis=patient, resilience=guarded)
    with pytest.raises(TierKVError) as caught:
        async with open_store(url, settings, SystemClock()).running():
            pass
    sentence = str(caught.value)
    assert "\n" not in sentence
    for noise in ("Errno", "_ssl.c", "TlsFiles(", "Error(", "None"):
        assert noise not in sentence
    return sentence


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(password="s3cret") as server:
        yield server


@pytest.fixture(scope="module")
def sentinels() -> Iterator[SentinelGroup]:
    with sentinel_group() as group:
        yield group


REFUSED = r"cannot be reached \(Connection refused\): start the server, or correct"
LOGIN = "refused the login .*check user, password and database"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:{free}", REFUSED),
        ("redis+cluster://127.0.0.1:{free}", REFUSED),
        ("redis+sentinel://127.0.0.1:{free}/kv", REFUSED),
        ("rediss://127.0.0.1:{free}", REFUSED),
        ("layered:memory://|redis://127.0.0.1:{free}", REFUSED),
        ("redis://nowhere.invalid", "correct the host name"),
        ("unix:///nowhere/socket", r"not exist\): start the server, or correct the path"),
        ("redis://127.0.0.1:{server}", LOGIN),
        ("redis://:wrong@127.0.0.1:{server}", LOGIN),
        ("redis://nobody:s3cret@127.0.0.1:{server}", LOGIN),
        ("redis://:s3cret@127.0.0.1:{server}/99", LOGIN),
        ("redis+sentinel://127.0.0.1:{sentinel}/other", "knows no service 'other': use the name"),
        ("redis+cluster://127.0.0.1:{master}", "it is no cluster, so use redis://"),
    ],
)
async def test_a_server_that_cannot_be_used(
    server: RedisServer, sentinels: SentinelGroup, url: str, says: str
) -> None:
    ports = {"free": free_port(), "server": server.port, "master": sentinels.master.port}
    ports["sentinel"] = sentinels.sentinel_ports[0]
    sentence = await refusal(url.format(**ports))
    assert re.search(says, sentence), sentence
    assert "s3cret" not in sentence


@pytest.mark.skipif(os.geteuid() == 0, reason="root may connect to any socket")
async def test_a_socket_that_is_not_for_us(server: RedisServer) -> None:
    server.socket_path.chmod(0)
    try:
        assert f"let user {os.geteuid()} connect" in await refusal(server.unix_url)
    finally:
        server.socket_path.chmod(0o700)


async def test_a_server_that_speaks_no_tls(server: RedisServer) -> None:
    sentence = await refusal(f"rediss://127.0.0.1:{server.port}", timeout_s=1.0)
    says = "did not answer within 1000 ms to a TLS handshake: check that it uses TLS on this port"
    assert says in sentence


async def test_a_server_whose_certificate_nobody_vouches_for(tls_redis: str) -> None:
    sentence = await refusal(tls_redis)
    assert "its certificate is refused: self-signed certificate): name its authority" in sentence


async def test_a_server_that_wants_a_certificate_of_ours(certificates: Path) -> None:
    port = free_port()
    with redis_server(*tls_words(certificates, port)):
        ours = TlsFiles(ca=str(certificates / "cert.pem"))
        sentence = await refusal(f"rediss://127.0.0.1:{port}", ours)
    assert "if it requires a client certificate, set" in sentence


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            lambda d: TlsFiles(ca=f"{d}/none.pem"),
            "authorities {d}/none.pem cannot be used (no such",
        ),
        (lambda d: TlsFiles(ca=f"{d}/text"), "authorities {d}/text cannot be used (no certificate"),
        (
            lambda d: TlsFiles(certificate=f"{d}/cert.pem", key=f"{d}/text"),
            "certificate {d}/cert.pem with {d}/text cannot be used",
        ),
        (lambda d: TlsFiles(certificate=f"{d}/cert.pem"), "a certificate with its key"),
        (lambda d: TlsFiles(key=f"{d}/key.pem"), "key {d}/key.pem needs its certificate"),
    ],
)
async def test_tls_files_that_are_of_no_use(
    certificates: Path, files: Callable[[Path], TlsFiles], says: str
) -> None:
    (certificates / "text").write_text("no PEM")
    sentence = await refusal("rediss://127.0.0.1:1", files(certificates))
    assert says.format(d=certificates) in sentence


async def test_a_directory_that_cannot_hold_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"{where} is a file, or lies below a file: set" in await refusal(where.as_uri())
    sentence = await refusal("file:///proc/tierkv")
    assert "the directory /proc/tierkv cannot be used as a store (" in sentence
    assert f"let user {os.geteuid()} write to it, or set another directory" in sentence
