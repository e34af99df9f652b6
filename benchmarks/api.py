"""The control API of one node, a process of its own on one core, asked over loopback TCP.

Run it as `python -m benchmarks.api`; the client is a plain socket, so that what is measured is the
node. The rows and their targets: admit and finish of a 32k-token prompt that is cached whole,
packed tokens; small requests per second; 10,000 requests open at once, 1,000 in the waiting line,
and what the loop and the memory of the node do meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.bench import Row, row, show

LONG_TOKENS = 32_768
SMALL_TOKENS = 64
BLOCK_SIZE = 16
CONNECTIONS = 32
_DEADLINE_S = 120.0


# A node whose engine is this benchmark: it commits what nothing has computed.
SERVE = """
import os
from tierkv.api.server import run
from tierkv.api.settings import NodeSettings
from tierkv.config import load
settings = load(NodeSettings, None, os.environ)
run(settings, lambda url: print(url, flush=True), is_engine_attached=True)
"""


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    pid: int

    def rss_mib(self) -> float:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found, "the node runs"
        return int(found[1]) / 1024


@contextmanager
def server(device_blocks: int) -> Iterator[Server]:
    """A node without storage, on the first core that there is."""
    settings = {
        "TIERKV_CACHE__DEVICE_BLOCKS": str(device_blocks),
        "TIERKV_CACHE__HOST_BLOCKS": str(device_blocks),
        "TIERKV_CACHE__BLOCK_SIZE": str(BLOCK_SIZE),
        "TIERKV_STORAGE__URL": "none",
        "TIERKV_NODE__PORT": "0",
        "TIERKV_NODE__IDLE_TIMEOUT_S": "120",  # 10,000 connections have their turns
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
            yield Server(url.hostname, url.port, child.pid)
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


def message(
    method: str, path: str, body: bytes = b"", content_type: str = "", request_id: str = ""
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: node", "Accept: application/msgpack"]
    if request_id:
        lines.append(f"Idempotency-Key: {request_id}")
    if body:
        lines.append(f"Content-Type: {content_type}")
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def admit(tokens: bytes, request_id: str, query: str = "") -> bytes:
    path = f"/v1/requests{query}"
    return message("POST", path, tokens, "application/octet-stream", request_id)


def finish(request_id: str, body: bytes = b"") -> bytes:
    return message("POST", f"/v1/requests/{request_id}/finish", body, "application/json")


def good(answer: tuple[int, bytes]) -> bytes:
    status, body = answer
    if status != 200:
        raise RuntimeError(f"status {status}: {body[:300]!r}")
    return body


def pack(num_tokens: int, first: int = 0) -> bytes:
    return struct.pack(f"<{num_tokens}i", *range(first, first + num_tokens))


async def long_prompt(to: Server, repeats: int) -> list[float]:
    """Milliseconds of an admission and its end, together."""
    connection, tokens = await connect(to), pack(LONG_TOKENS)
    good(await connection.ask(admit(tokens, "first")))
    good(await connection.ask(finish("first", b'{"num_tokens": %d}' % LONG_TOKENS)))
    samples = []
    for i in range(repeats + 20):
        first, second = admit(tokens, f"r{i}"), finish(f"r{i}")
        started = time.perf_counter()
        good(await connection.ask(first))
        good(await connection.ask(second))
        if i >= 20:
            samples.append((time.perf_counter() - started) * 1e3)
    connection.close()
    return samples


async def rates(to: Server, seconds: float) -> list[float]:
    """HTTP requests per second, for each of 5 windows: admissions and ends of small prompts."""
    samples = []
    for window in range(5):
        stop_at = time.perf_counter() + seconds / 5
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_keep_asking(to, f"{window}-{i}", stop_at))
                for i in range(CONNECTIONS)
            ]
        samples.append(sum(task.result() for task in tasks) / (time.perf_counter() - started))
    return samples


async def _keep_asking(to: Server, name: str, stop_at: float) -> int:
    connection, tokens, count = await connect(to), pack(SMALL_TOKENS), 0
    while time.perf_counter() < stop_at:
        request_id = f"{name}-{count}"
        good(await connection.ask(admit(tokens, request_id)))
        good(await connection.ask(finish(request_id)))
        count += 2
    connection.close()
    return count


@dataclass(frozen=True)
class Crowd:
    """seconds: from the first answer that could come to the last. memory_mib: the node's, with all
    of them open. late: how late the node's event loop was meanwhile. busy: the same, but counting
    no more of it than the loop's thread was at work; the rest is the machine's, not the loop's."""

    seconds: float
    late: Lag
    busy: Lag
    memory_mib: float

    def lag_rows(self) -> list[Row]:
        waited = 1 - self.busy.total_s / self.late.total_s if self.late.total_s else 0.0
        return [
            row("  the event loop late, p99", [self.late.p99_ms], "ms", most=50),
            row("  the same, at worst", [self.late.worst_ms], "ms"),
            row("  late while at work itself, p99", [self.busy.p99_ms], "ms", most=50),
            row("  the same, at worst", [self.busy.worst_ms], "ms"),
            row("  of all lateness, it had no core (at least)", [100 * waited], "%"),
        ]


