"""Clients that vanish, repeat themselves or send nonsense, at the counts of the release gate."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.nodes import Here
from tests.latch import until
from tierkv.http.bodies import JSON

TOKENS = list(range(48))


@asynccontextmanager
async def half_open(on: Here, path: str, body: bytes) -> AsyncIterator[None]:
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


async def test_a_client_that_goes_in_the_middle_of_an_admission_leaves_nothing(on: Here) -> None:
    dice = random.Random(10)
    service = on.node.service
    for trial in range(40):
        if trial % 2:  # nobody is admitted: the client goes while its request waits
            await on.client.ask("POST", "/v1/pause")
        body: dict[str, Any] = {"tokens": TOKENS, "request_id": f"r{trial}"}
        if (path := dice.choice(["generate", "prefill"])) == "generate":
            body["max_tokens"] = dice.randrange(1, 32)
        async with half_open(on, f"/v1/{path}", json.dumps(body).encode()):
            await asyncio.sleep(dice.random() * 0.004)
        if trial % 2:
            await until(lambda: service.stats().waiting_requests == 0, "nobody that waits")
            await on.client.ask("POST", "/v1/resume")
    await until(lambda: on.node.num_working == 0, "no call under way")


# Large bodies


@pytest.mark.promise("Ten megabytes of JSON do not block the loop.")
async def test_ten_megabytes_of_json_do_not_stop_the_loop(on: Here) -> None:
    raw = await asyncio.to_thread(
        lambda: json.dumps({"tokens": [123_456] * 1_200_000}, separators=(",", ":")).encode()
    )
    loop, stops = asyncio.get_running_loop(), list[float]()
    while not stops or (stops[-1] >= 0.5 and len(stops) < 5):  # a busy machine stops it, too
        asking = asyncio.ensure_future(
            on.client.ask("POST", "/v1/generate", data=BytesIO(raw), headers={"Content-Type": JSON})
        )
        stops.append(0.0)
        while not asking.done():
            started = loop.time()
            await asyncio.sleep(0.001)
            stops[-1] = max(stops[-1], loop.time() - started)
        answer = await asking
        assert (answer.status, answer.code) == (422, "request_too_large")
    assert stops[-1] < 0.5, stops  # 0.03 on a machine that does nothing else
