"""What the live page of a node is told, by whom it may be asked, and what that costs the node."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.api.guarded import Callers, bearer, guarded
from tests.api.nodes import Client, Here, here, process
from tests.latch import until
from tierkv.client.streams import EventReader
from tierkv.http import live
from tierkv.http.callers import RoleName
from tierkv.http.live import MAX_SAMPLES, LiveFeed

PAGE = Path(live.__file__).parent / "page"


class Stream:
    """An open page, as far as the node sees it: what it was told, by kind of event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.reader = EventReader()
        self.told: dict[str, list[Any]] = {}
        self.raw = b""

    async def more(self) -> bool:
        """Take what has come; whether anything did."""
        async with asyncio.timeout(20):
            chunk = await self.response.content.readany()
        self.raw += chunk
        for event in self.reader.feed(chunk):
            self.told.setdefault(event.name, []).append(msgspec.json.decode(event.data))
        return bool(chunk)

    async def until(self, kind: str, count: int = 1) -> Any:
        """The newest of this kind, once there are so many."""
        while len(self.told.get(kind, ())) < count:
            assert await self.more(), f"it ended without {kind}"
        return self.told[kind][-1]

    @property
    def samples(self) -> list[list[float]]:
        return [one for batch in self.told.get("samples", []) for one in batch]


@asynccontextmanager
async def opened(client: Client, token: str = "") -> AsyncIterator[Stream]:
    stream = client.session.get(f"{client.url}/live/stream", headers=bearer(token))
    async with stream as response:
        assert response.status == 200, await response.text()
        yield Stream(response)


async def generate(client: Client, prompt: str, name: str, token: str = "") -> None:
    body = {"prompt": prompt, "max_tokens": 2, "request_id": name}
    answer = await client.ask("POST", "/v1/generate", json=body, headers=bearer(token))
    assert answer.status == 200, answer.body


async def test_the_figures_are_those_of_metrics(on: Here) -> None:
    await generate(on.client, "Once upon a time there was a cache " * 4, "a")
    await generate(on.client, "Once upon a time there was a cache " * 4, "b")
    on.node.live.sample()
    async with opened(on.client) as page:
        names = await page.until("names")
        *_, last = await page.until("samples")
    metrics = await on.client.metrics()
    told = dict(zip(names, last[1:], strict=True))
    assert told == {name: metrics[name] for name in names}
    assert told['tierkv_lookup_tokens_total{result="hit_device"}'] > 0
    assert told['tierkv_missed_tokens_total{reason="never_stored"}'] > 0


async def test_a_page_gets_all_kept_samples_and_the_names_whenever_they_change(on: Here) -> None:
    for _ in range(3):
        on.node.live.sample()
    async with opened(on.client) as page:
        await page.until("samples")
        assert len(page.samples) >= 3
        on.node.live.figures = lambda: {"tierkv_other": 1.0}
        assert await page.until("names", 2) == ["tierkv_other"]


@pytest.mark.promise("Open live pages neither delay a shutdown nor take unbounded memory.")
async def test_streams_end_at_once_when_the_node_stops(tmp_path: Path) -> None:
    async with process(tmp_path) as child, opened(child.client) as page:
        await page.until("samples")
        child.terminate()
        await page.until("end")  # which a stream that serving cuts off does not have
        assert not await page.more()
        assert await child.ended() == 0


