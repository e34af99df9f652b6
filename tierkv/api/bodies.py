"""Reads request bodies and writes answers, as JSON or msgpack."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar
from uuid import uuid4

import msgspec
from aiohttp import web

from tierkv.api.types import FieldError
from tierkv.errors import BadRequestError

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)

_ID = re.compile(r"[!-~]{1,256}")  # visible ASCII: safe in a header and on a line of a log


class BodyError(BadRequestError):
    """A body that cannot be read at all."""


class MediaTypeError(BadRequestError):
    """A body of a type that the routes do not read."""


class BodyTimeoutError(BadRequestError):
    """A body that did not arrive in time."""


async def read_body(request: web.Request, kind: type[T], *, timeout_s: float) -> T:
    """The request's body as `kind`, by its content type. Raises BodyError, MediaTypeError,
    BodyTimeoutError or FieldError."""
    if request.content_type not in (JSON, MSGPACK):
        raise MediaTypeError(f"send {JSON} or {MSGPACK}, not {request.content_type[:80]!r}")
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            raw = await request.read()
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s") from error
    except (web.RequestPayloadError, ValueError) as error:
        raise BodyError("the body breaks off, or is not encoded as its headers say") from error
    return decode(raw, kind, content_type=request.content_type)


def decode(raw: bytes, kind: type[T], *, content_type: str) -> T:
    """`raw` as `kind`. Raises BodyError, or FieldError."""
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error
    except UnicodeDecodeError as error:
        raise BodyError("the body has text that is not UTF-8") from error
    except msgspec.DecodeError as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    except RecursionError as error:
        raise BodyError("the body is nested too deeply") from error


def answer(request: web.Request, value: object, *, status: int = 200) -> web.Response:
    """`value` as JSON, or as msgpack if that is what the request accepts."""
    headers = {REQUEST_ID_HEADER: request[REQUEST_ID]}
    if MSGPACK in request.headers.get("Accept", ""):
        body, content_type = msgspec.msgpack.encode(value), MSGPACK
    else:
        body, content_type = msgspec.json.encode(value), JSON
    return web.Response(body=body, status=status, content_type=content_type, headers=headers)


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(text: str, field: str) -> str:
    """`text`, or FieldError if it cannot be an id: ids go to headers and logs."""
    if not is_id(text):
        raise FieldError(f"{field} must have 1 to 256 visible ASCII characters")
    return text


def name_request(request: web.Request, given: str | None) -> str:
    """The request's id from now on: `given`, if it is, or the one of its header, or a new one."""
    if given is not None:
        request[REQUEST_ID] = check_id(given, "request_id")
    return request[REQUEST_ID]


def first_id(request: web.Request) -> str:
    """The id of the request's header if it has a good one, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if is_id(given) else uuid4().hex
