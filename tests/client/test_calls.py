"""A call has one outcome: the answer, the node's error, or a word on why there is neither."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.api.guarded import Authority, guarded
from tests.api.nodes import Here, process
from tests.client.scripted import Answering, breaks_off, problem, says, scripted, value
from tests.redis_server import free_port
from tierkv.api.types import DecodeBody, GenerateBody, LookupBody, PrefetchBody
from tierkv.client import (
    AsyncClient,
    BrokenOffError,
    DeadlineError,
    NotANodeError,
    RemoteError,
    Retries,
    UnreachableError,
)
from tierkv.errors import BadRequestError, ConfigError, HandoffError, OutOfBlocksError, TierKVError
from tierkv.http.problems import ERRORS, NotReadyError
from tierkv.http.settings import TlsSection

FAST = Retries(attempts=4, first_s=0.001, most_s=0.002)
ONCE = Retries(attempts=1)
LOOKUP = LookupBody(prompt="a")
FOUND = {
    "request_id": "r",
    "num_tokens": 1,
    "device_tokens": 0,
    "host_tokens": 0,
    "storage_tokens": None,
}


# Against a node


async def test_a_prompt_goes_over_as_words_or_tokens_and_comes_back_typed(on: Here) -> None:
    async with AsyncClient(on.client.url) as client:
        first = await client.generate(GenerateBody(prompt="Once upon", max_tokens=8, seed=3))
        tokens = list(b"Once upon")
        second = await client.generate(GenerateBody(tokens=tokens, max_tokens=8, seed=3))
        assert first.tokens == second.tokens
        assert second.matched.device > 0
        found = await client.lookup(LookupBody(tokens=tokens))
        assert found.num_tokens == len(tokens)
        assert (await client.readyz()).status == "ok"
        assert "tierkv_ready 1.0" in await client.metrics()
        assert (await client.stats()).running_requests == 0
        assert (await client.verify()).findings == []
        document = await client.openapi()
        assert "/v1/lookup" in str(document["paths"])


# Errors


@pytest.mark.promise("The client raises a node's error as its own class.")
@pytest.mark.parametrize(("kind", "status", "code"), [row[:3] for row in ERRORS])
async def test_every_error_of_a_node_is_raised_again_as_its_own_class(
    kind: type[TierKVError], status: int, code: str
) -> None:
    more: dict[str, Any] = {"reason": "expired", "tier": "device", "needed": 3, "available": 1}
    async with (
        scripted(problem(status, code, **more)) as on,
        AsyncClient(on.url, retries=ONCE) as client,
    ):
        with pytest.raises(kind) as caught:
            await client.generate(GenerateBody(prompt="a"))
        error = caught.value
        assert isinstance(error, RemoteError)
        assert (error.code, error.status, error.request_id) == (code, status, "r1")
        assert "why" in str(error)
        assert "r1" in str(error)
        if isinstance(error, HandoffError):
            assert error.reason == "expired"
        if isinstance(error, OutOfBlocksError):
            assert (error.tier, error.needed, error.available) == ("device", 3, 1)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, BadRequestError), (418, BadRequestError), (503, NotReadyError), (507, RemoteError)],
)
async def test_a_code_of_a_later_version_is_an_error_by_its_status(
    status: int, kind: type[Exception]
) -> None:
    later = problem(status, "of_a_later_version")
    async with scripted(later) as on, AsyncClient(on.url, retries=ONCE) as client:
        with pytest.raises(kind) as caught:
            await client.lookup(LOOKUP)
        assert isinstance(caught.value, RemoteError)
        assert (caught.value.status, caught.value.code) == (status, "of_a_later_version")


async def test_tls_and_unix_sockets(tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    certificate = await asyncio.to_thread(authority.issue, "node")
    trusting = await asyncio.to_thread(authority.trusted_by)
    path = tmp_path / "node.sock"
    tls = TlsSection(cert=str(certificate))
    async with guarded(None, tls=tls, unix_socket=path) as on:
        async with AsyncClient(on.url, tls=trusting) as client:
            assert (await client.livez()).status == "ok"
        async with AsyncClient(on.url, retries=ONCE) as client:
            with pytest.raises(UnreachableError, match="certificate"):
                await client.livez()
        async with AsyncClient(f"unix:{path}") as client:
            assert (await client.livez()).status == "ok"


@pytest.mark.parametrize("url", ["", "localhost:8100", "ftp://a", "file:///etc/passwd"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        AsyncClient(url)


@pytest.mark.parametrize("token", ["", "a\r\nX: 1", "tökén", "a\x00"])
def test_a_token_that_is_none_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(ConfigError):
        AsyncClient(token=token)


@pytest.mark.parametrize(
    "answer",
    [
        says(b"<html>", "text/html"),
        says(b"{}", "application/json"),
        says(b"\xc1", "application/msgpack"),
        says(b"[" * 100_000, "application/json"),
        says(b"moved", "text/plain", 302, Location="http://127.0.0.1:1/"),
        says(b"nonsense", "application/problem+json", 503),
        says(b"Bad Gateway", "text/html", 400),
    ],
)
async def test_what_answers_like_no_node_is_said_to_be_none(answer: Answering) -> None:
    async with scripted(answer) as on, AsyncClient(on.url, retries=FAST) as client:
        with pytest.raises(NotANodeError) as caught:
            await client.lookup(LOOKUP)
        assert on.url in str(caught.value)


# Asking again


@pytest.mark.parametrize(
    "first", [problem(503, "out_of_blocks"), problem(429, "quota"), breaks_off]
)
async def test_a_call_is_asked_again_under_one_id_until_its_attempts_end(first: Answering) -> None:
    """A lookup changes nothing, and work is named, so a node does it once."""
    answers = first, first, value(FOUND)
    async with scripted(*answers) as on, AsyncClient(on.url, retries=FAST) as client:
        assert (await client.lookup(LOOKUP)).num_tokens == 1
        assert len(on.asked) == 3
    async with scripted(first) as on, AsyncClient(on.url, retries=FAST) as client:
        with pytest.raises((RemoteError, BrokenOffError)):
            await client.generate(GenerateBody(prompt="a"))
        assert len(on.asked) == FAST.attempts
        assert len({body for _, _, body in on.asked}) == 1
        assert msgspec.msgpack.decode(on.asked[0][2])["request_id"]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 500, 502])
async def test_an_error_that_stays_is_not_asked_again(status: int) -> None:
    async with scripted(problem(status, "x")) as on, AsyncClient(on.url, retries=FAST) as client:
        with pytest.raises(RemoteError):
            await client.lookup(LOOKUP)
        assert len(on.asked) == 1


async def test_a_claim_that_waited_for_its_own_deadline_is_not_asked_again() -> None:
    refusal = problem(503, "handoff_failed", retry_after="0", reason="not_yet")
    async with scripted(refusal) as on, AsyncClient(on.url, retries=FAST) as client:
        with pytest.raises(HandoffError):
            await client.decode(DecodeBody(prompt="a", ticket_id="t"))
        assert len(on.asked) == 1


async def test_a_prefetch_that_is_asked_again_has_the_same_id() -> None:
    async with scripted(breaks_off, breaks_off, problem(500, "internal_error")) as on:
        async with AsyncClient(on.url, retries=FAST) as client:
            with pytest.raises(RemoteError):
                await client.prefetch(PrefetchBody(prompt="a"))
        bodies = Counter(body for _, _, body in on.asked)
        assert list(bodies.values()) == [3]
        assert msgspec.msgpack.decode(next(iter(bodies)))["request_id"]


async def test_the_node_says_when_to_ask_again() -> None:
    later = problem(503, "not_ready", retry_after="1")
    async with scripted(later, value(FOUND)) as on, AsyncClient(on.url, retries=FAST) as client:
        start = asyncio.get_running_loop().time()
        await client.lookup(LOOKUP)
        assert asyncio.get_running_loop().time() - start >= 0.99  # it counts milliseconds
    # Later than this call may last: its error is known now.
    much_later = problem(503, "not_ready", retry_after="3000")
    async with scripted(much_later) as on, AsyncClient(on.url, timeout_s=5) as client:
        with pytest.raises(RemoteError) as caught:
            await client.lookup(LOOKUP)
        assert caught.value.retry_after_s == 3000
        assert len(on.asked) == 1


@pytest.mark.parametrize("text", ["-1", "1.5", "Wed, 21 Oct 2026 07:28:00 GMT", "٣", "9" * 40])
async def test_an_odd_retry_after_does_no_harm(text: str) -> None:
    odd = problem(503, "not_ready", retry_after=text)
    async with scripted(odd) as on, AsyncClient(on.url, retries=FAST, timeout_s=5) as client:
        with pytest.raises(RemoteError):
            await client.lookup(LOOKUP)


async def test_pauses_grow_and_differ() -> None:
    retries = Retries(attempts=9, first_s=0.1, most_s=1.0)
    error = BrokenOffError("x")
    pauses = [[retries.pause_s(error, attempt) for _ in range(200)] for attempt in range(1, 9)]
    for attempt, found in enumerate(pauses):
        assert 0 <= min(found) < max(found) <= min(1.0, 0.1 * 2**attempt)
        assert len(set(found)) > 100


async def test_nobody_there_is_told_at_the_end_of_all_attempts() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with AsyncClient(url, retries=FAST) as client:
        for call in (client.lookup(LOOKUP), client.generate(GenerateBody(prompt="a"))):
            with pytest.raises(
                UnreachableError, match=f"^no node answers at {url}: Connection refused$"
            ):
                await call


async def test_a_call_ends_at_its_deadline_attempts_and_pauses_included() -> None:
    async def never(_: web.BaseRequest) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    scripts: list[tuple[Answering, ...]] = [(never,), (problem(503, "x"),)]
    for script in scripts:
        retries = Retries(attempts=1_000_000, first_s=0.01, most_s=0.01)
        async with (
            scripted(*script) as on,
            AsyncClient(on.url, retries=retries, timeout_s=0.3) as client,
        ):
            start = asyncio.get_running_loop().time()
            with pytest.raises((DeadlineError, RemoteError)):
                await client.lookup(LOOKUP)
            assert asyncio.get_running_loop().time() - start < 5


async def test_a_restart_of_the_node_is_not_noticed_by_calls_that_change_nothing(
    tmp_path: Path,
) -> None:
    port = free_port()  # which no connection gets while the node is down
    async with process(tmp_path, "--storage", "none", "--port", str(port)) as node:
        retries = Retries(attempts=200, first_s=0.05, most_s=0.2)
        async with AsyncClient(node.url, retries=retries) as client:
            await client.stats()
            node.terminate()
            assert await node.ended() == 0
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(client.lookup(LOOKUP))
                async with process(tmp_path, "--storage", "none", "--port", str(port)):
                    assert (await waiting).num_tokens == 1
