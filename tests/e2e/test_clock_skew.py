"""A node whose clock is wrong, as a process of its own: hand-offs go on, and the skew is shown."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.clocks import ProcessClocks
from tests.e2e.exact import fresh_connections, text, truth
from tests.e2e.test_processes import pair
from tests.processes import NodeProcess, gateway
from tests.redis_server import RedisServer, empty_redis, module_redis
from tierkv.refmodel.model import decode as decode_text

__all__ = ["empty_redis", "module_redis"]
pytestmark = pytest.mark.timeout(300)

AHEAD_S = 660.0  # a ticket lives for 600 s
NUM_TOKENS = 4
CLAIMED = 'tierkv_handoffs_total{outcome="claimed",side="claim"}'
SKEW = 'tierkv_storage_clock_skew_seconds{tenant=""}'


async def metrics(http: aiohttp.ClientSession, where: NodeProcess) -> dict[str, float]:
    async with http.get(where.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    parts = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in parts}


async def storage_detail(http: aiohttp.ClientSession, where: NodeProcess) -> str:
    async with http.get(where.url + "/readyz?verbose") as response:
        return str((await response.json())["parts"]["storage"]["detail"])


async def test_a_decode_node_with_a_wrong_clock_claims_and_shows_its_skew(
    empty_redis: RedisServer, tmp_path: Path
) -> None:
    clocks = ProcessClocks(tmp_path / "clocks")
    clocks.shift("decode", AHEAD_S)
    with clocks.used():
        async with (
            aiohttp.ClientSession(connector=fresh_connections()) as http,
            pair(empty_redis.url, tmp_path) as (_, prefill, decode),
            gateway(tmp_path, prefill=[prefill.url], decode=[decode.url]) as front,
        ):
            for number, ahead_s in enumerate((AHEAD_S, -AHEAD_S, AHEAD_S)):
                clocks.shift("decode", ahead_s)
                prompt = text(300, seed=number)
                body = {"prompt": decode_text(prompt), "max_tokens": NUM_TOKENS, "temperature": 0}
                async with http.post(front.url + "/v1/completions", json=body) as response:
                    told = (await response.json())["choices"][0]["text"]
                assert told == decode_text(truth(prompt, NUM_TOKENS).tokens)
            seen = await metrics(http, front)
            failed = [value for name, value in seen.items() if "failed_attempts_total" in name]
            assert failed
            assert not any(failed)
            found = await metrics(http, decode)
            assert found[CLAIMED] == 3
            assert found[SKEW] == pytest.approx(AHEAD_S, abs=2)
            assert "clock is 660 s ahead of it" in await storage_detail(http, decode)
            assert "clock" not in await storage_detail(http, prefill)
