"""Nodes, gateways and servers as child processes, which end with the demo."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from tierkv.client import AsyncClient
from tierkv.errors import TierKVError
from tierkv.tasks import task_group

A = TypeVar("A")

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 300.0


class DemoError(TierKVError):
    """The demo has failed. The text has the reason."""


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@asynccontextmanager
async def child(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process; stop it when the `async with` block ends, with SIGTERM, then SIGKILL.

    Args:
        command: program and arguments.
        log: file to which the process's stderr is appended.
        environ: environment variables to set in addition to those of this process.
    """
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # Ctrl-C is for the demo, which then stops its children
            preexec_fn=_die_with_parent,
        )
    try:
        yield process
    finally:
        await stop(process)


async def stop(process: asyncio.subprocess.Process) -> int:
    """Send SIGTERM to the process, wait until it has ended, and return its exit status.

    If it has not ended after 30 s, SIGKILL is sent.
    """
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
    return await process.wait()


Start = Callable[
    [Sequence[str], Path, Mapping[str, str]],
    AbstractAsyncContextManager[asyncio.subprocess.Process],
]


@dataclass(frozen=True, eq=False)
class NodeProcess:
    """A running `tierkv serve` or `tierkv gateway`.

    Attributes:
        url: the URL at which it listens.
        process: the child process.
        client: a client for this URL.
    """

    url: str
    process: asyncio.subprocess.Process
    client: AsyncClient


@asynccontextmanager
async def node(  # noqa: PLR0913 - what the command line asks for
    name: str,
    *,
    role: str,
    config: Path,
    storage: str,
    folder: Path,
    port: int = 0,
    direct: str | None = None,
    start: Start = child,
) -> AsyncIterator[NodeProcess]:
    """Run `tierkv serve`, and provide the node once it is ready.

    Args:
        name: name of the node.
        role: prefill, decode or both.
        config: path of its config file.
        storage: URL of its store.
        folder: directory for its log.
        port: port to listen on; 0 for a free port.
        direct: its setting `handoff.direct`; None for the default.
        start: runs a command; its arguments are the command, the log file and environment
            variables.

    Raises:
        DemoError: the node did not start. The text has the last line of its log.
    """
    command = [sys.executable, "-m", "tierkv", "serve", "--role", role, "--config", str(config)]
    command += ["--port", str(port), "--name", name]
    # A variable, not an option: a URL may contain a password, which `ps` would show. Several nodes
    # compute at once, so each has only one thread of BLAS.
    environ = {"TIERKV_STORAGE__URL": storage, "OPENBLAS_NUM_THREADS": "1"}
    if direct is not None:
        environ["TIERKV_HANDOFF__DIRECT"] = direct
    started = start(command, folder / f"{name}.log", environ)
    async with _listening(f"{name} node", started, folder / f"{name}.log") as process:
        yield process


@asynccontextmanager
async def gateway(
    folder: Path,
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    options: Sequence[str] = (),
    start: Start = child,
) -> AsyncIterator[NodeProcess]:
    """Run `tierkv gateway` on a free port, and provide it once it is ready.

    Args:
        folder: directory for its log.
        prefill: URLs of the prefill nodes.
        decode: URLs of the decode nodes.
        options: further options of `tierkv gateway`.
        start: runs a command; its arguments are the command, the log file and environment
            variables.

    Raises:
        DemoError: the gateway did not start. The text has the last line of its log.
    """
    command = [sys.executable, "-m", "tierkv", "gateway", "--port", "0", *options]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    started = start(command, folder / "gateway.log", {})
    async with _listening("gateway", started, folder / "gateway.log") as process:
        yield process


@asynccontextmanager
async def _listening(
    what: str, started: AbstractAsyncContextManager[asyncio.subprocess.Process], log: Path
) -> AsyncIterator[NodeProcess]:
    async with started as process:
        assert process.stdout is not None, "its stdout is a pipe"
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = (await process.stdout.readline()).decode()
        except TimeoutError as error:
            words = await asyncio.to_thread(last_words, log)
            raise DemoError(
                f"the {what} did not start within {_START_TIMEOUT_S:g} s: {words}"
            ) from error
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            words = await asyncio.to_thread(last_words, log)
            raise DemoError(f"the {what} did not start: {words}")
        async with AsyncClient(url, timeout_s=_CALL_TIMEOUT_S) as client:
            yield NodeProcess(url, process, client)


async def together(*starts: Coroutine[Any, Any, A]) -> list[A]:
    """Run coroutines concurrently and return their results; the first error stops all others."""
    async with task_group() as tasks:
        running = [tasks.create_task(start) for start in starts]
    return [task.result() for task in running]


