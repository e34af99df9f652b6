"""One row of the route table: from it come the router, the OpenAPI document and the auth matrix."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from http import HTTPStatus
from types import FunctionType
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from tierkv.http import bodies
from tierkv.http.callers import Access

M = TypeVar("M", bound=Callable[..., Awaitable[object]])

_MARK = "tierkv_routes"


class Disconnect(Enum):
    """What happens to the work of a client that has gone."""

    CANCEL = "cancel"  # it is stopped, and what it held is given back
    DETACH = "detach"  # it goes on to its end: others may wait for the result


async def _unbound(_: web.Request) -> web.StreamResponse:
    raise AssertionError("`routes_of` says whose method answers")


@dataclass(frozen=True, slots=True)
class Route:
    """Put it on a method as a decorator; `routes_of` then tells the rows of an object. The method
    returns what is to be encoded, or a whole response.

    path: with aiohttp's {names}. body, answer: msgspec types, None where there is none.
    query: names of query parameters with their types. is_stream: the answer may also be
    text/event-stream. is_body_optional: none is as good as {}. content_type: of the answer, where
    it is not JSON or msgpack. name: of the class and the method. summary: the first paragraph of
    the method's docstring.
    """

    method: str
    path: str
    access: Access
    _: KW_ONLY
    body: type | None = None
    answer: type | None = None
    status: int = HTTPStatus.OK
    on_disconnect: Disconnect = Disconnect.CANCEL
    query: tuple[tuple[str, type], ...] = ()
    is_stream: bool = False
    is_body_optional: bool = False
    content_type: str | None = None
    name: tuple[str, str] = ("", "")
    summary: str = ""
    handler: Handler = _unbound

    def __call__(self, method: M) -> M:
        # Of several, the last one is put on first.
        vars(method).setdefault(_MARK, []).insert(0, self)
        return method


# Which row a request's `match_info.route` is; a 404 or 405 has none.
_TABLE = web.AppKey("table", dict[web.AbstractRoute, Route])


def routes_of(owner: object) -> list[Route]:
    """The rows of the owner's methods, in the order in which its class has them."""
    kind = type(owner)
    return [
        replace(
            row,
            name=(kind.__name__.removesuffix("Routes").lower(), name),
            summary=" ".join((method.__doc__ or "").partition("\n\n")[0].split()),
            handler=_encoding(getattr(owner, name), row.status),
        )
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType)
        for row in vars(method).get(_MARK, ())
    ]


def _encoding(method: Callable[[web.Request], Awaitable[object]], status: int) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        found = await method(request)
        if isinstance(found, web.StreamResponse):
            return found
        return bodies.answer(request, found, status=status)

    return handler


def register(table: Iterable[Route], app: web.Application) -> None:
    app[_TABLE] = registered = {}
    for row in table:
        for method in ("GET", "HEAD") if row.method == "GET" else (row.method,):
            registered[app.router.add_route(method, row.path, row.handler)] = row


def access_of(request: web.Request) -> Access:
    """What its route needs. A path or method that there is not needs READ, so that a stranger does
    not learn which there are."""
    row = request.app[_TABLE].get(request.match_info.route)
    return row.access if row else Access.READ
