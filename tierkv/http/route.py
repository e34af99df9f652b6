"""The route table, from which the router, the OpenAPI document and the access checks are made."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from http import HTTPStatus
from types import FunctionType
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

import tierkv
from tierkv import tracing
from tierkv.http import bodies
from tierkv.http.bodies import EVENT_STREAM, ID_PATTERN, JSON, MSGPACK
from tierkv.http.callers import Access, Guard
from tierkv.http.problems import PROBLEM_JSON, Problem

M = TypeVar("M", bound=Callable[..., Awaitable[object]])

Handler = Callable[[web.BaseRequest], Awaitable[object]]
Fail = Callable[[web.BaseRequest, Exception], web.Response]
Count = Callable[[str, int], None]

NO_ROUTE = "none"  # the path in metrics of answers to unknown paths
_IN_PATH = web.RequestKey("in_path", dict[str, str])
_MARK = "tierkv_route"
_NAME = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_SPOKEN = (HttpVersion11, HttpVersion10)


async def _unbound(_: web.BaseRequest) -> object:
    raise AssertionError("`routes_of` binds the methods")


@dataclass(frozen=True, slots=True)
class Route:
    """One HTTP route, and the decorator that declares this route on a handler method.

    The decorated method returns a value to encode or a complete response. `routes_of` returns the
    routes of an object with such methods.

    Attributes:
        method: The HTTP method.
        path: The path; {name} stands for one segment, {name:.+} for all remaining segments.
        access: The access level that callers need.
        body, answer: msgspec types of the request's body and of the answer; None if there is none.
        status: HTTP status of a successful answer.
        query: Names of query parameters with their types.
        is_stream: True if the answer may also be text/event-stream.
        is_body_optional: True if a missing body is read as {}.
        content_type: Content type of an answer that is neither JSON nor msgpack; None otherwise.
        name: Names of the class and of the method, for OpenAPI.
        summary: The first paragraph of the method's docstring, for OpenAPI.
        handler: The bound method.
    """

    method: str
    path: str
    access: Access
    _: KW_ONLY
    body: type | None = None
    answer: type | None = None
    status: int = HTTPStatus.OK
    query: tuple[tuple[str, type], ...] = ()
    is_stream: bool = False
    is_body_optional: bool = False
    content_type: str | None = None
    name: tuple[str, str] = ("", "")
    summary: str = ""
    handler: Handler = _unbound

    def __call__(self, method: M) -> M:
        vars(method)[_MARK] = self
        return method


def routes_of(owner: object) -> list[Route]:
    """Return the routes that the methods of `owner` declare, in the order of the methods."""
    kind = type(owner)
    return [
        replace(
            row,
            name=(kind.__name__.removesuffix("Routes").lower(), name),
            summary=" ".join((method.__doc__ or "").partition("\n\n")[0].split()),
            handler=getattr(owner, name),
        )
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and (row := vars(method).get(_MARK)) is not None
    ]


def in_path(request: web.BaseRequest, name: str) -> str:
    """Return the decoded part of the request's path that {name} in the route's path stands for.

    Args:
        request: A request that the router has matched to a route.
        name: The name in the route's path.
    """
    return request[_IN_PATH][name]


class HttpRouter:
    """A router: authenticates the caller, calls the route's handler, and turns errors into answers.

    Args:
        table: The routes.
        guard: The authenticator of callers, which must be running.
        fail: Function that returns the error answer, given the request and the error.
        count: Called for each answer with the path of its route ("none" for an unknown path) and
            with its status.
        id_chars: Largest length of a request id from a header; a longer id is cut.
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
        self._places: dict[str, _Path] = {}
        for row in table:
            place = self._places.setdefault(row.path, _Path(row.path, len(self._places)))
            place.rows[row.method] = row
            if row.method == "GET":
                place.rows["HEAD"] = row
        self._patterned = {place.group: place for place in self._places.values() if place.names}
        self._pattern = re.compile("|".join(one.pattern for one in self._patterned.values()))

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the answer to `request`, which may be an error answer.

        Raises:
            ConnectionError: The client has closed the connection.
        """
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
            if row.access is Access.PUBLIC or not tracing.is_on():
                found = await row.handler(request)
            else:
                with tracing.serving(f"{request.method} {path}", request.headers):
                    found = await row.handler(request)
            if isinstance(found, web.StreamResponse):
                response = found
            else:
                response = bodies.answer(request, found, status=row.status)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - `fail` logs an unexpected error
            response = self._fail(request, error)
        finally:
            bodies.release(request)
        self._count(path, response.status)
        return response

    def _admit(self, request: web.BaseRequest, place: _Path | None) -> Route:
        """Return the route for the request after checking the caller's access.

        Only callers with READ access learn that a path is unknown. Other callers cannot find out
        which
        routes exist.
        """
        if request.version not in _SPOKEN:
            raise web.HTTPVersionNotSupported
        row = place.rows.get(request.method) if place else None
        self._guard.authorize(request, row.access if row else Access.READ)
        if row is not None:
            return row
        if place is None:
            raise web.HTTPNotFound
        raise web.HTTPMethodNotAllowed(request.method, place.rows)

    def _find(self, request: web.BaseRequest) -> _Path | None:
        path = request.rel_url.path_safe
        place = self._places.get(path)
        if place is not None and not place.names:
            return place
        found = self._pattern.fullmatch(path)
        if found is None or found.lastgroup is None:
            return None
        place = self._patterned[found.lastgroup]
        request[_IN_PATH] = {
            name: found[group].replace("%2F", "/").replace("%25", "%")
            for name, group in place.names.items()
        }
        return place


class _Path:
    """One path of the route table, its regular expression, and the route of each HTTP method."""

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        self.rows: dict[str, Route] = {}
        self.group = f"path_{number}"
        text, *pieces = _NAME.split(path)  # text, name, pattern, text, name, pattern, text
        self.names = {name: f"{name}_{number}" for name in pieces[::3]}
        self.pattern = f"(?P<{self.group}>{re.escape(text)}"
        for name, pattern, text in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            self.pattern += f"(?P<{self.names[name]}>{pattern or '[^/]+'}){re.escape(text)}"
        self.pattern += ")"


async def _expected(request: web.BaseRequest) -> None:
    """Send `100 Continue`, for which a client waits before sending the body.

    Raise a web.HTTPExpectationFailed for any other expectation in the request's Expect header.
    """
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # aiohttp counts the bytes of the answer here, without this line


Json = dict[str, Any]

_REFS = "#/components/schemas/{name}"
_PROBLEM_REF = {"$ref": "#/components/responses/Problem"}
_NAME_IN_PATH = re.compile(r"\{(\w+)\}")
_ID = {"type": "string", "pattern": ID_PATTERN}

_ALWAYS = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
_OF_CALLERS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_OF_BODIES = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,
    HTTPStatus.GONE,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
)


def document(table: Sequence[Route]) -> Json:
    """Return the OpenAPI document that describes the routes of `table`."""
    types = {kind for row in table for kind in (row.body, row.answer) if kind is not None}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    refs, schemas = msgspec.json.schema_components([*ordered, Problem], ref_template=_REFS)
    _mark_base64(schemas)
    media_of: dict[type, Json] = {
        kind: {"schema": ref} for kind, ref in zip([*ordered, Problem], refs, strict=True)
    }
    paths: dict[str, Json] = {}
    for row in table:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, media_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tierkv",
            "version": tierkv.__version__,
            "summary": "A node of the KV cache: requests, hand-off, cached blocks and life cycle.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"Problem": _problem(media_of[Problem])},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "certificate": {"type": "mutualTLS"},
            },
        },
    }


def _operation(row: Route, media_of: dict[type, Json]) -> Json:
    tag, _ = row.name
    operation: Json = {
        "operationId": "_".join(row.name),
        "tags": [tag],
        "summary": row.summary,
        "x-access": row.access.name.lower(),
        "parameters": _parameters(row),
        "responses": _responses(row, media_of),
        # {} means that a node may run without authentication.
        "security": [] if row.access is Access.PUBLIC else [{"token": []}, {"certificate": []}, {}],
    }
    if row.body is not None:
        media = media_of[row.body]
        content: Json = {JSON: media, MSGPACK: media}
        operation["requestBody"] = {"required": not row.is_body_optional, "content": content}
    return operation


def _parameters(row: Route) -> list[Json]:
    named = [
        {"name": name, "in": "path", "required": True, "schema": _ID}
        for name in _NAME_IN_PATH.findall(row.path)
    ]
    asked = [
        {"name": name, "in": "query", "schema": msgspec.json.schema(kind)}
        for name, kind in row.query
    ]
    headers = ["X-Request-Id"]
    if row.method == "POST" and "request_id" in _fields(row.body):
        headers.append("Idempotency-Key")
    if "session_id" in _fields(row.body):
        headers.append(bodies.SESSION_HEADER)
    return [*named, *asked, *({"name": name, "in": "header", "schema": _ID} for name in headers)]


def _responses(row: Route, media_of: dict[type, Json]) -> Json:
    content: Json = {}
    if row.answer is not None:
        media = media_of[row.answer]
        content = {JSON: media, MSGPACK: media}
    if row.content_type is not None:
        content[row.content_type] = {"schema": {"type": "string"}}
    if row.is_stream:
        content[
            EVENT_STREAM
        ] = {}  # no schema: some tools read it as one event's, others as the stream's
    status = HTTPStatus(row.status)
    good: Json = {"description": status.phrase, "headers": {"X-Request-Id": {"schema": _ID}}}
    if content:
        good["content"] = content
    if status is HTTPStatus.ACCEPTED:
        good["headers"]["Location"] = {"schema": {"type": "string"}}
    codes = [*_ALWAYS, *(_OF_BODIES if row.method != "GET" else (HTTPStatus.BAD_REQUEST,))]
    if row.access is not Access.PUBLIC:
        codes += _OF_CALLERS
    if _NAME_IN_PATH.search(row.path):
        codes += [HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY]
    if row.query:
        codes.append(HTTPStatus.UNPROCESSABLE_ENTITY)
    problems = {str(int(code)): _PROBLEM_REF for code in sorted(set(codes))}
    return {str(int(status)): good, **problems, "default": _PROBLEM_REF}


def _problem(media: Json) -> Json:
    return {
        "description": "A failure, with a stable code.",
        "content": {PROBLEM_JSON: media},
        "headers": {
            "X-Request-Id": {"schema": _ID},
            "Retry-After": {"schema": {"type": "integer"}},
        },
    }


def _fields(kind: type | None) -> tuple[str, ...]:
    return kind.__struct_fields__ if kind and issubclass(kind, msgspec.Struct) else ()


def _mark_base64(schema: object) -> None:
    """Add a base64 pattern to the schemas of bytes fields."""
    if isinstance(schema, dict):
        if schema.get("contentEncoding") == "base64":
            schema["pattern"] = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
        for part in schema.values():
            _mark_base64(part)
    elif isinstance(schema, list):
        for part in schema:
            _mark_base64(part)
