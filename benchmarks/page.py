"""What the live page costs a node: processor time per request, without and with three pages open.

Run it as `python -m benchmarks.page`. A node, a process of its own, answers 200 requests a second;
in turns nobody looks, and three clients read the page's stream as browsers do. Processor time, and
not the rate, is compared: the rate is what was asked for, and 2 % of it is what the page may take.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.bench import Row, row, show

PER_SECOND = 200
PAGES = 3
_PROMPTS = [f"One of a few prompts that come again and again, number {n}. " * 2 for n in range(16)]
_TICK_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def node(folder: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a node without storage."""
    settings = {"TIERKV_NODE__PORT": "0", "TIERKV_STORAGE__URL": "none"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tierkv", "serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | settings | {"XDG_CACHE_HOME": folder},
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child.stdout.readline().split()[-1], child.pid
    finally:
        child.terminate()
        child.wait()


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK_S


async def load(session: aiohttp.ClientSession, url: str, seconds: float) -> int:
    """Ask at the rate, come what may; how many were answered."""
    loop = asyncio.get_running_loop()
    began, count = loop.time(), int(PER_SECOND * seconds)

    async def ask(number: int) -> None:
        body = {"prompt": _PROMPTS[number % len(_PROMPTS)], "max_tokens": 1}
        async with session.post(f"{url}/v1/generate", json=body) as answer:
            await answer.read()
            assert answer.status == 200, answer.status

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            await asyncio.sleep(began + number / PER_SECOND - loop.time())
            tasks.create_task(ask(number))
    return count


@asynccontextmanager
async def pages(session: aiohttp.ClientSession, url: str, count: int) -> AsyncIterator[list[int]]:
    """So many open pages; how many bytes each was told."""
    told = [0] * count

    async def read(number: int) -> None:
        async with session.get(f"{url}/live/stream") as answer:
            async for chunk in answer.content.iter_any():
                told[number] += len(chunk)

    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read(number)) for number in range(count)]
        yield told
        for reader in readers:
            reader.cancel()


async def measured(url: str, pid: int, rounds: int, seconds: float) -> list[Row]:
    alone: list[float] = []
    watched: list[float] = []
    bytes_told: list[float] = []
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await load(session, url, 2.0)
        for number in range(2 * rounds):
            is_watched = number % 4 in (1, 2)  # without, with, with, without: a drift is in both
            async with pages(session, url, PAGES if is_watched else 0) as told:
                await load(session, url, 0.5)  # the first bytes are the last ten minutes
                before, told_before = cpu_s(pid), sum(told)
                count = await load(session, url, seconds)
                (watched if is_watched else alone).append(1000 * (cpu_s(pid) - before) / count)
                if is_watched:
                    bytes_told.append((sum(told) - told_before) / PAGES / seconds / 1000)
    base = row("nobody looks", alone, "ms CPU")
    return [
        base,
        row(f"{PAGES} pages are open", watched, "ms CPU", against=base, most=1.02),
        row("a page is told", bytes_told, "kB/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the time, for a first look"
    )
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rounds, seconds = (6, 2.0) if chosen.quick else (24, 2.0)
    with tempfile.TemporaryDirectory() as folder, node(folder) as (url, pid):
        show(uvloop.run(measured(url, pid, rounds, seconds)), as_json=chosen.json)


if __name__ == "__main__":
    main()
