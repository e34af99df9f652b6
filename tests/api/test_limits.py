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
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientConnectionResetError, web

from tests.api.guarded import Authority, guarded
from tests.api.nodes import Here, here
from tests.latch import until
from tierkv.api.settings import NodeSection
from tierkv.http.server import bind, serving, url_of
from tierkv.http.settings import TlsSection

HEAD = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LIVE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


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


BAD_HTTP = [
    (b"BR EW /livez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
    (b"GET /livez HTTP/1.1\r\n\r\n", 400),  # without a host
    (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
    (b"GET /livez\r\n\r\n", 505),
    (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 1_000 + b"\r\n", 431),
    (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 5_000 + b"\r\n", 431),
    # Framing that a proxy may read otherwise.
    (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    (HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (CHUNKED + b"ZZ\r\n", 400),
    (LIVE + b"BAD\r\n\r\n", 400),
    (HEAD + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}", 415),
    (HEAD + b"Expect: the-impossible\r\nContent-Length: 0\r\n\r\n", 417),
]
_CODES = {
    400: "malformed_request",
    414: "uri_too_long",
    415: "unsupported_media_type",
    417: "unknown_expectation",
    431: "headers_too_large",
    505: "http_version_not_supported",
}


async def test_what_is_no_http_is_a_problem_and_one_quiet_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "tierkv")
    async with here() as on:
        for sent, status in BAD_HTTP:
            answered, problem = await exchange(on.client.url, sent)
            assert (answered, problem["code"]) == (status, _CODES[status]), sent[:80]
        assert (await on.client.get("/livez")).status == 200
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
    assert_quiet(caplog)


async def test_a_body_that_breaks_off_behind_a_refusal_is_not_logged_as_a_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = b"POST /v1/nothing HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with here(body_timeout_s=0.5) as on, connected(on.client.url) as (reader, writer):
        writer.write(sent)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"ZZ\r\n")
        await writer.drain()
        await until_closed(reader)
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
@pytest.mark.parametrize("before", [b"", LIVE], ids=["first", "after a good request"])
async def test_half_a_head_is_closed_in_time_however_slowly_it_comes(before: bytes) -> None:
    async with here(head_timeout_s=0.5) as on, connected(on.client.url) as (reader, writer):
        if before:
            writer.write(before)
            await reader.readuntil(b"}")
        ended = asyncio.ensure_future(until_closed(reader))
        for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 400:  # nothing wrong with it so far
            writer.write(bytes([byte]))
            if (await asyncio.wait([ended], timeout=0.05))[0]:
                break
        assert ended.done(), "it may go on for ever"
        assert b"200" not in await ended


async def test_the_rest_of_a_refused_body_is_not_taken_for_a_late_head() -> None:
    async with (
        here(max_work_bytes=500_000, head_timeout_s=0.3) as on,
        connected(on.client.url) as (reader, writer),
    ):
        writer.write(HEAD + b"Content-Length: 600000\r\n\r\n")
        assert b" 422 " in await reader.readline()
        for _ in range(6):
            writer.write(b" " * 100_000)
            await asyncio.sleep(0.1)  # all of them together take longer than a head may
        await reader.readuntil(b"}")
        writer.write(LIVE)
        assert b" 200 " in await reader.readline()


async def test_a_connection_without_a_request_is_closed_in_time() -> None:
    async with here(idle_timeout_s=0.3) as on:
        for sent in (b"", LIVE):
            async with connected(on.client.url) as (reader, writer):
                writer.write(sent)
                await until_closed(reader)


async def test_a_tls_handshake_that_never_ends_is_closed(tmp_path: Path) -> None:
    tls = TlsSection(cert=str(Authority(tmp_path).issue("node")))
    section = NodeSection(port=0, head_timeout_s=0.3)
    async with guarded(None, tls=tls, section=section) as on:
        for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            async with connected(on.url) as (reader, writer):
                writer.write(sent)
                await until_closed(reader)


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
async def test_a_body_that_never_ends_is_given_up() -> None:
    async with here(body_timeout_s=0.2) as on:
        sent = HEAD + b'Content-Length: 20\r\n\r\n{"prom'
        status, problem = await exchange(on.client.url, sent)
        assert (status, problem["code"]) == (408, "body_timeout")


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
async def test_a_compressed_body_counts_by_its_real_size(coding: str) -> None:
    raw = b'{"prompt": "' + b"a" * 20_000_000 + b'"}'
    packed = await asyncio.to_thread(gzip.compress if coding == "gzip" else zlib.compress, raw)
    assert len(packed) < 40_000
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    async with here(max_body_bytes=1_000_000) as on:
        answer = await on.client.ask("POST", "/v1/generate", data=packed, headers=headers)
        assert (answer.status, answer.code) == (413, "body_too_large")


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
async def test_a_body_over_the_limit_is_refused_with_or_without_a_length() -> None:
    headers = {"Content-Type": "application/json"}
    async with here(max_body_bytes=10_000, body_timeout_s=1.0) as on:
        for data in (b" " * 40_000, pieces(b" " * 100_000)):
            answer = await on.client.ask("POST", "/v1/generate", data=data, headers=headers)
            assert (answer.status, answer.code) == (413, "body_too_large")
        announced = HEAD + b"Connection: close\r\nContent-Length: 99999999999\r\n\r\n{"
        assert (await exchange(on.client.url, announced))[1]["code"] == "body_too_large"


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
    body = b'{"prompt": "a"}' + b" " * 4_000_000
    begun = HEAD + b"Content-Length: 1000000\r\n\r\n"
    async with (
        here(max_work_bytes=4_500_000, max_body_bytes=5_000_000) as on,
        connected(on.client.url) as (_, writer),
    ):
        writer.write(begun)
        await until(lambda: on.node.bodies.num_bytes == 1_000_000, "the first to come")
        asking = [asyncio.to_thread(posted, on.client.url, "/v1/lookup", body) for _ in range(4)]
        assert await asyncio.gather(*asking) == [(503, "1")] * 4
        assert on.node.bodies.num_bytes == 1_000_000
        writer.close()
        await until(lambda: on.node.bodies.num_bytes == 0, "the first to be given up")


async def test_a_refused_body_of_which_no_more_comes_is_closed_in_time() -> None:
    head = HEAD + b"Content-Length: 2000000\r\n\r\n"
    async with here(max_work_bytes=1_000_000, body_timeout_s=0.2) as on:
        status, problem = await exchange(on.client.url, head + b" ")
        assert (status, problem["code"]) == (422, "request_too_large")


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
        assert (await on.client.post("/v1/lookup", {"tokens": [1] * 100})).status == 200


@pytest.mark.promise("Heads and bodies that are too late, too large or too deep are refused.")
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"prompt": ["', b'{"tokens": [['])
async def test_deep_nesting_is_refused_by_every_route_with_a_body(on: Here, opening: bytes) -> None:
    deep = opening * (900_000 // len(opening))
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/generate", "/v1/lookup", "/v1/decode", "/v1/prefetches"):
        answer = await on.client.ask("POST", path, data=deep, headers=headers)
        assert answer.code in ("malformed_body", "invalid_body")


# How many


async def test_a_connection_that_ends_makes_room_for_another() -> None:
    async with here(max_connections=1) as on:
        for _ in range(5):
            async with connected(on.client.url) as (reader, writer):
                writer.write(LIVE)
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
                async with connected(on.client.url) as (another, _):
                    assert await until_closed(another) == b""
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
        assert await until_closed(reader) == b""
        second.close()
        first.close()
