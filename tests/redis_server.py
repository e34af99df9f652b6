"""A real redis-server of a test's own: a free port, a temporary directory, nothing kept."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tierkv.storage.factory import StoreSettings
from tierkv.storage.redis.store import RedisSettings

_START_S = 60.0
# For stores whose deadlines are not what is tested, and which a busy machine must not miss.
PATIENT = StoreSettings(redis=RedisSettings(timeout_s=100.0, connect_timeout_s=50.0))


@dataclass(frozen=True)
class RedisServer:
    """A running server. `url` holds the password, if there is one."""

    port: int
    password: str | None
    socket_path: Path
    popen: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://{self._login}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._login}{self.socket_path}"

    @property
    def _login(self) -> str:
        return f":{self.password}@" if self.password else ""

    def execute(self, *command: str | bytes | int) -> object:
        """The server's answer to one command, over a connection of its own. Blocks."""
        with redis.Redis(port=self.port, password=self.password, protocol=2) as client:
            return client.execute_command(*command)

    def names(self, pattern: str = "*") -> list[bytes]:
        found = self.execute("KEYS", pattern)
        assert isinstance(found, list)
        return found

    def ttl(self, name: bytes) -> int:
        """Seconds that `name` still lives: -1 for ever, -2 where it is gone."""
        return int(str(self.execute("TTL", name)))

    def num_connections(self) -> int:
        """How many clients are connected, this question's own not counted. Blocks."""
        with redis.Redis(port=self.port, password=self.password) as client:
            return len(client.client_list()) - 1

    def pause(self) -> None:
        """Freeze the server: the kernel goes on accepting for it, nothing answers."""
        self.popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, paused or not."""
        self.popen.kill()


def program(name: str, why: str = "") -> str:
    """The path of a program. Skips the test where it is not installed."""
    places = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"no {name} on this machine{why}")
    return found


@contextmanager
def redis_server(*options: str, password: str | None = None) -> Iterator[RedisServer]:
    """Start a server, ready when the body begins and gone when it ends.

    options: words of its command line, such as "--maxmemory", "10mb". Skips the test where no
    redis-server is installed.
    """
    command = [program("redis-server")]
    with tempfile.TemporaryDirectory(prefix="tierkv-redis-") as directory:
        port, socket_path = free_port(), Path(directory, "redis.sock")
        # fmt: off
        command += [
            "--port", str(port), "--bind", "127.0.0.1", "--dir", directory,
            "--unixsocket", str(socket_path), "--save", "", "--appendonly", "no",
            "--loglevel", "warning", "--logfile", str(Path(directory, "log")), *options,
        ]
        # fmt: on
        if password is not None:
            command += ["--requirepass", password]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as popen:
            try:
                server = RedisServer(port, password, socket_path, popen)
                _wait_until_ready(server, Path(directory, "log"))
                yield server
            finally:
                popen.kill()


@pytest.fixture(scope="module")
def module_redis() -> Iterator[RedisServer]:
    """One server for the tests of a module; import it there, and use `empty_redis`."""
    with redis_server() as server:
        yield server


@pytest.fixture
def empty_redis(module_redis: RedisServer) -> RedisServer:
    """The module's server, with nothing in it."""
    module_redis.execute("FLUSHALL")
    return module_redis


# Below the ports that the system gives to connections: one of those could be there before the
# server is, or while it is down to be restarted.
# Each worker of a run in parallel has a range of its own.
_PORTS = 1_000
_FIRST_PORT = 12_000 + _PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20)
_next_port = itertools.count(secrets.randbelow(_PORTS))  # not `random`, which every test seeds anew


def free_port() -> int:
    """A TCP port that nothing listens on just now, and that nobody here was given of late."""
    while True:
        port = _FIRST_PORT + next(_next_port) % _PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_until_ready(server: RedisServer, log: Path) -> None:
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at and server.popen.poll() is None:
        try:
            server.execute("PING")
        except redis.ConnectionError:
            time.sleep(0.01)
        else:
            return
    text = log.read_text() if log.exists() else "(no log)"
    raise RuntimeError(f"redis-server did not come up on port {server.port}: {text}")
