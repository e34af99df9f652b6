"""What a client sends, or does not send, costs a node little and always has an answer."""

from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import json
import logging
import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientConnectionResetError, web

from tests.api.guarded import Authority, guarded
from tests.api.nodes import Here, here
from tests.latch import until
from tierkv.api.settings import NodeSection
from tierkv.http import server
from tierkv.http.server import bind, serving, url_of
from tierkv.http.settings import TlsSection

HEAD = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
LIVE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
TRIALS = pytest.mark.parametrize("trials", [3, pytest.param(100, marks=pytest.mark.slow)])


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.partition("://")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def exchange(url: str, sent: bytes) -> tuple[int, dict[str, str]]:
    """Status and problem of what comes back until the node closes. Checks that it is a problem."""
    async with connected(url) as (reader, writer):
        writer.write(sent)
        await writer.drain()
        answered = await until_closed(reader)
    head, _, body = answered.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert headers["content-type"] == "application/problem+json", answered[:300]
    assert headers["server"] == "tierkv"  # and no version of anything
    problem = json.loads(body)
    assert problem["request_id"] == headers["x-request-id"]
    status = int(lines[0].split()[1])
    assert problem["status"] == status
    return status, problem


def assert_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Bad input is nothing to wake an operator for, and has no traceback."""
    for record in caplog.records:
        assert record.levelno < logging.WARNING, record.getMessage()
        assert not record.exc_info, record.getMessage()
        assert "\n" not in record.getMessage()


# What is no HTTP


BAD_HTTP = {
    "method": (b"BR EW /livez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "version": (b"GET /livez HTTP/9.9\r\n\r\n", 400),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no host": (b"GET /livez HTTP/1.1\r\n\r\n", 400),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "length and chunks": (
        HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "header without colon": (b"GET /livez HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n", 400),
    "space before colon": (b"GET /livez HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n", 400),
    "folded header": (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n", 400),
    "NUL in a header": (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
    "NUL in the path": (b"GET /liv\x00ez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "control character": (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: \x01\r\n\r\n", 400),
    "nonsense": (b"\xff" * 100 + b"\r\n\r\n", 400),
    "long line": (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "long header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "long name": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a" * 20_000 + b": 1\r\n\r\n", 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 1_000 + b"\r\n", 431),
    "bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
    "version 0.9": (b"GET /livez\r\n\r\n", 505),
    "version 0.9, named": (b"GET /livez HTTP/0.9\r\n\r\n", 505),
    "version 2.0": (b"GET /livez HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "version 2.0 with a body": (b"POST /v1/reset HTTP/2.0\r\nContent-Length: 3\r\n\r\nabc", 505),
    "two hosts": (b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "bare line feeds": (b"GET /livez HTTP/1.1\nHost: a\n\n", 400),
    "a list of lengths": (HEAD + b"Content-Length: 5, 5\r\n\r\nabcde", 400),
    "a length with a sign": (HEAD + b"Content-Length: +5\r\n\r\nabcde", 400),
    "one length twice": (HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde", 400),
    "huge length": (HEAD + b"Content-Length: 99999999999999999999\r\n\r\nabc", 400),
    "chunked is not last": (HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "not quite chunked": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400),
    "negative chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nab", 400),
    "chunk that goes on": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n", 400),
    "chunks with line feeds": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n", 400),
    "many trailers": (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        + b"X: y\r\n" * 5_000
        + b"\r\n",
        431,
    ),
    "no path": (b"GET  HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "encoding that we lack": (HEAD + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}", 415),
    "encoding of nobody": (
        HEAD + b"Connection: close\r\nContent-Encoding: zork\r\nContent-Length: 2\r\n\r\n{}",
        415,
    ),
    "good one, then a bad one": (LIVE + b"BAD\r\n\r\n", 400),
    "expectation": (HEAD + b"Expect: the-impossible\r\nContent-Length: 0\r\n\r\n", 417),
}


_CODES = {
    400: "malformed_request",
    414: "uri_too_long",
    415: "unsupported_media_type",
    417: "unknown_expectation",
    431: "headers_too_large",
    505: "http_version_not_supported",
}


@pytest.mark.parametrize("name", BAD_HTTP)
@TRIALS
async def test_what_is_no_http_is_a_problem_and_one_quiet_line(
    name: str, trials: int, caplog: pytest.LogCaptureFixture
) -> None:
    sent, status = BAD_HTTP[name]
    caplog.set_level(logging.DEBUG, "tierkv")
    async with here() as on:
        for _ in range(trials):
            answered, problem = await exchange(on.client.url, sent)
            assert (answered, problem["code"]) == (status, _CODES[status])
        assert (await on.client.get("/livez")).status == 200
        await on.settle()
    assert_quiet(caplog)


async def test_bytes_of_any_kind_never_make_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    good = HEAD + b'Content-Length: 15\r\n\r\n{"prompt": "a"}'
    async with here() as on:
        for at in range(0, len(good), 3):
            for byte in (b"\x00", b"\r", b"\n", b"\xff", b":", b" "):
                async with connected(on.client.url) as (reader, writer):
                    writer.write(good[:at] + byte + good[at + 1 :])
                    writer.write_eof()
                    await until_closed(reader)
        await on.settle()
    assert_quiet(caplog)


async def test_a_body_that_breaks_off_behind_a_refusal_is_not_logged_as_a_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = b"POST /v1/nothing HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with here(body_timeout_s=0.5) as on:
        async with connected(on.client.url) as (reader, writer):
            writer.write(sent)
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"ZZ\r\n")
            await writer.drain()
            await until_closed(reader)
        await on.settle()
    assert_quiet(caplog)


async def test_a_client_that_goes_while_it_is_answered_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        raise ClientConnectionResetError("Cannot write to closing transport")  # as aiohttp does

    section = NodeSection(port=0)
    listener = bind(section)
    async with (
        serving(answer, [listener], section=section),
        connected(url_of(listener, has_tls=False)) as (reader, writer),
    ):
        writer.write(LIVE)
        assert await until_closed(reader) == b""
    assert_quiet(caplog)


# How long


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
@TRIALS
async def test_half_a_head_is_closed_in_time_however_slowly_it_comes(trials: int) -> None:
    async with here(head_timeout_s=2.0) as on:

        async def drip(number: int) -> float:
            """A byte now and then, for ever."""
            start = asyncio.get_running_loop().time()
            async with connected(on.client.url) as (reader, writer):
                if number % 2:  # after a good request, on the same connection
                    writer.write(LIVE)
                    await reader.readuntil(b"}")
                    start = asyncio.get_running_loop().time()
                ended = asyncio.ensure_future(until_closed(reader))
                for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 150:  # nothing wrong with it so far
                    writer.write(bytes([byte]))
                    done, _ = await asyncio.wait([ended], timeout=0.1)
                    if done:
                        break
                assert b"200" not in await ended
            return asyncio.get_running_loop().time() - start

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(drip(number)) for number in range(trials)]
        assert max(task.result() for task in tasks) < 10
        await on.settle()


async def test_a_connection_without_a_request_is_closed_in_time() -> None:
    async with here(idle_timeout_s=0.3) as on:
        for sent in (b"", LIVE):
            async with connected(on.client.url) as (reader, writer):
                writer.write(sent)
                await until_closed(reader)


def test_heads_have_ten_seconds_and_idle_connections_longer_than_load_balancers_keep_them() -> None:
    assert NodeSection().head_timeout_s <= 10
    assert NodeSection().idle_timeout_s > 60


async def test_a_tls_handshake_that_never_ends_is_closed(tmp_path: Path) -> None:
    tls = TlsSection(cert=str(Authority(tmp_path).issue("node")))
    section = NodeSection(port=0, head_timeout_s=0.3)
    async with guarded(None, tls=tls, section=section) as on:
        for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            async with connected(on.url) as (reader, writer):
                writer.write(sent)
                await until_closed(reader)


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
@TRIALS
async def test_a_body_that_never_ends_is_given_up(trials: int) -> None:
    async with here(body_timeout_s=0.2) as on:

        async def one() -> None:
            status, problem = await exchange(
                on.client.url, HEAD + b'Content-Length: 20\r\n\r\n{"prom'
            )
            assert (status, problem["code"]) == (408, "body_timeout")

        async with asyncio.TaskGroup() as group:
            for _ in range(trials):
                group.create_task(one())
        await on.settle()


@pytest.mark.promise("A client that reads no answer is disconnected.")
async def test_a_client_that_takes_no_answer_is_cut_off() -> None:
    section = NodeSection(port=0, send_timeout_s=0.3)
    async with guarded(None, section=section) as on:
        async with connected(on.url) as (reader, writer):
            # Nothing is read: 5 MB of answers fill all buffers of the way.
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            question = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
            for _ in range(1_000):
                writer.write(question)
            await until(lambda: writer.transport.is_closing() or is_cut(writer), "the cut")
            del reader
        assert (await on.client.get("/livez")).status == 200


def is_cut(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side has closed, seen without reading."""
    writer.write(b"\r\n")
    return writer.transport.is_closing()


