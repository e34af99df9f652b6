"""A real Mooncake master and one provider of memory, on free ports of this machine."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.redis_server import free_port, program

_START_S = 60.0
_GATE = Path(__file__).with_name("mooncake_gate.py")


@dataclass(frozen=True)
class MooncakeServer:
    master_port: int
    master: subprocess.Popen[bytes]
    provider: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.master_port}"

    def empty(self) -> None:
        """Forget all values. Blocks."""
        script = (
            "import sys, mooncake.store as m; s = m.MooncakeDistributedStore(); "
            "s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', sys.argv[1]); "
            "s.remove_all(True); s.close()"
        )
        address = f"127.0.0.1:{self.master_port}"
        subprocess.run([sys.executable, "-c", script, address], check=True, capture_output=True)


@dataclass(frozen=True)
class MasterGate:
    """See `tests/mooncake_gate.py`."""

    port: int
    popen: subprocess.Popen[str]

    def has_held(self) -> bool:
        """Whether it holds, and so will be until `release`. Blocks until it does."""
        assert self.popen.stdout is not None, "it is a pipe"
        return self.popen.stdout.readline() == "holding\n"

    def release(self) -> None:
        assert self.popen.stdin is not None, "it is a pipe"
        print(file=self.popen.stdin, flush=True)


@contextmanager
def master_gate(master_port: int, name: str) -> Iterator[MasterGate]:
    command = [sys.executable, str(_GATE), str(master_port), name]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as popen:
        assert popen.stdout is not None, "it is a pipe"
        try:
            yield MasterGate(int(popen.stdout.readline()), popen)
        finally:
            popen.kill()


def mooncake_program(name: str) -> str:
    """Where a program of the package is. Skips the test, with the reason, where it cannot run."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake's package cannot be loaded: {error}")
    return program(name)


@contextmanager
def mooncake_server(segment: str = "1 GB") -> Iterator[MooncakeServer]:
    for tries_left in (2, 1, 0):
        with ExitStack() as stack:
            try:
                server = _server(stack, segment)
            except RuntimeError:  # such as a provider, at times, whose port another has taken
                if not tries_left:
                    raise
                continue
            yield server
            return


def _server(stack: ExitStack, segment: str) -> MooncakeServer:
    master_program = mooncake_program("mooncake_master")
    provider_program = mooncake_program("mooncake_client")
    rpc, metrics, port = free_port(), free_port(), free_port()
    # fmt: off
    master = _started(stack, [
        master_program, "--rpc_address=127.0.0.1", f"--rpc_port={rpc}",
        "--metrics_host=127.0.0.1", f"--metrics_port={metrics}",
    ])
    _wait_for_port(rpc, master)
    provider = _started(stack, [
        provider_program, "--host=127.0.0.1", f"--port={port}",
        "--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{rpc}",
        "--protocol=tcp", f"--global_segment_size={segment}", "--local_buffer_size=16 MB",
    ])
    # fmt: on
    server = MooncakeServer(rpc, master, provider)
    _wait_until_it_takes_values(server)
    return server


def _started(stack: ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(popen.wait)
    stack.callback(popen.kill)
    return popen


def _wait_for_port(port: int, popen: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at and popen.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError("mooncake_master did not come up")


def _wait_until_it_takes_values(server: MooncakeServer) -> None:
    script = (
        "import sys, time, mooncake.store as m; s = m.MooncakeDistributedStore(); "
        "s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', sys.argv[1]); "
        "end = time.monotonic() + 15\n"
        "while s.put('t:ready', b'x') and time.monotonic() < end: time.sleep(0.05)\n"
        "code = 0 if s.is_exist('t:ready') == 1 else 1; s.remove('t:ready', True); s.close(); "
        "sys.exit(code)"
    )
    address = f"127.0.0.1:{server.master_port}"
    done = subprocess.run([sys.executable, "-c", script, address], check=False, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"the provider lends no memory: {done.stderr[-500:]!r}")


@pytest.fixture(scope="module")
def module_mooncake() -> Iterator[MooncakeServer]:
    """One master and provider for the tests of a module."""
    with mooncake_server() as server:
        yield server


@pytest.fixture
def empty_mooncake(module_mooncake: MooncakeServer) -> MooncakeServer:
    module_mooncake.empty()
    return module_mooncake
