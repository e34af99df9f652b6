"""The OpenAI completions API: what may be asked, checked, and the shapes of answers."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import msgspec

from tierkv.cache.tokens import count, pack, unpack
from tierkv.client.http import Body
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.sampling import encode

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


FinishReason = Literal["stop", "length"]
Prompt = str | list[int]

_MOST_STOPS = 4
_MOST_STOP_CHARACTERS = 256
_MOST_TEMPERATURE = 2.0
_SEED_BITS = 63


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """prompt: a text, the tokens of one, or a list of either.

    Fields that the reference model cannot serve are known, and refused unless they change nothing.
    seed: without one, a random seed; the same seed gives the same answer. top_k: not of OpenAI.
    """

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = 1
    top_p: float | None = 1.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None
    echo: bool | None = False
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises InvalidRequestError."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > _MOST_STOPS:
            raise InvalidRequestError(f"at most {_MOST_STOPS} stop texts", param="stop")
        if not all(0 < len(stop) <= _MOST_STOP_CHARACTERS for stop in stops):
            raise InvalidRequestError(
                f"a stop text has 1 to {_MOST_STOP_CHARACTERS} characters", param="stop"
            )
        return stops

    def jobs(self, request_id: str, authorization: str | None, *, most: int) -> Iterator[Job]:
        """One job for each prompt. Raises InvalidRequestError."""
        self._check()
        prompts = self._prompts()
        if not 0 < len(prompts) <= most:
            raise InvalidRequestError(f"give 1 to {most} prompts at once", param="prompt")
        seed = secrets.randbits(_SEED_BITS) if self.seed is None else self.seed % 2**64
        for number, prompt in enumerate(prompts):
            yield Job(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                tokens=_tokens(prompt),
                max_tokens=16 if self.max_tokens is None else self.max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k,
                seed=seed,
                authorization=authorization,
            )

    def _prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [cast("list[int]", self.prompt)]
        if int in kinds:
            raise InvalidRequestError("prompt mixes tokens with prompts", param="prompt")
        return cast("list[Prompt]", self.prompt)

    def _check(self) -> None:
        for field, value, neutral in (
            ("n", self.n, 1),
            ("best_of", self.best_of, 1),
            ("top_p", self.top_p, 1),
            ("presence_penalty", self.presence_penalty, 0),
            ("frequency_penalty", self.frequency_penalty, 0),
            ("logprobs", self.logprobs, None),
            ("logit_bias", self.logit_bias or None, None),
            ("suffix", self.suffix or None, None),
            ("echo", self.echo, False),
        ):
            if value is not None and value != neutral:
                raise InvalidRequestError(
                    f"{field} {value!r} is not supported: leave it out", param=field
                )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
        if self.temperature is not None and not 0 <= self.temperature <= _MOST_TEMPERATURE:
            raise InvalidRequestError("temperature must be in 0..2", param="temperature")
        if self.top_k < 0:
            raise InvalidRequestError("top_k must not be negative", param="top_k")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options need stream", param="stream_options")


def _tokens(prompt: Prompt) -> bytes:
    if not prompt:
        raise InvalidRequestError("a prompt is empty", param="prompt")
    try:
        packed = pack(encode(prompt) if isinstance(prompt, str) else prompt)
    except (BadRequestError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"the prompt cannot be read: {error}", param="prompt") from error
    if int(unpack(packed).max()) >= VOCAB_SIZE:
        raise InvalidRequestError(
            f"a token of this model is in 0..{VOCAB_SIZE - 1}", param="prompt"
        )
    return packed


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of text, or all of it where nothing is streamed."""

    text: str
    index: int
    logprobs: None = None
    finish_reason: FinishReason | None = None


class CachedDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """cached_tokens: of the prompts, found in a tier by the first node that ended its part."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """created: Unix seconds. usage: null in pieces of a stream."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None = None
    object: str = "text_completion"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "tierkv"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[Model, ...]
    object: str = "list"
