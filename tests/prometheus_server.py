"""A real Prometheus of a test's own, which scrapes twice a second and asks its rules as often."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.redis_server import free_port, program
from tierkv.demo.processes import child

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DEBIAN = " (Debian's package prometheus has it)"
Sample = tuple[dict[str, str], float]


async def promtool(*arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    """Exit status, and all it said."""
    process = await asyncio.create_subprocess_exec(
        program("promtool", DEBIAN),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate(stdin)
    return process.returncode or 0, said.decode()


def rules_at_once() -> dict[str, Any]:
    """The shipped rules, but that none waits for its fault to last, or looks back on minutes."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["for"] = "0s"
            rule["expr"] = re.sub(r"\[\d+m\]", "[15s]", rule["expr"])
    return rules


@dataclass
class Prometheus:
    url: str
    http: aiohttp.ClientSession

    async def query(self, expression: str) -> list[Sample]:
        """Labels and value of each series that is a number."""
        async with self.http.get(
            f"{self.url}/api/v1/query", params={"query": expression}
        ) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        result = answer["data"]["result"]
        values = [(one["metric"], float(one["value"][1])) for one in result]
        return [(labels, value) for labels, value in values if not math.isnan(value)]

    async def firing(self) -> set[tuple[str, str]]:
        """Names of alerts, with the instance that they are about."""
        async with self.http.get(f"{self.url}/api/v1/alerts") as response:
            alerts = (await response.json())["data"]["alerts"]
        return {
            (one["labels"]["alertname"], one["labels"].get("instance", ""))
            for one in alerts
            if one["state"] == "firing"
        }

    async def evaluations(self) -> float:
        name = "prometheus_rule_group_iterations_total"
        async with self.http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def until(self, is_so: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(30):
                while not await is_so():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"never seen: {what}; firing: {await self.firing()}") from None

    async def until_fires(self, alert: str, instance: str) -> None:
        async def fires() -> bool:
            return (alert, instance) in await self.firing()

        await self.until(fires, f"{alert} of {instance}")


@asynccontextmanager
async def prometheus(folder: Path, jobs: Mapping[str, Sequence[str]]) -> AsyncIterator[Prometheus]:
    """jobs: addresses by job. Skips the test where there is no Prometheus."""
    path = program("prometheus", DEBIAN)
    (folder / "rules.yml").write_text(json.dumps(rules_at_once()))
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]}
            for job, targets in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [path, f"--config.file={folder / 'prometheus.yml'}", "--log.level=warn"]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}"]
    async with child(command, folder / "prometheus.log"), aiohttp.ClientSession() as http:
        server = Prometheus(f"http://{address}", http)

        async def is_ready() -> bool:
            try:
                async with http.get(f"{server.url}/-/ready") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        async with asyncio.timeout(30):
            while not await is_ready():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        yield server


def expressions_of(dashboard: Mapping[str, Any]) -> dict[str, list[str]]:
    """By panel's title, with Grafana's variables filled in as it would for all nodes."""
    found = {}
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        texts = [
            target["expr"].replace("$__rate_interval", "10m").replace("$instance", ".*")
            for target in panel["targets"]
        ]
        left = [text for text in texts if re.search(r"\$\w", text)]
        assert left == [], "no variable is left"
        found[panel["title"]] = texts
    return found
