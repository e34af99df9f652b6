"""The client of programs without an event loop, in threads, against a node in a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from aiohttp import web

from tests.api.nodes import Here
from tests.client.scripted import says, scripted
from tests.latch import until
from tierkv.api.types import GenerateBody, LookupBody
from tierkv.client import BrokenOffError, CallError, Client, Retries, UnreachableError
from tierkv.errors import BadRequestError
from tierkv.http.bodies import EVENT_STREAM

T = TypeVar("T")

_TOKENS = b'event: tokens\ndata: {"tokens":[97],"text":"a"}\n\n'


async def in_thread(work: Callable[[], T]) -> T:
    async with asyncio.timeout(60):
        return await asyncio.to_thread(work)


async def with_client(url: str, work: Callable[[Client], T]) -> T:
    """Return what `work` does with a client, in a thread."""

    def in_its_thread() -> T:
        with Client(url) as client:
            return work(client)

    return await in_thread(in_its_thread)


async def test_calls_and_streams_wait_for_their_answers(on: Here) -> None:
    def work(client: Client) -> None:
        body = GenerateBody(prompt="Once upon", max_tokens=8)
        whole = client.generate(body)
        with client.stream_generate(body) as stream:
            told = [token for news in stream for token in news.tokens]
        assert tuple(told) == stream.answer.tokens == whole.tokens
        assert client.lookup(LookupBody(prompt="Once upon")).num_tokens == 9
        with pytest.raises(BadRequestError):
            client.lookup(LookupBody())

    await with_client(on.client.url, work)


async def test_many_threads_share_a_client(on: Here) -> None:
    def work(client: Client) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            ask = [pool.submit(client.lookup, LookupBody(prompt="a" * n)) for n in range(1, 65)]
            return [one.result().num_tokens for one in ask]

    assert await with_client(on.client.url, work) == list(range(1, 65))


async def test_leaving_a_stream_early_closes_its_connection() -> None:
    left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
        await response.prepare(request)
        await response.write(_TOKENS)
        try:
            await asyncio.Event().wait()
        finally:  # the end of the connection cancels the handler
            left.set()
        return response

    async with scripted(endless) as node:
        client = await in_thread(lambda: Client(node.url))

        def work() -> None:
            with client.stream_generate(GenerateBody(prompt="a")) as stream:
                next(iter(stream))

        await in_thread(work)
        await until(left.is_set, "the end of the connection, with the client still open")
        await in_thread(client.close)


async def test_a_stream_that_is_refused_is_never_open(on: Here) -> None:
    def work(client: Client) -> None:
        stream = client.stream_generate(GenerateBody(prompt="a", max_tokens=2))
        with pytest.raises(BrokenOffError, match="to its end"):
            _ = stream.answer
        refused = client.stream_generate(GenerateBody())
        with pytest.raises(BadRequestError), refused:
            pass

    await with_client(on.client.url, work)


async def test_a_stream_that_is_over_says_so_however_often_it_is_read(on: Here) -> None:
    def work(client: Client) -> None:
        with client.stream_generate(GenerateBody(prompt="a", max_tokens=2)) as stream:
            assert len(list(stream)) >= 1
            assert list(stream) == []
        assert list(stream) == []
        with client.stream_generate(GenerateBody(prompt="a", max_tokens=900)) as stream:
            next(iter(stream))
        with pytest.raises(CallError, match="closed"):
            list(stream)

    await with_client(on.client.url, work)


async def test_a_stream_that_failed_raises_that_however_often_it_is_read() -> None:
    def work(client: Client) -> None:
        with client.stream_generate(GenerateBody(prompt="a")) as stream:
            for _ in range(2):
                with pytest.raises(BrokenOffError):
                    list(stream)

    async with scripted(says(_TOKENS, EVENT_STREAM)) as node:
        await with_client(node.url, work)


async def test_closing_ends_the_calls_of_other_threads(on: Here) -> None:
    client = await in_thread(lambda: Client(on.client.url))
    endless = GenerateBody(prompt="a", max_tokens=900)
    calling = asyncio.ensure_future(in_thread(lambda: client.generate(endless)))
    await until(lambda: on.node.num_working == 1)
    await in_thread(client.close)
    await in_thread(client.close)
    with pytest.raises(CallError):
        await calling
    with pytest.raises(CallError, match="closed"):
        await in_thread(client.livez)


def test_a_client_without_a_node_says_so_and_ends_its_thread() -> None:
    before = set(threading.enumerate())
    with (
        Client("http://127.0.0.1:9", retries=Retries(attempts=2, first_s=0.01)) as client,
        pytest.raises(UnreachableError),
    ):
        client.livez()
    assert set(threading.enumerate()) <= before
