"""Clients that send long prompts as fast as they are answered, in a process of their own:

    python long_prompts.py PORT CLIENTS MEBIBYTES SECONDS

They take turns in what they send: a text, a list of tokens, a text of escapes, lists of tokens, a
chat of one message, one of many. Prints how many answers had which status, and by how much the
loop of this process was late at worst: it reads one of the bodies whole, every half second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress


async def client(port: int, path: str, body: bytes, until: float, statuses: Counter[str]) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
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


async def read_on_the_loop(body: bytes, until: float) -> float:
    """How late a timer of 50 ms was at worst, with a body to read in the same turn."""
    worst_s = 0.0
    while time.monotonic() < until:
        due = time.monotonic() + 0.05
        json.loads(body)
        await asyncio.sleep(due - time.monotonic())
        worst_s = max(worst_s, time.monotonic() - due)
        await asyncio.sleep(0.5)
    return worst_s


def filled(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


def message(text: bytes) -> bytes:
    return b'{"role": "user", "content": "%b"}' % text


async def main(port: int, clients: int, mebibytes: int, seconds: float) -> None:
    size = (mebibytes << 20) - 128
    bodies = [
        ("completions", b'{"max_tokens": 1, "prompt": "%b"}' % filled(b"x", size)),
        ("completions", b'{"max_tokens": 1, "prompt": [%b1]}' % filled(b"1,", size)),
        ("completions", b'{"max_tokens": 1, "prompt": "%b"}' % filled(rb"\"", size)),
        ("completions", b'{"max_tokens": 1, "prompt": [%b[1]]}' % filled(b"[1,2],", size)),
        ("chat/completions", b'{"messages": [%b]}' % message(filled(rb"a\n", size))),
        ("chat/completions", b'{"messages": [%b0]}' % filled(message(b"a") + b",", size)),
    ]
    statuses: Counter[str] = Counter()
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        late = tasks.create_task(read_on_the_loop(bodies[1][1], until))
        for number in range(clients):
            path, body = bodies[number % len(bodies)]
            tasks.create_task(client(port, f"/v1/{path}", body, until, statuses))
    sys.stdout.write(json.dumps({"statuses": statuses, "late_s": late.result()}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
