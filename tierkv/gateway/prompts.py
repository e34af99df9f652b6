"""Prompts of callers' requests, their validation, and the bodies of calls to nodes."""

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

Given = str | list[str | int | list[int]]  # msgspec does not support a union of list types

_NO_BYTES = b"\xc4\x00"  # no bytes, in msgpack's form bin 8
_BYTES = struct.Struct(">BI")  # head of msgpack's form bin 32: type byte and length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to generate: a prompt and its sampling parameters.

    Attributes:
        request_id: Id of the request; ids of the calls to nodes begin with it.
        prompt: A text, the messages of a chat, or token ids as little-endian int32 bytes.
        max_tokens: Largest number of tokens to generate.
        temperature: Divisor of the logits; 0 chooses the most likely token.
        top_k: Number of most likely tokens to sample from; 0 for all.
        seed: Seed of the sampling. If a second node continues the answer, it gets the same seed and
            therefore chooses the same tokens.
        sampling: Further sampling parameters by their names in the nodes' API. Parameters with a
            value that has no effect are left out.
        authorization: The caller's Authorization header; None if the caller sent none. The gateway
            forwards it to nodes only with the setting `forward_authorization`.
        num_logprobs: Number of most likely tokens whose log probabilities are returned with each
            token; None to return no log probabilities.
        session_id: Id of the session (conversation) to which the prompt belongs; None if it belongs
            to no session.
        kv_hints: Hints of a request router about the KV of the prompt; None if there are none.
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
        """The prompt's token ids, as little-endian int32 bytes.

        For a prompt given as text or messages, read this property only after a node has tokenized
        the prompt and the token ids have replaced the text.
        """
        assert isinstance(self.prompt, bytes), "the relay asks a node first"
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return count(self.tokens)

    def body(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """Return the msgpack body of an HTTP call to a node, as byte strings to send in order.

        The prompt's tokens are not copied: they are the second byte string.

        Args:
            fields: Fields of the body, without `tokens`.
            after: Generated tokens to append to the prompt in the field `tokens`.
        """
        packed_after = pack(after)
        head = msgspec.msgpack.encode({**fields, "tokens": b""})
        assert head.endswith(_NO_BYTES), "the last value is empty"
        size = len(self.tokens) + len(packed_after)
        return head.removesuffix(_NO_BYTES) + _BYTES.pack(0xC6, size), self.tokens, packed_after

    def work(self, fields: Mapping[str, object], after: Sequence[int] = ()) -> Body:
        """Return the body of a call to a node that generates the answer as a stream.

        The body contains the prompt, the sampling parameters and `fields`.

        Args:
            fields: Further fields of the body, without `tokens`.
            after: Generated tokens to append to the prompt in the field `tokens`.

        Returns:
            The body in msgpack, as byte strings to send in order.
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
    """Return the prompts in a request's body: texts unchanged, token lists as int32 bytes.

    Args:
        given: The field `prompt` of the body: one text, one list of tokens, or a list of texts or
            of lists of tokens.
        max_prompts: Largest number of prompts.
        max_tokens: Largest number of tokens of a prompt that is given as a list of tokens.

    Raises:
        InvalidRequestError: A prompt is empty or too long, or there are no prompts or too many.
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
    """Return an upper bound of the size of `prompt` as int32 token ids, in bytes.

    Each byte of text is counted as one token. Tokens that a chat template adds are not counted.
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