# How much


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@TRIALS
async def test_a_compressed_body_counts_by_its_real_size(coding: str, trials: int) -> None:
    raw = b'{"prompt": "' + b"a" * 100_000_000 + b'"}'
    packed = await asyncio.to_thread(gzip.compress if coding == "gzip" else zlib.compress, raw)
    assert len(packed) < 200_000
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    async with here(max_body_bytes=1_000_000) as on:
        for _ in range(trials):
            answer = await on.client.ask("POST", "/v1/generate", data=packed, headers=headers)
            assert (answer.status, answer.code) == (413, "body_too_large")
        await on.settle()


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
@TRIALS
async def test_a_body_over_the_limit_is_refused_with_or_without_a_length(trials: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1_000

    headers = {"Content-Type": "application/json"}
    async with here(max_body_bytes=10_000) as on:
        for _ in range(trials):
            for data in (b" " * 40_000, pieces()):
                answer = await on.client.ask("POST", "/v1/generate", data=data, headers=headers)
                assert (answer.status, answer.code) == (413, "body_too_large")
        await on.settle()


async def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes() -> None:
    async with here(body_timeout_s=0.5) as on:
        sent = HEAD + b"Connection: close\r\nContent-Length: 99999999999\r\n\r\n{"
        status, problem = await exchange(on.client.url, sent)
        assert (status, problem["code"]) == (413, "body_too_large")
        await on.settle()


async def test_bodies_beyond_what_may_be_in_work_are_refused_until_others_are_done() -> None:
    half = b'{"prompt": "a"' + b" " * 599_986
    begun = HEAD.replace(b"generate", b"lookup") + b"Content-Length: 600001\r\n\r\n" + half
    headers = {"Content-Type": "application/json"}
    async with here(max_work_bytes=1_000_000) as on, connected(on.client.url) as (reader, writer):
        writer.write(begun)
        await writer.drain()
        await until(lambda: on.node.bodies.num_bytes == 600_001, "the first to come")
        for data in (half + b"}", pieces(half + b"}")):
            answer = await on.client.ask("POST", "/v1/lookup", data=data, headers=headers)
            assert (answer.status, answer.code) == (503, "too_much_in_work")
        assert (await on.client.post("/v1/lookup", {"prompt": "a"})).status == 200
        writer.write(b"}")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: on.node.bodies.num_bytes == 0, "all to be done")
        answer = await on.client.ask("POST", "/v1/lookup", data=half + b"}", headers=headers)
        assert answer.status == 200
        await on.settle()


