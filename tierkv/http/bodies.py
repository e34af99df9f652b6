"""Reads request bodies, and writes answers as JSON, msgpack or server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from random import getrandbits
from typing import TypeVar

import msgspec
from aiohttp import web

from tierkv.cache.keys import pack
from tierkv.errors import BadRequestError, RequestTooLargeError, TierKVError
from tierkv.http.settings import ListenSection
from tierkv.tasks import deadline

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"
REQUEST_ID_HEADER = "X-Request-Id"
SERVER = "tierkv"  # in every answer: aiohttp would tell its version, and Python's
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


class TooMuchInWorkError(TierKVError):
    """The bodies of the requests under way fill what there is for them: ask again soon."""


class BodyReader:
    """Reads the bodies of one server's requests. Their bytes are counted until `let_go`: more than
    `max_work_bytes` at a time are refused before they are read."""

    def __init__(self, section: ListenSection) -> None:
        self._section = section
        self._long_one = asyncio.Semaphore()  # parsing takes several times a body's memory
        self.num_bytes = 0

    async def read(
        self, request: web.BaseRequest, kind: type[T], finish: Callable[[T], T] = lambda body: body
    ) -> T:
        """The request's body as `kind`, by its content type, after `finish`, which may do what
        takes time with it: a long one is decoded, and finished, in a thread.

        application/octet-stream is the packed tokens alone, with the other fields as query
        parameters. Raises BodyError, MediaTypeError, BodyTimeoutError, TooMuchInWorkError, what
        `finish` raises, or FieldError.
        """
        content_type = _media_type(request, kind)
        pieces = await self._receive(request)

        def work() -> T:
            raw = b"".join(pieces)
            if content_type == OCTETS:
                return finish(from_query(request, kind, {"tokens": raw}))
            most = self._section.max_prompt_tokens
            return finish(decode(raw, kind, content_type=content_type, most_tokens=most))

        if not pieces and content_type != OCTETS:
            raise BodyError("the body is empty")
        if sum(map(len, pieces)) <= LARGE_BYTES:
            return work()
        async with self._long_one:
            return await asyncio.to_thread(work)

    async def read_optional(self, request: web.BaseRequest, kind: type[T]) -> T:
        """As `read`; without a body, `kind` with its defaults."""
        if not request.can_read_body:
            return kind()
        return await self.read(request, kind)

    async def _receive(self, request: web.BaseRequest) -> list[bytes]:
        most, timeout_s = request.client_max_size, self._section.body_timeout_s
        length = request.content_length or 0
        if length > most:  # none of it need be read
            raise web.HTTPRequestEntityTooLarge(most)
        self._count(request, length)

        def late() -> BodyTimeoutError:
            return BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s")

        pieces: list[bytes] = []
        size = 0

        def take(piece: bytes) -> None:
            nonlocal size
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise web.HTTPRequestEntityTooLarge(most)
            if size > length:  # it came in chunks, or compressed
                self._count(request, len(piece))

        content = request.content
        try:
            if content.is_eof():  # a short one comes with its head
                while piece := content.read_nowait():
                    take(piece)
                return pieces
            async with deadline(timeout_s, late):
                async for piece in content.iter_any():
                    take(piece)
        except (web.RequestPayloadError, ValueError) as error:
            raise BodyError("the body breaks off, or is not encoded as its headers say") from error
        return pieces

    def _count(self, request: web.BaseRequest, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._section.max_work_bytes:
            raise TooMuchInWorkError(
                f"the bodies in work have {self.num_bytes} bytes, and there is room for "
                f"{self._section.max_work_bytes}"
            )
        self.num_bytes += num_bytes
        _, before = request.get(_COUNTED, (self, 0))
        request[_COUNTED] = self, before + num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


_COUNTED = web.RequestKey("counted", tuple[BodyReader, int])


def let_go(request: web.BaseRequest) -> None:
    """The request is answered: its body counts no more."""
    if _COUNTED in request:
        reader, num_bytes = request[_COUNTED]
        reader.give_back(num_bytes)


def _media_type(request: web.BaseRequest, kind: type) -> str:
    """Raises MediaTypeError if it is none that `kind` can be read from."""
    content_type = request.content_type
    if content_type not in (JSON, MSGPACK):
        # aiohttp says octets of a header that is missing or cannot be read, too.
        given = request.headers.get("Content-Type", "")
        if not (given.lower().startswith(OCTETS) and _has_tokens(kind)):
            raise MediaTypeError(f"send {JSON} or {MSGPACK}, not {given[:80]!r}")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in _ENCODINGS:  # aiohttp leaves those it does not know as they are
        raise MediaTypeError(f"bodies are encoded with gzip or deflate, not {encoding[:80]!r}")
    return content_type


def from_query(
    request: web.BaseRequest, kind: type[T], more: Mapping[str, bytes] | None = None
) -> T:
    """The query parameters, and `more`, as `kind`. Raises FieldError."""
    try:
        return msgspec.convert({**request.query, **(more or {})}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error


def is_set(request: web.BaseRequest, flag: str) -> bool:
    """Whether the query has this flag, be it alone or with a value that does not deny it."""
    return request.query.get(flag, "false").lower() not in ("false", "0")


def _has_tokens(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and "tokens" in kind.__struct_fields__


def _left_raw(kind: type) -> tuple[str, ...]:
    """The fields of `kind` that are not decoded with it."""
    if not issubclass(kind, msgspec.Struct):
        return ()
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type is msgspec.Raw)


def decode(raw: bytes, kind: type[T], *, content_type: str, most_tokens: int | None = None) -> T:
    """`raw` as `kind`. Raises BodyError, FieldError, or RequestTooLargeError.

    A long list of tokens is counted, then packed in pieces, between which the loop's thread has a
    turn: one call for 10 MB would hold the interpreter for 70 ms (2-core x86-64 VM, 2026-11-21).
    What `kind` leaves as it is (msgspec.Raw) is not read a second time.
    """
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        left = _left_raw(kind) if len(raw) > LARGE_BYTES else ()
        is_short = len(raw) <= LARGE_BYTES or not (left or _has_tokens(kind))
        body = msgspec.json.decode(raw, type=kind) if is_short else None
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        _refuse_twins(raw, fields)
        if body is not None:
            return body
        if left:
            raws = {name: fields[name] for name in left if name in fields}
            rest = msgspec.json.decode(
                msgspec.json.encode({**fields, **dict.fromkeys(raws)}), type=kind
            )
            assert isinstance(rest, msgspec.Struct), "kinds that leave something are structs"
            return msgspec.structs.replace(rest, **raws)
        tokens = memoryview(fields.get("tokens", b""))
        if tokens[:1].tobytes() != b"[":
            return msgspec.json.decode(raw, type=kind)
        if most_tokens is not None and _count_commas(tokens) >= most_tokens:
            raise RequestTooLargeError(f"a prompt has at most {most_tokens} tokens here")
        rest = msgspec.json.decode(msgspec.json.encode({**fields, "tokens": b""}), type=kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error
    except UnicodeDecodeError as error:
        raise BodyError("the body has text that is not UTF-8") from error
    except msgspec.DecodeError as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    except RecursionError as error:
        raise BodyError("the body is nested too deeply") from error
    assert isinstance(rest, msgspec.Struct), "kinds with tokens are structs"
    return msgspec.structs.replace(rest, tokens=_pack_pieces(tokens))


def _pack_pieces(array: memoryview) -> bytes:
    """The packed tokens of a JSON array that has been checked to be one."""
    at, end, packed = 1, len(array) - 1, []
    while at < end:
        text = bytes(array[at : min(at + _PIECE_BYTES, end)])
        if at + len(text) < end:
            text = text[: text.rindex(b",")]
        try:
            packed.append(pack(msgspec.json.decode(b"[" + text + b"]", type=list[int])))
        except msgspec.DecodeError as error:
            raise FieldError("tokens must be integers") from error
        at += len(text) + 1
    return b"".join(packed)


def _count_commas(array: memoryview) -> int:
    pieces = range(0, len(array), _PIECE_BYTES)
    return sum(bytes(array[at : at + _PIECE_BYTES]).count(b",") for at in pieces)


def _refuse_twins(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise BodyError if an object of the JSON text has a key twice: readers differ in which they
    take, so one that checks and one that acts could see two different bodies.

    fields: the object's, of which a key that is there twice has but one value, so the text is
    longer than what they come to. Only where it is (or is spaced unusually) all is read again.
    """
    if raw.count(b":") == len(fields):  # one for each key: none twice, and no inner object
        return
    values = [memoryview(value) for value in fields.values()]
    size = sum(map(len, values)) + sum(len(key.encode()) for key in fields) + 4 * len(fields) + 1
    is_plain = len(raw) in (size, size + 2 * len(fields) - 1)  # {"a":1,"b":2} or {"a": 1, "b": 2}
    if is_plain and not any(value[:1].tobytes() == b"{" for value in values):
        return
    longest = max(values, key=len, default=memoryview(b""))
    if len(longest) > LARGE_BYTES and longest[:1].tobytes() == b"[":  # numbers, or no body of ours
        raw = raw.replace(longest, b"0", 1)
    json.loads(raw, object_pairs_hook=_no_twins, parse_int=len)  # of a long one, no number


