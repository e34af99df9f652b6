"""Small requests beside clients who send 15 MiB again and again: memory, lag, how long they take.

Run it as `python -m benchmarks.flood`. A gateway before two nodes over a Redis, and one of the
nodes, all real processes. The clients are a process of their own, 50 of a gateway, 12 of a node:
each sends the next body as soon as the last one is answered, whatever it was told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import uvloop

from benchmarks.bench import Row, row, show
from tierkv.demo.processes import NodeProcess, gateway, node, private_redis, together

BODY_BYTES = 15 << 20
# As many tokens as a node takes at the most: what is packed and checked before it is refused.
_PADDED_TOKENS = 1_048_004
_PIECE_BYTES = 256 << 10
_EVERY_S = 0.2
MOST_MIB, MOST_LAG, MOST_SMALL_S, DRAIN_S = 1024.0, 0.01, 0.5, 20.0
BODIES: dict[str, Callable[[], bytes]] = {
    "text": lambda: b'"' + b"a" * BODY_BYTES + b'"',
    "tokens": lambda: b"[" + b",".join([b"97"] * (BODY_BYTES // 3)) + b"]",
    "padded tokens": lambda: b"[" + b",".join([b"        97    "] * _PADDED_TOKENS) + b"]",
}


@dataclass(frozen=True)
class Target:
    """Who is flooded. pid: whose memory is looked at."""

    what: str
    url: str
    path: str
    tokens: str  # the field that holds a prompt's tokens
    clients: int
    pid: int


@dataclass
class Seen:
    small_s: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    num_unready: int = 0


# The clients


def flood(target: Target, kind: str, is_ready: Event, seconds: float) -> None:
    """Runs in a process of its own."""
    name = "prompt" if kind == "text" else target.tokens
    body = b'{"max_tokens":4,"%s":%s}' % (name.encode(), BODIES[kind]())
    is_ready.set()
    uvloop.run(_send(target, body, seconds))


async def _send(target: Target, body: bytes, seconds: float) -> None:
    clients = [asyncio.create_task(_client(target, body)) for _ in range(target.clients)]
    await asyncio.sleep(seconds)
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)


async def _client(target: Target, body: bytes) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _connection(target, body)
        await asyncio.sleep(0.05)


async def _connection(target: Target, body: bytes) -> None:
    to = urlsplit(target.url)
    reader, writer = await asyncio.open_connection(to.hostname, to.port)
    head = f"POST {target.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"

    async def send() -> None:
        writer.write(head.encode())
        for at in range(0, len(body), _PIECE_BYTES):
            writer.write(body[at : at + _PIECE_BYTES])
            await writer.drain()

    sending: asyncio.Task[None] | None = None
    try:
        while True:
            sending = asyncio.create_task(send())
            said = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", said)
            await reader.readexactly(int(length[1]) if length else 0)
            await sending
            if b"onnection: close" in said:
                return
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.wait([sending])
        writer.close()


# Who looks


def resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "a process that runs"
    return int(found[1]) / 1024


async def beside(
    session: aiohttp.ClientSession, target: Target, nodes: list[str], until: float
) -> Seen:
    """Small requests, one after another, and looks at the memory and the nodes."""
    seen = Seen()
    for number in itertools.count():
        if (began := time.monotonic()) >= until:
            return seen
        body = {"prompt": f"hello there {began} {number}", "max_tokens": 4}
        async with session.post(target.url + target.path, json=body) as answer:
            await answer.read()
        seen.small_s.append(time.monotonic() - began)
        seen.peak_mib = max(seen.peak_mib, resident_mib(target.pid))
        for url in nodes:
            async with session.get(url + "/readyz") as answer:
                seen.num_unready += answer.status != 200
        await asyncio.sleep(_EVERY_S)
    raise AssertionError("it counts for ever")


async def late(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """How often the loop was looked at, and how often it was later than 50 ms."""
    async with session.get(url + "/metrics") as answer:
        text = await answer.text()
    counted = {
        found[1]: float(found[2])
        for found in re.finditer(r'event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    }
    return counted["+Inf"], counted["+Inf"] - counted["0.05"]


async def measured(target: Target, kind: str, nodes: list[str], seconds: float) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    clients = context.Process(target=flood, args=(target, kind, is_ready, seconds), daemon=True)
    clients.start()
    async with aiohttp.ClientSession() as session:
        await asyncio.to_thread(is_ready.wait)
        looks, lates = await late(session, target.url)
        seen = await beside(session, target, nodes, time.monotonic() + seconds)
        await asyncio.to_thread(clients.join)
        all_looks, all_lates = await late(session, target.url)
    assert seen.num_unready == 0, f"{seen.num_unready} times a node was not ready"
    name = f"{target.what}, {target.clients} x {kind}"
    share = (all_lates - lates) / max(all_looks - looks, 1.0)
    return [
        row(f"{name}: peak memory", [seen.peak_mib], "MiB", most=MOST_MIB),
        row(f"{name}: loop later than 50 ms", [share], "share", most=MOST_LAG),
        row(f"{name}: small request", seen.small_s, "s", most=MOST_SMALL_S),
        row(f"{name}: worst small request", [max(seen.small_s)], "s"),
    ]


@asynccontextmanager
async def targets(
    folder: Path,
) -> AsyncIterator[tuple[list[tuple[Target, NodeProcess]], list[str]]]:
    (folder / "node.toml").write_text("")
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(private_redis(folder))

        async def one(name: str) -> NodeProcess:
            starting = node(
                name, role="both", config=folder / "node.toml", storage=url, folder=folder
            )
            return await stack.enter_async_context(starting)

        behind = await together(one("first"), one("second"))
        nodes = [each.url for each in behind]
        options = [part for each in nodes for part in ("--both", each)]
        front = await stack.enter_async_context(
            gateway(folder, prefill=[], decode=[], options=options)
        )
        found = [
            (
                Target("gateway", front.url, "/v1/completions", "prompt", 50, front.process.pid),
                front,
            ),
            (
                Target("node", nodes[0], "/v1/generate", "tokens", 12, behind[0].process.pid),
                behind[0],
            ),
        ]
        yield found, nodes


async def all_of(seconds: float, kinds: list[str]) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        async with targets(Path(name)) as (found, nodes):
            for target, _ in found:
                for kind in kinds:
                    rows += await measured(target, kind, nodes, seconds)
            for target, process in found:
                began = time.monotonic()
                process.process.terminate()
                await process.process.wait()
                took = time.monotonic() - began
                rows.append(row(f"{target.what}: ends after SIGTERM", [took], "s", most=DRAIN_S))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="padded tokens alone, 10 s each")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    os.environ["TIERKV_HANDOFF__DIRECT"] = "off"
    kinds, seconds = (["padded tokens"], 10.0) if chosen.quick else (list(BODIES), 60.0)
    show(uvloop.run(all_of(seconds, kinds)), as_json=chosen.json)


if __name__ == "__main__":
    main()
