"""The control API of one node, a process of its own on one core, asked over loopback TCP.

Run it as `python -m benchmarks.api`; the client is a plain socket, so that the node is measured.
The rows and their targets: a lookup of a 16k-token prompt that is cached whole, packed tokens;
small lookups per second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.bench import Row, row, show

LONG_TOKENS = 16_384
SMALL_TOKENS = 64
BLOCK_SIZE = 16
CONNECTIONS = 32


SERVE = "import sys; from tierkv.cli import main; sys.argv[1:] = ['serve']; main()"


@dataclass(frozen=True)
class Server:
    host: str
    port: int


@contextmanager
def server(device_blocks: int) -> Iterator[Server]:
    """A node without storage, on the first core that there is."""
    settings = {
        "TIERKV_CACHE__DEVICE_BLOCKS": str(device_blocks),
        "TIERKV_CACHE__HOST_BLOCKS": str(device_blocks),
        "TIERKV_CACHE__BLOCK_SIZE": str(BLOCK_SIZE),
        "TIERKV_STORAGE__URL": "none",
        "TIERKV_NODE__PORT": "0",
    }
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | settings,
        )
        try:
            assert child.stdout is not None
            line = child.stdout.readline().decode()
            url = urlsplit(line.split()[-1])
            assert url.hostname, line
            assert url.port, line
            os.sched_setaffinity(child.pid, cores[:1])
            for task in os.listdir(f"/proc/{child.pid}/task"):
                os.sched_setaffinity(int(task), cores[:1])
            os.sched_setaffinity(0, cores[1:] or cores)
            yield Server(url.hostname, url.port)
        finally:
            child.terminate()
            child.wait(60)
            os.sched_setaffinity(0, cores)


class Connection(asyncio.Protocol):
    """One connection with one question at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = bytes(self._buffer[:end])
        found = re.search(rb"(?i)content-length: *(\d+)", head)
        size = end + 4 + (int(found[1]) if found else 0)
        if len(self._buffer) >= size:
            answer, self._answer = self._answer, None
            body = bytes(self._buffer[end + 4 : size])
            del self._buffer[:size]
            if not answer.done():
                answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the node hung up"))

    def ask(self, message: bytes) -> asyncio.Future[tuple[int, bytes]]:
        assert self._transport is not None, "it is connected"
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(to: Server) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, to.host, to.port)
    return connection


def lookup(tokens: bytes) -> bytes:
    """Return the bytes of a request for POST /v1/lookup of packed `tokens`."""
    return _message("/v1/lookup", {"tokens": tokens})


def _message(path: str, fields: Mapping[str, object]) -> bytes:
    body = msgspec.msgpack.encode(fields)
    head = [
        f"POST {path} HTTP/1.1",
        "Host: node",
        "Accept: application/msgpack",
        "Content-Type: application/msgpack",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def good(answer: tuple[int, bytes]) -> bytes:
    status, body = answer
    if status != 200:
        raise RuntimeError(f"status {status}: {body[:300]!r}")
    return body


def prompt_of(num_tokens: int, number: int = 0) -> bytes:
    """Return a packed prompt of bytes, another one for each `number`."""
    return struct.pack(f"<{num_tokens}i", *((7 * at + number) % 251 for at in range(num_tokens)))


async def long_prompt(to: Server, repeats: int) -> list[float]:
    """Return the milliseconds of each lookup of a prompt that is cached whole."""
    connection, tokens = await connect(to), prompt_of(LONG_TOKENS)
    good(await connection.ask(_message("/v1/generate", {"max_tokens": 1, "tokens": tokens})))
    samples = []
    for i in range(repeats + 20):
        asked = lookup(tokens)
        started = time.perf_counter()
        good(await connection.ask(asked))
        if i >= 20:
            samples.append((time.perf_counter() - started) * 1e3)
    connection.close()
    return samples


async def rates(to: Server, seconds: float) -> list[float]:
    """Return the lookups of small prompts per second, for each of 5 windows."""
    samples = []
    for _ in range(5):
        stop_at = time.perf_counter() + seconds / 5
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_keep_asking(to, i, stop_at)) for i in range(CONNECTIONS)]
        samples.append(sum(task.result() for task in tasks) / (time.perf_counter() - started))
    return samples


async def _keep_asking(to: Server, number: int, stop_at: float) -> int:
    connection, asked, count = await connect(to), lookup(prompt_of(SMALL_TOKENS, number)), 0
    while time.perf_counter() < stop_at:
        good(await connection.ask(asked))
        count += 1
    connection.close()
    return count


async def measure(to: Server, *, repeats: int, seconds: float) -> Sequence[Row]:
    samples = await long_prompt(to, repeats)
    per_second = await rates(to, seconds)
    return [
        row("lookup, 16k tokens, all cached: p50", samples, "ms", most=1.5),
        row("the same: p99", [statistics.quantiles(samples, n=100)[98]], "ms"),
        # Time per request, since a target is a most: 2,000 a second are 0.5 ms each.
        row("one small lookup, one core", [1e3 / each for each in per_second], "ms", most=0.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    with server(device_blocks=LONG_TOKENS // BLOCK_SIZE + 1_000) as to:
        rows = uvloop.run(
            measure(
                to,
                repeats=100 if options.quick else 500,
                seconds=2.0 if options.quick else 10.0,
            )
        )
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
