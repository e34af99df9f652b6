"""Reads request bodies, and writes answers as JSON, msgpack or server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import getrandbits
from typing import Protocol, TypeVar

import msgspec
from aiohttp import StreamReader, web

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
# After which the event loop asks a thread that parses for the interpreter. It needs it anew after
# nearly every call of the system: beside bodies of 15 MiB all the time it was late by more than 50
# ms in 27 of 100 cases with Python's 5 ms, in 11 with 0.5, in 1 with 0.1, in 4 with 0.02 (2-core
# x86 VM, 2026-11-27). Set at all times, it cost a generation of 60 tokens 4 %.
_TURN_S = 1e-4
ESCAPE_BYTES = 6  # of JSON text, at most, for one byte of what it says
# What the decoder reads at once, of a body without its long values: a million marks take 20 to 30
# ms, in which nothing else of this process runs (2-core x86-64 VM, 2026-11-25).
_MOST_REST_BYTES = 4 << 20
_MOST_MARKS = 1_000_000
# Texts up to 256 bytes, or 16 escapes, with what is before each; and a text, without its quotes.
# No group repeats possessively: until 3.11.5 Python matches such groups wrongly (gh-106052).
_SHORT_TEXTS = re.compile(rb'(?:[^"]*+"[^"\\]{0,256}+(?:\\.[^"\\]{0,16}+){0,16}")*', re.DOTALL)
_INSIDE_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*', re.DOTALL)
_LONG_TEXT_BYTES = 256
_MARKS = (b'"', b",", b"[", b"{")
_NAME_BYTES = 34
_NUMBER_BYTES = 4 << 10  # of one token; longer ones would take long to refuse
_LONG_ARRAY = b"\xa6tokens\xdd"  # msgpack's key and its mark of a list of up to 2^32; no UTF-8

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
    """The bodies of requests under way use all of max_work_bytes: ask again soon."""


class BodyReader:
    """Reads the bodies of one server's requests. Their bytes are counted until `let_go`: more than
    `max_work_bytes` at a time are refused before they are read."""

    def __init__(self, section: ListenSection) -> None:
        self._section = section
        self._long_one = asyncio.Semaphore()  # it takes several times a body's memory
        self.num_bytes = 0

    async def read(
        self, request: web.BaseRequest, kind: type[T], finish: Callable[[T], T] = lambda body: body
    ) -> T:
        """Decode the request's body as `kind`, by its content type; returns what `finish` makes of
        it. A long body is decoded and finished in a thread.

        application/octet-stream is the packed tokens alone, with the other fields as query
        parameters. Raises BodyError, MediaTypeError, BodyTimeoutError, TooMuchInWorkError, what
        `finish` raises, or FieldError.
        """
        content_type = _media_type(request, kind)
        pieces = await self._receive(request)
        if not pieces and content_type != OCTETS:
            raise BodyError("the body is empty")

        def work() -> T:
            if content_type == OCTETS:
                return finish(from_query(request, kind, {"tokens": b"".join(pieces)}))
            raw, most = _joined(pieces), self._section.max_prompt_tokens
            return finish(decode(raw, kind, content_type=content_type, most_tokens=most))

        return await self.aside(sum(map(len, pieces)), work)

    async def aside(self, num_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns. For many bytes it runs in a thread, one such at a time, for which
        the event loop waits little."""
        if num_bytes <= LARGE_BYTES:
            return work()
        async with self._long_one:
            with _short_turns():
                return await asyncio.to_thread(work)

    async def read_optional(self, request: web.BaseRequest, kind: type[T]) -> T:
        """As `read`; without a body, or with an empty one, `kind` with its defaults."""
        if not request.can_read_body or not (pieces := await self._receive(request)):
            return kind()
        content_type = _media_type(request, kind)
        return decode(_joined(pieces), kind, content_type=content_type)

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


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(_TURN_S, before))
    try:
        yield
    finally:
        if before > _TURN_S:  # else another server of this process is in its turn
            sys.setswitchinterval(before)


class OneAtATime(Protocol):
    """A connection, which is told when the answer to its request is known."""

    def is_answered(self, body: StreamReader) -> None: ...


CONNECTION = web.RequestKey("connection", OneAtATime)
_COUNTED = web.RequestKey("counted", tuple[BodyReader, int])


