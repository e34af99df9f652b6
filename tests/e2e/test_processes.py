"""Real nodes as real processes: hand-off, death, restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.exact import fresh_connections, text, truth
from tests.processes import NodeProcess, node
from tests.redis_server import redis_server
from tierkv.refmodel.model import decode as decode_text

pytestmark = pytest.mark.timeout(600)

CONFIG = """
[cache]
block_size = 16
device_blocks = 1024
host_blocks = 2048
"""


@pytest.fixture(params=["file", "redis"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of each kind of store that processes can share."""
    if request.param == "file":
        yield f"file://{tmp_path / 'store'}"
    else:
        with redis_server() as server:
            yield server.url


class Cluster:
    """Nodes over one store, and a client."""

    def __init__(self, storage: str, folder: Path, http: aiohttp.ClientSession) -> None:
        self._storage = storage
        self._folder = folder
        self.http = http
        self._config = folder / "node.toml"
        self._config.write_text(CONFIG)

    def node(self, name: str, role: str) -> Any:
        return node(
            name,
            role=role,
            config=self._config,
            storage=self._storage,
            folder=self._folder,
            direct="off",  # what is said of a store goes through it
        )

    async def post(self, where: NodeProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(where.url + path, json=body) as response:
            answer: dict[str, Any] = await response.json(content_type=None)
            assert response.status == 200, answer
            return answer

    async def findings(self, where: NodeProcess) -> list[str]:
        async with self.http.get(where.url + "/v1/verify") as response:
            found: list[str] = (await response.json())["findings"]
            return found


@asynccontextmanager
async def cluster(storage: str, folder: Path) -> AsyncIterator[Cluster]:
    timeout = aiohttp.ClientTimeout(total=200)
    async with aiohttp.ClientSession(connector=fresh_connections(), timeout=timeout) as http:
        yield Cluster(storage, folder, http)


@asynccontextmanager
async def pair(
    storage: str, folder: Path
) -> AsyncIterator[tuple[Cluster, NodeProcess, NodeProcess]]:
    """A prefill node and a decode node."""
    async with (
        cluster(storage, folder) as nodes,
        nodes.node("prefill", "prefill") as prefill,
        nodes.node("decode", "decode") as decode,
    ):
        yield nodes, prefill, decode


@pytest.mark.promise("Real processes hand over thousands of tokens exactly.")
@pytest.mark.parametrize(
    "storage", [pytest.param("file", marks=pytest.mark.slow), "redis"], indirect=True
)
@pytest.mark.parametrize("length", [4_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_thousands_of_tokens_are_handed_over_exactly(
    length: int, storage: str, tmp_path: Path
) -> None:
    prompt = text(length)
    async with pair(storage, tmp_path) as (nodes, p, d):
        body = {"prompt": decode_text(prompt), "ticket_id": "long"}
        published = await nodes.post(p, "/v1/prefill", body)
        assert published["num_blocks"] == length // 16
        answer = await nodes.post(d, "/v1/decode", body | {"max_tokens": 5})
        assert tuple(answer["tokens"]) == truth(prompt, 5).tokens
        assert answer["matched"]["storage"] == length


@pytest.mark.parametrize(
    "storage", [pytest.param("file", marks=pytest.mark.slow), "redis"], indirect=True
)
@pytest.mark.parametrize(
    "delays_s", [(0.02,), pytest.param((0.0, 0.01, 0.02, 0.03, 0.05, 0.08), marks=pytest.mark.slow)]
)
async def test_a_decode_node_killed_in_the_middle_of_a_claim_loses_nothing(
    storage: str, delays_s: tuple[float, ...], tmp_path: Path
) -> None:
    prompt = text(3_000)
    expected = truth(prompt, 8).tokens
    async with cluster(storage, tmp_path) as nodes, nodes.node("prefill", "prefill") as p:
        body = {"prompt": decode_text(prompt), "ticket_id": "t"}
        await nodes.post(p, "/v1/prefill", body)
        for number, delay_s in enumerate(delays_s):
            async with nodes.node(f"decode-{number}", "decode") as d:
                claim = asyncio.ensure_future(nodes.post(d, "/v1/decode", body | {"max_tokens": 8}))
                await asyncio.wait([claim], timeout=delay_s)
                d.process.kill()
                await d.process.wait()
                with contextlib.suppress(aiohttp.ClientError, AssertionError, ValueError):
                    await claim
        async with nodes.node("decode", "decode") as d:
            answer = await nodes.post(d, "/v1/decode", body | {"max_tokens": 8})
            assert tuple(answer["tokens"]) == expected
            assert answer["computed_tokens"] == 0
