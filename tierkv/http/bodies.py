"""Reads request bodies, and writes answers as JSON, msgpack or server-sent events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from random import getrandbits
from typing import TypeVar

import msgspec
from aiohttp import web

from tierkv.cache.tokens import pack
from tierkv.errors import BadRequestError
from tierkv.tasks import deadline

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)

_ENCODINGS = ("identity", "gzip", "deflate")

LARGE_BYTES = 256 << 10
_PIECE_BYTES = 64 << 10  # 0.6 ms of parsing

# Visible ASCII: safe in a header and on a line of a log. Not a dot or two: clients leave these out
# of a path, and would ask another route.
ID_PATTERN = r"^(?!\.{1,2}$)[!-~]{1,256}$"
_ID = re.compile(ID_PATTERN)


class BodyError(BadRequestError):
    """A body that cannot be read at all."""


class FieldError(BadRequestError):
    """A body that can be read, but whose fields are not what the route takes."""


class MediaTypeError(BadRequestError):
    """A body of a type that the routes do not read."""


class BodyTimeoutError(BadRequestError):
    """A body that did not arrive in time."""


async def read_body(request: web.Request, kind: type[T], *, timeout_s: float) -> T:
    """The request's body as `kind`, by its content type. application/octet-stream is the packed
    tokens alone, with the other fields as query parameters. Raises BodyError, MediaTypeError,
    BodyTimeoutError or FieldError."""
    content_type = request.content_type
    if content_type not in (JSON, MSGPACK):
        # aiohttp says octets of a header that is missing or cannot be read, too.
        given = request.headers.get("Content-Type", "")
        if not (given.lower().startswith(OCTETS) and _has_tokens(kind)):
            raise MediaTypeError(f"send {JSON} or {MSGPACK}, not {given[:80]!r}")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in _ENCODINGS:  # aiohttp leaves those it does not know as they are
        raise MediaTypeError(f"bodies are encoded with gzip or deflate, not {encoding[:80]!r}")
    if (request.content_length or 0) > request.client_max_size:  # none of it need be read
        raise web.HTTPRequestEntityTooLarge(request.client_max_size)

    def late() -> BodyTimeoutError:
        return BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s")

    try:
        async with deadline(timeout_s, late):
            raw = await request.read()
    except (web.RequestPayloadError, ValueError) as error:
        raise BodyError("the body breaks off, or is not encoded as its headers say") from error
    if content_type == OCTETS:
        return from_query(request, kind, {"tokens": raw})
    if not raw:
        raise BodyError("the body is empty")
    if len(raw) > LARGE_BYTES:
        return await asyncio.to_thread(decode_large, raw, kind, content_type)
    return decode(raw, kind, content_type=content_type)


async def read_optional(request: web.Request, kind: type[T], *, timeout_s: float) -> T:
    """As `read_body`; without a body, `kind` with its defaults."""
    if not request.can_read_body:
        return kind()
    return await read_body(request, kind, timeout_s=timeout_s)


def from_query(request: web.Request, kind: type[T], more: Mapping[str, bytes] | None = None) -> T:
    """The query parameters, and `more`, as `kind`. Raises FieldError."""
    try:
        return msgspec.convert({**request.query, **(more or {})}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error


def is_set(request: web.Request, flag: str) -> bool:
    """Whether the query has this flag, be it alone or with a value that does not deny it."""
    return request.query.get(flag, "false").lower() not in ("false", "0")


def _has_tokens(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and "tokens" in kind.__struct_fields__


def decode_large(raw: bytes, kind: type[T], content_type: str) -> T:
    """For a thread: JSON tokens are parsed in pieces, between which the loop's thread has a turn;
    one call for 10 MB would hold the interpreter for 70 ms (2-core x86-64 VM, 2026-11-21)."""
    if content_type == MSGPACK or not _has_tokens(kind):
        return decode(raw, kind, content_type=content_type)
    fields = decode(raw, dict[str, msgspec.Raw], content_type=JSON)
    tokens = bytes(memoryview(fields.get("tokens", b"")))
    if not tokens.startswith(b"["):
        return decode(raw, kind, content_type=JSON)
    packed = _pack_pieces(tokens)
    rest = msgspec.json.encode({**fields, "tokens": b""})
    body = decode(rest, kind, content_type=JSON)
    assert isinstance(body, msgspec.Struct), "kinds with tokens are structs"
    return msgspec.structs.replace(body, tokens=packed)


def _pack_pieces(array: bytes) -> bytes:
    """The packed tokens of a JSON array that has been checked to be one."""
    packed, at, end = [], 1, len(array) - 1
    while at < end:
        comma = array.find(b",", min(at + _PIECE_BYTES, end))
        stop = end if comma < 0 else comma
        try:
            piece = msgspec.json.decode(b"[" + array[at:stop] + b"]", type=list[int])
        except msgspec.DecodeError as error:
            raise FieldError("tokens must be integers") from error
        packed.append(pack(piece))
        at = stop + 1
    return b"".join(packed)


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
    if wants_msgpack(request):
        body, content_type = msgspec.msgpack.encode(value), MSGPACK
    else:
        body, content_type = msgspec.json.encode(value), JSON
    return web.Response(body=body, status=status, content_type=content_type)


def wants_msgpack(request: web.Request) -> bool:
    return MSGPACK in request.headers.get("Accept", "")


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(text: str, field: str) -> str:
    """`text`, or FieldError if it cannot be an id: ids go to headers and logs."""
    if not is_id(text):
        raise FieldError(f"{field} must have 1 to 256 visible ASCII characters, and not be . or ..")
    return text


def name_request(request: web.Request, given: str | None) -> str:
    """The request's id from now on: `given`, if it is, or the one of its header, or a new one."""
    if given is not None:
        request[REQUEST_ID] = check_id(given, "request_id")
    return request[REQUEST_ID]


def first_id(request: web.Request) -> str:
    """The id of the request's header if it has a good one, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if is_id(given) else f"{getrandbits(128):032x}"  # uuid4 costs 10 times as much


EVENT_STREAM = "text/event-stream"
_WRITE_TIMEOUT_S = 30.0  # a client that takes nothing for so long has gone


def event_stream() -> web.StreamResponse:
    """An answer that is an event stream."""
    return web.StreamResponse(
        headers={
            "Content-Type": EVENT_STREAM,
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # a proxy in between is not to collect events
        }
    )


async def open_stream(request: web.Request) -> web.StreamResponse:
    """The head of an event stream, on its way."""
    response = event_stream()
    await response.prepare(request)
    return response


async def write(response: web.StreamResponse, chunk: bytes) -> None:
    """Raises ConnectionError if the client has gone or takes nothing."""
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.write(chunk)
    except TimeoutError as error:
        raise ConnectionResetError(f"nothing was read for {_WRITE_TIMEOUT_S:g} s") from error
