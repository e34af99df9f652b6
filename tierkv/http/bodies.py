"""Reading of request bodies, and writing of answers as JSON, msgpack or server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from random import getrandbits
from typing import TypeVar

import msgspec
from aiohttp import web

from tierkv.errors import BadRequestError, RequestTooLargeError, TierKVError
from tierkv.http.settings import ListenSection
from tierkv.tasks import deadline
from tierkv.threads import in_thread

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
REQUEST_ID_HEADER = "X-Request-Id"
SESSION_HEADER = "X-Session-ID"  # as vLLM names it
SERVER = "tierkv"  # in every answer; aiohttp's default would show its version and Python's
REQUEST_ID = web.RequestKey("request_id", str)

_ENCODINGS = ("identity", "gzip", "deflate")

LARGE_BYTES = 256 << 10  # decoded in 1 to 3 ms; a longer body is decoded in a thread

# Visible ASCII: safe in a header and on a line of a log. No "." or "..": clients remove these from
# a path, and would call another route.
ID_PATTERN = r"^(?!\.{1,2}$)[!-~]{1,256}$"
_ID = re.compile(ID_PATTERN)


class BodyError(BadRequestError):
    """The body cannot be read: send valid JSON or MessagePack."""


class FieldError(BadRequestError):
    """A field or parameter is wrong: correct the one that the error sentence names."""


class MediaTypeError(BadRequestError):
    """The type or encoding of the body is not supported: send JSON or MessagePack."""


class BodyTimeoutError(BadRequestError):
    """The body did not arrive in time: send it faster, or in smaller parts."""


class TooMuchInWorkError(TierKVError):
    """The bodies of all running requests would exceed `max_work_bytes`: retry later."""


class BodyReader:
    """A reader of the request bodies of one server, with a limit on the sum of their sizes.

    A body counts towards this limit, `max_work_bytes`, until the function `release` is called for
    its request. A body that would exceed the limit is rejected, if possible before it is read.
    """

    def __init__(self, section: ListenSection) -> None:
        self._section = section
        # One at a time, because decoding takes several times a body's memory.
        self._long_one = asyncio.Semaphore()
        self.num_bytes = 0

    async def read(
        self, request: web.BaseRequest, kind: type[T], finish: Callable[[T], T] = lambda body: body
    ) -> T:
        """Read and decode the request's body. A body above 256 KiB is decoded in a thread.

        Args:
            request: A request whose body is still unread.
            kind: Type of the decoded body.
            finish: Called with the decoded body, in the same thread; its result is the result of
                `read`.

        Returns:
            The result of `finish`.

        Raises:
            BodyError: The body is empty or cannot be read.
            FieldError: The body's fields do not fit `kind`.
            MediaTypeError: The body is neither JSON nor msgpack.
            BodyTimeoutError: The body took longer than `body_timeout_s`.
            web.HTTPRequestEntityTooLarge: The body is larger than `max_body_bytes`.
            RequestTooLargeError: The body is larger than `max_work_bytes`.
            TooMuchInWorkError: The bodies of all running requests would exceed `max_work_bytes`.
        """
        content_type = _media_type(request)
        raw = await self._receive(request)
        if not raw:
            raise BodyError("the body is empty: send a JSON or MessagePack object")
        return await self.in_thread_if_large(
            len(raw), lambda: finish(decode(raw, kind, content_type=content_type))
        )

    async def in_thread_if_large(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, called in a thread if it processes more than 256 KiB.

        Only one such thread runs at a time.

        Args:
            num_bytes: Number of bytes that `work` processes.
            work: The function to call.
        """
        if num_bytes <= LARGE_BYTES:
            return work()
        async with self._long_one:
            return await in_thread(work)

    async def read_optional(self, request: web.BaseRequest, kind: type[T]) -> T:
        """Read and decode the request's body, but accept a missing or empty body.

        Args:
            request: A request whose body is still unread.
            kind: Type of the decoded body.

        Returns:
            The decoded body; `kind()` if the body is missing or empty.

        Raises:
            TierKVError: The errors of `read`, except that for an empty body.
        """
        if not request.can_read_body or not (raw := await self._receive(request)):
            return kind()
        return decode(raw, kind, content_type=_media_type(request))

    async def _receive(self, request: web.BaseRequest) -> bytearray:
        most, timeout_s = request.client_max_size, self._section.body_timeout_s
        length = request.content_length or 0
        if length > most:  # rejected unread
            raise web.HTTPRequestEntityTooLarge(most)
        self.count(request, length)

        def late() -> BodyTimeoutError:
            return BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s")

        raw = bytearray()

        def add(piece: bytes) -> None:
            raw.extend(piece)
            if len(raw) > most:
                raise web.HTTPRequestEntityTooLarge(most)
            if len(raw) > length:  # the body is chunked or compressed
                self.count(request, len(piece))

        content = request.content
        try:
            if content.is_eof():  # a short body has arrived together with the headers
                while piece := content.read_nowait():
                    add(piece)
                return raw
            async with deadline(timeout_s, late):
                async for piece in content.iter_any():
                    add(piece)
        except (web.RequestPayloadError, ValueError) as error:
            raise BodyError(
                "the body is cut off, or its encoding is not that of its Content-Encoding header"
            ) from error
        return raw

    def count(self, request: web.BaseRequest, num_bytes: int) -> None:
        """Count `num_bytes` bytes of memory for a request, within the limit `max_work_bytes`.

        `release` subtracts all bytes of a request at its end.

        Args:
            request: The request that uses the bytes.
            num_bytes: Number of bytes to add.

        Raises:
            RequestTooLargeError: The request alone exceeds the limit. Nothing was added.
            TooMuchInWorkError: All requests together would exceed the limit. Nothing was added.
        """
        most = self._section.max_work_bytes
        _, before = request.get(_COUNTED, (self, 0))
        if before + num_bytes > most:
            raise RequestTooLargeError(
                f"the request needs more than {most} bytes with its prompts, the maximum for "
                "one request: make it smaller"
            )
        if self.num_bytes + num_bytes > most:
            raise TooMuchInWorkError(
                f"the bodies being worked on use {self.num_bytes} of {most} bytes: "
                "send the request again later"
            )
        self.num_bytes += num_bytes
        request[_COUNTED] = self, before + num_bytes


