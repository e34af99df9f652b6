"""Long prompts: counted and refused before any of their tokens is packed, and bounded in all."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.scripted import stage
from tests.latch import PATIENCE_S, until
from tierkv.cache.keys import pack
from tierkv.gateway.failures import InvalidRequestError
from tierkv.gateway.prompts import CountedPrompt, read_prompts
from tierkv.http import bodies
from tierkv.http.bodies import LARGE_BYTES, FieldError

TEXTS = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 255), max_size=20)
SEVERAL = st.lists(TEXTS, min_size=1, max_size=5) | st.lists(TOKENS, min_size=1, max_size=5)


def read(value: object, *, most_prompts: int = 5, most_tokens: int = 200) -> list[CountedPrompt]:
    raw = msgspec.Raw(json.dumps(value).encode())
    return read_prompts(raw, most_prompts=most_prompts, most_tokens=most_tokens)


@given(SEVERAL, st.booleans())
def test_prompts_are_packed_as_they_were_counted_in_either_encoding(
    several: list[str] | list[list[int]], is_msgpack: bool
) -> None:
    expected = [pack(list(one.encode()) if isinstance(one, str) else one) for one in several]
    if is_msgpack:
        raw = msgspec.Raw(msgspec.msgpack.encode(several))
        prompts = read_prompts(raw, most_prompts=5, most_tokens=200)
    else:
        prompts = read(several)
    assert [prompt.packed_bytes for prompt in prompts] == [len(packed) for packed in expected]
    assert [prompt.packed() for prompt in prompts if prompt.num_tokens] == [*filter(None, expected)]


@given(TEXTS | TOKENS.filter(bool) | SEVERAL, st.integers(1, 30))
def test_a_prompt_is_refused_exactly_where_it_has_too_many_tokens(
    value: str | list[int] | list[str] | list[list[int]], most: int
) -> None:
    first = value[0] if isinstance(value, list) else value
    several = value if isinstance(value, list) and not isinstance(first, int) else [value]
    longest = max(len(one.encode()) if isinstance(one, str) else len(one) for one in several)  # type: ignore[arg-type]
    if longest > most:
        with pytest.raises(InvalidRequestError, match=f"at most {most} tokens"):
            read(value, most_tokens=most)
    else:
        assert max(prompt.num_tokens for prompt in read(value, most_tokens=most)) == longest


@pytest.mark.parametrize("value", [["x", 3], [3, "x"], [[3], "x"], ["x", [3]], [[3], 3], [[[3]]]])
def test_what_mixes_kinds_of_prompts_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="mixes"):
        read(value)


@pytest.mark.parametrize("value", [3, None, True, {"a": 1}, 1.5])
def test_what_is_no_prompt_is_refused(value: object) -> None:
    with pytest.raises(FieldError):
        read(value)


@pytest.mark.parametrize("value", [[1.5], [None], [-1], [256], [2**40], []])
def test_what_holds_no_tokens_of_the_model_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError):
        [prompt.packed() for prompt in read([value] if value == [] else value)]


@pytest.mark.parametrize("value", [["x"] * 6, [[1]] * 6, ['"'] * 6, [[]] * 6, []])
def test_more_prompts_than_may_come_at_once_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 5 prompts"):
        read(value)


async def test_a_prompt_longer_than_any_node_takes_is_refused_and_nobody_is_asked() -> None:
    async with stage(max_prompt_tokens=1000) as on:
        for prompt in ("x" * 1001, [1] * 1001, ["short", "x" * 1001], ["x" * 300_000] * 2):
            asked = await on.caller.ask({"prompt": prompt})
            assert (asked.status, asked.body["code"]) == (400, "context_length_exceeded")
        assert not any(node.calls for node in (*on.prefill, *on.decode))
        assert (await on.caller.ask({"prompt": "x" * 1000})).is_whole


async def test_prompts_beyond_the_bound_in_bytes_are_told_to_come_again() -> None:
    async with stage(max_work_bytes=20_000) as on:
        for node in on.prefill:
            node.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(on.caller.ask({"prompt": "x" * 4000}))
            await until(lambda: on.gateway.backend.admission.num_running == 1)
            refused = await on.caller.ask({"prompt": "y" * 2000})
            assert (refused.status, refused.body["code"]) == (503, "overloaded")
            assert refused.headers["Retry-After"] == "1"
            for node in on.prefill:
                node.gate.set()
        assert first.result().is_whole
        assert (await on.caller.ask({"prompt": "y" * 2000})).is_whole
        assert on.gateway.backend.admission.num_bytes == 0


@pytest.mark.parametrize("step", ["read", "packed"])
async def test_while_a_long_prompt_is_read_or_packed_others_are_answered(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, too: the loop waits no 5 ms for the interpreter whenever it has called the system."""
    reached, go_on = threading.Event(), threading.Event()
    loop_thread, usual_s = threading.get_ident(), sys.getswitchinterval()

    def hold(num_bytes: int) -> None:
        if num_bytes > LARGE_BYTES:
            assert threading.get_ident() != loop_thread, "the loop itself does it"
            assert sys.getswitchinterval() < usual_s / 10
            reached.set()
            assert go_on.wait(PATIENCE_S)

    def decode(raw: bytes, *rest: Any, **more: Any) -> Any:
        hold(len(raw))
        return really_decode(raw, *rest, **more)

    def packed(prompt: CountedPrompt) -> bytes:
        hold(prompt.packed_bytes)
        return really_packed(prompt)

    really_decode, really_packed = bodies.decode, CountedPrompt.packed
    if step == "read":
        monkeypatch.setattr(bodies, "decode", decode)
    else:
        monkeypatch.setattr(CountedPrompt, "packed", packed)
    async with stage() as on, asyncio.TaskGroup() as tasks:
        long = tasks.create_task(on.caller.ask({"prompt": [100] * 80_000}))
        try:
            await until(lambda: reached.is_set() or long.done(), "the long prompt")
            assert reached.is_set(), long.result().body
            assert (await on.caller.ask({"prompt": "short"})).is_whole
            assert not long.done()
        finally:
            go_on.set()
    assert long.result().is_whole
    assert sys.getswitchinterval() == usual_s
