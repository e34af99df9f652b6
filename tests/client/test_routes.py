"""The client knows every route, and calls each as the table says."""

from __future__ import annotations

import inspect
from urllib.parse import unquote

import msgspec
import pytest

from tests.api.nodes import settings
from tests.client.scripted import scripted, value
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.server import routes as table_of
from tierkv.client import AsyncClient, Client, NotANodeError
from tierkv.client import routes as client_routes
from tierkv.client.routes import RouteCall
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.route import Route


def table() -> list[Route]:
    node = Node(settings(), device=CpuDevice(), environ={"XDG_CACHE_HOME": "/nonexistent"})
    try:
        return table_of(node, Metrics(node))
    finally:
        node.device.close()


TABLE = {(row.method, row.path): row for row in table()}
CALLS = {
    name.lower(): call for name, call in vars(client_routes).items() if isinstance(call, RouteCall)
}


def test_every_route_of_the_table_has_a_call_and_no_call_is_of_another() -> None:
    assert {(call.method, call.path) for call in CALLS.values()} == set(TABLE)
    assert len(CALLS) == len(TABLE)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_reads_what_its_route_answers(name: str) -> None:
    call = CALLS[name]
    answer = TABLE[call.method, call.path].answer
    assert call.answer is (answer if answer is not None else bytes)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_a_method_of_both_clients_with_a_body_where_the_route_has_one(
    name: str,
) -> None:
    call = CALLS[name]
    parameters = inspect.signature(getattr(AsyncClient, name)).parameters
    row = TABLE[call.method, call.path]
    assert ("body" in parameters) == (row.body is not None)
    assert callable(getattr(Client, name))
    if row.is_stream:
        assert callable(getattr(AsyncClient, f"stream_{name}"))
        assert callable(getattr(Client, f"stream_{name}"))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "events"])
async def test_each_method_asks_its_route_with_its_body(name: str) -> None:
    call = CALLS[name]
    row = TABLE[call.method, call.path]
    method = getattr(AsyncClient, name)
    arguments: list[object] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.name == "body":
            assert row.body is not None
            arguments.append(some(row.body))
        else:
            arguments.append("a name/?")
    async with scripted(value("not what it expects")) as on, AsyncClient(on.url) as client:
        if name == "metrics":
            assert await client.metrics()
        else:
            with pytest.raises(NotANodeError, match="cannot be read"):
                await method(client, *arguments)
    (asked_method, path, body), *_ = on.asked
    assert asked_method == call.method
    assert unquote(path.partition("?")[0]) == call.path.replace("{id}", "a name/?")
    if row.body is not None:
        decoded: object = msgspec.msgpack.decode(body, type=row.body)
        assert isinstance(decoded, row.body)


def some(kind: type) -> object:
    """A body of this type, with what it cannot do without."""
    given: dict[str, object] = {
        "prompt": "a",
        "ticket_id": "t",
        "num_tokens": 3,
        "url": "memory://",
        "tier": "device",
        "blocks": 7,
    }
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    if kind.__name__ == "CommitBody":
        given.pop("num_tokens")
    return msgspec.convert({key: given[key] for key in given if key in fields}, kind)
