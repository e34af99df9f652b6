"""The routes that tell: probes, version, metrics, stats, verify."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tierkv
from tests.api.nodes import Client, Here, here, settings
from tierkv.api.node import Node
from tierkv.api.server import listening
from tierkv.api.settings import Role
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.server import bind
from tierkv.storage.memory import MemoryStore


@pytest.mark.parametrize("path", ["/readyz", "/healthz"])
async def test_a_node_is_ready_and_says_what_it_depends_on_if_asked(on: Here, path: str) -> None:
    assert (await on.client.get(path)).body == {"status": "ok"}
    verbose = (await on.client.get(f"{path}?verbose")).body
    assert verbose == {
        "status": "ok",
        "parts": {
            "service": {"status": "ok", "detail": "accepts requests"},
            "device": {"status": "ok", "detail": "cpu"},
            "storage": {"status": "ok", "detail": "memory://"},
        },
    }
    assert (await on.client.get(f"{path}?verbose=true")).body == verbose
    for no in ("false", "False", "0"):
        assert (await on.client.get(f"{path}?verbose={no}")).body == {"status": "ok"}


@pytest.mark.promise("A node whose store is down or read-only is ready and degraded.")
async def test_a_node_whose_store_is_down_is_ready_but_degraded(on: Here) -> None:
    on.store.fail_next(1)
    answer = await on.client.get("/readyz?verbose")
    assert answer.status == 200
    assert answer.body["status"] == "degraded"
    assert answer.body["parts"]["storage"]["status"] == "degraded"
    on.store.fail_next(100)
    answer = await on.client.post("/v1/generate", {"prompt": "still answers"})
    assert answer.status == 200
    on.store.fail_next(0)
    assert (await on.client.get("/readyz")).body == {"status": "ok"}


async def test_a_store_that_says_nothing_makes_a_node_degraded_not_silent(on: Here) -> None:
    on.store.hold()
    answer = await on.client.get("/readyz?verbose")
    assert (answer.status, answer.body["status"]) == (200, "degraded")
    assert "does not answer" in answer.body["parts"]["storage"]["detail"]


@pytest.mark.promise("A lost device makes a node unready and leaves it alive.")
async def test_a_lost_device_makes_a_node_unready_and_leaves_it_alive(on: Here) -> None:
    device = on.node.device
    assert isinstance(device, CpuDevice)
    device.failure = device.status = "GPU 0 is lost to this process: restart the process"
    for path in ("/readyz", "/readyz?verbose"):
        answer = await on.client.get(path)
        assert (answer.status, answer.code) == (503, "not_ready")
        assert "device: GPU 0 is lost" in answer.body["detail"]
    assert (await on.client.get("/livez")).status == 200
    assert (await on.client.get("/v1/stats")).status == 200
    assert (await on.client.get("/v1/verify")).body == {"findings": []}


@pytest.mark.parametrize("failure", [None, "tierkv-flush ended with OSError: disk full"])
async def test_a_draining_node_is_alive_takes_no_work_and_says_why_it_is_not_ready(
    on: Here, failure: str | None
) -> None:
    on.node.service.failure = failure
    on.node.drain()
    assert (await on.client.get("/livez")).status == 200
    why = f"shutting down after a failure: {failure}" if failure else "shutting down"
    for verbose in ("", "?verbose"):
        answer = await on.client.get(f"/readyz{verbose}")
        assert (answer.status, answer.code) == (503, "not_ready")
        assert f"this node is {why}" in answer.body["detail"]
    for path in ("generate", "prefill", "decode", "lookup"):
        refused = await on.client.post(f"/v1/{path}", {"prompt": "a", "ticket_id": "t"})
        assert (refused.status, refused.code) == (503, "shutting_down")


async def test_a_node_that_has_not_started_is_alive_and_not_ready() -> None:
    node = Node(settings(), environ={"XDG_CACHE_HOME": "/nonexistent"})
    async with (
        listening(node, bind(node.settings.node)) as url,
        aiohttp.ClientSession() as session,
    ):
        client = Client(url, session)
        assert (await client.get("/livez")).status == 200
        assert (await client.get("/version")).status == 200
        for path in ("/readyz", "/v1/stats", "/v1/verify", "/metrics"):
            answer = await client.get(path)
            assert (answer.status, answer.code) == (503, "not_ready")
        answer = await client.post("/v1/generate", {"prompt": "a"})
        assert (answer.status, answer.code) == (503, "not_ready")
    node.device.close()


async def test_version_tells_what_two_nodes_must_share() -> None:
    async with here(Role.DECODE, name="d1") as on:
        answer = (await on.client.get("/version")).body
        assert answer["version"] == tierkv.__version__
        assert (answer["name"], answer["role"]) == ("d1", "decode")
        assert answer["fingerprint"]["model"] == "tierkv-ref-tiny"


# Metrics


async def test_every_series_is_there_before_the_first_request(on: Here) -> None:
    before = await on.client.metrics()
    await on.client.post("/v1/prefill", {"prompt": "hello " * 20, "ticket_id": "t"})
    await on.client.post("/v1/decode", {"prompt": "hello " * 20, "ticket_id": "t"})
    await on.client.post("/v1/decode", {"prompt": "hello", "ticket_id": "t"})
    await on.client.post("/v1/generate", {"prompt": ""})
    await on.client.get("/nothing")
    after = await on.client.metrics()
    assert set(after) == set(before)


@pytest.mark.promise("The documented metrics are all metrics.")
async def test_the_table_of_metrics_has_all_of_them_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    async with here() as on:
        text = (await on.client.get("/metrics")).body.decode()
        exposed = {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in text_string_to_metric_families(text)
            if family.name.startswith("tierkv_") and not family.name.endswith("_created")
        }
    assert set(re.findall(r"`(tierkv_\w+)", page)) == exposed


async def test_counts_follow_what_happens(on: Here) -> None:
    prompt = "a prompt of some words, " * 4  # 96 tokens
    await on.client.post("/v1/generate", {"prompt": prompt, "max_tokens": 4})
    await on.client.post("/v1/generate", {"prompt": prompt, "max_tokens": 4})
    await on.client.post("/v1/prefill", {"prompt": prompt, "ticket_id": "t"})
    found = await on.client.metrics()

    def value(name: str, **labels: str) -> float:
        pairs = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
        return found[f"{name}{{{pairs}}}" if pairs else name]

    assert value("tierkv_ready") == 1
    assert value("tierkv_lookup_tokens_total", result="hit_device") == 2 * 95
    assert value("tierkv_lookup_tokens_total", result="miss") == 96 + 2
    assert value("tierkv_admitted_requests_total") == 3
    assert value("tierkv_generated_tokens_total") == 9
    assert value("tierkv_transfer_bytes_total", direction="storage_write") > 0
    assert value("tierkv_tier_capacity_bytes", tier="device") == 64 * 16 * 1024
    used = value("tierkv_blocks", tier="device", state="used")
    assert value("tierkv_tier_used_bytes", tier="device") == used * 16 * 1024
    assert value("tierkv_http_requests_total", route="/v1/generate", status="2xx") == 2
    assert value("tierkv_time_to_first_token_seconds_count", operation="generate") == 2
    assert value("tierkv_time_to_first_token_seconds_count", operation="prefill") == 1
    assert value("tierkv_estimated_seconds", way="compute") > 0
    await on.client.post("/v1/decode", {"prompt": prompt, "ticket_id": "t", "max_tokens": 2})
    async with asyncio.timeout(10):  # the node measures its loop every 50 ms
        while not value("tierkv_event_loop_lag_seconds_count"):
            found = await on.client.metrics()
    found = await on.client.metrics()
    assert value("tierkv_handoffs_total", side="publish", outcome="published") == 1
    assert value("tierkv_handoffs_total", side="claim", outcome="claimed") == 1


async def test_it_is_told_when_each_layer_of_loads_was_there(store: MemoryStore) -> None:
    async with here(Role.PREFILL, store=store) as p, here(Role.DECODE, store=store) as d:
        work = {"prompt": "a prompt of some words, " * 4, "ticket_id": "t"}
        await p.client.post("/v1/prefill", work)
        await d.client.post("/v1/decode", work)
        times = (await d.client.get("/v1/stats")).body["load_layers"]
        assert times["num_loads"] > 0
        assert 0 <= times["total_s"][0] <= times["total_s"][-1]
        found = await d.client.metrics()
        for layer, total_s in enumerate(times["total_s"]):
            for name, expected in (("count", times["num_loads"]), ("sum", total_s)):
                assert found[f'tierkv_load_layer_seconds_{name}{{layer="{layer}"}}'] == expected


async def test_openmetrics_is_spoken_to_who_asks_for_it(on: Here) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = await on.client.get("/metrics", headers=accept)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")
