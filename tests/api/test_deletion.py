"""A full deletion: what it answers is gone stays gone, on a real node with a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.api.nodes import Process, process
from tests.latch import PATIENCE_S
from tests.redis_server import RedisServer, redis_server

PROMPT = [index * 7 % 251 for index in range(3000)]  # the reference model reads bytes
SETTINGS = """
[cache]
host_write = "write_through"
storage_write = "write_through"
device_blocks = 512
host_blocks = 512
[handoff]
publish_deadline_s = 2.0
"""


def stored(server: RedisServer) -> list[bytes]:
    """The names of all values that hold blocks, tails, lists of tails and tickets."""
    names = server.execute("KEYS", "*")
    assert isinstance(names, list)
    return [name for name in names if b":producer:" not in name]


async def delete_all(node: Process) -> tuple[int, int]:
    """The copies that requests hold, and the number of values that were removed."""
    assert (await node.client.post("/v1/pause", {})).status == 200
    answer = await node.client.ask("DELETE", "/v1/blocks?storage=true")
    assert answer.status == 200, answer.body
    assert (await node.client.post("/v1/resume", {})).status == 200
    return answer.body["held_copies"], answer.body["removed_values"]


@asynccontextmanager
async def over(server: RedisServer, folder: Path) -> AsyncIterator[Process]:
    """A node over `server` that, at the end, waits for all copies and writes before it exits."""
    settings = folder / "node.toml"
    settings.write_text(SETTINGS)
    async with process(folder, "--config", settings, "--storage", server.url) as node:
        yield node
        node.terminate()
        assert await node.ended() == 0


async def test_nothing_that_was_being_written_is_stored_after_a_full_deletion(
    tmp_path: Path,
) -> None:
    with redis_server() as server:
        async with over(server, tmp_path) as node:
            for attempt in range(3):
                work = {"tokens": [*PROMPT[attempt:], attempt], "max_tokens": 1}
                assert (await node.client.post("/v1/generate", work)).status == 200
                await delete_all(node)
                assert stored(server) == []
            async with asyncio.timeout(PATIENCE_S):  # a copy to the host may hold blocks till then
                while (await node.client.ask("DELETE", "/v1/blocks")).body["held_copies"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert stored(server) == []


async def test_a_deletion_on_a_frozen_redis_fails_and_succeeds_when_it_answers(
    tmp_path: Path,
) -> None:
    with redis_server() as server:
        async with over(server, tmp_path) as node:
            work = {"tokens": PROMPT, "max_tokens": 1}
            assert (await node.client.post("/v1/generate", work)).status == 200
            server.pause()
            answer = await node.client.ask("DELETE", "/v1/blocks?storage=true")
            assert (answer.status, answer.code) == (503, "store_unavailable")
            server.resume()
            again = await node.client.post("/v1/generate", work)
            assert again.status == 200
            assert set(again.body["matched"].values()) == {0}
            while (await node.client.ask("DELETE", "/v1/blocks?storage=true")).status == 503:
                pass  # until the node has seen that the store answers again
        assert stored(server) == []
