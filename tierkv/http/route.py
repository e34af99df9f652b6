"""The route table: its rows give the router, the OpenAPI document and the auth matrix."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from http import HTTPStatus
from types import FunctionType
from typing import TypeVar

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from tierkv.http import bodies
from tierkv.http.auth import Guard
from tierkv.http.callers import Access

M = TypeVar("M", bound=Callable[..., Awaitable[object]])

Handler = Callable[[web.BaseRequest], Awaitable[object]]
Fail = Callable[[web.BaseRequest, Exception], web.Response]
Count = Callable[[str, int], None]

NO_ROUTE = "none"  # what answers to paths that there are not are counted under
_IN_PATH = web.RequestKey("in_path", dict[str, str])
_MARK = "tierkv_routes"
_NAME = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_SPOKEN = (HttpVersion11, HttpVersion10)


class Disconnect(Enum):
    """What happens to the work of a client that has gone."""

    CANCEL = "cancel"  # it is stopped, and what it held is given back
    DETACH = "detach"  # it goes on to its end: others may wait for the result


async def _unbound(_: web.BaseRequest) -> object:
    raise AssertionError("`routes_of` says whose method answers")


@dataclass(frozen=True, slots=True)
class Route:
    """Put it on a method as a decorator; `routes_of` then tells the rows of an object. The method
    returns what is to be encoded, or a whole response.

    path: {name} is one part of it, {name:.+} all the rest. body, answer: msgspec types, None where
    there is none.
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


def routes_of(owner: object) -> list[Route]:
    """The rows of the owner's methods, in the order in which its class has them."""
    kind = type(owner)
    return [
        replace(
            row,
            name=(kind.__name__.removesuffix("Routes").lower(), name),
            summary=" ".join((method.__doc__ or "").partition("\n\n")[0].split()),
            handler=getattr(owner, name),
        )
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType)
        for row in vars(method).get(_MARK, ())
    ]


def in_path(request: web.BaseRequest, name: str) -> str:
    """What the request's path has for {name}."""
    return request[_IN_PATH][name]


class HttpRouter:
    """Answers requests from the table: names each, asks who calls, runs the row's handler, and
    turns whatever that raises into an answer.

    guard: knows who may call; it must be running. fail: an answer that tells of an error.
    count: told of each answer's path, as in the table, and status. id_chars: so much of the id in a
    request's header is its id.
    """

    def __init__(
        self,
        table: Iterable[Route],
        guard: Guard,
        fail: Fail,
        count: Count = lambda *_: None,
        *,
        id_chars: int = 256,
    ) -> None:
        self._id_chars = id_chars
        self._guard = guard
        self._fail = fail
        self._count = count
        self._exact: dict[str, _Path] = {}
        self._patterns: dict[str, _Path] = {}
        for row in table:
            places = self._patterns if "{" in row.path else self._exact
            place = places.setdefault(row.path, _Path(row.path))
            place.rows[row.method] = row
            if row.method == "GET":
                place.rows["HEAD"] = row

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Raises ConnectionError if the client has gone."""
        request[bodies.REQUEST_ID] = bodies.first_id(request)[: self._id_chars]
        path = NO_ROUTE
        response: web.StreamResponse
        try:
            place = self._find(request)
            if place:
                path = place.path
            row = self._admit(request, place)
            if "Expect" in request.headers:
                await _expected(request)
            found = await row.handler(request)
            if isinstance(found, web.StreamResponse):
                response = found
            else:
                response = bodies.answer(request, found, status=row.status)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - what nobody expected is logged by `fail`
            response = self._fail(request, error)
        finally:
            bodies.let_go(request)
        self._count(path, response.status)
        return response

    def _admit(self, request: web.BaseRequest, place: _Path | None) -> Route:
        """The row, if there is one and its caller may. To be told that there is none needs READ: a
        stranger does not learn by trying which there are."""
        if request.version not in _SPOKEN:
            raise web.HTTPVersionNotSupported
        row = place.rows.get(request.method) if place else None
        self._guard.admit(request, row.access if row else Access.READ)
        if row is not None:
            return row
        if place is None:
            raise web.HTTPNotFound
        raise web.HTTPMethodNotAllowed(request.method, place.rows)

    def _find(self, request: web.BaseRequest) -> _Path | None:
        path = request.rel_url.path_safe
        place = self._exact.get(path)
        if place is not None:
            return place
        for place in self._patterns.values():
            if path.startswith(place.start) and (found := place.pattern.fullmatch(path)):
                request[_IN_PATH] = {
                    name: value.replace("%2F", "/").replace("%25", "%")
                    for name, value in found.groupdict().items()
                }
                return place
        return None


class _Path:
    """One path of the table with the rows of its methods. start: what its requests begin with."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: dict[str, Route] = {}
        self.start = path.partition("{")[0]
        pieces = _NAME.split(path)  # text, name, pattern, text, name, pattern, text
        self.pattern = re.compile(
            "".join(
                re.escape(text) + (f"(?P<{name}>{pattern or '[^/]+'})" if name else "")
                for text, name, pattern in zip(
                    pieces[::3], [*pieces[1::3], None], [*pieces[2::3], None], strict=True
                )
            )
        )


async def _expected(request: web.BaseRequest) -> None:
    """Let the client send its body, which it waits to be asked for."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the answer, of which this is no part
