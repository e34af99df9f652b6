"""Prompts of callers' bodies, packed once and sent to any number of nodes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tierkv.cache.keys import TOKEN_BYTES, count, pack
from tierkv.client.http import Body
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.tokenizers import Messages

Prompt = str | bytes | Messages
"""A text, packed tokens, or the messages of a chat."""

Given = str | list[str | int | list[int]]  # msgspec knows no union of several lists

_NO_BYTES = b"\xc4\x00"  # msgpack's short form, bin 8, of no bytes
_BYTES = struct.Struct(">BI")  # its long form, bin 32: mark and length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt and its sampling.

    Attributes:
        prompt: A text, packed tokens, or the messages of a chat.
        authorization: The caller's header, if the gateway forwards it.
        seed: Seed of the sampling, always set, so that a second node continues like the first.
        sampling: Further fields of the sampling by the names that nodes give them, without those
            that have their default.
        num_logprobs: Number of most likely tokens whose log probabilities are wanted beside the
            chosen token's; None for no log probabilities.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    sampling: Mapping[str, float] = field(default_factory=dict)
    authorization: str | None = None
    num_logprobs: int | None = None

    @property
    def tokens(self) -> bytes:
        """The prompt, packed, once a node has said what tokens its text is."""
        assert isinstance(self.prompt, bytes), "the relay asks a node first"
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return count(self.tokens)

    def body(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """Return a body in msgpack: `fields`, and as `tokens` the prompt and the tokens `after` it.

        The prompt is not copied, however many nodes get it.
        """
        packed_after = pack(after)
        head = msgspec.msgpack.encode({**fields, "tokens": b""})
        assert head.endswith(_NO_BYTES), "the last value is empty"
        size = len(self.tokens) + len(packed_after)
        return head.removesuffix(_NO_BYTES) + _BYTES.pack(0xC6, size), self.tokens, packed_after

    def work(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """Return a body with `fields` and the sampling, which asks for a streamed answer.

        See `body`.
        """
        sampling: dict[str, object] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
            **self.sampling,
        }
        if self.num_logprobs is not None:
            sampling["logprobs"] = self.num_logprobs
        return self.body({**sampling, "stream": True, **fields}, after)


def read_prompts(given: Given, *, most_prompts: int, most_tokens: int) -> list[Prompt]:
    """Return the prompts of a body: texts unchanged, tokens packed.

    Args:
        given: A text, its tokens, or a list of either.
        most_prompts: Length of the longest list of prompts.
        most_tokens: Length of the longest list of tokens.

    Raises:
        InvalidRequestError: A prompt is empty, too long or none at all, or they are too many.
    """
    several: Sequence[object] = [given] if isinstance(given, str) else given
    kinds = {type(one) for one in several}
    if kinds == {int}:
        several, kinds = [several], {list}
    if not 1 <= len(several) <= most_prompts:
        raise InvalidRequestError(
            f"one request may have 1 to {most_prompts} prompts, not {len(several)}", param="prompt"
        )
    if len(kinds) > 1 or any(isinstance(one, list) and not _are_tokens(one) for one in several):
        raise InvalidRequestError(
            "prompt must be one text, one list of tokens, a list of texts, or a list "
            "of lists of tokens",
            param="prompt",
        )
    return [_read(one, most_tokens) for one in several]


def _are_tokens(several: list[object]) -> bool:
    return all(type(one) is int for one in several)


def _read(prompt: object, most_tokens: int) -> str | bytes:
    assert isinstance(prompt, str | list), "no other prompts are decoded"
    if not prompt:
        raise empty()
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > most_tokens:
        raise too_long(most_tokens)
    try:
        return pack(prompt)
    except BadRequestError as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error


def packed_bytes(prompt: Prompt) -> int:
    """Return the most bytes that `prompt` has when packed, without the tokens of a chat template.

    A token is at least a byte of text.
    """
    if isinstance(prompt, bytes):
        return len(prompt)
    if isinstance(prompt, str):
        return TOKEN_BYTES * len(prompt.encode())
    return sum(packed_bytes(text) for message in prompt for text in message.values())


def empty() -> InvalidRequestError:
    """Return the refusal of a prompt without tokens."""
    return InvalidRequestError("a prompt is empty: give at least one token", param="prompt")


def too_long(most_tokens: int) -> InvalidRequestError:
    """Return the refusal of a prompt with more tokens."""
    return InvalidRequestError(
        f"the prompt is longer than the nodes' {most_tokens} tokens: shorten it",
        param="prompt",
        code="context_length_exceeded",
    )
