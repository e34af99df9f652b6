"""Nodes and gateways as processes of their own, begun as forks of one interpreter.

`tierkv.demo.processes` starts new interpreters, each of which takes a second of processor time.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.preloaded import Forked, new_process
from tierkv.client import AsyncClient

_START_S = 200.0


@dataclass(frozen=True, eq=False)
class NodeProcess:
    """One `tierkv serve` or `tierkv gateway` that listens at `url`."""

    url: str
    process: asyncio.subprocess.Process | Forked
    client: AsyncClient


async def stop(process: asyncio.subprocess.Process | Forked) -> int:
    """Send SIGTERM, then SIGKILL to a process that goes on, and return its exit status."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(30):
                await process.wait()
        except TimeoutError:
            process.kill()
    return await process.wait()


@asynccontextmanager
async def node(
    name: str,
    *,
    role: str,
    config: Path,
    storage: str,
    folder: Path,
    port: int = 0,
    direct: str | None = None,
) -> AsyncIterator[NodeProcess]:
    """Run a node; see `tierkv.demo.processes.node`."""
    arguments = ["serve", "--role", role, "--config", str(config), "--port", str(port)]
    environ = {"TIERKV_STORAGE__URL": storage}
    if direct is not None:
        environ["TIERKV_HANDOFF__DIRECT"] = direct
    async with _listening([*arguments, "--name", name], folder / f"{name}.log", environ) as process:
        yield process


@asynccontextmanager
async def gateway(
    folder: Path, *, prefill: Sequence[str], decode: Sequence[str], options: Sequence[str] = ()
) -> AsyncIterator[NodeProcess]:
    """Run a gateway; see `tierkv.demo.processes.gateway`."""
    arguments = ["gateway", "--port", "0", *options]
    for url in prefill:
        arguments += ["--prefill", url]
    for url in decode:
        arguments += ["--decode", url]
    async with _listening(arguments, folder / "gateway.log", {}) as process:
        yield process


@asynccontextmanager
async def _listening(
    arguments: Sequence[str], log: Path, environ: Mapping[str, str]
) -> AsyncIterator[NodeProcess]:
    with log.open("ab") as stderr:
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environ}
        process = await new_process(arguments, alone, stderr=stderr.fileno())
    try:
        assert process.stdout is not None, "its stdout is a pipe"
        async with asyncio.timeout(_START_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", line)
        assert found, f"{line!r}: {_end_of(log)}"
        async with AsyncClient(found[0], timeout_s=300.0) as client:
            yield NodeProcess(found[0], process, client)
    finally:
        await stop(process)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
