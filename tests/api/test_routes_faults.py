"""Clients that vanish, repeat themselves or send nonsense, at the counts of the release gate."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import Enum
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import msgpack
import msgspec
import pytest

from tests.api.nodes import Answer, Here, here
from tests.latch import until
from tierkv.api.types import DecodeBody, GenerateBody, LookupBody, PrefillBody, PromptBody
from tierkv.http.bodies import JSON, LARGE_BYTES, MSGPACK

SLOW = pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
TOKENS = list(range(48))


def generation(request_id: str, **fields: Any) -> bytes:
    body = {"tokens": TOKENS, "max_tokens": 1, "request_id": request_id} | fields
    return json.dumps(body).encode()


@asynccontextmanager
async def half_open(on: Here, body: bytes, path: str = "/v1/generate") -> AsyncIterator[None]:
    """A question on a connection of its own, that is cut at the end of the body."""
    url = urlsplit(on.client.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        yield
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("is_whole", [False, SLOW])
async def test_a_client_that_goes_in_the_middle_of_an_admission_leaves_nothing(
    *, is_whole: bool
) -> None:
    dice = random.Random(10)
    async with here() as on:
        service = on.node.service
        for trial in range(1000 if is_whole else 50):
            if trial % 2:  # nobody is admitted: the client goes while its request waits
                await on.client.ask("POST", "/v1/pause")
            async with half_open(on, generation(f"r{trial}", max_tokens=dice.randrange(1, 32))):
                await asyncio.sleep(dice.random() * 0.004)
            if trial % 2:
                await until(lambda: service.stats().waiting_requests == 0, "nobody that waits")
                await on.client.ask("POST", "/v1/resume")
        await until(lambda: on.node.num_working == 0, "no call under way")
        await on.settle()


@pytest.mark.parametrize("is_whole", [False, SLOW])
async def test_repeated_ids_get_one_allocation_and_one_answer(*, is_whole: bool) -> None:
    async with here() as on:
        service, trials = on.node.service, 10_000 if is_whole else 200
        for trial in range(trials // 5):
            before = service.stats().requests.admitted_requests
            body = generation(f"r{trial}")

            async def ask(body: bytes = body) -> Answer:
                headers = {"Content-Type": JSON}
                return await on.client.ask("POST", "/v1/generate", data=body, headers=headers)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask()) for _ in range(3)]
            answers = [task.result() for task in tasks]
            answers += [await ask(), await ask()]  # late
            assert {answer.status for answer in answers} == {200}
            assert all(answer.body == answers[0].body for answer in answers)
            assert service.stats().requests.admitted_requests == before + 1
        await on.settle()


async def test_an_id_that_was_used_for_something_else_is_refused() -> None:
    async with here() as on:
        headers = {"Content-Type": JSON}
        path = "/v1/generate"
        first = await on.client.ask("POST", path, data=generation("r"), headers=headers)
        assert first.status == 200
        for change in ({"max_tokens": 9}, {"tokens": [5]}):
            body = generation("r", **change)
            answer = await on.client.ask("POST", path, data=body, headers=headers)
            assert (answer.status, answer.code) == (409, "duplicate_request")
        await on.settle()


NONSENSE: list[tuple[str, bytes]] = [
    (JSON, b""),
    (JSON, b"\xff\xfe"),
    (JSON, b'{"tokens": [1, NaN]}'),
    (JSON, b'{"tokens": [1e400]}'),
    (JSON, b'{"tokens": [' + b"9" * 5000 + b"]}"),
    (JSON, b'{"tokens": ' + b"[" * 100_000),
    (JSON, b'{"tokens": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    (JSON, b'{"tokens": [1], "request_id": "\\ud800"}'),
    (JSON, b'{"tokens": [1], "request_id": "a\\u0000b"}'),
    (JSON, b'{"tokens": [1], "ttl_s": -Infinity}'),
    (JSON, b'{"tokens": {"0": 1}}'),
    (JSON, b"[1, 2, 3]"),
    (JSON, b'"tokens"'),
    (MSGPACK, b"\x81\xa6tokens" + b"\x91" * 100_000),
    (MSGPACK, b"\xdd\xff\xff\xff\xff"),
    (MSGPACK, b"\x81\xa6tokens\xc6\xff\xff\xff\xff"),
    (MSGPACK, msgpack.packb({"tokens": b"123"})),
    (MSGPACK, msgpack.packb({"tokens": [float("nan")]})),
    ("application/octet-stream", b"123"),
    ("application/octet-stream", b"\xff\xff\xff\xff"),
]
ROUTES = ["/v1/generate", "/v1/decode", "/v1/prefetches", "/v1/explain", "/v1/lookup"]


@pytest.mark.parametrize("path", ROUTES)
async def test_nonsense_is_a_4xx_problem_on_every_route_and_never_a_traceback(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with here() as on:
        for content_type, raw in NONSENSE:
            headers = {"Content-Type": content_type}
            answer = await on.client.ask("POST", path, data=raw, headers=headers)
            assert 400 <= answer.status < 500, raw[:60]
            assert answer.code
        await on.settle()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# Large bodies


@pytest.mark.parametrize(
    ("inner", "status"),
    [
        ("1", 200),
        ("1.5", 422),
        ('"1,2"', 422),
        ("[1, 2]", 422),
        ("null", 422),
        ("-1", 400),
        ("4294967296", 400),
        ("1 2", 400),
        ("", 400),
    ],
)
async def test_a_large_list_of_tokens_is_read_as_exactly_as_a_small_one(
    inner: str, status: int
) -> None:
    async with here() as on:
        filler = "1, " * (LARGE_BYTES // 5)
        raw = f'{{"tokens": [{filler}{inner}, {filler}2]}}'.encode()
        headers = {"Content-Type": JSON}
        large = await on.client.ask("POST", "/v1/lookup", data=raw, headers=headers)
        raw = f'{{"tokens": [1, {inner}, 2]}}'.encode()
        small = await on.client.ask("POST", "/v1/lookup", data=raw, headers=headers)
        assert large.status == small.status == status
        assert status == 200 or large.code == small.code


@pytest.mark.promise("Ten megabytes of JSON do not block the loop.")
async def test_ten_megabytes_of_json_do_not_stop_the_loop() -> None:
    async with here() as on:
        raw = await asyncio.to_thread(
            lambda: json.dumps({"tokens": [123_456] * 1_200_000}, separators=(",", ":")).encode()
        )
        loop, stops = asyncio.get_running_loop(), list[float]()
        while not stops or (stops[-1] >= 0.5 and len(stops) < 5):  # a busy machine stops it, too
            asking = asyncio.ensure_future(
                on.client.ask(
                    "POST", "/v1/generate", data=BytesIO(raw), headers={"Content-Type": JSON}
                )
            )
            stops.append(0.0)
            while not asking.done():
                started = loop.time()
                await asyncio.sleep(0.001)
                stops[-1] = max(stops[-1], loop.time() - started)
            answer = await asking
            assert (answer.status, answer.code) == (422, "request_too_large")
        assert stops[-1] < 0.5, stops  # 0.03 on a machine that does nothing else


@pytest.mark.parametrize("kind", [GenerateBody, PrefillBody, DecodeBody, LookupBody])
def test_the_fields_beside_packed_tokens_can_all_be_query_parameters(
    kind: type[PromptBody],
) -> None:
    """Packed tokens come alone in their body, so every other field must be a plain value, but for
    media and stop texts, which ask for JSON or msgpack."""
    simple = (str, int, float, bool, Enum)
    required = {"ticket_id": "t"} if kind is DecodeBody else {}
    body = msgspec.convert({"tokens": [1], **required}, kind)
    for name in kind.__struct_fields__:
        if name not in ("tokens", "media", "stop"):
            default = getattr(body, name)
            assert default is None or isinstance(default, simple), name
