"""A prefill node as a process of its own: carries out each line of stdin, answers with one line.

    python -m tests.pd.direct_producer URL FIELDS

FIELDS: of HandoffSettings and, under "cache", of CacheSettings, as JSON; "device": cpu or cuda.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.pd import nodes
from tests.preloaded import ForkedProgram
from tests.redis_server import PATIENT
from tests.world import World, tokens, world
from tierkv.clock import SystemClock
from tierkv.pd.settings import HandoffSettings
from tierkv.storage.factory import open_store


class Producer:
    """The process, as a test sees it. Its calls block."""

    def __init__(self, url: str, fields: dict[str, Any]) -> None:
        self.popen = ForkedProgram("tests.pd.direct_producer", url, json.dumps(fields))
        self._answer()

    def publish(self, count: int, ticket: str, base: int = 0) -> None:
        """A prompt of `count` tokens from `base` on."""
        self._ask(do="publish", count=count, ticket=ticket, base=base)

    def state(self) -> dict[str, Any]:
        """leases, findings, shown."""
        return self._ask(do="state")

    def _ask(self, **work: object) -> dict[str, Any]:
        self.popen.stdin.write(json.dumps(work).encode() + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.popen.stdout.readline()
        if not line:
            _, told = self.popen.communicate()
            raise RuntimeError(f"the producer died with {self.popen.returncode}: {told!r}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)


@contextmanager
def producer(url: str, **fields: Any) -> Iterator[Producer]:
    running = Producer(url, fields)
    try:
        yield running
    finally:
        running.kill()
        running.popen.communicate()


async def claim(node: World, count: int, ticket: str = "t") -> None:
    """All of a prompt of `count` tokens from 0 on, every byte as the producer computed it."""
    await nodes.claim(node, tokens(count), ticket)


async def no_leases(running: Producer) -> None:
    async with asyncio.timeout(10):
        while (await asyncio.to_thread(running.state))["leases"]:  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.01)
    assert (await asyncio.to_thread(running.state))["findings"] == []


async def _main(url: str, fields: dict[str, Any]) -> None:
    cache = {"device_blocks": 64, "host_blocks": 64} | fields.pop("cache", {})
    new_world: Any = world
    if fields.pop("device", "cpu") == "cuda":
        from tests.gpu.cuda_world import cuda_world as new_world  # noqa: PLC0415 - needs CuPy
    handoff = msgspec.convert(fields, HandoffSettings)
    store = open_store(url, PATIENT, SystemClock())
    async with new_world(store=store, handoff=handoff, **cache) as node:
        print(json.dumps({}), flush=True)  # noqa: T201 - it is its answer
        while line := await asyncio.to_thread(sys.stdin.readline):
            work = json.loads(line)
            answer: dict[str, Any] = {}
            if work["do"] == "publish":
                await nodes.publish(node, tokens(work["count"], work["base"]), work["ticket"])
            else:
                answer = {
                    "leases": nodes.leases(node),
                    "findings": node.service.verify(),
                    "shown": node.service.stats().handoff.shown_blocks,
                }
            print(json.dumps(answer), flush=True)  # noqa: T201 - it is its answer


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
