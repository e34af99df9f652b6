"""Prompts of callers' requests, packed once and sent to any number of nodes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tierkv.cache.keys import TOKEN_BYTES, count, pack
from tierkv.client.http import Body
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.kv_hints import KvHints
from tierkv.tokenizers import Messages

Prompt = str | bytes | Messages
"""A text, packed tokens, or the messages of a chat."""

Given = str | list[str | int | list[int]]  # msgspec knows no union of several lists

_NO_BYTES = b"\xc4\x00"  # msgpack's short form, bin 8, of no bytes
_BYTES = struct.Struct(">BI")  # its long form, bin 32: mark and length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to be generated: a prompt and the rules of choosing tokens.

    Attributes:
        request_id: Id of the request, from which ids of calls to nodes are made.
        prompt: A text, tokens packed as int32, or the messages of a chat.
        max_tokens: Largest number of tokens to generate.
        temperature: Divisor of the logits; 0 chooses the most likely token.
        top_k: Number of most likely tokens to choose from; 0 for all.
        seed: Seed of the random choices. It is always set, so that a second node continues with the
            same tokens.
        sampling: Further fields under the names that nodes use, without fields at their default.
        authorization: The caller's Authorization header; None without one. Used if the gateway
            forwards it.
        num_logprobs: Number of most likely tokens whose log probabilities are wanted beside the
            chosen token's; None for no log probabilities.
        session_id: The session that the prompt is a turn of; None without one.
        kv_hints: The hints of a router about the prompt; None without any.
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
    session_id: str | None = None
    kv_hints: KvHints | None = None

    @property
    def tokens(self) -> bytes:
        """The prompt as packed tokens.

        A text must have been turned into tokens by a node before.
        """
        assert isinstance(self.prompt, bytes), "the relay asks a node first"
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return count(self.tokens)

    def body(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """Return the body of a call to a node, in msgpack, as parts to send one after another.

        The prompt is a part of its own, which is not copied for each node.

        Args:
            fields: Fields of the body, without `tokens`.
            after: Tokens to append to the prompt in the field `tokens`.
        """
        packed_after = pack(after)
        head = msgspec.msgpack.encode({**fields, "tokens": b""})
        assert head.endswith(_NO_BYTES), "the last value is empty"
        size = len(self.tokens) + len(packed_after)
        return head.removesuffix(_NO_BYTES) + _BYTES.pack(0xC6, size), self.tokens, packed_after

    def work(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """Return the body of a call that generates tokens, with the sampling and a streamed answer.

        Args:
            fields: Further fields of the body.
            after: Tokens to append to the prompt; see `body`.
        """
        sampling: dict[str, object] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
            **self.sampling,
        }
        if self.num_logprobs is not None:
            sampling["logprobs"] = self.num_logprobs
        if self.session_id is not None:
            sampling["session_id"] = self.session_id
        if self.kv_hints is not None:
            sampling["kv_hints"] = self.kv_hints
        return self.body({**sampling, "stream": True, **fields}, after)


def read_prompts(given: Given, *, max_prompts: int, max_tokens: int) -> list[Prompt]:
    """Return the prompts of a body: texts unchanged, tokens packed as int32.

    Args:
        given: A text, a list of tokens, or a list of either.
        max_prompts: Largest number of prompts.
        max_tokens: Largest number of tokens of a prompt.

    Raises:
        InvalidRequestError: A prompt is empty or too long, or there are none or too many.
    """
    several: Sequence[object] = [given] if isinstance(given, str) else given
    kinds = {type(one) for one in several}
    if kinds == {int}:
        several, kinds = [several], {list}
    if not 1 <= len(several) <= max_prompts:
        raise InvalidRequestError(
            f"one request may have 1 to {max_prompts} prompts, not {len(several)}", param="prompt"
        )
    if len(kinds) > 1 or any(isinstance(one, list) and not _are_tokens(one) for one in several):
        raise InvalidRequestError(
            "prompt must be one text, one list of tokens, a list of texts, or a list "
            "of lists of tokens",
            param="prompt",
        )
    return [_read(one, max_tokens) for one in several]


def _are_tokens(several: list[object]) -> bool:
    return all(type(one) is int for one in several)


def _read(prompt: object, max_tokens: int) -> str | bytes:
    assert isinstance(prompt, str | list), "no other prompts are decoded"
    if not prompt:
        raise empty()
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > max_tokens:
        raise too_long(max_tokens)
    try:
        return pack(prompt)
    except BadRequestError as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error


def packed_bytes(prompt: Prompt) -> int:
    """Return the largest number of bytes that `prompt` can have as packed tokens.

    A token stands for at least one byte of text. Tokens that a chat template adds are not counted.
    """
    if isinstance(prompt, bytes):
        return len(prompt)
    if isinstance(prompt, str):
        return TOKEN_BYTES * len(prompt.encode())
    return sum(packed_bytes(text) for message in prompt for text in message.values())


def empty() -> InvalidRequestError:
    """Return the error for a prompt without tokens."""
    return InvalidRequestError("a prompt is empty: give at least one token", param="prompt")


def too_long(max_tokens: int) -> InvalidRequestError:
    """Return the error for a prompt with more than `max_tokens` tokens."""
    return InvalidRequestError(
        f"the prompt is longer than the nodes' {max_tokens} tokens: shorten it",
        param="prompt",
        code="context_length_exceeded",
    )
