"""Nodes to talk to: in this process with latches, or as processes of their own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
from msgspec.structs import replace

from tests.faulty import FaultyStore
from tests.latch import CopyLatch, until
from tests.preloaded import Forked, new_process
from tests.sessions import begin_request, publish_request
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.server import listening, routes
from tierkv.api.settings import NodeSection, NodeSettings, Role
from tierkv.cache.keys import MediaItem, pack
from tierkv.client.streams import EventReader
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.callers import ticket_name
from tierkv.http.problems import PASSING_REASONS
from tierkv.http.route import Route
from tierkv.http.server import bind
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.memory import MemorySettings, MemoryStore

Json = dict[str, Any]
_START_S = 200.0


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def code(self) -> str:
        """The code of a problem, of which it also checks the shape."""
        assert self.headers["Content-Type"] == "application/problem+json"
        assert self.body["status"] == self.status
        assert self.body["request_id"] == self.headers["X-Request-Id"]
        assert self.body["title"]
        assert self.body["detail"]
        assert "Traceback" not in str(self.body)
        is_passing = self.status in (429, 503) or self.body.get("reason") in PASSING_REASONS
        assert ("Retry-After" in self.headers) == is_passing
        code: str = self.body["code"]
        return code


class Client:
    """Asks one node."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Json) -> Answer:
        return await self.ask("POST", path, json=body)

    async def events(self, path: str, body: Json, **options: Any) -> list[tuple[str, Json]]:
        """Return the names and the data of the events of a streamed answer."""
        answer = await self.ask("POST", path, json=body | {"stream": True}, **options)
        assert answer.status == 200, answer.body
        found = EventReader().feed(answer.body)
        return [(event.name, msgspec.json.decode(event.data)) for event in found]

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            raw = await response.read()
            is_json = response.content_type.endswith("json")
            body = await response.json(content_type=None) if is_json else raw
            return Answer(response.status, response.headers.copy(), body)

    async def metrics(self) -> dict[str, float]:
        """Return the node's metrics by name and labels."""
        lines = (await self.get("/metrics")).body.decode().splitlines()
        found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in found}

    async def running_requests(self) -> int:
        count: int = (await self.get("/v1/stats")).body["running_requests"]
        return count


@dataclass
class Here:
    """A node in this process. settles: whether it must be idle and whole before it ends."""

    node: Node
    client: Client
    latch: CopyLatch
    store: FaultyStore
    settles: bool = True

    def release(self) -> None:
        self.latch.release()
        self.store.release()

    async def settle(self) -> None:
        """Nothing runs any more, and the books are right."""
        service = self.node.service
        await until(lambda: service.stats().running_requests == 0, "no running request")
        await until(lambda: service.tiers.work.num_tasks == 0, "an idle node")
        assert service.verify() == []


def settings(role: Role = Role.BOTH, **options: Any) -> NodeSettings:
    return NodeSettings(
        node=NodeSection(role=role, port=0, **options),
        cache=CacheSettings(device_blocks=64, host_blocks=64),
    )


def route_table() -> list[Route]:
    """Return the routes of a node that never runs."""
    node = Node(settings(), device=CpuDevice(), store=MemoryStore(MemorySettings(), SystemClock()))
    try:
        return routes(node, Metrics(node))
    finally:
        node.device.close()


async def compute(
    node: Node,
    tokens: Sequence[int],
    *,
    tenant: str = "",
    media: Sequence[MediaItem] = (),
    adapter: str = "",
    ticket_id: str | None = None,
) -> None:
    """Leave a prompt in the cache of `node`.

    With `ticket_id` the prompt is published as well. The KV is what the device memory holds: use
    prompts that no test generates from.
    """
    prompt = node.prompt(pack(tokens), tenant, media, adapter)
    name = node.request_name(f"computed-{uuid4().hex}", tenant)
    request = await begin_request(node.service, name, prompt, max_new_tokens=0)
    await node.service.scheduler.commit(request, prompt.tokens)
    if ticket_id is not None:
        await publish_request(node.service, request, ticket_name(ticket_id, tenant), [7])
    node.service.scheduler.end(request)


@asynccontextmanager
async def holding(node: Node, tokens: Sequence[int]) -> AsyncIterator[None]:
    """Hold the device blocks of a prompt while the body runs."""
    request = await begin_request(
        node.service, "holder", node.prompt(pack(tokens), ""), max_new_tokens=0
    )
    try:
        yield
    finally:
        node.service.scheduler.end(request)


@asynccontextmanager
async def here(
    role: Role = Role.BOTH,
    *,
    store: Any = None,
    fetch_policy: FetchPolicy | None = None,
    **options: Any,
) -> AsyncIterator[Here]:
    """Run a node that answers on a port of its own, and check that it ends idle and whole.

    Args:
        role: role of the node.
        store: its store; by default one in its memory.
        fetch_policy: its cache.fetch_policy; None for the default.
        options: settings of its table `node`.
    """
    latch = CopyLatch()
    faulty = FaultyStore(store or MemoryStore(MemorySettings(), SystemClock()))
    chosen = settings(role, **options)
    if fetch_policy is not None:
        chosen = replace(chosen, cache=replace(chosen.cache, fetch_policy=fetch_policy))
    node = Node(chosen, device=CpuDevice(before_copy=latch), store=faulty)
    async with (
        listening(node, bind(chosen.node)) as url,
        node.running(),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=500)) as session,
    ):
        on = Here(node, Client(url, session), latch, faulty)
        try:
            yield on
            if on.settles:
                on.release()
                await on.settle()
        finally:
            on.release()


@dataclass
class Process:
    """`tierkv serve` in a process of its own."""

    url: str
    process: asyncio.subprocess.Process | Forked
    client: Client
    log: Path

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Its exit status; its log says nothing of a traceback."""
        async with asyncio.timeout(_START_S):
            status = await self.process.wait()
        assert "Traceback" not in self.log_text()
        return status

    def log_text(self) -> str:
        return self.log.read_text()


@asynccontextmanager
async def process(
    folder: Path, *arguments: str | Path, command: str = "serve", **environ: str
) -> AsyncIterator[Process]:
    """Started and listening; killed at the end if it still runs."""
    log = folder / f"{uuid4().hex}.log"
    with log.open("wb") as stderr:
        child = await new_process(
            (command, "--port", "0", *arguments),
            clean_environ(folder) | environ,
            stderr=stderr.fileno(),
        )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(_START_S):
            line = (await child.stdout.readline()).decode()
        found = re.fullmatch(r"tierkv \w+ listening on (\S+)\n", line)
        assert found, f"{line!r}: {log.read_text()}"
        async with aiohttp.ClientSession() as session:
            yield Process(found[1], child, Client(found[1], session), log)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def run_to_end(folder: Path, *arguments: str | Path, **environ: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command that should end by itself."""
    child = await new_process(arguments, clean_environ(folder) | environ)
    try:
        async with asyncio.timeout(_START_S):
            out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


def planted(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process that runs `code` before all else."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def clean_environ(folder: Path) -> dict[str, str]:
    """This process's environment without settings of tierkv, and with a cache of the test's own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TIERKV_")}
    return kept | {"XDG_CACHE_HOME": str(folder / "cache")}


async def prefetched(client: Client, prefetch_id: str) -> Json:
    """Return the answer about a prefetch once the prefetch is over."""
    async with asyncio.timeout(10):
        while True:
            body: Json = (await client.get(f"/v1/prefetches/{prefetch_id}")).body
            if body["state"] != "running":
                return body
