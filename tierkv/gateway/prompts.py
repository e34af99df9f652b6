"""Prompts of callers' bodies: counted, and refused if they are too long, before their tokens are
packed; then packed once, and sent to any number of nodes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tierkv.cache.keys import TOKEN_BYTES, count, pack, unpack
from tierkv.client.http import Body
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.http.bodies import ESCAPE_BYTES, FieldError, count_numbers, pack_numbers
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.model import encode_bytes

_START_BYTES = 1024  # tell what a prompt is
_MSGPACK_BYTES = 5  # of a token, at most
_WRONG_TYPE = "prompt must be a text, its tokens, or a list of either"
_MIXED = "prompt mixes tokens with prompts, or texts with tokens"


_NO_BYTES = b"\xc4\x00"  # msgpack's short form, bin 8, of no bytes
_BYTES = struct.Struct(">BI")  # its long form, bin 32: mark and length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """tokens: the prompt, packed. authorization: the caller's header, if it is to be handed on.

    seed: always given, so that a second node goes on as the first would have.
    """

    request_id: str
    tokens: bytes
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    authorization: str | None = None

    @property
    def num_tokens(self) -> int:
        return count(self.tokens)

    def body(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """A body in msgpack: `fields`, and as `tokens` the prompt and the tokens `after` it. The
        prompt is not copied, however many nodes get it."""
        packed_after = pack(after)
        head = msgspec.msgpack.encode({**fields, "tokens": b""})
        assert head.endswith(_NO_BYTES), "the last value is empty"
        size = len(self.tokens) + len(packed_after)
        return head.removesuffix(_NO_BYTES) + _BYTES.pack(0xC6, size), self.tokens, packed_after

    def work(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """As `body`, with the sampling, and streamed."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "seed": self.seed}
        return self.body({**sampling, "stream": True, **fields}, after)


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """One prompt that is not packed yet. raw: a text's UTF-8, or a JSON array."""

    raw: bytes | memoryview
    num_tokens: int

    @property
    def packed_bytes(self) -> int:
        return self.num_tokens * TOKEN_BYTES

    def packed(self) -> bytes:
        """Raises InvalidRequestError if there are none, or some that the model does not have."""
        if not self.num_tokens:
            raise _empty()
        if isinstance(self.raw, bytes):
            return encode_bytes(self.raw).tobytes()
        try:
            packed = pack_numbers(self.raw)
            highest = int(unpack(packed).max(initial=-1))
        except (BadRequestError, msgspec.DecodeError) as error:
            raise InvalidRequestError(
                f"the prompt cannot be read: {error}", param="prompt"
            ) from error
        if not packed:  # a long array, but of nothing
            raise _empty()
        if highest >= VOCAB_SIZE:
            raise InvalidRequestError(
                f"a token of this model is in 0..{VOCAB_SIZE - 1}", param="prompt"
            )
        return packed


def text_prompt(text: str, most_tokens: int) -> CountedPrompt:
    """Raises InvalidRequestError if it is too long."""
    if len(text) > most_tokens:  # each character is at least one token
        raise too_long(most_tokens)
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error
    if len(raw) > most_tokens:
        raise too_long(most_tokens)
    return CountedPrompt(raw, num_tokens=len(raw))


def read_prompts(given: msgspec.Raw, *, most_prompts: int, most_tokens: int) -> list[CountedPrompt]:
    """Count the prompts of `given`, a field of a body. It takes no memory for prompts that are
    refused. Raises FieldError or InvalidRequestError."""
    view = _as_json(given, most_tokens)
    start = bytes(view[:_START_BYTES])
    if start[:1] == b'"':
        if len(view) - 2 > most_tokens * ESCAPE_BYTES:
            raise too_long(most_tokens)
        return [_text(bytes(view), most_tokens)]
    if start[:1] != b"[":
        raise FieldError(_WRONG_TYPE)
    match start[1:].lstrip()[:1]:
        case b"]":
            raise _too_many(most_prompts)
        case b'"':
            prompts = [text_prompt(one, most_tokens) for one in _texts(bytes(view), most_prompts)]
        case b"[":
            prompts = _lists(view, most_prompts, most_tokens)
        case _:
            prompts = [_list(view, most_tokens)]
    if len(prompts) > most_prompts:
        raise _too_many(most_prompts)
    return prompts


def _as_json(given: msgspec.Raw, most_tokens: int) -> memoryview:
    view = memoryview(given)
    if bytes(view[:1]) in (b'"', b"["):  # these are numbers in msgpack
        return view
    if len(view) > most_tokens * _MSGPACK_BYTES:
        raise too_long(most_tokens)
    try:
        return memoryview(msgspec.json.encode(msgspec.msgpack.decode(view)))
    except msgspec.DecodeError as error:
        raise FieldError(_WRONG_TYPE) from error


def _text(raw: bytes, most_tokens: int) -> CountedPrompt:
    """raw: a JSON text. An escape in it has more bytes than what it stands for."""
    longest = most_tokens * (ESCAPE_BYTES if b"\\" in raw else 1)
    if len(raw) - 2 > longest:
        raise too_long(most_tokens)
    try:
        return text_prompt(msgspec.json.decode(raw, type=str), most_tokens)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error


def _texts(raw: bytes, most_prompts: int) -> list[str]:
    # Each has two quotation marks; more of them stand after a backslash.
    if (raw.count(b'"') - raw.count(b'\\"')) // 2 > most_prompts:
        raise _too_many(most_prompts)
    try:
        return msgspec.json.decode(raw, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(_MIXED, param="prompt") from error


def _lists(view: memoryview, most_prompts: int, most_tokens: int) -> list[CountedPrompt]:
    """view: an array of arrays."""
    raw, prompts, at = bytes(view), list[CountedPrompt](), 1
    while (start := raw.find(b"[", at)) >= 0:
        if len(prompts) == most_prompts:
            raise _too_many(most_prompts)
        stop = raw.find(b"]", start) + 1
        if raw[at:start].strip() != (b"," if prompts else b"") or not stop:
            raise InvalidRequestError(_MIXED, param="prompt")
        prompts.append(_list(memoryview(raw)[start:stop], most_tokens))
        at = stop
    if raw[at:].strip() != b"]":
        raise InvalidRequestError(_MIXED, param="prompt")
    return prompts


def _list(array: memoryview, most_tokens: int) -> CountedPrompt:
    num_tokens = count_numbers(array)
    if num_tokens > most_tokens:
        raise too_long(most_tokens)
    if num_tokens < 0:
        raise InvalidRequestError(_MIXED, param="prompt")
    is_empty = len(array) <= _START_BYTES and not bytes(array[1:-1]).strip()
    return CountedPrompt(array, num_tokens=0 if is_empty else num_tokens)


def _empty() -> InvalidRequestError:
    return InvalidRequestError("a prompt is empty", param="prompt")


def too_long(most_tokens: int) -> InvalidRequestError:
    """What a prompt of more tokens is refused with."""
    return InvalidRequestError(
        f"a prompt has at most {most_tokens} tokens here",
        param="prompt",
        code="context_length_exceeded",
    )


def _too_many(most_prompts: int) -> InvalidRequestError:
    return InvalidRequestError(f"give 1 to {most_prompts} prompts at once", param="prompt")
