"""Prompts in every form become the tokens that they say, and are bounded in number and bytes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.scripted import Stage, script, stage
from tests.latch import until
from tierkv.cache.keys import pack
from tierkv.gateway.failures import InvalidRequestError
from tierkv.gateway.openai import CompletionBody
from tierkv.gateway.prompts import Prompt
from tierkv.http.bodies import JSON, MSGPACK, FieldError, decode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
TOKENS = st.lists(st.integers(0, 255), min_size=1, max_size=20)
SEVERAL = st.lists(TEXTS, min_size=1, max_size=5) | st.lists(TOKENS, min_size=1, max_size=5)


def read(
    value: object, *, max_prompts: int = 5, max_tokens: int = 200, in_msgpack: bool = False
) -> list[Prompt]:
    encoded = (msgspec.msgpack if in_msgpack else msgspec.json).encode({"prompt": value})
    body = decode(encoded, CompletionBody, content_type=MSGPACK if in_msgpack else JSON)
    return body.prompts(max_prompts=max_prompts, max_tokens=max_tokens)


@given(SEVERAL, st.booleans())
def test_texts_stay_texts_and_tokens_are_packed_in_either_encoding(
    several: list[str] | list[list[int]], in_msgpack: bool
) -> None:
    expected = [one if isinstance(one, str) else pack(one) for one in several]
    assert read(several, in_msgpack=in_msgpack) == expected
    assert read(several[0], in_msgpack=in_msgpack) == expected[:1]


@given(st.lists(TOKENS, min_size=1, max_size=5), st.integers(1, 30))
def test_a_list_of_tokens_is_refused_exactly_where_it_is_too_long(
    value: list[list[int]], most: int
) -> None:
    longest = max(map(len, value))
    if longest > most:
        with pytest.raises(InvalidRequestError, match=f"nodes' {most} tokens"):
            read(value, max_tokens=most)
    else:
        assert len(read(value, max_tokens=most)) == len(value)


NO_PROMPTS = [
    *(["x", 3], [[3], "x"], ["x", [3]], [[3], 3], [[3, "x"]]),
    *(3, None, True, {"a": 1}, 1.5, [1.5], [None], [[[3]]]),
]


@pytest.mark.parametrize("value", NO_PROMPTS, ids=str)
def test_what_is_no_prompt_or_mixes_kinds_of_prompts_is_refused(value: object) -> None:
    for in_msgpack in (True, False):
        with pytest.raises((InvalidRequestError, FieldError)):
            read(value, in_msgpack=in_msgpack)


async def test_a_prompt_longer_than_any_node_takes_is_refused_and_nobody_computes() -> None:
    async with stage(max_prompt_tokens=1000) as on:
        for prompt in ("x" * 1001, [1] * 1001, [[1] * 1001], ["x" * 300_000] * 2):
            asked = await on.caller.ask({"prompt": prompt})
            assert (asked.status, asked.body["code"]) == (400, "context_length_exceeded")
        assert not any(node.calls for node in on.nodes)
        assert (await on.caller.ask({"prompt": "x" * 1000})).is_whole


async def test_a_text_with_more_tokens_than_its_node_takes_is_refused(on: Stage) -> None:
    script(on.nodes, most_tokens=99)
    asked = await on.caller.ask({"prompt": "x" * 100})
    assert (asked.status, asked.body["code"]) == (400, "context_length_exceeded")
    assert (await on.caller.ask({"prompt": "x" * 99})).is_whole


async def test_prompts_beyond_the_bound_in_bytes_are_told_to_come_again() -> None:
    async with stage(max_work_bytes=25_000) as on:
        script(on.prefill, is_held=True)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(on.caller.ask({"prompt": "x" * 4000}))
            await until(lambda: on.gateway.backend.admission.num_running == 1)
            refused = await on.caller.ask({"prompt": "y" * 2000})
            assert (refused.status, refused.body["code"]) == (503, "too_much_in_work")
            assert refused.headers["Retry-After"] == "1"
            script(on.prefill, is_held=False)
        assert first.result().is_whole
        assert (await on.caller.ask({"prompt": "y" * 2000})).is_whole
        assert on.gateway.backend.bodies.num_bytes == 0