_COUNTED = web.RequestKey("counted", tuple[BodyReader, int])


def release(request: web.BaseRequest) -> None:
    """Stop counting an answered request's bytes towards the server's limit for all requests."""
    if _COUNTED in request:
        reader, num_bytes = request[_COUNTED]
        reader.num_bytes -= num_bytes


def _media_type(request: web.BaseRequest) -> str:
    content_type = request.content_type
    if content_type not in (JSON, MSGPACK):
        given = request.headers.get("Content-Type", "")
        raise MediaTypeError(
            f"the Content-Type {given[:80]!r} is not supported: send {JSON} or {MSGPACK}"
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in _ENCODINGS:  # aiohttp does not decode unknown encodings
        raise MediaTypeError(
            f"the Content-Encoding {encoding[:80]!r} is not supported: use gzip, deflate or none"
        )
    return content_type


def from_query(request: web.BaseRequest, kind: type[T]) -> T:
    """Return the query parameters of the request as an object of type `kind`.

    Args:
        request: The request with the query.
        kind: Type of the result.

    Raises:
        FieldError: A parameter does not fit `kind`, or is given twice.
    """
    if len(request.query) > len(set(request.query)):
        raise FieldError("a query parameter is given twice: give it once")
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error


def is_set(request: web.BaseRequest, flag: str) -> bool:
    """Return True if a query parameter is present and its value is not "false" or "0".

    Args:
        request: The request with the query.
        flag: Name of the query parameter.
    """
    return request.query.get(flag, "false").lower() not in ("false", "0")


def decode(raw: bytes | bytearray, kind: type[T], *, content_type: str) -> T:
    """Return the body that `raw` encodes, as an object of type `kind`.

    Args:
        raw: The encoded body.
        kind: Type of the result.
        content_type: Encoding of `raw`: the constant `JSON` or `MSGPACK`.

    Raises:
        BodyError: `raw` cannot be read, or an object in the JSON text has the same key twice.
        FieldError: The fields do not fit `kind`.
    """
    try:
        if content_type == MSGPACK:
            return msgspec.msgpack.decode(raw, type=kind)
        body = msgspec.json.decode(raw, type=kind)
        _refuse_twins(raw, msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
        return body
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error
    except UnicodeDecodeError as error:
        raise BodyError("the body contains text that is not valid UTF-8") from error
    except msgspec.DecodeError as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    except RecursionError as error:
        raise BodyError("the body is nested too deeply") from error


def _refuse_twins(raw: bytes | bytearray, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise a BodyError if an object in the JSON text `raw` has the same key twice.

    Decoders differ in which value they use, and a proxy could check another value than the node.
    """
    if raw.count(b":") == len(fields):  # one colon per key: no key twice, no inner object
        return
    values = [bytes(value) for value in fields.values()]
    size = sum(map(len, values)) + sum(len(key.encode()) for key in fields) + 4 * len(fields) + 1
    is_plain = len(raw) in (size, size + 2 * len(fields) - 1)  # {"a":1,"b":2} or {"a": 1, "b": 2}
    if is_plain and not any(value[:1] in b"{[" and b"{" in value for value in values):
        return
    json.loads(
        raw, object_pairs_hook=_no_twins, parse_int=len
    )  # `len` avoids the slow parsing of long numbers


def _no_twins(pairs: list[tuple[str, object]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise BodyError("an object of the body has the same key twice: remove one")


def answer(request: web.BaseRequest, value: object, *, status: int = 200) -> web.Response:
    """Return a response with `value` as JSON, or as msgpack if the request accepts it.

    Args:
        request: The request to answer.
        value: The value to encode.
        status: HTTP status of the response.
    """
    if wants_msgpack(request):
        body, content_type = msgspec.msgpack.encode(value), MSGPACK
    else:
        body, content_type = msgspec.json.encode(value), JSON
    return web.Response(body=body, status=status, headers=headers_of(request, content_type))


def headers_of(request: web.BaseRequest, content_type: str) -> dict[str, str]:
    """Return the headers that all answers have: Content-Type, Server and X-Request-Id.

    Args:
        request: The request to answer.
        content_type: Content type of the answer.
    """
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
    """Return `text` if it can be used as an id in headers, paths and logs.

    An id has 1 to 256 visible ASCII characters, and is not "." or "..".

    Args:
        text: The id that the caller gave.
        field: Name of the id's field, for the error.

    Raises:
        FieldError: `text` cannot be used as an id.
    """
    if not is_id(text):
        raise FieldError(
            f"{field} must have 1 to 256 visible ASCII characters, and must not be . or .."
        )
    return text


def session_of(request: web.BaseRequest, given: str | None) -> str | None:
    """Return the id of the session (conversation) that a request belongs to.

    Args:
        request: The request.
        given: The id in the request's body; None to use the header X-Session-ID.

    Returns:
        The id; None if neither the body nor the header has one.

    Raises:
        FieldError: The id is not 1 to 256 visible ASCII characters, or is "." or "..".
    """
    session_id = request.headers.get(SESSION_HEADER) if given is None else given
    return None if session_id is None else check_id(session_id, "session_id")


def name_request(request: web.BaseRequest, given: str | None) -> str:
    """Set the request's id to `given`, unless `given` is None; return the request's id.

    Args:
        request: The request.
        given: Id from the body or a header; None to keep the present id.

    Raises:
        FieldError: `given` does not have 1 to 256 visible ASCII characters, or is "." or "..".
    """
    if given is not None:
        request[REQUEST_ID] = check_id(given, "request_id")
    return request[REQUEST_ID]


def first_id(request: web.BaseRequest) -> str:
    """Return the id in the request's X-Request-Id header, or a new id if there is no valid one."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and is_id(given):
        return given
    return f"{getrandbits(128):032x}"  # uuid4 costs 10 times as much


EVENT_STREAM = "text/event-stream"
_WRITE_TIMEOUT_S = 30.0  # seconds after which a client that reads nothing is disconnected


def event_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Return an unsent response of type text/event-stream."""
    return web.StreamResponse(
        headers={
            **headers_of(request, EVENT_STREAM),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # a proxy must not buffer events
        }
    )


async def open_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Send the HTTP headers of a text/event-stream response, and return the response."""
    response = event_stream(request)
    await response.prepare(request)
    return response


async def write(
    response: web.StreamResponse, chunk: bytes, *, timeout_s: float = _WRITE_TIMEOUT_S
) -> None:
    """Write `chunk` to a streamed response, and disconnect a client that does not read.

    Args:
        response: A response whose HTTP headers were sent.
        chunk: The bytes to write.
        timeout_s: Seconds after which a client that reads nothing is disconnected.

    Raises:
        ConnectionError: The client has closed the connection, or has read nothing for `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(chunk)
    except TimeoutError as error:
        raise ConnectionResetError(f"the client read nothing for {timeout_s:g} s") from error
