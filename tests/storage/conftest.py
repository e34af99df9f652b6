"""Servers and certificates that several test files of this folder use."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake_server import empty_mooncake, module_mooncake  # noqa: F401 - fixtures
from tests.redis_groups import empty_cluster, module_cluster  # noqa: F401 - fixtures
from tests.redis_server import empty_redis, free_port, module_redis, redis_server  # noqa: F401
from tests.storage.values import tls_words


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a self-signed certificate for 127.0.0.1 and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine to make certificates with")
    directory = tmp_path_factory.mktemp("certificates")
    # fmt: off
    command = [
        openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem"),
    ]
    # fmt: on
    subprocess.run(command, check=True, capture_output=True)
    return directory


@pytest.fixture
def tls_redis(certificates: Path) -> Iterator[str]:
    """Yield the URL of a Redis server with TLS."""
    port = free_port()
    with redis_server(*tls_words(certificates, port), "--tls-auth-clients", "no"):
        yield f"rediss://127.0.0.1:{port}"
