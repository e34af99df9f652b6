"""The nodes and gateways of `tierkv.demo.processes`, begun as forks of one interpreter.

A new interpreter would take a second of processor time for each.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

from tests.preloaded import Forked, new_process
from tierkv.demo import processes
from tierkv.demo.processes import NodeProcess, stop

__all__ = ["NodeProcess", "gateway", "node", "stop"]


@asynccontextmanager
async def _forked(
    command: Sequence[str], log: Path, environ: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    async def fork() -> Forked | asyncio.subprocess.Process:
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environ}
        arguments = command[command.index("tierkv") + 1 :]
        with log.open("ab") as stderr:
            return await new_process(arguments, alone, stderr=stderr.fileno())

    async with asyncio.TaskGroup() as group:  # a task apart, in which nothing of tierkv blocks
        forked = group.create_task(fork())
    # A fork has every method that is used.
    process = cast("asyncio.subprocess.Process", forked.result())
    try:
        yield process
    finally:
        await stop(process)


node = partial(processes.node, start=_forked)
gateway = partial(processes.gateway, start=_forked)
