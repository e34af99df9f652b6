"""A node's own streams: tokens as they come, then a summary or a problem."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.nodes import here
from tests.e2e.exact import text, truth
from tests.latch import finish, until
from tierkv.api.settings import Role
from tierkv.api.types import GenerateBody
from tierkv.client import AsyncClient
from tierkv.errors import ShuttingDownError
from tierkv.gpu.protocol import Direction
from tierkv.refmodel.model import decode as decode_text

PROMPT = text(100)
BODY = {"prompt": decode_text(PROMPT), "stream": True}


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
    body, told = GenerateBody(prompt=decode_text(PROMPT), max_tokens=900), list[int]()
    async with (
        here() as on,
        AsyncClient(on.client.url) as client,
        client.stream_generate(body) as stream,
    ):

        async def read() -> None:
            async for news in stream:
                told.extend(news.tokens)

        reading = asyncio.create_task(read())
        await until(lambda: len(told) > 5, "some tokens")
        on.node.drain()
        await finish(on.node.idle(grace_s=0.05))
        with pytest.raises(ShuttingDownError):
            await reading
    assert told == list(truth(PROMPT, len(told)).tokens)
