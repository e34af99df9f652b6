"""The OpenAPI 3.1 document, made from the route table and the types of its bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

import tierkv
from tierkv.http.bodies import EVENT_STREAM, ID_PATTERN, JSON, MSGPACK, OCTETS
from tierkv.http.callers import Access
from tierkv.http.problems import PROBLEM_JSON, Problem
from tierkv.http.route import Route

Json = dict[str, Any]

_REFS = "#/components/schemas/{name}"
_PROBLEM_REF = {"$ref": "#/components/responses/Problem"}
_NAME = re.compile(r"\{(\w+)\}")
_ID = {"type": "string", "pattern": ID_PATTERN}
_METHODS_THAT_ARE_NAMED = ("POST",)

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


def document(table: Sequence[Route], examples: Mapping[type, Json]) -> Json:
    """The document of all routes of `table`. examples: one for each type that has some."""
    types = {kind for row in table for kind in (row.body, row.answer) if kind is not None}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    refs, schemas = msgspec.json.schema_components([*ordered, Problem], ref_template=_REFS)
    media_of: dict[type, Json] = {
        kind: {"schema": ref, **({"example": examples[kind]} if kind in examples else {})}
        for kind, ref in zip([*ordered, Problem], refs, strict=True)
    }
    paths: dict[str, Json] = {}
    seen: set[str] = set()
    for row in table:
        operation = _operation(row, media_of)
        if operation["operationId"] in seen:  # two paths, one handler
            operation["operationId"] += "_" + row.path.strip("/")
        seen.add(operation["operationId"])
        paths.setdefault(row.path, {})[row.method.lower()] = operation
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
            "schemas": _exact(schemas),
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
        "x-on-disconnect": row.on_disconnect.value,
        "parameters": _parameters(row),
        "responses": _responses(row, media_of),
        # {}: a node that asks nobody who they are.
        "security": [] if row.access is Access.PUBLIC else [{"token": []}, {"certificate": []}, {}],
    }
    if row.body is not None:
        operation["requestBody"] = _body(row, row.body, media_of[row.body])
    return operation


def _parameters(row: Route) -> list[Json]:
    named = [
        {"name": name, "in": "path", "required": True, "schema": _ID}
        for name in _NAME.findall(row.path)
    ]
    asked = [
        {"name": name, "in": "query", "schema": msgspec.json.schema(kind)}
        for name, kind in row.query
    ]
    headers = ["X-Request-Id"]
    if row.method in _METHODS_THAT_ARE_NAMED and "request_id" in _fields(row.body):
        headers.append("Idempotency-Key")
    return [*named, *asked, *({"name": name, "in": "header", "schema": _ID} for name in headers)]


def _body(row: Route, kind: type, media: Json) -> Json:
    content: Json = {JSON: media, MSGPACK: {"schema": media["schema"]}}
    if "tokens" in _fields(kind):
        content[OCTETS] = {
            "schema": {
                "type": "string",
                "description": "The packed tokens, with the other fields as query parameters.",
            }
        }
    return {"required": not row.is_body_optional, "content": content}


def _responses(row: Route, media_of: dict[type, Json]) -> Json:
    content: Json = {}
    if row.answer is not None:
        media = media_of[row.answer]
        content = {JSON: media, MSGPACK: {"schema": media["schema"]}}
    if row.content_type is not None:
        content[row.content_type] = {"schema": {"type": "string"}}
    if row.is_stream:
        content[
            EVENT_STREAM
        ] = {}  # a schema is taken for the whole by some, for one event by others
    status = HTTPStatus(row.status)
    good: Json = {"description": status.phrase, "headers": {"X-Request-Id": {"schema": _ID}}}
    if content:
        good["content"] = content
    if status is HTTPStatus.ACCEPTED:
        good["headers"]["Location"] = {"schema": {"type": "string"}}
    codes = [*_ALWAYS, *(_OF_BODIES if row.method != "GET" else (HTTPStatus.BAD_REQUEST,))]
    if row.access is not Access.PUBLIC:
        codes += _OF_CALLERS
    if _NAME.search(row.path):
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


def _exact(schemas: dict[str, Json]) -> dict[str, Json]:
    """With what the decoder does besides: bytes in JSON are base64, and nothing else."""
    for schema in schemas.values():
        _say_base64(schema)
    return schemas


def _say_base64(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("contentEncoding") == "base64":
            schema["pattern"] = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
        for part in schema.values():
            _say_base64(part)
    elif isinstance(schema, list):
        for part in schema:
            _say_base64(part)
