"""OpenAI's completions and chat completions: request bodies, their validation, and answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec.structs import asdict, replace

from tierkv.api.types import Logprobs, TokenLogprob
from tierkv.gateway.failures import InvalidRequestError
from tierkv.gateway.prompts import Given, Job, Prompt, read_prompts
from tierkv.kv_hints import KvHints

FinishReason = Literal["stop", "length"]
Count = Annotated[int, msgspec.Meta(le=2**31 - 1)]  # `check` rejects low values

_MAX_STOPS = 4
_MAX_CHOICES = 128
_MAX_STOP_CHARACTERS = 256
_MAX_TEMPERATURE = 2.0
_MAX_LOGPROBS = 20
_SEED_BITS = 63
_DEFAULT_TOKENS = 16


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer.

    Attributes:
        include_usage: True to send the token usage once, at the end of the stream.
        continuous_usage_stats: Accepted without effect; load generators of vLLM send it.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SharedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that text completions and chats share.

    A field that is null counts as missing. A node rejects a field that its engine does not support,
    except with a value that has no effect.

    Attributes:
        seed: Seed of the sampling; null for a random seed. The same seed gives the same answer.
        top_k: Not a field of OpenAI; number of most likely tokens to sample from; 0 or -1 for all.
        min_tokens: Not a field of OpenAI; number of tokens at the start of the answer in which the
            answer cannot end.
        ignore_eos: Not a field of OpenAI; true to continue after tokens that end an answer.
        skip_special_tokens: Not a field of OpenAI; accepted without effect.
        n: Number of answers to each prompt, each with another seed.
        session_id: Not a field of OpenAI; id of the session (conversation) to which the request
            belongs.
        kv_hints: Not a field of OpenAI; hints of a request router about the KV of the prompt.
    """

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = 1.0
    top_k: Count | None = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    min_tokens: Count | None = 0
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    n: int | None = 1
    top_p: float | None = 1.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_p: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = False
    service_tier: str | None = None
    session_id: str | None = None
    kv_hints: KvHints | None = None
    logprobs_field: ClassVar[str] = "logprobs"  # sets `num_logprobs`

    @property
    def token_limit(self) -> int:
        """The largest number of tokens to generate."""
        return _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def length_field(self) -> str:
        """The name of the request's field that limits the number of generated tokens."""
        return "max_tokens"

    @property
    def with_usage(self) -> bool:
        """True if the client asks for the token usage at the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_candidates(self) -> int:
        """The number of most likely tokens to sample from; 0 for all tokens."""
        return 0 if self.top_k in (None, -1) else self.top_k or 0

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens that are returned with each token of the answer.

        Each has its log probability. None if the request asks for no log probabilities.
        """
        return None

    @property
    def num_choices(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    def sampling(self) -> dict[str, float]:
        """Return the sampling parameters to send to a node, by their names in the nodes' API.

        Parameters that are missing, or whose value would not change the result, are left out.
        """
        shares = {"top_p": (self.top_p, 1.0), "min_p": (self.min_p, 0.0)}
        others = {
            "repetition_penalty": (self.repetition_penalty, 1.0),
            "presence_penalty": (self.presence_penalty, 0.0),
            "frequency_penalty": (self.frequency_penalty, 0.0),
            "ignore_eos": (self.ignore_eos, False),
            "min_tokens": (self.min_tokens, 0),
        }
        if not (self.temperature == 0 or self.top_k == 1):
            others |= shares
        return {
            name: value
            for name, (value, neutral) in others.items()
            if value is not None and value != neutral
        }

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the answer.

        Raises:
            InvalidRequestError: There are more than 4 texts, or a text does not have 1 to 256
                characters.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > _MAX_STOPS:
            raise InvalidRequestError(f"stop must have at most {_MAX_STOPS} texts", param="stop")
        if not all(0 < len(stop) <= _MAX_STOP_CHARACTERS for stop in stops):
            raise InvalidRequestError(
                f"each text of stop must have 1 to {_MAX_STOP_CHARACTERS} characters", param="stop"
            )
        return stops

    def check(self) -> None:
        """Check the values of the fields.

        Raises:
            InvalidRequestError: A value is out of range or not supported; the error names the
                field.
        """
        self.refuse_unless(
            ("store", self.store, False),
            ("logit_bias", self.logit_bias or None, None),
        )
        if self.token_limit < 1:
            field = self.length_field
            raise InvalidRequestError(f"{field} must be at least 1", param=field)
        if not 0 <= (self.min_tokens or 0) <= self.token_limit:
            raise InvalidRequestError("min_tokens must be in 0..max_tokens", param="min_tokens")
        if self.temperature is not None and not 0 <= self.temperature <= _MAX_TEMPERATURE:
            raise InvalidRequestError("temperature must be in 0..2", param="temperature")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidRequestError("top_p must be above 0 and at most 1", param="top_p")
        if not 1 <= self.num_choices <= _MAX_CHOICES:
            raise InvalidRequestError(f"n must be in 1..{_MAX_CHOICES}", param="n")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= _MAX_LOGPROBS:
            raise InvalidRequestError(
                f"the number of log probabilities must be in 0..{_MAX_LOGPROBS}",
                param=self.logprobs_field,
            )
        if self.num_candidates < 0:
            raise InvalidRequestError("top_k must be -1 or more", param="top_k")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError('stream_options needs "stream": true', param="stream_options")

    def refuse_unless(self, *fields: tuple[str, object, object]) -> None:
        """Check that each unsupported field is null or has a value without effect.

        Args:
            fields: For each field its name, its value, and the value that has no effect.

        Raises:
            InvalidRequestError: A field has another value; the error names the field.
        """
        for field, value, neutral in fields:
            if value is not None and value != neutral:
                raise InvalidRequestError(
                    f"{field} {value!r:.80} is not supported: leave it out", param=field
                )

    def jobs(
        self,
        prompts: Sequence[Prompt],
        request_id: str,
        authorization: str | None,
        session_id: str | None,
    ) -> Iterator[Job]:
        """Yield a job for each answer to generate, in the order of the prompts.

        Args:
            prompts: The prompts of the body.
            request_id: Id of the request. If there are several jobs, each gets this id with a
                number appended.
            authorization: The caller's Authorization header; None if the caller sent none.
            session_id: Id of the session from the body or the header; None if there is none.
        """
        seed = secrets.randbits(_SEED_BITS) if self.seed is None else self.seed % 2**64
        every = [(prompt, choice) for prompt in prompts for choice in range(self.num_choices)]
        for number, (prompt, choice) in enumerate(every):
            yield Job(
                request_id=request_id if len(every) == 1 else f"{request_id}-{number}",
                prompt=prompt,
                max_tokens=self.token_limit,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.num_candidates,
                seed=(seed + choice) % 2**64,
                sampling=self.sampling(),
                num_logprobs=self.num_logprobs,
                authorization=authorization,
                session_id=session_id,
                kv_hints=self.kv_hints,
            )


class CompletionBody(SharedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a text completion.

    Attributes:
        prompt: One text, one list of tokens, or a list of texts or of lists of tokens.
    """

    prompt: Given
    best_of: int | None = 1
    logprobs: int | None = None
    suffix: str | None = None
    echo: bool | None = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def without_prompts(self) -> Self:
        """Return a copy of the body without the prompts, so that their memory can be freed."""
        return replace(self, prompt="")

    def prompts(self, *, max_prompts: int, max_tokens: int) -> list[Prompt]:
        """Validate the body, and return its prompts: texts unchanged, token lists as int32 bytes.

        Args:
            max_prompts: Largest number of prompts.
            max_tokens: Largest number of tokens of a prompt that is given as a list of tokens.

        Raises:
            InvalidRequestError: A prompt or another field is wrong.
        """
        self.check()
        self.refuse_unless(
            ("best_of", None if self.best_of == self.num_choices else self.best_of, 1),
            ("suffix", self.suffix or None, None),
            ("echo", self.echo, False),
        )
        return read_prompts(self.prompt, max_prompts=max_prompts, max_tokens=max_tokens)


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content


class ChatBody(SharedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat completion.

    Attributes:
        messages: The messages of the chat. A node turns them into one prompt with the model's chat
            template.
    """

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[object] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, object] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    logprobs_field: ClassVar[str] = "top_logprobs"

    @property
    def token_limit(self) -> int:
        given = self.max_completion_tokens
        return super().token_limit if given is None else given

    @property
    def length_field(self) -> str:
        given = self.max_completion_tokens
        return super().length_field if given is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def without_prompts(self) -> Self:
        return replace(self, messages=[])

    def prompts(self, *, max_prompts: int, max_tokens: int) -> list[Prompt]:
        """Validate the body, and return a list with one prompt: the messages of the chat.

        Args:
            max_prompts: Ignored.
            max_tokens: Ignored, because the messages are not tokenized yet.

        Raises:
            InvalidRequestError: A message or another field is wrong.
        """
        del max_prompts, max_tokens
        self.check()
        without_tools = self.tool_choice in ("none", "auto")
        self.refuse_unless(
            ("tools", self.tools or None, None),
            ("tool_choice", None if without_tools else self.tool_choice, None),
            ("response_format", self.response_format, {"type": "text"}),
            ("modalities", self.modalities, ["text"]),
            ("reasoning_effort", self.reasoning_effort, None),
            ("chat_template_kwargs", self.chat_template_kwargs or None, None),
        )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError('top_logprobs needs "logprobs": true', param="top_logprobs")
        if not self.messages:
            raise InvalidRequestError(
                "messages is empty: give at least one message", param="messages"
            )
        return [[{"role": one.role, "content": one.text()} for one in self.messages]]


# Answers

Placed = tuple[int, Logprobs]
"""The number of characters of the answer before a token, and the token's log probabilities."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The next text of one choice of a streamed answer, or the whole text of one choice.

    Attributes:
        text: The text to send to the client.
        logprobs: For each token: the number of characters of the answer before the token, and the
            token's log probabilities. Empty if the client asked for no log probabilities.
    """

    text: str = ""
    logprobs: Sequence[Placed] = ()

    @classmethod
    def joined(cls, pieces: Sequence[AnswerPiece]) -> AnswerPiece:
        """Return one piece with the text and log probabilities of all `pieces`."""
        text = "".join(piece.text for piece in pieces)
        return cls(text, [one for piece in pieces for one in piece.logprobs])


class CachedDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The token usage of a request.

    Attributes:
        prompt_tokens: Number of tokens of all prompts.
        completion_tokens: Number of generated tokens.
        total_tokens: The sum of both.
        prompt_tokens_details: Number of prompt tokens that were found in the cache. If several
            nodes worked on a prompt, the number comes from the node that first ended its answer
            without an error.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class LikelyToken(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position of a chat's answer.

    Attributes:
        token: Text of the token.
        logprob: Natural logarithm of its probability.
        bytes: UTF-8 bytes of the text; null if the token is only a part of a character.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] | None

    @classmethod
    def of(cls, one: TokenLogprob) -> LikelyToken:
        is_whole = "\ufffd" not in one.text
        return cls(one.text, one.logprob, tuple(one.text.encode()) if is_whole else None)


class ChosenToken(LikelyToken, frozen=True):
    """A token of a chat's answer, and the most likely tokens at its position."""

    top_logprobs: tuple[LikelyToken, ...] = ()


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of a chat's answer."""

    content: tuple[ChosenToken, ...]

    @classmethod
    def of(cls, placed: Sequence[Placed]) -> ChatLogprobs:
        return cls(
            tuple(
                ChosenToken(
                    **asdict(LikelyToken.of(one.chosen)),
                    top_logprobs=tuple(map(LikelyToken.of, one.top)),
                )
                for _, one in placed
            )
        )


class TextLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of a text completion, one entry per token in each field.

    Attributes:
        tokens: Text of each token.
        token_logprobs: Log probability of each token.
        top_logprobs: For each token, the log probabilities of the most likely tokens at its
            position and of the token itself, by the text of the token.
        text_offset: Number of characters of the answer before each token.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]

    @classmethod
    def of(cls, placed: Sequence[Placed]) -> TextLogprobs:
        return cls(
            tuple(one.chosen.text for _, one in placed),
            tuple(one.chosen.logprob for _, one in placed),
            # If tokens have the same text, the most likely one wins.
            tuple(
                {each.text: each.logprob for each in (one.chosen, *reversed(one.top))}
                for _, one in placed
            ),
            tuple(offset for offset, _ in placed),
        )


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: Literal["assistant"] = "assistant"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt, or a part of an answer.

    A text completion has the field `text`. A whole chat answer has `message`; a part of a streamed
    chat answer has `delta`.
    """

    text: str | msgspec.UnsetType = msgspec.UNSET
    index: int
    message: ChatDelta | msgspec.UnsetType = msgspec.UNSET
    delta: ChatDelta | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a part of a streamed answer.

    Attributes:
        usage: The token usage, in a whole answer and in the last part of a stream; null in all
            other parts.
    """

    id: str
    object: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: TokenUsage | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of a streamed answer share, and methods that build answers.

    Attributes:
        id: Id of the answer.
        created: Time of the answer, in Unix seconds.
        model: Name of the model.
        is_chat: True for a chat, False for a text completion.
    """

    id: str
    created: int
    model: str
    is_chat: bool

    def whole(
        self,
        pieces: Sequence[AnswerPiece],
        finishes: Sequence[FinishReason | None],
        usage: TokenUsage,
    ) -> Completion:
        """Return the answer to a request that did not ask for a streamed answer.

        Args:
            pieces: Text and log probabilities of each choice.
            finishes: Reason why each choice ended, in the order of `pieces`.
            usage: The token usage of all choices.
        """
        choices = (
            self._choice(index, "message", piece, finish)
            for index, (piece, finish) in enumerate(zip(pieces, finishes, strict=True))
        )
        return self._of(tuple(choices), usage, "chat.completion")

    def piece(
        self, index: int, piece: AnswerPiece, finish: FinishReason | None = None
    ) -> Completion:
        """Return a part of a streamed answer.

        Args:
            index: Number of the choice, from 0.
            piece: The next text and log probabilities of the choice.
            finish: Reason why the choice ended, in its last part; None in all other parts.
        """
        choice = self._choice(index, "delta", piece, finish)
        return self._of((choice,), None, "chat.completion.chunk")

    def _choice(
        self, index: int, field: str, piece: AnswerPiece, finish: FinishReason | None
    ) -> Choice:
        kind = ChatLogprobs if self.is_chat else TextLogprobs
        logprobs = kind.of(piece.logprobs) if piece.logprobs else None
        text: dict[str, Any] = (
            {field: ChatDelta(content=piece.text)} if self.is_chat else {"text": piece.text}
        )
        return Choice(index=index, logprobs=logprobs, finish_reason=finish, **text)

    def usage(self, usage: TokenUsage) -> Completion:
        """Return the last part of a streamed answer, which has the token usage of all choices."""
        return self._of((), usage, "chat.completion.chunk")

    def _of(self, choices: tuple[Choice, ...], usage: TokenUsage | None, kind: str) -> Completion:
        return Completion(
            id=self.id,
            object=kind if self.is_chat else "text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )


# Models


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "tierkv"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[Model, ...]
    object: str = "list"