def last_words(log: Path) -> str:
    """Return the last line of a log, in which a process says why it ended."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("error: ") if lines else "it logged nothing"


@asynccontextmanager
async def private_redis(folder: Path) -> AsyncIterator[str]:
    """Run redis-server on a free local port, without persistence, and provide its URL.

    Raises:
        DemoError: redis-server is not installed, or did not start.
    """
    # ./scripts/test installs redis-server beside the interpreter if the system has none.
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    program = shutil.which("redis-server", path=beside)
    if program is None:
        raise DemoError(
            "--storage redis needs the program redis-server: install it (on Debian: "
            "apt-get install redis-server), or give the URL of a running server"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    command += ["--appendonly", "no", "--dir", str(folder), "--daemonize", "no"]
    async with child(command, folder / "redis.log") as process:
        assert process.stdout is not None, "its stdout is a pipe"
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                async for line in process.stdout:
                    if b"Ready to accept connections" in line:
                        break
                else:
                    raise DemoError("the private redis-server ended at once")
        except TimeoutError as error:
            raise DemoError("the private redis-server did not start") from error
        async with asyncio.TaskGroup() as tasks:
            drain = tasks.create_task(process.stdout.read())  # its log must not fill the pipe
            try:
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                await stop(process)
                await drain


_RUNNING = "tierkv_gateway_node_requests"
_RESUMED = 'tierkv_gateway_routed_total{how="resumed"}'
_ANSWER_S = 300.0


@dataclass(frozen=True)
class FleetAnswer:
    """An answer through the gateway, during which a decode node was killed.

    Attributes:
        text: the whole answer.
        first_token_s: seconds from the call until the caller had the first text.
        killed_after: number of tokens that the caller had when the node was killed; None if the
            answer was complete before that, and no node was killed.
        is_resumed: True if another decode node went on with the answer.
    """

    text: str
    first_token_s: float
    killed_after: int | None
    is_resumed: bool


class Fleet:
    """A gateway, and the decode nodes behind it.

    Args:
        gateway: the gateway that receives the prompts.
        decode: the decode nodes, by the URL that the gateway uses for them.
    """

    def __init__(self, gateway: NodeProcess, decode: Mapping[str, NodeProcess]) -> None:
        self._gateway = gateway
        self._decode = decode

    async def complete_and_kill(
        self, prompt: str | list[int], max_tokens: int, *, tokens_before_kill: int
    ) -> FleetAnswer:
        """Send a prompt to the gateway, and kill the decode node that generates the answer.

        On a busy machine the node can be done before this process has read its first tokens. No
        node is killed then.

        Args:
            prompt: the prompt, a text or tokens.
            max_tokens: number of tokens to generate.
            tokens_before_kill: number of tokens to wait for before the node is killed.

        Raises:
            DemoError: the answer does not arrive whole.
        """
        started = time.monotonic()
        first_token_s, text, num_tokens, killed_after = 0.0, "", 0, None
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        try:
            async for piece in self._pieces(body):
                first_token_s = first_token_s or time.monotonic() - started
                text += piece
                num_tokens += 1
                if num_tokens == tokens_before_kill and await self._kill_generating():
                    killed_after = num_tokens
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DemoError(f"the gateway at {self._gateway.url} failed: {error}") from error
        is_resumed = await self._metric(_RESUMED) > 0
        return FleetAnswer(text, first_token_s, killed_after, is_resumed)

    async def _pieces(self, body: Mapping[str, object]) -> AsyncIterator[str]:
        url = self._gateway.url + "/v1/completions"
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, json=body) as response,
        ):
            if response.content_type != "text/event-stream":
                raise DemoError(f"the gateway answered {response.status}: {await response.text()}")
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                piece = json.loads(data) if data else {}
                if "error" in piece:
                    raise DemoError(f"the gateway gave up: {piece['error']['message']}")
                for choice in piece.get("choices", ()):
                    yield choice["text"]
        raise DemoError("the gateway closed the connection before the end of its answer")

    async def _kill_generating(self) -> bool:
        """Kill the decode node that generates; return False if none does."""
        for url, node in self._decode.items():
            running = f'{_RUNNING}{{node="{url}"}}'
            if not await self._metric(running):
                continue
            # The node stands still while the gateway is asked whether the answer is complete.
            node.process.send_signal(signal.SIGSTOP)
            try:
                if await self._metric(running):
                    node.process.kill()
                    await node.process.wait()
                    return True
            finally:
                if node.process.returncode is None:
                    node.process.send_signal(signal.SIGCONT)
        return False

    async def _metric(self, name: str) -> float:
        lines = (await self._gateway.client.metrics()).splitlines()
        values = [line.removeprefix(name) for line in lines if line.startswith(f"{name} ")]
        return float(values[0]) if values else 0.0
