"""Prompts of callers' bodies, packed once and sent to any number of nodes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tierkv.cache.keys import count, pack, unpack
from tierkv.client.http import Body
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.model import encode_bytes

Given = str | list[str | int | list[int]]  # msgspec knows no union of several lists

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


def packed_prompts(given: Given, *, most_prompts: int, most_tokens: int) -> list[bytes]:
    """Pack the prompts of a body.

    Args:
        given: A text, its tokens, or a list of either.
        most_prompts: Length of the longest list of prompts.
        most_tokens: Length of the longest prompt.

    Raises:
        InvalidRequestError: A prompt is empty, too long, or not one of the model's, or there are
            too many prompts or none.
    """
    several: Sequence[object] = [given] if isinstance(given, str) else given
    kinds = {type(one) for one in several}
    if kinds == {int}:
        several, kinds = [several], {list}
    if not 1 <= len(several) <= most_prompts:
        raise InvalidRequestError(f"give 1 to {most_prompts} prompts at once", param="prompt")
    if len(kinds) > 1 or any(isinstance(one, list) and not _are_tokens(one) for one in several):
        raise InvalidRequestError(
            "prompt mixes tokens with prompts, or texts with tokens", param="prompt"
        )
    return [_packed(one, most_tokens) for one in several]


def _are_tokens(several: list[object]) -> bool:
    return all(type(one) is int for one in several)


def _packed(prompt: object, most_tokens: int) -> bytes:
    assert isinstance(prompt, str | list), "no other prompts are decoded"
    if len(prompt) > most_tokens:  # each character is at least one token
        raise too_long(most_tokens)
    if not prompt:
        raise InvalidRequestError("a prompt is empty", param="prompt")
    try:
        if isinstance(prompt, str):
            packed = encode_bytes(prompt.encode()).tobytes()
        else:
            packed = pack(prompt)
    except (BadRequestError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error
    if count(packed) > most_tokens:
        raise too_long(most_tokens)
    if int(unpack(packed).max()) >= VOCAB_SIZE:
        raise InvalidRequestError(
            f"a token of this model is in 0..{VOCAB_SIZE - 1}", param="prompt"
        )
    return packed


def too_long(most_tokens: int) -> InvalidRequestError:
    """What a prompt of more tokens is refused with."""
    return InvalidRequestError(
        f"a prompt has at most {most_tokens} tokens here",
        param="prompt",
        code="context_length_exceeded",
    )
