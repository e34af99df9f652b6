"""A node's open files after clients that were hostile: those that it had before."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path

import aiohttp
import pytest

from tests.api.nodes import Process, process
from tests.api.test_refusals import BAD_BODIES
from tests.latch import PATIENCE_S

NUM_CALLS = 200
ROUTES = ["/v1/generate", "/v1/decode", "/v1/prefetches", "/v1/explain", "/v1/lookup"]
CLIENTS = 16


def open_files(on: Process) -> list[str]:
    """What each descriptor of the node's process is."""
    folder = f"/proc/{on.process.pid}/fd"
    names = []
    for number in os.listdir(folder):
        try:
            names.append(os.readlink(f"{folder}/{number}"))
        except FileNotFoundError:
            continue  # it was closed in between
    return sorted(names)


async def hostile(on: Process, count: int) -> None:
    """Nonsense, unknown paths and methods, and calls that are given up, over a pool of connections
    that is closed at the end."""
    dice = random.Random(15)
    statuses: list[int] = []

    async def client(calls: range) -> None:
        for number in calls:
            kind, body, *_ = BAD_BODIES[number % len(BAD_BODIES)]
            path = dice.choice([*ROUTES, "/v1/nothing", "/v1/requests/no", "/v1/tickets/no"])
            method = dice.choice(["POST", "POST", "POST", "GET", "DELETE", "OPTIONS", "HEAD"])
            limit = aiohttp.ClientTimeout(total=0.002 if number % 10 == 0 else 200)
            try:
                async with http.request(
                    method,
                    on.url + path,
                    data=body,
                    headers={"Content-Type": kind},
                    timeout=limit,
                ) as response:
                    await response.read()
                    statuses.append(response.status)
            except (TimeoutError, aiohttp.ClientError):
                statuses.append(0)

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as http,
        asyncio.TaskGroup() as group,
    ):
        for at in range(CLIENTS):
            group.create_task(client(range(at, count, CLIENTS)))
    assert sum(400 <= status < 500 for status in statuses) > count // 2
    # A store that a busy machine answers too late for is 503, and no bug.
    assert not [status for status in statuses if status >= 500 and status != 503]
    gc.collect()  # aiohttp forgets to close a socket whose connecting was given up


@pytest.mark.promise("Hostile clients leave no file open.")
async def test_hostile_calls_leave_no_file_open(tmp_path: Path) -> None:
    async with process(tmp_path) as on:
        await hostile(on, 100)  # what is opened once, and stays
        await on.client.get("/livez")
        before = await settled(on)
        await hostile(on, NUM_CALLS)
        await on.client.get("/livez")
        async with asyncio.timeout(PATIENCE_S):
            while len(open_files(on)) > len(before):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
        assert (await on.client.get("/v1/verify")).body == {"findings": []}
        on.terminate()
        assert await on.ended() == 0


async def settled(on: Process) -> list[str]:
    """When nothing was opened or closed for a while: connections outlive their client a little."""
    files = open_files(on)
    while True:
        await asyncio.sleep(0.5)
        last, files = files, open_files(on)
        if files == last:
            return files
