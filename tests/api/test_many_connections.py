"""Hundreds of clients that come together are all answered, and leave nothing behind."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.api.nodes import Here, here, holding
from tests.latch import until


@asynccontextmanager
async def connections(
    on: Here, count: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    url = urlsplit(on.client.url)
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            pair = await asyncio.open_connection(url.hostname, url.port)
            stack.callback(pair[1].close)
            found.append(pair)
        yield found


def message(path: str, tokens: bytes, name: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: node", "Content-Type: application/octet-stream"]
    head += [f"Idempotency-Key: {name}", f"Content-Length: {len(tokens)}", "", ""]
    return "\r\n".join(head).encode() + tokens


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head[9:12]), await reader.readexactly(size)


async def test_requests_that_come_together_are_all_answered() -> None:
    count = 400
    # On a slow machine the first answer is old when the last has come.
    async with here(idle_timeout_s=60) as on, connections(on, count) as pairs:
        async with holding(on.node, range(64 * 16)):
            for number, (_, writer) in enumerate(pairs):
                path = "/v1/generate?max_tokens=1"
                writer.write(message(path, struct.pack("<i", 7), f"r{number}"))
            waiting = on.node.service.scheduler
            await until(lambda: waiting.num_waiting == count, "all to have come")
        for reader, _ in pairs:
            async with asyncio.timeout(60):
                assert (await answer(reader))[0] == 200
        await on.settle()


async def test_long_bodies_that_come_together_arrive_whole() -> None:
    num_tokens = 75_000
    async with here() as on, connections(on, 64) as pairs:
        async with asyncio.TaskGroup() as group:
            for number, (_, writer) in enumerate(pairs):
                tokens = struct.pack("<i", number) * num_tokens
                writer.write(message("/v1/lookup", tokens, f"r{number}"))
                group.create_task(writer.drain())
            answers = [group.create_task(asyncio.wait_for(answer(pair[0]), 60)) for pair in pairs]
        for task in answers:
            status, body = task.result()
            assert status == 200
            assert b'"num_tokens":75000' in body


@pytest.mark.parametrize(
    "num_rounds", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_clients_that_ask_and_go_leave_nothing_behind(num_rounds: int) -> None:
    async with here() as on:
        for _ in range(num_rounds):
            async with connections(on, 200) as pairs:
                for number, (_, writer) in enumerate(pairs):
                    writer.write(message("/v1/generate", b"\7\0\0\0", f"r{number}"))
                await asyncio.sleep(0)
        await until(lambda: on.node.num_working == 0, "no call under way")
        await on.settle()


async def test_clients_that_come_and_go_together_are_answered_and_leave_no_connection() -> None:
    count, live = 300, b"GET /livez HTTP/1.1\r\nHost: node\r\n\r\n"

    async def visit(on: Here, have_all: asyncio.Barrier, *, asks: bool) -> None:
        url = urlsplit(on.client.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        if asks:
            writer.write(live)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await have_all.wait()
        writer.close()

    # Those of one round may still be leaving while the next one's come; of two, none is left.
    async with here(max_connections=2 * count) as on:
        for _ in range(4):
            have_all = asyncio.Barrier(count)
            async with asyncio.TaskGroup() as group:
                for number in range(count):
                    group.create_task(visit(on, have_all, asks=number % 5 > 0))