def let_go(request: web.BaseRequest) -> None:
    """The request is answered: its body counts no more, and its connection may have another one."""
    if _COUNTED in request:
        reader, num_bytes = request[_COUNTED]
        reader.give_back(num_bytes)
    if CONNECTION in request:
        request[CONNECTION].is_answered(request.content)


def _joined(pieces: list[bytes]) -> bytes | bytearray:
    """`pieces` as one. Added one by one: joining 15 MiB at once holds the interpreter for 20 ms.
    Empties `pieces`."""
    if len(pieces) == 1:
        return pieces.pop()
    pieces.reverse()
    raw = bytearray()
    while pieces:
        raw += pieces.pop()
    return raw


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
    """The query parameters, and `more`, as `kind`. Raises FieldError, also for a parameter that is
    given twice: see `_refuse_twins`."""
    if len(request.query) > len(set(request.query)):
        raise FieldError("a query parameter is given twice")
    try:
        return msgspec.convert({**request.query, **(more or {})}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error


def is_set(request: web.BaseRequest, flag: str) -> bool:
    """Whether the query has this flag, be it alone or with a value that does not deny it."""
    return request.query.get(flag, "false").lower() not in ("false", "0")


def _has_tokens(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and "tokens" in kind.__struct_fields__


def _may_be_long(kind: type) -> frozenset[str]:
    """Fields of `kind` that may hold a long value: its tokens, and those of type msgspec.Raw."""
    if not issubclass(kind, msgspec.Struct):
        return frozenset()
    fields = msgspec.structs.fields(kind)
    return frozenset(f.name for f in fields if f.name == "tokens" or f.type is msgspec.Raw)


def decode(
    raw: bytes | bytearray, kind: type[T], *, content_type: str, most_tokens: int | None = None
) -> T:
    """`raw` as `kind`. Raises BodyError, FieldError, or RequestTooLargeError.

    A long list of tokens is counted, then packed in pieces, and what `kind` leaves as it is
    (msgspec.Raw) is cut out: the decoder would hold the interpreter for 25 to 60 ms to read over
    15 MiB once (2-core x86-64 VM, 2026-11-25).
    """
    try:
        if content_type == MSGPACK:
            _refuse_long_array(raw, most_tokens)
            return msgspec.msgpack.decode(raw, type=kind)
        if len(raw) > LARGE_BYTES:
            return _decode_long(raw, kind, most_tokens)
        body = msgspec.json.decode(raw, type=kind)
        _refuse_twins(raw, msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
        return body
    except msgspec.ValidationError as error:
        raise FieldError(str(error)) from error
    except UnicodeDecodeError as error:
        raise BodyError("the body has text that is not UTF-8") from error
    except msgspec.DecodeError as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    except RecursionError as error:
        raise BodyError("the body is nested too deeply") from error


def _decode_long(raw: bytes | bytearray, kind: type[T], most_tokens: int | None) -> T:
    short, cut = _without_long_values(raw, _Allowance(kind, most_tokens))
    fields = msgspec.json.decode(short, type=dict[str, msgspec.Raw])
    _refuse_twins(short, fields)
    names = _may_be_long(kind) & fields.keys()
    longs = {name: cut.pop(_name(fields[name]), None) for name in names}
    if not cut:
        return _put_together(fields, longs, kind, most_tokens)
    if any(value[:1].tobytes() == b"[" for value in cut.values()):
        raise FieldError("the body has a long list where it takes none")
    return msgspec.json.decode(raw, type=kind)


def _put_together(
    fields: Mapping[str, msgspec.Raw],
    longs: Mapping[str, memoryview | None],
    kind: type[T],
    most_tokens: int | None,
) -> T:
    """The body of `fields`, with each of its `longs` in place of the name that stands for it."""
    raws = {
        name: fields[name] if long is None else msgspec.Raw(long)
        for name, long in longs.items()
        if name != "tokens"
    }
    tokens = longs.get("tokens")
    absent: dict[str, object] = dict.fromkeys(raws)
    if tokens is not None and tokens[:1].tobytes() == b'"':  # packed, in base64
        absent["tokens"], tokens = msgspec.Raw(tokens), None
    if tokens is not None:
        if most_tokens is not None and count_numbers(tokens) > most_tokens:
            raise _too_long(most_tokens)
        absent["tokens"] = b""
    body = msgspec.json.decode(msgspec.json.encode({**fields, **absent}), type=kind)
    assert isinstance(body, msgspec.Struct), "kinds with such fields are structs"
    body = msgspec.structs.replace(body, **raws)
    if tokens is not None:
        body = msgspec.structs.replace(body, tokens=pack_numbers(tokens))
    return body


class _Allowance:
    """How much a long body may hold. Used up while it is scanned, so that one with too much is
    refused before the rest of it is."""

    def __init__(self, kind: type, most_tokens: int | None) -> None:
        self._may_be_packed = _has_tokens(kind)  # in base64, of which a token takes 5.3 bytes
        self._most_tokens = most_tokens
        self._num_tokens = self._num_bytes = self._num_marks = 0

    def text(self, piece: bytes | bytearray) -> None:
        """Raise RequestTooLargeError if the texts have more tokens together, of a byte each."""
        least = len(piece) // ESCAPE_BYTES
        if not self._may_be_packed:
            escapes = piece.count(b"\\") + (ESCAPE_BYTES - 2) * piece.count(rb"\u")
            least = max(least, len(piece) - escapes)
        self._num_tokens += least
        if self._most_tokens is not None and self._num_tokens > self._most_tokens:
            raise _too_long(self._most_tokens)

    def rest(self, view: memoryview) -> None:
        """Raise BodyError if the decoder would take long for all that is neither text nor list."""
        self._num_bytes += len(view)
        if self._num_bytes <= _MOST_REST_BYTES:
            for piece in _pieces(view):
                self._num_marks += sum(map(piece.count, _MARKS))
        if self._num_bytes > _MOST_REST_BYTES or self._num_marks > _MOST_MARKS:
            raise BodyError(
                f"the body has too many values: besides long texts and a list of tokens at most "
                f"{_MOST_REST_BYTES >> 20} MiB, and {_MOST_MARKS:,} commas, quotes and brackets"
            )


def _without_long_values(
    raw: bytes | bytearray, allowance: _Allowance
) -> tuple[bytes | bytearray, dict[bytes, memoryview]]:
    """The JSON text with a random name in place of each long text, and of each long array without
    texts; and the values by name. It is scanned in pieces, and arrays are not parsed here.

    Raises BodyError, and what `allowance` does.
    """
    view, parts, cut = memoryview(raw), list[bytes](), dict[bytes, memoryview]()
    done = at = 0

    def take(start: int, stop: int) -> None:
        nonlocal done
        name = b'"%032x"' % getrandbits(128)
        cut[name] = view[start:stop]
        parts.extend((bytes(view[done:start]), name))
        done = stop

    while True:
        short = _SHORT_TEXTS.match(raw, at, min(at + _PIECE_BYTES, len(raw)))
        assert short is not None, "it matches nothing, too"
        allowance.rest(view[at : short.end()])
        at = short.end()
        quote = raw.find(b'"', at)
        end = len(raw) if quote < 0 else quote
        if end - at > LARGE_BYTES:  # no keys are in between, so there is one value
            start = raw.find(b"[", at, end)
            behind = raw.find(b"}", start, end)  # of the object that has it
            stop = raw.rfind(b"]", at, end if behind < 0 else behind) + 1
            if start >= 0 and stop - start > LARGE_BYTES:
                take(start, stop)
                at = stop
        allowance.rest(view[at:end])
        if quote < 0:
            break
        at = _end_of_text(raw, quote, allowance)
        if at - quote > _LONG_TEXT_BYTES:
            take(quote, at)
    if not cut:
        return raw, cut
    return b"".join((*parts, view[done:])), cut


def _end_of_text(raw: bytes | bytearray, start: int, allowance: _Allowance) -> int:
    """Behind the quotation mark that ends the text which the one at `start` begins. Raises
    BodyError if none does, and what `allowance` does."""
    at = start + 1
    while at < len(raw):
        piece = _INSIDE_TEXT.match(raw, at, min(at + _PIECE_BYTES, len(raw)))
        assert piece is not None, "it matches nothing, too"
        at, before = piece.end(), at
        allowance.text(raw[before:at])
        if raw[at : at + 1] == b'"':
            return at + 1
        if at == before:
            break  # a backslash, and nothing behind it
    raise BodyError("the body cannot be read: a text in it does not end")


def _name(value: msgspec.Raw) -> bytes:
    """`value`, if it is as long as names are."""
    return bytes(value) if len(memoryview(value)) == _NAME_BYTES else b""


def _pieces(array: memoryview) -> Iterator[bytes]:
    for at in range(0, len(array), _PIECE_BYTES):
        yield bytes(array[at : at + _PIECE_BYTES])


def count_numbers(array: memoryview) -> int:
    """The length of a JSON array of numbers, by its commas: 1 if it is empty. -1 if there are texts
    or arrays in it. The numbers are not parsed."""
    commas = brackets = 0
    for piece in _pieces(array):
        commas += piece.count(b",")
        brackets += piece.count(b"[")
        if b'"' in piece or brackets > 1:
            return -1
    return commas + 1


def pack_numbers(array: memoryview) -> bytes:
    """Pack a JSON array of tokens, in pieces, so that other threads run in between. Raises
    FieldError, BadRequestError or msgspec.DecodeError if it is no such array."""
    at, end, packed = 1, len(array) - 1, list[bytes]()
    while at < end:
        size = _PIECE_BYTES
        while True:  # up to a comma
            text = bytes(array[at : min(at + size, end)])
            comma = text.rfind(b",") if at + len(text) < end else len(text)
            if comma >= 0:
                break
            if len(text.strip()) > _NUMBER_BYTES:
                raise FieldError("tokens must be integers")
            size *= 2
        try:
            numbers = msgspec.json.decode(b"[%b]" % text[:comma], type=list[int])
        except msgspec.ValidationError as error:
            raise FieldError("tokens must be integers") from error
        if not numbers and (packed or at + comma < end):
            raise msgspec.DecodeError("a list has a comma with no number before or behind it")
        packed.append(pack(numbers))
        at += comma + 1
    return b"".join(packed)


def _refuse_long_array(raw: bytes | bytearray, most_tokens: int | None) -> None:
    """Raise RequestTooLargeError if msgpack holds a longer list of tokens, before it is decoded."""
    at = raw.find(_LONG_ARRAY)
    if at >= 0 and most_tokens is not None:
        start = at + len(_LONG_ARRAY)
        if int.from_bytes(raw[start : start + 4], "big") > most_tokens:
            raise _too_long(most_tokens)


def _too_long(most_tokens: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"a prompt has at most {most_tokens} tokens here")


def _refuse_twins(raw: bytes | bytearray, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise BodyError if an object of the JSON text has a key twice: decoders differ in which value
    they take, so a proxy that checks and a node that acts could see two different bodies.

    fields: the decoded object. A key that was there twice has one value in it, so the text is
    longer than its fields. Only then, or if spaced unusually, is the text decoded again.
    """
    if raw.count(b":") == len(fields):  # one for each key: none twice, and no inner object
        return
    values = [bytes(value) for value in fields.values()]
    size = sum(map(len, values)) + sum(len(key.encode()) for key in fields) + 4 * len(fields) + 1
    is_plain = len(raw) in (size, size + 2 * len(fields) - 1)  # {"a":1,"b":2} or {"a": 1, "b": 2}
    if is_plain and not any(value[:1] in b"{[" and b"{" in value for value in values):
        return
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
    """Make `given` the request's id, if there is one; returns the id."""
    if given is not None:
        request[REQUEST_ID] = check_id(given, "request_id")
    return request[REQUEST_ID]


def first_id(request: web.BaseRequest) -> str:
    """The id of the request's header if it has a good one, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and is_id(given):
        return given
    return f"{getrandbits(128):032x}"  # uuid4 costs 10 times as much


EVENT_STREAM = "text/event-stream"
_EVENT_ID = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_WRITE_TIMEOUT_S = 30.0  # a client that takes nothing for so long has gone


def last_event(request: web.BaseRequest) -> tuple[int, int] | None:
    """Which event a client that comes back has seen last, by an id such as `epoch-number`."""
    known = _EVENT_ID.fullmatch(request.headers.get("Last-Event-ID", ""))
    return (int(known[1]), int(known[2])) if known else None


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


async def write(
    response: web.StreamResponse, chunk: bytes, *, timeout_s: float = _WRITE_TIMEOUT_S
) -> None:
    """Raises ConnectionError if the client has gone or takes nothing."""
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(chunk)
    except TimeoutError as error:
        raise ConnectionResetError(f"nothing was read for {timeout_s:g} s") from error
