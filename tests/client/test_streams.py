"""Answers in pieces: whole, cut, late, wrong, left early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.api.nodes import Here
from tests.client.scripted import Answering, events, problem, says, scripted
from tests.latch import until
from tierkv.api.types import DecodeBody, GenerateAnswer, GenerateBody, PrefillBody
from tierkv.client import (
    AsyncClient,
    BrokenOffError,
    DeadlineError,
    NotANodeError,
    RemoteError,
    Retries,
    TokenStream,
)
from tierkv.client.streams import EventReader, ServerEvent
from tierkv.errors import OutOfBlocksError

BODY = GenerateBody(prompt="Once upon", max_tokens=12)
ONCE = Retries(attempts=1)
TOKENS = b'event: tokens\ndata: {"tokens": [104, 105], "text": "hi"}\n\n'


@asynccontextmanager
async def streamed(
    answer: Answering, *, timeout_s: float = 60.0
) -> AsyncIterator[TokenStream[GenerateAnswer]]:
    """The stream of a server that answers so."""
    async with (
        scripted(answer) as on,
        AsyncClient(on.url, timeout_s=timeout_s, retries=ONCE) as client,
        client.stream_generate(BODY) as stream,
    ):
        yield stream


async def test_a_stream_tells_the_tokens_and_then_the_answer(on: Here) -> None:
    async with AsyncClient(on.client.url) as client:
        whole = await client.generate(BODY)
        told: list[int] = []
        async with client.stream_generate(BODY) as stream:
            with pytest.raises(BrokenOffError):
                _ = stream.answer
            async for news in stream:
                told += news.tokens
        assert tuple(told) == stream.answer.tokens == whole.tokens
        async with client.stream_generate(BODY) as stream:
            assert (await stream.finished()).tokens == whole.tokens


async def test_a_hand_off_in_streams(on: Here) -> None:
    async with AsyncClient(on.client.url) as client:
        whole = await client.generate(BODY)
        async with client.stream_prefill(PrefillBody(prompt="Once upon", ticket_id="t")) as first:
            assert (await first.finished()).ticket_id == "t"
        claim = DecodeBody(prompt="Once upon", ticket_id="t", max_tokens=12)
        async with client.stream_decode(claim) as rest:
            assert (await rest.finished()).tokens == whole.tokens


async def test_an_error_before_the_first_token_is_raised_when_entering() -> None:
    answer = problem(503, "out_of_blocks", tier="device", needed=2, available=1)
    with pytest.raises(OutOfBlocksError):
        async with streamed(answer):
            pytest.fail("there is no stream")


async def test_an_error_on_the_way_is_raised_where_it_comes() -> None:
    failure = (
        b'event: error\ndata: {"title":"T","status":503,"detail":"why","code":"shutting_down",'
        b'"request_id":"r"}\n\n'
    )
    async with streamed(events(TOKENS, failure)) as stream:
        assert (await anext(stream)).tokens == [104, 105]
        with pytest.raises(RemoteError) as caught:
            await anext(stream)
        assert caught.value.code == "shutting_down"


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("rest", [b"", b"event: tok", b'event: done\ndata: {"request_id"'])
async def test_a_stream_that_is_cut_says_so_and_is_not_taken_for_whole(
    rest: bytes, *, is_cut: bool
) -> None:
    async with streamed(events(TOKENS, rest, is_cut=is_cut)) as stream:
        with pytest.raises(BrokenOffError):
            await stream.finished()
        with pytest.raises(BrokenOffError):
            _ = stream.answer


@pytest.mark.parametrize(
    "piece",
    [
        b"event: tokens\ndata: nonsense\n\n",
        b'event: tokens\ndata: {"tokens": "x"}\n\n',
        b"event: done\ndata: {}\n\n",
        b"event: done\ndata: \xff\n\n",
        b"event: error\ndata: {}\n\n",
        b"event: tokens\ndata: " + b"[" * 100_000 + b"\n\n",
    ],
)
async def test_events_that_no_node_sends(piece: bytes) -> None:
    async with streamed(events(piece)) as stream:
        with pytest.raises(NotANodeError):
            await stream.finished()


async def test_events_of_other_names_are_left_out() -> None:
    answer = events(b": a comment\n\n", b"event: later\ndata: 1\n\n", b"data: 2\n\n", TOKENS)
    async with streamed(answer) as stream:
        assert (await anext(stream)).text == "hi"


async def test_what_is_no_stream_is_no_node() -> None:
    with pytest.raises(NotANodeError):
        async with streamed(says(b"{}", "application/json")):
            pytest.fail("there is no stream")


async def test_a_stream_that_falls_silent_ends_at_its_deadline() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        response = await events(TOKENS)(request)
        await asyncio.sleep(3600)
        return response

    async with streamed(silent, timeout_s=0.5) as stream:
        await anext(stream)
        with pytest.raises(DeadlineError):
            await anext(stream)


async def test_how_long_the_reader_takes_does_not_count(on: Here) -> None:
    async with (
        AsyncClient(on.client.url, timeout_s=2.0) as client,
        client.stream_generate(BODY) as stream,
    ):
        await anext(stream)
        await asyncio.sleep(2.5)  # the time itself is what is tested
        assert (await stream.finished()).tokens


@pytest.mark.parametrize("how", ["break", "error", "cancel"])
async def test_leaving_a_stream_ends_the_work_of_the_node(on: Here, how: str) -> None:
    body = GenerateBody(prompt="for ever", max_tokens=900)
    async with AsyncClient(on.client.url) as client:
        reached = asyncio.Event()

        async def read() -> None:
            async with client.stream_generate(body) as stream:
                async for _ in stream:
                    reached.set()
                    if how == "break":
                        break
                    if how == "error":
                        raise LookupError

        task = asyncio.ensure_future(read())
        await reached.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (how == "cancel")
        await until(lambda: on.node.num_working == 0, "the end of the work")
        assert how != "error" or isinstance(task.exception(), LookupError)


# The parser


@given(cuts=st.lists(st.integers(0, 200)), ends=st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int], ends: bytes) -> None:
    text = (
        b"\n: comment\nid: 7\nevent: tokens\ndata: one\ndata:two\n\ndata\n\nevent: alone\n\n"
        b"retry: 5\ndata: last\n\ndata: never ended\n"
    ).replace(b"\n", ends)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = EventReader()
    found = [event for start, stop in pairwise(places) for event in reader.feed(text[start:stop])]
    assert found == [
        ServerEvent("tokens", b"one\ntwo"),
        ServerEvent("message", b""),
        ServerEvent("message", b"last"),
    ]


def test_an_event_without_an_end_is_refused() -> None:
    reader = EventReader()
    for _ in range(64):
        assert list(reader.feed(b"x" * (1 << 20))) == []
    with pytest.raises(ValueError, match="more than 64 MiB"):
        list(reader.feed(b"x"))
