"""Allowed bodies cannot kill a gateway, or keep other callers from it: as processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from tests.processes import NodeProcess, gateway, node

_LAG = re.compile(r'tierkv_gateway_event_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')


def peak_rss_mib(process: NodeProcess) -> float:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def lag_p99_s(metrics: str) -> float:
    """The bucket in which the 99th of 100 beats of the loop is."""
    buckets = [(float(le), float(count)) for le, count in _LAG.findall(metrics)]
    return next(le for le, count in buckets if count >= 0.99 * buckets[-1][1])


async def test_long_prompts_leave_room_for_small_ones_and_end_with_the_drain(
    tmp_path: Path,
) -> None:
    clients, mebibytes, seconds, most_mib = 8, 4, 3.0, 400
    config = tmp_path / "all.toml"
    config.write_text("[gateway]\ndrain_grace_s = 2.0\n[cache]\ndevice_blocks = 256\n")
    options = ("--config", str(config))
    small_s: list[float] = []
    async with (
        node("n", role="both", config=config, storage="none", folder=tmp_path) as one,
        gateway(tmp_path, prefill=(), decode=(), options=(*options, "--both", one.url)) as front,
        aiohttp.ClientSession() as http,
    ):
        generator = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("long_prompts.py"))),
            *(front.url.rsplit(":", 1)[1], str(clients), str(mebibytes), str(seconds)),
            stdout=subprocess.PIPE,
        )
        ended = asyncio.ensure_future(generator.communicate())
        body = {"prompt": "a small prompt", "max_tokens": 1}
        while not ended.done():
            started = time.monotonic()
            async with http.post(front.url + "/v1/completions", json=body) as response:
                assert response.status in (200, 503), await response.text()
                is_answered = response.status == 200
            small_s += [time.monotonic() - started] if is_answered else []
            await asyncio.wait([ended], timeout=0.1)
        told_by_clients = json.loads((await ended)[0])
        statuses, bare_s = told_by_clients["statuses"], told_by_clients["late_s"]
        metrics = await front.client.metrics()
        peak_mib, lag_s = peak_rss_mib(front), lag_p99_s(metrics)
        started = time.monotonic()
        front.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await front.process.wait()
        small_s.sort()
        told = (
            f"{statuses}; peak {peak_mib:.0f} MiB, lag p99 {lag_s} s ({bare_s:.3f} of a loop "
            f"that reads one whole), {len(small_s)} small: median "
            f"{small_s[len(small_s) // 2]:.3f}, worst {small_s[-1]:.3f} s; ended in "
            f"{time.monotonic() - started:.1f} s with {front.process.returncode}"
        )
        sys.stdout.write(told + "\n")  # figures, with -s
    assert set(statuses) <= {"400", "422", "503"}, told  # refused, or turned away for now
    assert peak_mib < most_mib, told
    assert lag_s <= max(4 * bare_s, 0.25), told
    assert small_s[-1] < max(20 * bare_s, 2.0), told
    assert front.process.returncode == 0, told
    assert f'tierkv_gateway_node_failures_in_a_row{{node="{one.url}"}} 0.0' in metrics, told