def _no_twins(pairs: list[tuple[str, object]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise BodyError("the body has a key twice in one object")


def answer(request: web.BaseRequest, value: object, *, status: int = 200) -> web.Response:
    """`value` as JSON, or as msgpack if that is what the request accepts."""
    if wants_msgpack(request):
        body, content_type = msgspec.msgpack.encode(value), MSGPACK
    else:
        body, content_type = msgspec.json.encode(value), JSON
    return web.Response(body=body, status=status, headers=headers_of(request, content_type))


def headers_of(request: web.BaseRequest, content_type: str) -> dict[str, str]:
    """What every answer has."""
    return {
        "Content-Type": content_type,
        "Server": SERVER,
        REQUEST_ID_HEADER: request[REQUEST_ID],
    }


def wants_msgpack(request: web.BaseRequest) -> bool:
    return MSGPACK in request.headers.get("Accept", "")


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(text: str, field: str) -> str:
    """`text`, or FieldError if it cannot be an id: ids go to headers and logs."""
    if not is_id(text):
        raise FieldError(f"{field} must have 1 to 256 visible ASCII characters, and not be . or ..")
    return text


def name_request(request: web.BaseRequest, given: str | None) -> str:
    """The request's id from now on: `given`, if it is, or the one of its header, or a new one."""
    if given is not None:
        request[REQUEST_ID] = check_id(given, "request_id")
    return request[REQUEST_ID]


def first_id(request: web.BaseRequest) -> str:
    """The id of the request's header if it has a good one, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if is_id(given) else f"{getrandbits(128):032x}"  # uuid4 costs 10 times as much


EVENT_STREAM = "text/event-stream"
_WRITE_TIMEOUT_S = 30.0  # a client that takes nothing for so long has gone


def event_stream(request: web.BaseRequest) -> web.StreamResponse:
    """An answer that is an event stream."""
    return web.StreamResponse(
        headers={
            **headers_of(request, EVENT_STREAM),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # a proxy in between is not to collect events
        }
    )


async def open_stream(request: web.BaseRequest) -> web.StreamResponse:
    """The head of an event stream, on its way."""
    response = event_stream(request)
    await response.prepare(request)
    return response


async def write(response: web.StreamResponse, chunk: bytes) -> None:
    """Raises ConnectionError if the client has gone or takes nothing."""
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.write(chunk)
    except TimeoutError as error:
        raise ConnectionResetError(f"nothing was read for {_WRITE_TIMEOUT_S:g} s") from error
