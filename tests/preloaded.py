"""Processes of `tierkv`, and of modules of the tests, that begin as forks of one interpreter which
has imported everything.

A fork takes 0.05 s of processor time, a new interpreter 1.1 s. A test that changes how Python
starts, by PYTHONPATH, gets a new interpreter.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_MODULES = (
    "numpy.random",
    "tierkv.cli.status",
    "tierkv.cli.node",
    "tierkv.cli.serving",
    "tierkv.cli.settings",
    "tierkv.cli.storage",
    "tierkv.cli.token",
    "tierkv.gateway.server",
    "tierkv.api.server",
    "tierkv.storage.redis.store",
)
_MAX_REQUEST_BYTES = 200_000
_LOST = -signal.SIGKILL
_PR_SET_PDEATHSIG = 1
_PYTHONPATH = os.environ.get("PYTHONPATH")


class Forked:
    """A process of `tierkv`, with the methods of asyncio's that tests use."""

    def __init__(self, status: _Reading, out: _Reading, err: _Reading | None) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.stdout = out[0]
        self._status, self._stderr = status[0], None if err is None else err[0]
        self._transports = [pipe[1] for pipe in (status, out, err) if pipe is not None]
        self._lock = asyncio.Lock()

    @classmethod
    async def begun(
        cls, arguments: Sequence[str | Path], environ: Mapping[str, str], stderr: int | None
    ) -> Forked:
        status, out, err, stdin = _request("tierkv", arguments, environ, stderr)
        os.close(stdin)
        read_err = None if err is None else await _reading(err)
        self = cls(await _reading(status), await _reading(out), read_err)
        self.pid = int(await self._status.readline())
        return self

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        async with self._lock:
            if self.returncode is None:
                line = await self._status.readline()
                self.returncode = int(line) if line else _LOST
                for transport in self._transports:
                    transport.close()
            return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """Return all that the process writes to stdout and stderr, once it has ended."""
        assert self._stderr is not None, "stderr is no pipe"
        async with asyncio.TaskGroup() as group:
            err = group.create_task(self._stderr.read())
            out = await self.stdout.read()
        await self.wait()
        return out, err.result()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProgram:
    """A process of a module, with the methods of `subprocess.Popen` that tests use.

    Args:
        module: Module to run; `tierkv` runs the command.
        arguments: Its arguments.
        stderr: File descriptor of its log; None for a pipe.
        environ: Variables beside those of this process.
    """

    def __init__(
        self,
        module: str,
        *arguments: str | Path,
        stderr: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        whole = {**os.environ, **(environ or {})}
        status, out, err, stdin = _request(module, arguments, whole, stderr)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(out, "rb")
        self._err = None if err is None else os.fdopen(err, "rb")
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline())

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the process has ended, and return its exit status."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} goes on after {timeout_s} s")
            line = self._status.readline()
            self.returncode = int(line) if line else _LOST
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        with suppress(TimeoutError):
            self.wait(0.0)
        return self.returncode

    def communicate(self) -> tuple[bytes, bytes]:
        """Close stdin, and return the rest of stdout and stderr once the process has ended."""
        self.stdin.close()
        out = b"" if self.stdout.closed else self.stdout.read()
        err = b"" if self._err is None or self._err.closed else self._err.read()
        self.wait()
        self.stdout.close()
        if self._err is not None:
            self._err.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def output_of(module: str, *arguments: str | Path) -> str:
    """Return what a module prints that ends with 0."""
    process = ForkedProgram(module, *arguments)
    out, err = process.communicate()
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


_Reading = tuple[asyncio.StreamReader, asyncio.ReadTransport]


async def _reading(fd: int) -> _Reading:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport


_requests: socket.socket | None = None
_processes: list[subprocess.Popen[bytes]] = []


def _interpreter() -> socket.socket:
    """Return the socket of the interpreter that is forked, and start it at the first call."""
    global _requests
    if _requests is None:
        _requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())]
            _processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # Processes that compute at once leave each other a core.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
            )
    return _requests


async def new_process(
    arguments: Sequence[str | Path], environ: Mapping[str, str], *, stderr: int | None = None
) -> asyncio.subprocess.Process | Forked:
    """Start `tierkv` as a fork, or as a new interpreter where `environ` changes how one starts.

    Args:
        arguments: Arguments of the command.
        environ: Its whole environment.
        stderr: File descriptor of its log; None for a pipe.
    """
    if environ.get("PYTHONPATH") == _PYTHONPATH:
        return await Forked.begun(arguments, environ, stderr)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tierkv", *map(str, arguments)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if stderr is None else stderr,
        env=environ,
    )


def _request(
    module: str, arguments: Sequence[str | Path], environ: Mapping[str, str], stderr: int | None
) -> tuple[int, int, int | None, int]:
    """Ask for a process; return our ends of its pipes: status, stdout, stderr and stdin."""
    (status, their_status), (out, their_out), (their_in, stdin) = os.pipe(), os.pipe(), os.pipe()
    err, their_err = os.pipe() if stderr is None else (None, os.dup(stderr))
    request = {
        "arguments": [*map(str, arguments)],
        "environ": dict(environ),
        "folder": str(Path.cwd()),
        "module": module,
    }
    theirs = [their_in, their_out, their_err, their_status]
    socket.send_fds(_interpreter(), [json.dumps(request).encode()], theirs)
    for fd in theirs:
        os.close(fd)
    return status, out, err, stdin


# In the interpreter that is forked


def _serve(requests: socket.socket) -> str:
    """Fork for each request; return the module in the child, with environment and descriptors."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with os.fdopen(children.pop(pid), "w") as told:
                    told.write(f"{os.waitstatus_to_exitcode(status)}\n")
        if requests.fileno() in ready:
            raw, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
            if not raw:
                sys.exit()  # the tests have ended
            request = json.loads(raw)
            *standard, status_fd = fds
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wakes, status_fd, requests.detach(), *children.values()):
                    os.close(fd)
                _become(request, standard)
                return str(request["module"])
            children[pid] = status_fd
            os.write(status_fd, f"{pid}\n".encode())
            for fd in standard:
                os.close(fd)


def _become(request: dict[str, object], standard: list[int]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no node outlives the tests
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
        os.close(fd)
    environ, arguments = request["environ"], request["arguments"]
    assert isinstance(environ, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(str(request["folder"]))
    sys.argv = ["tierkv", *arguments]
    gc.unfreeze()


def _main() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    module = _serve(socket.socket(fileno=int(sys.argv[1])))
    if module != "tierkv":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"].__package__ = None  # click takes the name of the command from argv
    from tierkv.__main__ import run  # noqa: PLC0415 - in the child

    run()


if __name__ == "__main__":
    _main()
