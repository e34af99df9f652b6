"""The OpenAPI document: valid, complete, and true of what the node answers."""

from __future__ import annotations

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.api.nodes import Here, route_table
from tierkv.http.route import document


@pytest.mark.promise("The OpenAPI document has every route with its problems.")
def test_every_route_is_in_the_document_with_its_problems() -> None:
    rows = route_table()
    paths = document(rows)["paths"]
    for row in rows:
        operation = paths[row.path][row.method.lower()]
        assert operation["summary"].endswith(".")
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}
        assert ("requestBody" in operation) == (row.body is not None)
        assert str(int(row.status)) in operation["responses"]


async def test_every_answer_names_its_request(on: Here) -> None:
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


async def test_a_node_tells_its_document(on: Here) -> None:
    answer = await on.client.get("/openapi.json")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    assert "/openapi.json" in answer.body["paths"]
    OpenAPIV31SpecValidator(answer.body).validate()
    assert set(answer.body["paths"]) == {row.path for row in route_table()}
