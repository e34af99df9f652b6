"""Hundreds of clients that come together are all answered, and leave nothing behind."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

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