@pytest.mark.promise("Open live pages neither delay a shutdown nor take unbounded memory.")
async def test_a_page_that_takes_nothing_is_dropped_and_the_ring_stays_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_WRITE_S", 0.2)
    async with here() as on:
        on.node.live.figures = lambda: {f"tierkv_{number}": 1e12 for number in range(1000)}
        at = urlsplit(on.client.url)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (at.hostname, at.port))
            await loop.sock_sendall(deaf, b"GET /live/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: on.node.live.num_watching == 1)
            async with asyncio.timeout(20):
                while on.node.live.num_watching:  # the machine's own buffers fill first
                    for _ in range(20):
                        on.node.live.sample()
                    await asyncio.sleep(0.01)


async def test_an_hour_of_samples_costs_the_node_no_more_memory_than_the_first_minutes() -> None:
    feed = LiveFeed()
    feed.figures = lambda: {f"tierkv_{number}_total": 1e12 + number for number in range(80)}
    for _ in range(7200):
        feed.sample()
    ring = feed._ring  # noqa: SLF001 - what it keeps
    assert len(ring) == MAX_SAMPLES
    assert sum(map(len, ring)) < 2 << 20


@pytest.mark.promise("A failure of the live page does not fail the node.")
async def test_what_fails_for_the_page_does_not_fail_the_node(
    on: Here, caplog: pytest.LogCaptureFixture
) -> None:

    def broken() -> dict[str, float]:
        raise ZeroDivisionError("of a test")

    figures, on.node.live.figures = on.node.live.figures, broken
    await until(lambda: "task tierkv-live failed" in caplog.text)
    on.node.live.figures = figures
    async with opened(on.client) as page:
        await page.until("samples")
    assert (await on.client.get("/readyz")).status == 200


async def test_what_is_told_of_requests_is_moments_and_counts_and_never_a_token(on: Here) -> None:
    secret = "the password is swordfish " * 3
    await generate(on.client, secret, "mine")
    async with opened(on.client) as page:
        [one] = await page.until("requests")
        await page.until("prefixes")
        answer = await on.client.get(f"/live/requests/{one['n']}/explain")
    assert one["id"] == "mine"
    assert one["tokens"] == len(secret)
    assert one["missed"] == "never_stored"
    at = one["at"]
    assert at["began"] <= at["admitted"] <= at["computed"] <= at["ended"]
    assert answer.body["reason"] == "nothing is missing"
    packed = b"".join(bytes([code]) for code in b"swordfish")
    for raw in (page.raw, msgspec.json.encode(answer.body)):
        assert packed not in raw
        assert ",".join(str(code) for code in packed).encode() not in raw
        assert not re.search(rb"[0-9a-f]{64}", raw)  # nor a digest, by which to guess


@pytest.mark.promise("A tenant's live page shows only its own requests.")
async def test_a_callers_page_shows_the_requests_and_prefixes_of_its_tenant(
    callers: Callers,
) -> None:
    one, two = [await callers.token(RoleName.WRITE, name) for name in ("one", "two")]
    admin = await callers.token(RoleName.ADMIN)
    async with guarded(callers) as on:
        await generate(on.client, "of tenant one, " * 4, "first", one)
        await generate(on.client, "of tenant two, and longer, " * 8, "second", two)
        seen = {}
        for token in (one, two, admin):
            async with opened(on.client, token) as page:
                told = await page.until("requests")
                runs = (await page.until("prefixes"))["runs"]
            seen[token] = {row["id"]: row["n"] for row in told}, len({run[1] for run in runs})
        assert seen[one] == ({"first": 1}, 1)
        assert seen[two] == ({"second": 2}, 1)
        assert seen[admin] == ({"first": 1, "second": 2}, 2)
        for token, number, status in ((one, 1, 200), (one, 2, 404), (two, 1, 404), (admin, 1, 200)):
            path = f"/live/requests/{number}/explain"
            assert (await on.client.get(path, headers=bearer(token))).status == status
        assert (await on.client.get("/live/requests/1/explain")).status == 401
        for path in ("/live/requests/x/explain", "/live/requests/999/explain"):
            answer = await on.client.get(path, headers=bearer(admin))
            assert (answer.status, answer.code) == (404, "unknown_id")


async def test_the_page_itself_is_public_and_its_data_is_not(callers: Callers) -> None:
    async with guarded(callers) as on:
        page = await on.client.get("/")
        assert page.status == 200
        assert page.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        for name in re.findall(r'(?:src|href)="(live/[^"]+)"', page.body.decode()):
            answer = await on.client.get(f"/{name}")
            assert answer.status == 200, name
            assert answer.body
        assert (await on.client.get("/live/stream")).code == "unauthenticated"
        wrong = bearer("tkv_0000000000000000_no")
        assert (await on.client.get("/live/stream", headers=wrong)).status == 401
        for path in ("/live/none.js", "/live/..%2Flive.py", "/live/uplot.LICENSE", "/live/page"):
            assert (await on.client.get(path)).status == 404, path


def test_the_wheel_has_the_page_and_the_library_is_what_was_published(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    options = ("-q", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", *options, root]
    subprocess.run(command, check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    for file in PAGE.iterdir():
        assert f"tierkv/http/page/{file.name}" in inside
    lines = (PAGE / "SHA256SUMS").read_text().splitlines()
    sums = {name: expected for expected, name in map(str.split, lines)}
    assert set(sums) == {"uplot.js", "uplot.css", "uplot.LICENSE"}
    for name, expected in sums.items():
        assert hashlib.sha256((PAGE / name).read_bytes()).hexdigest() == expected
