"""The client knows every route, and calls each as the table says."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import get_args, get_type_hints
from urllib.parse import unquote

import msgspec
import pytest

from tests.api.nodes import route_table
from tests.client.scripted import scripted, value
from tests.fuzz.test_body_fields import minimal
from tierkv.client import AsyncClient, Client, NotANodeError
from tierkv.http.route import Route

TABLE = {(row.method, row.path): row for row in route_table()}
METHODS = {
    name: method
    for name, method in vars(AsyncClient).items()
    if inspect.iscoroutinefunction(method) and not name.startswith("_")
}


async def asked_by(name: str) -> Route:
    """The route that a method asks, with the name and the body that it was given."""
    method, row = METHODS[name], None
    body_type = get_type_hints(method).get("body")
    kind = next((one for one in (body_type, *get_args(body_type)) if isinstance(one, type)), None)
    async with scripted(value("not what it expects")) as on, AsyncClient(on.url) as client:
        arguments = [
            msgspec.convert(minimal(kind), kind)
            if parameter.name == "body" and kind
            else "a name/?"
            for parameter in list(inspect.signature(method).parameters.values())[1:]
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        with suppress(NotANodeError):
            await method(client, *arguments)
    (asked_method, path, raw), *_ = on.asked
    template = unquote(path.partition("?")[0]).replace("a name/?", "{id}")
    row = TABLE[asked_method, template]
    assert (kind is not None) == (row.body is not None)
    if row.body is not None:
        assert row.body is kind
        assert isinstance(msgspec.msgpack.decode(raw, type=row.body), row.body)
    return row


@pytest.mark.promise("Both clients have a method for every route.")
async def test_every_route_of_the_table_has_a_method_of_both_clients_with_its_answer() -> None:
    routes = [await asked_by(name) for name in METHODS]
    asked = {(row.method, row.path) for row in routes}
    assert asked == set(TABLE)
    assert len(routes) == len(asked)
    for name, row in zip(METHODS, routes, strict=True):
        assert row.answer in (get_type_hints(METHODS[name])["return"], None)
        streams = ["", "stream_"] if row.is_stream else [""]
        assert all(callable(getattr(Client, f"{prefix}{name}")) for prefix in streams)
        assert all(callable(getattr(AsyncClient, f"{prefix}{name}")) for prefix in streams)