def posted(url: str, path: str, body: bytes) -> tuple[int, str | None]:
    """Status and Retry-After, as one learns them who sends a whole body before they read."""
    connection = http.client.HTTPConnection(url.partition("://")[2], timeout=200)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers["Retry-After"]
    finally:
        connection.close()


async def test_who_sends_all_of_a_long_body_before_they_read_learn_that_they_may_try_again() -> (
    None
):
    """120 MB of refused bodies at once."""
    body = b'{"prompt": "a"}' + b" " * 12_000_000
    begun = HEAD + b"Content-Length: 1000000\r\n\r\n"
    async with (
        here(max_work_bytes=12_500_000, max_body_bytes=13_000_000) as on,
        connected(on.client.url) as (_, writer),
    ):
        writer.write(begun)
        await until(lambda: on.node.bodies.num_bytes == 1_000_000, "the first to come")
        asking = [asyncio.to_thread(posted, on.client.url, "/v1/lookup", body) for _ in range(10)]
        assert await asyncio.gather(*asking) == [(503, "1")] * 10
        assert on.node.bodies.num_bytes == 1_000_000
        writer.close()
        await until(lambda: on.node.bodies.num_bytes == 0, "the first to be given up")
        await on.settle()


async def test_a_connection_goes_on_behind_a_refused_body_that_came_whole() -> None:
    head = HEAD + b"Content-Length: 2000000\r\n\r\n"
    async with here(max_work_bytes=1_000_000) as on, connected(on.client.url) as (reader, writer):
        writer.write(head + b" " * 2_000_000 + LIVE)
        answered = await reader.readuntil(b"HTTP/1.1 200 OK\r\n")
        assert answered.startswith(b"HTTP/1.1 422 ")
        await on.settle()


async def test_a_refused_body_of_which_no_more_comes_is_closed_in_time() -> None:
    head = HEAD + b"Content-Length: 2000000\r\n\r\n"
    async with here(max_work_bytes=1_000_000, body_timeout_s=0.2) as on:
        status, problem = await exchange(on.client.url, head + b" ")
        assert (status, problem["code"]) == (422, "request_too_large")
        await on.settle()