@dataclass(frozen=True)
class Lag:
    """Which the node says itself: of the beats of its loop the bucket of its histogram that the
    slowest one of 100, and the slowest of all, fall into, as its upper end; and all together."""

    p99_ms: float
    worst_ms: float
    total_s: float

    @classmethod
    def between(cls, before: Beats, after: Beats) -> Lag:
        counts = [(bound, n - before.counts[bound]) for bound, n in after.counts.items()]
        p99_ms, worst_ms = (
            1e3 * next(bound for bound, n in counts if n >= share * counts[-1][1])
            for share in (0.99, 1.0)
        )
        return cls(p99_ms, worst_ms, after.total_s - before.total_s)


@dataclass(frozen=True)
class Beats:
    """One histogram of /metrics. counts: beats that were at most so many seconds late since the
    node's start. total_s: all lateness."""

    counts: dict[float, float]
    total_s: float

    @classmethod
    def read(cls, metrics: str, name: str) -> Beats:
        found = re.findall(rf'{name}_bucket\{{le="([^"]+)"\}} (\S+)', metrics)
        total = re.search(rf"^{name}_sum (\S+)", metrics, re.MULTILINE)
        assert total, name
        return cls({float(bound): float(count) for bound, count in found}, float(total[1]))


async def crowd(to: Server, count: int, *, waits: bool) -> Crowd:
    """`count` requests on as many connections, all of them asked for at once and open together.

    waits: the node is paused until all have come, so that they stand in its waiting line.
    """
    control = await connect(to)
    if waits:
        good(await control.ask(message("POST", "/v1/pause")))
    connections = [await connect(to) for _ in range(count)]
    before = await _metrics(control)
    started = time.perf_counter()
    tokens, name = pack(BLOCK_SIZE), "w" if waits else "c"
    asked = [
        connection.ask(admit(tokens, f"{name}{i}", f"?deadline_s={_DEADLINE_S:g}"))
        for i, connection in enumerate(connections)
    ]
    if waits:
        for _ in range(20):  # answered after what was sent before it
            good(await control.ask(message("GET", "/livez")))
        started = time.perf_counter()
        good(await control.ask(message("POST", "/v1/resume")))
    for answer in asked:
        good(await answer)
    memory = to.rss_mib()
    ends = [connection.ask(finish(f"{name}{i}")) for i, connection in enumerate(connections)]
    for answer in ends:
        good(await answer)
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    await asyncio.sleep(1.0)  # all leave at once, which is work for the node too
    after = await _metrics(control)
    control.close()
    late, busy = (
        Lag.between(Beats.read(before, name), Beats.read(after, name))
        for name in ("tierkv_event_loop_lag_seconds", "tierkv_event_loop_busy_seconds")
    )
    return Crowd(seconds, late, busy, memory)


async def _metrics(control: Connection) -> str:
    return good(await control.ask(message("GET", "/metrics"))).decode()


async def measure(to: Server, *, repeats: int, seconds: float, concurrent: int) -> Sequence[Row]:
    samples = await long_prompt(to, repeats)
    per_second = await rates(to, seconds)
    together = await crowd(to, concurrent, waits=False)
    waiting = await crowd(to, concurrent // 10, waits=True)
    return [
        row("admit + finish, 32k tokens, all cached: p50", samples, "ms", most=1.5),
        row("the same: p99", [statistics.quantiles(samples, n=100)[98]], "ms"),
        # Time per request, since a target is a most: 2,000 a second are 0.5 ms each.
        row("one small request, one core", [1e3 / each for each in per_second], "ms", most=0.5),
        row(f"{concurrent} open at once, asked for and ended", [together.seconds], "s"),
        *together.lag_rows(),
        row("  the node's memory", [together.memory_mib], "MiB", most=1024),
        row(f"{concurrent // 10} in the waiting line, admitted and ended", [waiting.seconds], "s"),
        *waiting.lag_rows(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    concurrent = 1_000 if options.quick else 10_000
    wanted = 2 * concurrent + 200
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    with server(device_blocks=LONG_TOKENS // BLOCK_SIZE + concurrent + 1_000) as to:
        rows = uvloop.run(
            measure(
                to,
                repeats=100 if options.quick else 500,
                seconds=2.0 if options.quick else 10.0,
                concurrent=concurrent,
            )
        )
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
