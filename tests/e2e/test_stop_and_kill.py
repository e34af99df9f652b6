"""A node stopped or killed while blocks move, again and again over one store."""

from __future__ import annotations

import asyncio
import random
import signal
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.exact import text, truth
from tests.e2e.test_processes import Cluster, cluster, storage  # noqa: F401 - a fixture
from tests.processes import NodeProcess
from tests.redis_server import PATIENT
from tierkv.clock import SystemClock
from tierkv.refmodel.model import decode as decode_text
from tierkv.storage.factory import open_store
from tierkv.storage.maintenance import values_under

# The prompts share their beginnings, so that each life of the node hits what the last ones stored.
LENGTHS = (33, 250, 600, 911)
NEW = 12
CONFIG = """
[node]
drain_grace_s = 0.3
[cache]
block_size = 16
device_blocks = 192
host_blocks = 256
storage_write = "write_through"
fetch_policy = "wait_complete"
"""

TRIALS = [
    pytest.param(1, marks=pytest.mark.timeout(600)),
    pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


@cache
def right_answer(length: int) -> tuple[int, ...]:
    return truth(text(length), NEW).tokens


class Lives:
    """One node after another over one store, and what its clients were told."""

    def __init__(self, nodes: Cluster) -> None:
        self._nodes = nodes
        self._http = nodes.http
        self.num_right = self.num_refused = self.num_cut = self.num_hits = 0

    async def ask(self, where: NodeProcess, length: int, request_id: str) -> bool:
        """One request; its answer is right, or a refusal with a reason, or the node has gone.
        Whether it was answered."""
        body = {"prompt": decode_text(text(length)), "max_tokens": NEW, "request_id": request_id}
        try:
            async with self._http.post(where.url + "/v1/generate", json=body) as response:
                answer: dict[str, Any] = await response.json(content_type=None)
        except (aiohttp.ClientError, ValueError, ConnectionError):
            self.num_cut += 1
            return False
        if response.status == 200:
            assert tuple(answer["tokens"]) == right_answer(length), (length, answer)
            self.num_right += 1
            self.num_hits += answer["matched"]["storage"] > 0
        else:
            assert (response.status, answer["code"]) == (503, "shutting_down"), answer
            self.num_refused += 1
        return response.status == 200

    async def readiness(self, where: NodeProcess) -> int | None:
        try:
            async with self._http.get(where.url + "/readyz") as response:
                return response.status
        except (aiohttp.ClientError, ConnectionError):
            return None

    async def live(self, trial: int, rng: random.Random, number: signal.Signals) -> None:
        async with self._nodes.node(f"life-{trial}", "both") as node:
            assert await self._nodes.findings(node) == []
            async with asyncio.TaskGroup() as clients:
                for at, length in enumerate(rng.sample(LENGTHS, 3)):
                    clients.create_task(self.ask(node, length, f"{trial}-{at}"))
                await asyncio.sleep(rng.uniform(0, 0.6))
                node.process.send_signal(number)
                if number is signal.SIGTERM:
                    clients.create_task(self._watch_the_end(node, f"{trial}-late"))
            status = await node.process.wait()
        assert status == (0 if number is signal.SIGTERM else -number)

    async def _watch_the_end(self, node: NodeProcess, request_id: str) -> None:
        """Once it says that it is not ready it takes no more work, until nobody answers."""
        seen = [await self.readiness(node)]
        while seen[-1] is not None:
            if seen[-1] == 503 and seen.count(503) == 1:
                assert not await self.ask(node, LENGTHS[0], request_id), "work was taken"
            await asyncio.sleep(0.005)
            seen.append(await self.readiness(node))
        told = [status for status in seen[:-1] if status != 200]
        assert set(told) <= {503}
        assert 200 not in seen[len(seen) - 1 - len(told) :], "it was ready again"


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_node_that_ends_while_blocks_move_leaves_nothing_wrong_behind(
    storage: str,  # noqa: F811
    tmp_path: Path,
    number: signal.Signals,
    trials: int,
) -> None:
    rng = random.Random(trials + number)
    async with cluster(storage, tmp_path) as nodes:
        (tmp_path / "node.toml").write_text(CONFIG)
        lives = Lives(nodes)
        for trial in range(trials):
            await lives.live(trial, rng, number)
        async with nodes.node("last", "both") as node:
            for length in LENGTHS:
                await lives.ask(node, length, f"last-{length}")
                await lives.ask(node, length, f"last-again-{length}")
            assert await nodes.findings(node) == []
        assert lives.num_right >= 2 * len(LENGTHS)
        if trials >= 100:
            assert lives.num_right > trials
            assert lives.num_hits > trials // 4
            assert lives.num_cut + lives.num_refused > trials // 4, "nothing was interrupted"
    await nothing_lives_for_ever(storage)


async def nothing_lives_for_ever(url: str) -> None:
    """What a killed node left half done goes by itself when its time is over."""
    store = open_store(url, PATIENT, SystemClock())
    async with store.running():
        ends = [value.expires_at async for value in values_under(store, "tierkv")]
    assert ends
    assert None not in ends
    root = Path(url.removeprefix("file://"))
    left = (root / ".writers").glob("*/*") if url.startswith("file") else []
    assert [path for path in left if path.name != "lock"] == []
