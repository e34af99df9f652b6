"""Clients that send long prompts as fast as they are answered, in a process of their own:

    python long_prompts.py PORT CLIENTS MEBIBYTES SECONDS

Half of them send a text, half a list of tokens. Prints how many answers had which status.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress


async def client(port: int, body: bytes, until: float, statuses: Counter[str]) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            statuses["refused"] += 1
            continue
        sending = asyncio.ensure_future(send(writer, head, body))
        try:
            statuses[(await reader.readline()).decode().split()[1]] += 1
        except (ConnectionError, IndexError):
            statuses["cut off"] += 1
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            writer.close()


async def send(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
    with suppress(ConnectionError):  # it may be answered before it has all come
        writer.write(head)
        for at in range(0, len(body), 1 << 18):
            writer.write(body[at : at + (1 << 18)])
            await writer.drain()


async def main(port: int, clients: int, mebibytes: int, seconds: float) -> None:
    text = b'{"max_tokens": 1, "prompt": "%b"}' % (b"x" * ((mebibytes << 20) - 64))
    tokens = b'{"max_tokens": 1, "prompt": [%b1]}' % (b"1," * ((mebibytes << 19) - 64))
    statuses: Counter[str] = Counter()
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(port, (text, tokens)[number % 2], until, statuses))
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
