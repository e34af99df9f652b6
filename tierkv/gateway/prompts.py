"""Prompts as they come in bodies: counted, and refused where they are too long, before any of their
tokens is packed; then packed once, and sent to any number of nodes as they are."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tierkv.cache.keys import TOKEN_BYTES, count, pack, unpack
from tierkv.client.http import Body
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.http.bodies import FieldError
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.model import encode_bytes

_ESCAPE_BYTES = 6  # of JSON text, at most, for one byte of what it says
_PIECE_BYTES = 64 << 10  # 0.6 ms of parsing, between which the loop's thread has a turn
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
        """`fields`, and as `tokens` the prompt and the tokens `after` it, as msgpack. The prompt is
        not copied, however often and of how many nodes it is asked."""
        packed_after = pack(after)
        head = msgspec.msgpack.encode({**fields, "tokens": b""})
        assert head.endswith(_NO_BYTES), "the last value is empty"
        size = len(self.tokens) + len(packed_after)
        return head.removesuffix(_NO_BYTES) + _BYTES.pack(0xC6, size), self.tokens, packed_after

    def work(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """As `body`, with how to go on from there."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "seed": self.seed}
        return self.body({**sampling, "stream": True, **fields}, after)


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """One prompt that is not packed yet. raw: a text's UTF-8, or the inside of a JSON array."""

    raw: bytes
    is_text: bool
    num_tokens: int

    @property
    def packed_bytes(self) -> int:
        return self.num_tokens * TOKEN_BYTES

    def packed(self) -> bytes:
        """Raises InvalidRequestError if there are none, or some that the model does not have."""
        if not self.num_tokens:
            raise InvalidRequestError("a prompt is empty", param="prompt")
        if self.is_text:
            return encode_bytes(self.raw).tobytes()
        try:
            packed = b"".join(pack(tokens) for tokens in _in_pieces(self.raw))
            highest = int(unpack(packed).max(initial=-1))
        except (BadRequestError, msgspec.DecodeError) as error:
            raise InvalidRequestError(
                f"the prompt cannot be read: {error}", param="prompt"
            ) from error
        if highest >= VOCAB_SIZE:
            raise InvalidRequestError(
                f"a token of this model is in 0..{VOCAB_SIZE - 1}", param="prompt"
            )
        return packed


def text_prompt(text: str, most_tokens: int) -> CountedPrompt:
    """Raises InvalidRequestError if it is too long."""
    if len(text) > most_tokens:  # each character is at least one token
        raise _too_long(most_tokens)
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error
    if len(raw) > most_tokens:
        raise _too_long(most_tokens)
    return CountedPrompt(raw, is_text=True, num_tokens=len(raw))


def read_prompts(given: msgspec.Raw, *, most_prompts: int, most_tokens: int) -> list[CountedPrompt]:
    """What `given`, a field of a body, has for prompts, counted. It costs no more memory than the
    prompts that are not refused. Raises FieldError or InvalidRequestError."""
    _refuse_the_longest(memoryview(given), most_tokens)
    raw = bytes(given)
    if raw[:1] not in (b'"', b"["):  # not JSON's: these are numbers in msgpack
        try:
            raw = msgspec.json.encode(msgspec.msgpack.decode(raw))
        except msgspec.DecodeError as error:
            raise FieldError(_WRONG_TYPE) from error
    if raw[:1] == b'"':
        return [_text(raw, most_tokens)]
    if raw[:1] != b"[":
        raise FieldError(_WRONG_TYPE)
    inside = raw[1:-1].strip()
    if not inside:
        raise _too_many(most_prompts)
    if inside[:1] == b'"':
        prompts = [text_prompt(text, most_tokens) for text in _texts(raw, most_prompts)]
    elif inside[:1] == b"[":
        prompts = _lists(inside, most_prompts, most_tokens)
    else:
        prompts = [_list(inside, most_tokens)]
    if len(prompts) > most_prompts:
        raise _too_many(most_prompts)
    return prompts


def _refuse_the_longest(view: memoryview, most_tokens: int) -> None:
    """Where one look at a long prompt tells: nothing of it is copied."""
    start = bytes(view[:2])
    if start[:1] == b'"' and len(view) - 2 > most_tokens * _ESCAPE_BYTES:
        raise _too_long(most_tokens)
    if start[:1] == b"[" and start[1:].isdigit():
        pieces = range(0, len(view), _PIECE_BYTES)
        if sum(bytes(view[at : at + _PIECE_BYTES]).count(b",") for at in pieces) >= most_tokens:
            raise _too_long(most_tokens)


def _text(raw: bytes, most_tokens: int) -> CountedPrompt:
    """raw: a JSON text, of which some may stand for less than they have bytes."""
    longest = most_tokens * (_ESCAPE_BYTES if b"\\" in raw else 1)
    if len(raw) - 2 > longest:
        raise _too_long(most_tokens)
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


def _lists(inside: bytes, most_prompts: int, most_tokens: int) -> list[CountedPrompt]:
    """inside: arrays with commas between, without what is around them."""
    if inside.count(b"[") > most_prompts:
        raise _too_many(most_prompts)
    if b'"' in inside or inside.count(b"[") != inside.count(b"]"):
        raise InvalidRequestError(_MIXED, param="prompt")
    prompts = []
    for number, piece in enumerate(inside.split(b"]")[:-1]):
        before, _, array = piece.partition(b"[")
        if before.strip() != (b"," if number else b""):
            raise InvalidRequestError(_MIXED, param="prompt")
        prompts.append(_list(array.strip(), most_tokens))
    if inside.rpartition(b"]")[2].strip():
        raise InvalidRequestError(_MIXED, param="prompt")
    return prompts


def _list(inside: bytes, most_tokens: int) -> CountedPrompt:
    num_tokens = inside.count(b",") + 1 if inside else 0
    if num_tokens > most_tokens:
        raise _too_long(most_tokens)
    if b'"' in inside or b"[" in inside:
        raise InvalidRequestError(_MIXED, param="prompt")
    return CountedPrompt(inside, is_text=False, num_tokens=num_tokens)


def _in_pieces(inside: bytes) -> Iterator[list[int]]:
    at = 0
    while at < len(inside):
        comma = inside.find(b",", at + _PIECE_BYTES)
        stop = len(inside) if comma < 0 else comma
        yield msgspec.json.decode(b"[%b]" % inside[at:stop], type=list[int])
        at = stop + 1


def _too_long(most_tokens: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"a prompt has at most {most_tokens} tokens here",
        param="prompt",
        code="context_length_exceeded",
    )


def _too_many(most_prompts: int) -> InvalidRequestError:
    return InvalidRequestError(f"give 1 to {most_prompts} prompts at once", param="prompt")
