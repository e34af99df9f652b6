"""A node's own streams: tokens as they come, then a summary or a problem."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.api.nodes import Here, here
from tests.e2e.exact import text, truth
from tests.latch import finish, until
from tierkv.api.settings import Role
from tierkv.client.streams import EventReader
from tierkv.gpu.protocol import Direction
from tierkv.refmodel.model import decode as decode_text

PROMPT = text(100)
BODY = {"prompt": decode_text(PROMPT), "stream": True}


async def events(on: Here, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    reader = EventReader()
    async with on.client.session.post(on.client.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Request-Id"]
        return [
            (event.name, json.loads(event.data))
            async for chunk in response.content.iter_any()
            for event in reader.feed(chunk)
        ]


def tokens_of(found: list[tuple[str, dict[str, Any]]]) -> list[int]:
    return [token for name, data in found if name == "tokens" for token in data["tokens"]]


async def test_the_first_token_of_a_prefill_comes_before_its_blocks_are_stored() -> None:
    async with here(Role.PREFILL) as on:
        on.latch.hold(Direction.OFFLOAD)
        async with on.client.session.post(
            on.client.url + "/v1/prefill", json=BODY | {"ticket_id": "t"}
        ) as response:
            line = await finish(response.content.readline())
            assert line == b"event: tokens\n"
            on.latch.release()
            assert b"event: done" in await finish(response.read())


async def test_what_fails_before_the_first_token_is_an_ordinary_answer() -> None:
    async with here(Role.DECODE) as on:
        body = BODY | {"ticket_id": "never", "deadline_s": 1.0}
        answer = await on.client.post("/v1/decode", body)
        assert (answer.status, answer.code) == (503, "handoff_failed")
        assert answer.body["reason"] == "not_yet"


async def test_what_is_cut_off_in_the_middle_ends_with_an_error_event() -> None:
    async with here() as on, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(events(on, "/v1/generate", BODY | {"max_tokens": 900}))
        await until(lambda: on.node.engine.stats.generated_tokens > 5)
        on.node.drain()
        await finish(on.node.idle(grace_s=0.05))
        found = await task
        name, problem = found[-1]
        assert name == "error"
        assert (problem["status"], problem["code"]) == (503, "shutting_down")
        assert problem["request_id"]
        assert tokens_of(found) == list(truth(PROMPT, len(tokens_of(found))).tokens)
