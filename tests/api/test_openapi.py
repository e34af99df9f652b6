"""The OpenAPI document: valid, complete, and true of what the node answers."""

from __future__ import annotations

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.api.nodes import here, settings
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.server import routes
from tierkv.api.types import EXAMPLES
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.bodies import JSON, decode
from tierkv.http.route import Route, document
from tierkv.storage.memory import MemorySettings, MemoryStore


def table() -> list[Route]:
    node = Node(settings(), device=CpuDevice(), store=MemoryStore(MemorySettings(), SystemClock()))
    return routes(node, Metrics(node))


def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(document(table(), EXAMPLES)).validate()


@pytest.mark.promise("The OpenAPI document has every route with its problems.")
def test_every_route_is_in_the_document_with_its_problems() -> None:
    rows = table()
    paths = document(rows, EXAMPLES)["paths"]
    for row in rows:
        operation = paths[row.path][row.method.lower()]
        assert operation["summary"].endswith(".")
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}
        assert ("requestBody" in operation) == (row.body is not None)
        assert str(int(row.status)) in operation["responses"]


def test_no_path_and_method_is_in_the_table_twice() -> None:
    rows = [(row.method, row.path) for row in table()]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_examples_are_what_the_types_take(kind: type) -> None:
    decode(msgspec.json.encode(EXAMPLES[kind]), kind, content_type=JSON)


async def test_every_answer_names_its_request() -> None:
    async with here() as on:
        for path in ("/livez", "/metrics", "/openapi.json", "/v1/blocks", "/v1/stats", "/nothing"):
            for method in ("GET", "HEAD", "PATCH"):
                answer = await on.client.ask(method, path, headers={"X-Request-Id": "mine"})
                assert answer.headers["X-Request-Id"] == "mine", (method, path)
                assert answer.headers["Server"] == "tierkv"
        answer = await on.client.post("/v1/generate", {"prompt": "a", "stream": True})
        assert answer.headers["X-Request-Id"]
        answer = await on.client.ask("HEAD", "/live/stream", headers={"X-Request-Id": "mine"})
        assert answer.headers["X-Accel-Buffering"] == "no"  # proxies let each event through at once
        assert answer.headers["X-Request-Id"] == "mine"


async def test_a_node_tells_its_document() -> None:
    async with here() as on:
        answer = await on.client.get("/openapi.json")
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/json")
        assert "/openapi.json" in answer.body["paths"]
        OpenAPIV31SpecValidator(answer.body).validate()
        assert set(answer.body["paths"]) == {row.path for row in table()}
