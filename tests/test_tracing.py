"""Traces, received by a collector's own protocol: one hand-off is one trace, and off is off."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.api.nodes import process
from tests.gateway.scripted import serve
from tests.latch import until
from tests.redis_server import free_port
from tierkv import tracing

pytest.importorskip("opentelemetry.sdk")
messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE, SPAN = CALLER.split("-")[1:3]
PROMPT = "A prompt that is long enough for several blocks of sixteen tokens, and a tail."


@dataclass
class Collector:
    """What an OTLP collector receives over HTTP."""

    spans: list[Any] = field(default_factory=list)
    instances: set[str] = field(default_factory=set)

    async def take(self, request: web.Request) -> web.Response:
        raw = await request.read()  # the server has unpacked it
        told = messages.ExportTraceServiceRequest.FromString(raw)
        for resource in told.resource_spans:
            self.instances |= {
                one.value.string_value
                for one in resource.resource.attributes
                if one.key == "service.instance.id"
            }
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(
            body=messages.ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def names(self, trace: str) -> set[str]:
        return {one.name for one in self.spans if one.trace_id.hex() == trace}

    def one(self, name: str) -> Any:
        [found] = [one for one in self.spans if one.name == name]
        return found


@asynccontextmanager
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Processes that are started meanwhile send their spans there."""
    here, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", here.take)
    async with serve(app) as url:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield here


@pytest.mark.promise("One hand-off is one trace.")
async def test_one_hand_off_is_one_trace_through_the_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "node.toml"
    settings.write_text(f'[storage]\nurl = "file://{tmp_path}/store"\n[handoff]\ndirect = "off"\n')
    given = "--config", settings
    async with (
        collector(monkeypatch) as found,
        process(tmp_path, "--role", "prefill", *given, "--name", "p") as prefill,
        process(tmp_path, "--role", "decode", *given, "--name", "d") as decode,
    ):
        await prefill.client.ask(
            "POST",
            "/v1/prefill",
            json={"prompt": PROMPT, "ticket_id": "t1"},
            headers={"traceparent": CALLER},
        )
        await decode.client.post("/v1/decode", {"prompt": PROMPT, "ticket_id": "t1"})
        await prefill.client.get("/livez")
        prefill.terminate()
        decode.terminate()
        assert await prefill.ended() == 0
        assert await decode.ended() == 0
        await until(lambda: found.instances == {"p", "d"}, "spans of both")
    assert found.names(TRACE) >= {
        "POST /v1/prefill",
        "tierkv.match",
        "tierkv.fetch",
        "tierkv.queue",
        "tierkv.compute",
        "tierkv.storage.write",
        "tierkv.publish",
        "tierkv.claim.wait",
        "tierkv.storage.read",
        "tierkv.load",
    }
    assert found.one("POST /v1/prefill").parent_span_id.hex() == SPAN
    publish, wait = found.one("tierkv.publish"), found.one("tierkv.claim.wait")
    assert wait.parent_span_id == publish.span_id
    assert publish.parent_span_id == found.one("POST /v1/prefill").span_id
    assert wait.end_time_unix_nano >= wait.start_time_unix_nano > time.time_ns() - 10**12
    # The decode node's own request had no caller's span: it is linked.
    [link] = found.one("POST /v1/decode").links
    assert (link.trace_id.hex(), link.span_id) == (TRACE, publish.span_id)
    queues = [one for one in found.spans if one.name == "tierkv.queue"]
    queues.sort(key=lambda one: one.start_time_unix_nano)
    assert all(one.start_time_unix_nano >= wait.end_time_unix_nano for one in queues[1:])
    read = [one for one in found.spans if one.name == "tierkv.storage.read"]
    told = [kept for one in read for kept in one.attributes if kept.key == "blocks"]
    assert sum(one.value.int_value for one in told) == 5
    assert not any("livez" in one.name for one in found.spans)  # probes would be most of it


async def test_a_gateways_request_is_one_trace_with_both_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path}/store"
    async with (
        collector(monkeypatch) as found,
        process(tmp_path, "--role", "prefill", "--storage", store) as prefill,
        process(tmp_path, "--role", "decode", "--storage", store) as decode,
        process(
            tmp_path, "--prefill", prefill.url, "--decode", decode.url, command="gateway"
        ) as front,
    ):
        body = {"prompt": PROMPT, "max_tokens": 4}
        answer = await front.client.post("/v1/completions", body)
        while answer.status == 503:  # the gateway has yet to look at its nodes
            answer = await front.client.post("/v1/completions", body)
        assert answer.status == 200

        def is_whole() -> bool:
            names = {"POST /v1/prefill", "POST /v1/decode", "tierkv.claim.wait"}
            return any(names <= found.names(one.trace_id.hex()) for one in found.spans)

        await until(is_whole, "both nodes' spans")
        [trace] = {one.trace_id.hex() for one in found.spans if one.name == "tierkv.claim.wait"}
        await until(lambda: "POST /v1/completions" in found.names(trace), "the gateway's own")


async def test_a_parent_that_is_none_is_left_out_and_the_request_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collector(monkeypatch) as found, process(tmp_path) as node:
        for wrong in ("nonsense", "00-0-0-0", "00-" + "f" * 5000, CALLER[:-3]):
            answer = await node.client.ask(
                "POST",
                "/v1/generate",
                json={"prompt": PROMPT, "max_tokens": 1},
                headers={"traceparent": wrong},
            )
            assert answer.status == 200
        node.terminate()
        assert await node.ended() == 0
        await until(lambda: len(found.spans) > 4, "spans")
    roots = [one for one in found.spans if one.name == "POST /v1/generate"]
    assert [one.parent_span_id for one in roots] == [b""] * 4
    assert len({one.trace_id for one in roots}) == 4


@pytest.mark.promise("Disabled tracing or an absent collector delays no answer.")
async def test_a_collector_that_is_not_there_costs_neither_answers_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    async with process(tmp_path) as node:
        assert (await node.client.post("/v1/generate", {"prompt": PROMPT})).status == 200
        node.terminate()
        began = time.monotonic()
        assert await node.ended() == 0
        assert time.monotonic() - began < 30  # OpenTelemetry itself would wait for longer


@pytest.mark.promise("Disabled tracing or an absent collector delays no answer.")
def test_off_is_off() -> None:
    script = (
        "import sys, tierkv.api.server, tierkv.gateway.server\n"
        "from tierkv import tracing\n"
        "with tracing.exporting('a', {}), tracing.span('b') as one: assert one is None\n"
        "assert tracing.headers() == {} and not tracing.is_on() and tracing.context() is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_the_package_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with caplog.at_level(logging.WARNING), tracing.exporting("a", environ):
        assert not tracing.is_on()
    assert "pip install -e '.[otel]'" in caplog.text


def test_an_engine_that_traces_has_the_caches_spans_under_its_own(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

told = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(told))
trace.set_tracer_provider(provider)

from tests.embed.engine import engine

with engine(store="memory://") as here:
    with trace.get_tracer("engine").start_as_current_span("step") as step:
        call = here.cache.admit("a", list(range(40)), max_new_tokens=1)
    call.wait(30)
    here.cache.abort("a").wait(30)
ours = step.get_span_context().trace_id
names = {one.name for one in told.get_finished_spans() if one.context.trace_id == ours}
assert {"step", "tierkv.fetch", "tierkv.match"} <= names, names
"""
    )
    subprocess.run([sys.executable, str(script)], check=True, cwd=Path(__file__).parents[1])