async def test_a_refused_body_may_take_longer_than_a_head() -> None:
    async with (
        here(max_work_bytes=1_000_000, head_timeout_s=0.2, body_timeout_s=60) as on,
        connected(on.client.url) as (reader, writer),
    ):
        writer.write(HEAD + b"Content-Length: 2000000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 422 ")
        ended = asyncio.get_running_loop().time() + 0.6
        while asyncio.get_running_loop().time() < ended:
            writer.write(b" " * 10)
            await asyncio.sleep(0.01)
        assert not reader.at_eof()
        writer.close()
        await on.settle()


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 50_000):
        yield data[at : at + 50_000]


@pytest.mark.parametrize("num_tokens", [101, 150_000])
async def test_a_prompt_with_too_many_tokens_is_refused_in_whatever_form_it_comes(
    num_tokens: int,
) -> None:
    packed = base64.b64encode(bytes(4 * num_tokens)).decode()
    forms = ({"tokens": [1] * num_tokens}, {"tokens": packed}, {"prompt": "a" * num_tokens})
    async with here(max_prompt_tokens=100) as on:
        for body in forms:
            answer = await on.client.post("/v1/lookup", body)
            assert (answer.status, answer.code) == (422, "request_too_large")
        octets = {"Content-Type": "application/octet-stream"}
        data = bytes(4 * num_tokens)
        answer = await on.client.ask("POST", "/v1/lookup", data=data, headers=octets)
        assert (answer.status, answer.code) == (422, "request_too_large")
        assert (await on.client.post("/v1/lookup", {"tokens": [1] * 100})).status == 200


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"prompt": ["', b'{"tokens": [['])
async def test_deep_nesting_is_refused_by_every_route_with_a_body(opening: bytes) -> None:
    deep = opening * (900_000 // len(opening))
    headers = {"Content-Type": "application/json"}
    async with here() as on:
        for path in ("/v1/generate", "/v1/lookup", "/v1/decode", "/v1/prefetches"):
            answer = await on.client.ask("POST", path, data=deep, headers=headers)
            assert answer.code in ("malformed_body", "invalid_body")


# How many


@asynccontextmanager
async def full(trials: int) -> AsyncIterator[Here]:
    """A node whose connections are all taken; more come from elsewhere."""
    release = asyncio.Event()
    taken: list[int] = []

    async def hold(on: Here) -> None:
        async with connected(on.client.url) as (reader, writer):
            writer.write(LIVE)
            await reader.readuntil(b"}")
            taken.append(1)
            await release.wait()

    async with (
        here(max_connections=trials, idle_timeout_s=60) as on,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(trials):
            group.create_task(hold(on))
        await until(lambda: len(taken) == trials, "so many connections")
        yield on
        release.set()


@TRIALS
async def test_a_connection_too_many_is_told_so_and_closed(trials: int) -> None:
    async with full(trials) as on:
        for sent in (LIVE, b"", HEAD) * max(1, trials // 3):
            status, problem = await exchange(on.client.url, sent)
            assert (status, problem["code"]) == (503, "too_many_connections")


async def test_a_connection_that_ends_makes_room_for_another() -> None:
    async with here(max_connections=1) as on:
        for _ in range(20):
            async with connected(on.client.url) as (reader, writer):
                writer.write(LIVE)
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
                status, _ = await exchange(on.client.url, LIVE)
                assert status == 503
            await room(on)


async def room(on: Here) -> None:
    """Return when the node has noticed that the connection has gone."""
    async with asyncio.timeout(20):
        while True:
            async with connected(on.client.url) as (reader, writer):
                writer.write(LIVE + LIVE)
                if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                    writer.write_eof()
                    await until_closed(reader)
                    return


async def test_many_connections_too_many_are_closed_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with full(2) as on:

        async def refused() -> bytes:
            async with connected(on.client.url) as (reader, _):
                return await until_closed(reader)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(refused()) for _ in range(300)]
        answers = [task.result() for task in tasks]
        assert all(not answer or b" 503 " in answer[:20] for answer in answers)
        assert any(answers)
    assert_quiet(caplog)


async def test_of_those_too_many_that_stay_only_some_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_REFUSAL_S", 60.0)  # who was answered stays until it has left
    async with full(2) as on, AsyncExitStack() as stay:
        others = [await stay.enter_async_context(connected(on.client.url)) for _ in range(80)]
        answers = [await until_closed(reader) for reader, _ in others]
        assert sum(b" 503 " in answer[:20] for answer in answers) == 64
        assert sum(not answer for answer in answers) == 16


async def test_tls_counts_connections_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = TlsSection(cert=str(authority.issue("node")))
    section = NodeSection(port=0, max_connections=1)
    context: ssl.SSLContext = authority.trusted_by()
    async with guarded(None, tls=tls, section=section) as on:
        port = int(on.url.rsplit(":", 1)[1])
        _, first = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        first.write(LIVE)
        await first.drain()
        reader, second = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert b"too_many_connections" in await until_closed(reader)
        second.close()
        first.close()
