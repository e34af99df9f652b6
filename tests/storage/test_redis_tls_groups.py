"""TLS with a private authority and passwords, for a cluster and for Sentinels."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from tests.latch import until
from tests.redis_groups import wait_until
from tests.redis_server import free_port, redis_server
from tests.storage.values import PATIENT, content_of, get_one, redis_store, tls_words
from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import EMPTY_MESSAGE, GetStatus, PutItem, PutStatus, Usage
from tierkv.storage.redis.store import RedisSettings
from tierkv.storage.redis.url import TlsFiles


@contextmanager
def tls_cluster(certificates: Path) -> Iterator[str]:
    """Yield the URL of a cluster of one node, which has all slots."""
    tls, bus = free_port(), free_port()
    words = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--tls-cluster", "yes")
    with redis_server(*words, *tls_words(certificates, tls), password="pw") as server:
        server.execute("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        wait_until(lambda: "cluster_state:ok" in str(server.execute("CLUSTER", "INFO")), "slots")
        yield f"rediss+cluster://:pw@127.0.0.1:{tls}"


@contextmanager
def tls_sentinel(certificates: Path, directory: Path) -> Iterator[str]:
    """Yield the URL of a Sentinel and its master, which have different passwords."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
    tls, port = free_port(), free_port()
    with redis_server(*tls_words(certificates, tls), "--tls-replication", "yes", password="pw"):
        words = [word.removeprefix("--") for word in tls_words(certificates, port)]
        pairs = zip(words[::2], words[1::2], strict=True)
        lines = [f"{name} {value}" for name, value in pairs]
        lines += [
            "port 0", "bind 127.0.0.1", f"dir {directory}", "tls-replication yes",
            "requirepass other", f"sentinel monitor kv 127.0.0.1 {tls} 1",
            "sentinel auth-pass kv pw",
        ]  # fmt: skip
        config = directory / "sentinel.conf"
        config.write_text("\n".join(lines) + "\n")
        command = [program, str(config), "--sentinel"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as popen:
            try:
                wait_until(lambda: _answers(certificates, port), "a sentinel")
                yield f"rediss+sentinel://:pw@127.0.0.1:{port}/kv"
            finally:
                popen.kill()


def _answers(certificates: Path, port: int) -> bool:
    certificate, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    with redis.Redis(
        host="127.0.0.1", port=port, password="other", ssl=True, ssl_ca_certs=certificate,
        ssl_certfile=certificate, ssl_keyfile=key,
    ) as client:  # fmt: skip
        return bool(client.ping())


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_all_connections_are_encrypted_and_show_our_certificate(
    certificates: Path, tmp_path: Path, kind: str
) -> None:
    pem, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    login = "other" if kind == "sentinel" else None
    tls = TlsFiles(ca=pem, certificate=pem, key=key)
    settings = replace(PATIENT, tls=tls, sentinel_password=login)
    group = tls_cluster(certificates) if kind == "cluster" else tls_sentinel(certificates, tmp_path)
    url = await asyncio.to_thread(group.__enter__)
    try:
        store = redis_store(url, settings)
        notifier = store.notifier()
        async with store.running(), notifier.running():
            names = [f"t:f:{index}:0" for index in range(8)]
            sizes = [1, 5_000, 1 << 20, (5 << 20) + 3] * 2
            content = {n: content_of(n, size) for n, size in zip(names, sizes, strict=True)}
            puts = await store.put([PutItem(n, (value,)) for n, value in content.items()])
            assert {one.status for one in puts} == {PutStatus.STORED}
            for name, value in content.items():
                assert await get_one(store, name, len(value)) == (GetStatus.HIT, value)
            assert await store.exists([*names, "t:f:none:0"]) == 8
            assert await store.usage("t:f") == Usage(8, sum(sizes))
            with notifier.listen("t:topic") as listener:
                await until(lambda: listener.is_live)
                assert await listener.next(60) == EMPTY_MESSAGE
                await notifier.notify("t:topic", "hello")
                assert await listener.next(60) == "hello"
        without = RedisSettings(timeout_s=2.0, connect_timeout_s=2.0, tls=TlsFiles(ca=pem))
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            async with redis_store(url, without).running():
                pass
    finally:
        await asyncio.to_thread(group.__exit__, None, None, None)
