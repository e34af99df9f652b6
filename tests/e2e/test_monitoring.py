"""A real Prometheus looks at real nodes and a gateway: every panel of the dashboard shows
something, and each alert fires when its fault happens, and not before."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.processes import NodeProcess, gateway, node
from tests.prometheus_server import (
    DEPLOY,
    RULES,
    Prometheus,
    expressions_of,
    prometheus,
    promtool,
)
from tests.redis_server import RedisServer, program, redis_server
from tierkv.demo.processes import together

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

MOST_S = 0.15
CONFIG = """
[cache]
device_blocks = 512
host_blocks = 256
storage_write = "write_through"
"""
SMALL = """
[cache]
device_blocks = 64
host_blocks = 64
host_write = "write_back"
"""


def address(process: NodeProcess) -> str:
    return process.url.removeprefix("http://")


@dataclass
class Watched:
    """Prefill and decode nodes over Redis behind a gateway; a small node without storage; and one
    that is to be killed, alone behind a gateway of its own."""

    redis: RedisServer
    prefill: NodeProcess
    decode: NodeProcess
    small: NodeProcess
    mortal: NodeProcess
    gateway: NodeProcess
    other_gateway: NodeProcess
    prometheus: Prometheus
    http: aiohttp.ClientSession
    fired_before: set[tuple[str, str]]

    async def post(self, where: NodeProcess, path: str, **body: Any) -> int:
        async with self.http.post(where.url + path, json=body) as response:
            await response.read()
            return response.status

    async def fires(self, alert: str, where: NodeProcess) -> None:
        await self.prometheus.until_fires(alert, address(where))


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    (folder / "node.toml").write_text(CONFIG)
    (folder / "small.toml").write_text(SMALL)
    async with AsyncExitStack() as stack:
        program("prometheus")
        redis = stack.enter_context(redis_server("--maxmemory-policy", "noeviction"))

        of_redis: dict[str, Any] = {"config": folder / "node.toml", "storage": redis.url}
        alone: dict[str, Any] = {"role": "both", "config": folder / "small.toml", "storage": "none"}
        nodes = (
            node("prefill", role="prefill", folder=folder, direct="off", **of_redis),
            node("decode", role="decode", folder=folder, direct="off", **of_redis),
            node("small", folder=folder, direct="off", **alone),
            node("mortal", folder=folder, direct="off", **alone),
        )
        prefill, decode, small, mortal = await together(*map(stack.enter_async_context, nodes))
        front, other = [
            await stack.enter_async_context(
                gateway(folder, prefill=before, decode=after, options=options)
            )
            for before, after, options in (
                ([prefill.url], [decode.url], ()),
                ([], [], ("--both", mortal.url)),
            )
        ]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200))
        )
        jobs = {
            "tierkv-nodes": [address(one) for one in (prefill, decode, small, mortal)],
            "tierkv-gateway": [address(front), address(other)],
        }
        await skip_if_too_slow(http, [one for addresses in jobs.values() for one in addresses])
        server = await stack.enter_async_context(prometheus(folder, jobs))
        fleet = Watched(redis, prefill, decode, small, mortal, front, other, server, http, set())
        await some_load(fleet)
        seen = await server.evaluations()

        async def has_looked() -> bool:
            return await server.evaluations() >= seen + 4

        await server.until(has_looked, "a few rounds of the rules")

        async def is_quiet() -> bool:
            fleet.fired_before = await server.firing()
            return not fleet.fired_before

        # A busy machine makes loops late for a while, and then it is right that this is said.
        with suppress(AssertionError):
            await server.until(is_quiet, "no alert")
        yield fleet


async def skip_if_too_slow(http: aiohttp.ClientSession, addresses: list[str]) -> None:
    """Prometheus looks at all of them each half second: where that is most of what the machine can
    do, alerts are right to fire."""

    async def look() -> float:
        began = time.monotonic()
        for one in addresses:
            async with http.get(f"http://{one}/metrics") as response:
                await response.read()
        return time.monotonic() - began

    if (took_s := min([await look() for _ in range(3)])) > MOST_S:
        pytest.skip(f"a look at all processes takes this machine {took_s:.2f} s, above {MOST_S} s")


async def some_load(on: Watched) -> None:
    """Counters that are about to be looked at have been seen before they grow."""

    async def all_seen() -> bool:
        return len(await on.prometheus.query('up{job=~"tierkv.*"} == 1')) == 6

    await on.prometheus.until(all_seen, "all six processes")
    for number in range(3):
        for _ in range(2):
            body = {"prompt": f"{number} of some words. " * 12, "max_tokens": 4}
            assert await on.post(on.gateway, "/v1/completions", **body) == 200
            assert await on.post(on.other_gateway, "/v1/completions", **body) == 200
    # More than the device holds, so that blocks go to the host and come back; and more than both.
    for number in (0, 1, 2, 3, 0, 4, 5, 5, 5):
        prompt = chr(97 + number) * 480
        assert await on.post(on.small, "/v1/generate", prompt=prompt, max_tokens=1) == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    async with watched(tmp_path_factory.mktemp("watched")) as fleet:
        yield fleet


@pytest.mark.promise("`promtool` accepts metrics and alert rules.")
async def test_metrics_and_rules_are_what_promtool_likes(on: Watched) -> None:
    for process in (on.prefill, on.gateway):
        async with on.http.get(process.url + "/metrics") as response:
            assert await promtool("check", "metrics", stdin=await response.read()) == (0, "")
    status, said = await promtool("check", "rules", str(RULES))
    assert status == 0, said


@pytest.mark.promise("Every dashboard panel shows data.")
async def test_every_panel_of_the_dashboard_shows_something(on: Watched) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tierkv.json").read_text())
    empty = [
        f"{title}: {expression}"
        for title, expressions in expressions_of(dashboard).items()
        for expression in expressions
        if not await on.prometheus.query(expression)
    ]
    assert empty == []


@pytest.mark.promise("Each alert fires on its fault and on no healthy system.")
async def test_no_alert_fires_while_all_is_well(on: Watched) -> None:
    assert on.fired_before == set()


def damage_all_blocks(redis: RedisServer) -> None:
    names = redis.execute("KEYS", "*")
    assert isinstance(names, list)
    blocks = [name for name in names if int(str(redis.execute("STRLEN", name))) > 9000]
    assert blocks
    for name in blocks:
        redis.execute("SETRANGE", name, 8000, b"damage")


@pytest.mark.promise("Each alert fires on its fault and on no healthy system.")
async def test_alerts_of_the_store_fire(on: Watched) -> None:
    words = "what is stored and damaged. " * 12
    assert await on.post(on.prefill, "/v1/prefill", prompt=words, ticket_id="to-be-damaged") == 200
    damage_all_blocks(on.redis)
    claim = {"prompt": words, "ticket_id": "to-be-damaged", "policy": "recompute"}
    await on.post(on.decode, "/v1/decode", **claim)
    await on.fires("TierKVDamagedBlocks", on.decode)

    on.redis.execute("CONFIG", "SET", "maxmemory", "1")
    await on.post(on.prefill, "/v1/prefill", prompt="no room for this " * 9, ticket_id="refused")
    await on.fires("TierKVStoreRefusesWrites", on.prefill)
    on.redis.execute("CONFIG", "SET", "maxmemory", "0")

    on.redis.pause()
    try:
        statuses = await asyncio.gather(
            *(
                on.post(on.prefill, "/v1/prefill", prompt=f"{n} lost " * 9, ticket_id=f"lost{n}")
                for n in range(4)
            )
        )
        assert 200 not in statuses
        await on.fires("TierKVStoreUnreachable", on.prefill)
        await on.fires("TierKVHandoffsFail", on.prefill)
    finally:
        on.redis.resume()


@pytest.mark.promise("Each alert fires on its fault and on no healthy system.")
async def test_alerts_of_a_small_node_fire(on: Watched) -> None:
    for _ in range(3):
        for number in range(6):  # as much again as both tiers hold
            prompt = chr(65 + number) * 480
            assert await on.post(on.small, "/v1/generate", prompt=prompt, max_tokens=1) == 200
    await on.fires("TierKVThrash", on.small)

    long = [
        asyncio.create_task(
            on.post(on.small, "/v1/generate", prompt=f"{n} goes on ", max_tokens=900)
        )
        for n in range(6)
    ]
    await on.fires("TierKVNoRoom", on.small)
    for task in long:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    for _ in range(6):
        on.small.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.4)  # what the fault is: no timer is served meanwhile
        on.small.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.1)
    await on.fires("TierKVEventLoopLag", on.small)


@pytest.mark.promise("Each alert fires on its fault and on no healthy system.")
async def test_alerts_of_a_node_that_dies_fire(on: Watched) -> None:
    on.mortal.process.kill()
    await on.mortal.process.wait()
    body = {"prompt": "nobody answers", "max_tokens": 4}
    assert await on.post(on.other_gateway, "/v1/completions", **body) >= 500
    await on.fires("TierKVTargetDown", on.mortal)
    await on.fires("TierKVNodeOutOfRotation", on.other_gateway)
    await on.fires("TierKVGatewayErrors", on.other_gateway)
