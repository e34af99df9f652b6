"""The request bodies and answers of a node's HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import asdict, astuple

from tierkv.cache.keys import TOKEN_BYTES, MediaItem, Prompt, pack
from tierkv.engine import (
    EngineSpec,
    FinishReason,
    GenerateRequest,
    Generation,
    Prefilled,
    Sampling,
    TokenLogprobs,
)
from tierkv.errors import RequestTooLargeError
from tierkv.http.bodies import FieldError
from tierkv.kv_hints import KvHints
from tierkv.observe import Lookup
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Matched
from tierkv.tokenizers import Tokenizer
from tierkv.transfer.tier import StoreState

MaxTokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
MinTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TopK = Annotated[int, msgspec.Meta(le=2**31 - 1)]  # `Sampling` rejects negative values
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
StopTexts = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=256)]], msgspec.Meta(max_length=4)
]


class MediaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image, audio clip or video in a prompt.

    Attributes:
        start: Position in the prompt of the first placeholder token.
        num_tokens: Number of placeholder tokens.
        hash: Hash of the content and of its shape: 16 to 64 bytes, in hexadecimal.
    """

    start: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    hash: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){16,64}$")]


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, given as exactly one of `prompt` and `tokens`.

    Attributes:
        prompt: The text.
        tokens: A list of token ids, or the ids as bytes of 32-bit little-endian integers (base64 in
            JSON).
        media: Images, audio and video of the prompt. Prompts share a block only if the block has
            the same media in both. An engine may support no media.
        adapter: Name and revision of the LoRA adapter; "" for none. Prompts with different adapters
            share no block. An engine may support no adapters.
    """

    prompt: str | None = None
    tokens: list[int] | bytes | None = None
    media: Annotated[list[MediaBody], msgspec.Meta(max_length=1024)] = []
    adapter: Annotated[str, msgspec.Meta(max_length=256)] = ""

    def media_items(self) -> list[MediaItem]:
        return [MediaItem(one.start, one.num_tokens, bytes.fromhex(one.hash)) for one in self.media]

    def packed(self, tokenizer: Tokenizer | None, max_tokens: int = 2**31 - 1) -> bytes:
        """Return the prompt's token ids, as little-endian int32 bytes.

        Args:
            tokenizer: The tokenizer of the node's engine; None if the node has none.
            max_tokens: Largest allowed number of tokens.

        Raises:
            FieldError: Neither or both of `prompt` and `tokens` are given, or the prompt is a text
                and the node has no tokenizer.
            BadRequestError: A token is out of range.
            RequestTooLargeError: The prompt has more than `max_tokens` tokens.
        """
        given = self.tokens if self.prompt is None else self.prompt
        if given is None or (self.prompt is not None and self.tokens is not None):
            raise FieldError("give either prompt or tokens, and not both")
        if isinstance(given, str):
            if tokenizer is None:
                raise FieldError(
                    "this node has no tokenizer, since it has no model of its own: give "
                    "tokens instead of prompt"
                )
            check_length(tokenizer.fewest_tokens(given), max_tokens)
            given = tokenizer.encode(given)
        num_tokens = len(given) // TOKEN_BYTES if isinstance(given, bytes) else len(given)
        check_length(num_tokens, max_tokens)
        return pack(given)


def check_length(num_tokens: int, max_tokens: int) -> None:
    """Check that a prompt is not too long.

    Args:
        num_tokens: Number of the prompt's tokens.
        max_tokens: Largest allowed number of tokens.

    Raises:
        RequestTooLargeError: The prompt has more than `max_tokens` tokens.
    """
    if num_tokens > max_tokens:
        raise RequestTooLargeError(
            f"the prompt is longer than this node's {max_tokens} tokens: shorten it"
        )


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text or a chat to turn into tokens: exactly one of the two fields is given.

    Attributes:
        prompt: The text.
        messages: The messages of a chat. The model's chat template turns them into one text.
    """

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None

    @property
    def num_characters(self) -> int:
        """The number of characters of the text, or of all messages."""
        if self.messages is None:
            return len(self.prompt or "")
        return sum(len(message.content) for message in self.messages)

    def encoded(self, tokenizer: Tokenizer) -> bytes:
        """Return the token ids, as little-endian int32 bytes.

        Raises:
            FieldError: Neither or both of `prompt` and `messages` are given.
            BadRequestError: The text has no tokens, or the chat template rejects the messages.
        """
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("give exactly one of prompt and messages")
        if self.messages is None:
            return tokenizer.encode(self.prompt or "")
        return tokenizer.encode_chat([asdict(one) for one in self.messages])


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text or a chat.

    Attributes:
        tokens: The token ids, as bytes of 32-bit little-endian integers (base64 in JSON). Other
            routes accept a prompt in this form.
        num_tokens: Number of tokens.
    """

    tokens: bytes
    num_tokens: int


class LookupBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_id: str | None = None


class SamplingBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt and the sampling parameters of its answer.

    Attributes:
        temperature, top_k, seed, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty: Sampling parameters, with the same meaning as in vLLM.
        ignore_eos: True to continue after tokens that end an answer.
        min_tokens: Number of tokens at the start of the answer in which the answer cannot end.
        logprobs: Number of most likely tokens whose log probabilities are returned with each token;
            null to return no log probabilities.
        request_id: Id of the request; a repeated call with the same id gets the same answer. null
            for a new id.
        session_id: Id of the session (conversation) to which the request belongs. For
            `node.session_ttl_s` seconds, the blocks of the session's last turn are evicted only
            after all other blocks.
        kv_hints: Hints of a request router about the KV of the prompt. A hint to fetch the prompt
            has no effect here, because the node looks for every prompt in storage anyway.
        stream: True to send tokens as server-sent events as soon as they are computed.
    """

    temperature: float = 0.0
    top_k: TopK = 0
    seed: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    min_tokens: MinTokens = 0
    logprobs: NumLogprobs | None = None
    request_id: str | None = None
    session_id: str | None = None
    kv_hints: KvHints | None = None
    stream: bool = False

    def sampling(self) -> Sampling:
        """Return the sampling parameters.

        Raises:
            BadRequestError: A value is out of range.
        """
        return Sampling(**{one.name: getattr(self, one.name) for one in fields(Sampling)})


class GenerateBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to generate tokens.

    Attributes:
        max_tokens: Largest number of tokens to generate.
        use_cache: False to compute the whole prompt without cached blocks, and to cache no blocks.
        answered_tokens: Number of tokens at the end of the prompt that are already a part of the
            answer, generated by an earlier call. Streamed text starts after the text of these
            tokens.
        stop: Texts that end the answer, and are not included in its text.
    """

    max_tokens: MaxTokens = 32
    use_cache: bool = True
    answered_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    stop: StopTexts = []


class PrefillBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to compute a prompt and its first token, and publish the prompt for a decode node.

    Attributes:
        ticket_id: Id by which the decode node claims the prompt; null to use the request's id.
        wait: "published" to answer once the prompt is published, "nothing" to answer once the first
            token is computed.
    """

    ticket_id: str | None = None
    wait: PublishWait = PublishWait.PUBLISHED


class DecodeBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to claim a published prompt and generate the tokens after it.

    Prompt and sampling parameters must be the same as in the prefill request.

    Attributes:
        ticket_id: Id under which the prefill node published the prompt.
        max_tokens: Largest number of tokens to generate.
        policy: What to do with tokens of the prompt that cannot be fetched. "whole": fail.
            "recompute": compute them on this node. "recompute_all": do not look for the ticket, and
            compute the whole prompt.
        deadline_s: Seconds to wait for the prompt to be published; null for the node's setting.
        stop: Texts that end the answer, and are not included in its text.
    """

    ticket_id: str
    max_tokens: MaxTokens = 32
    policy: ClaimPolicy = ClaimPolicy.WHOLE
    deadline_s: Seconds | None = None
    stop: StopTexts = []


def job_of(
    body: SamplingBody,
    spec: EngineSpec,
    name: str,
    prompt: Prompt,
    max_tokens: int = 1,
    *,
    uses_cache: bool = True,
) -> GenerateRequest:
    """Translate the body of an API call to a request for the engine.

    Args:
        body: The body of the call.
        spec: The description of the node's engine.
        name: The id of the new request in the scheduler.
        prompt: The prompt of the body.
        max_tokens: Largest number of tokens to generate.
        uses_cache: False to compute the whole prompt without cached blocks, and to cache no blocks.

    Raises:
        FieldError: The body has media or an adapter that the engine does not support.
        BadRequestError: A value is out of range.
    """
    if (body.media and not spec.takes_media) or (body.adapter and not spec.takes_adapters):
        raise FieldError(
            "the engine of this node supports neither media nor adapters: remove these fields"
        )
    return GenerateRequest(
        name,
        prompt.tokens,
        max_tokens,
        body.sampling(),
        uses_cache=uses_cache,
        space=prompt.space,
        ignores_end=body.ignore_eos,
        min_tokens=body.min_tokens,
        stops=tuple(body.stop) if isinstance(body, GenerateBody | DecodeBody) else (),
        num_logprobs=body.logprobs,
    )


class MatchedTokens(msgspec.Struct, frozen=True):
    """The number of cached prompt tokens by the place where they were found.

    Each token counts once.

    Attributes:
        device: Number of tokens on the device, or on the way to the device for another request.
        host: Number of tokens on the host.
        storage: Number of tokens fetched from storage for this request.
        direct: Number of tokens read from another node's memory for this request, instead of from
            storage.
    """

    device: int
    host: int
    storage: int
    direct: int = 0

    @classmethod
    def of(cls, matched: Matched) -> MatchedTokens:
        return MatchedTokens(*astuple(matched))


class TokenLogprob(msgspec.Struct, frozen=True):
    """A candidate token at one position of an answer, with its text and its log probability."""

    token: int
    text: str
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of token probabilities at one position of an answer.

    Sampling parameters such as the temperature have no effect on them.

    Attributes:
        chosen: The token of the answer at this position.
        top: The most likely tokens at this position, in descending order.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def with_texts(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> tuple[Logprobs | None, ...] | None:
    """Return the log probabilities of an answer, with the text of each token.

    Args:
        tokens: The tokens of the answer.
        logprobs: The log probabilities of each token; empty if the request asks for none.
        tokenizer: The tokenizer of the model.

    Returns:
        One entry per token of the answer, None for a token without log probabilities; None as a
            whole if `logprobs` is empty.
    """

    def named(token: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token, tokenizer.token_text(token), logprob)

    if not logprobs:
        return None
    return tuple(
        None
        if one is None
        else Logprobs(named(token, one.chosen), tuple(named(*other) for other in one.top))
        for token, one in zip(tokens, logprobs, strict=True)
    )


class TokensEvent(msgspec.Struct, frozen=True):
    """An event of a stream: the next tokens of the answer.

    The last event may have only text, and no tokens: text that was held back because it was an
    incomplete character or could begin a stop text.

    Attributes:
        tokens: The tokens after those of earlier events.
        text: The text that these tokens complete.
        pieces: Text of each token; "" for a token that ends within a character.
        logprobs: Log probabilities of each token; null if the request does not ask for them.
    """

    tokens: Sequence[int]
    text: str
    pieces: Sequence[str] = ()
    logprobs: Sequence[Logprobs | None] | None = None


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The generated tokens.

    Attributes:
        request_id: Id of the request.
        text: The text of the answer.
        tokens: The tokens of the answer.
        prompt_tokens: Number of tokens of the prompt.
        computed_tokens: Number of prompt tokens that this node computed.
        matched: Number of prompt tokens found on each tier.
        load_problem: Reason why cached tokens were computed instead of loaded; null if there was no
            such problem.
        queue_s: Seconds from the call until the request was admitted, including the fetch from
            storage and the wait for a ticket.
        time_to_first_token_s: Seconds from the call until this node computed its first token.
        total_s: Seconds from the call until the last token.
        finish_reason: "length" if max_tokens was reached, "stop" if the model or a stop text ended
            the answer.
        logprobs: Log probabilities of each token, null for tokens that the prefill node generated;
            null as a whole if the request does not ask for them.
    """

    request_id: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    matched: MatchedTokens
    load_problem: str | None
    queue_s: float
    time_to_first_token_s: float
    total_s: float
    finish_reason: FinishReason = "length"
    logprobs: tuple[Logprobs | None, ...] | None = None

    @classmethod
    def of(cls, request_id: str, generation: Generation, tokenizer: Tokenizer) -> GenerateAnswer:
        """Return the answer to a request.

        Args:
            request_id: Id of the request.
            generation: The engine's result.
            tokenizer: The tokenizer of the model.
        """
        return GenerateAnswer(
            request_id=request_id,
            text=generation.text,
            tokens=generation.tokens,
            prompt_tokens=generation.prompt_tokens,
            computed_tokens=generation.computed_tokens,
            matched=MatchedTokens.of(generation.matched),
            load_problem=generation.load_problem,
            queue_s=generation.queue_s,
            time_to_first_token_s=generation.first_token_s,
            total_s=generation.total_s,
            finish_reason=generation.finish_reason,
            logprobs=with_texts(generation.tokens, generation.logprobs, tokenizer),
        )


class DecodeAnswer(GenerateAnswer, frozen=True, kw_only=True):
    """The tokens generated after a claimed prompt.

    Attributes:
        ticket_id: Id of the ticket, as given in the request.
        producer: The node that published the prompt; null if this node found no usable ticket and
            computed the prompt.
        first_tokens: The first tokens of the answer, which the producer generated.
    """

    ticket_id: str
    producer: str | None
    first_tokens: tuple[int, ...]

    @classmethod
    def of_ticket(
        cls, answer: GenerateAnswer, ticket_id: str, ticket: Ticket | None
    ) -> DecodeAnswer:
        """Return the answer to a decode request.

        Args:
            answer: The generated tokens.
            ticket_id: Id of the ticket, as given in the request.
            ticket: The claimed ticket; None if this node computed the prompt instead.
        """
        return DecodeAnswer(
            **asdict(answer),
            ticket_id=ticket_id,
            producer=ticket.producer if ticket else None,
            first_tokens=ticket.first_tokens if ticket else (),
        )


class PrefillAnswer(GenerateAnswer, frozen=True, kw_only=True):
    """The outcome of a prefill.

    If the call did not wait for the publish, present_blocks, early_blocks, flushed_bytes and
    expires_at are null.

    Attributes:
        tokens, text: The first token.
        ticket_id: Id of the ticket, by which a decode node claims the prompt.
        num_blocks: Number of blocks of the prompt, including a partial last block.
        tail_tokens: Number of tokens in the partial last block; 0 if there is none.
        present_blocks: Number of the prompt's blocks that were in storage before the publish.
        early_blocks: Number of the prompt's blocks that were stored while the prompt was computed.
        flushed_bytes: Number of bytes that the publish wrote to storage.
        expires_at: Time at which the ticket expires, in Unix seconds.
    """

    ticket_id: str
    num_blocks: int
    tail_tokens: int
    present_blocks: int | None
    early_blocks: int | None
    flushed_bytes: int | None
    expires_at: float | None

    @classmethod
    def of_prefill(
        cls, answer: GenerateAnswer, prefilled: Prefilled, ticket_id: str, block_size: int
    ) -> PrefillAnswer:
        """Return the answer to a prefill request.

        Args:
            answer: The part of the answer that every generation has, with the first token.
            prefilled: The engine's result. The outcome of the publish is included if the call
                waited for the publish.
            ticket_id: Id of the ticket: the one in the request, or else the id of the request.
            block_size: Number of tokens per block.
        """
        published, num_tokens = prefilled.published, prefilled.generation.prompt_tokens
        return PrefillAnswer(
            **asdict(answer),
            ticket_id=ticket_id,
            num_blocks=-(-num_tokens // block_size),
            tail_tokens=num_tokens % block_size,
            present_blocks=published.present_blocks if published else None,
            early_blocks=published.early_blocks if published else None,
            flushed_bytes=published.flushed_bytes if published else None,
            expires_at=published.ticket.expires_at if published else None,
        )


class LookupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a prompt's leading tokens that are cached on each tier.

    Each token counts on one tier only.

    Attributes:
        num_tokens: Number of tokens of the prompt.
        device_tokens: Number of leading tokens that are on the device.
        host_tokens: Number of tokens after the device tokens that are on the host.
        storage_tokens: Number of tokens after the host tokens that are in storage; null if the
            store did not answer.
    """

    request_id: str
    num_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None

    @classmethod
    def of(cls, request_id: str, found: Lookup) -> LookupAnswer:
        """Return the answer to a lookup.

        Args:
            request_id: Id of the request.
            found: The number of tokens found on each tier.
        """
        return LookupAnswer(request_id=request_id, **asdict(found))


class VerifyAnswer(msgspec.Struct, frozen=True):
    """The result of a check of the bookkeeping of blocks, slots and leases.

    Attributes:
        findings: A sentence for each fault; empty if there is no fault.
    """

    findings: list[str]


class PartHealth(msgspec.Struct, frozen=True):
    status: str
    detail: str


class ReadyAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The health of a node or a gateway that accepts requests.

    Attributes:
        status: "ok" or "degraded".
        parts: Health of each part of the node, or of each node behind the gateway, by name; absent
            without ?verbose.
    """

    status: str
    parts: dict[str, PartHealth] | None = None


class LiveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the event loop.

    Attributes:
        status: "ok".
        heartbeat_age_s: Seconds since the lag of the loop was last measured, normally at most 0.05;
            null while the node starts.
        worst_lag_s: Longest lag of the loop within the last minute, in seconds.
    """

    status: str
    heartbeat_age_s: float | None
    worst_lag_s: float


class VersionAnswer(msgspec.Struct, frozen=True):
    """The version of the node, and the identity of its KV.

    Attributes:
        version: Version of tierkv.
        name: Name of the node.
        role: Prefill, decode or both.
        fingerprint: Fields in which two nodes must agree to share blocks.
        stored_under: Prefix of the names of the node's stored blocks.
        model: Name of the model's directory or file; "" if the node was started without a path.
    """

    version: str
    name: str
    role: str
    fingerprint: dict[str, str]
    stored_under: str
    model: str = ""


PinSeconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
WaitSeconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class AbortAnswer(msgspec.Struct, frozen=True):
    """The id of the request that was aborted."""

    request_id: str
    state: Literal["aborted"] = "aborted"


class PrefetchBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to fetch a prompt's blocks from storage to the host.

    Attributes:
        request_id: Id of the prefetch; null for a new id. A repeated call with the same id and body
            starts no second prefetch.
        deadline_s: Seconds after which the prefetch ends with the blocks fetched so far.
        kv_hints: Hints of a request router. If hints are given, the prompt is fetched only if one
            of them asks for this.
    """

    request_id: str | None = None
    deadline_s: WaitSeconds = 30.0
    kv_hints: KvHints | None = None


class PrefetchState(Enum):
    RUNNING = "running"
    DONE = "done"  # all stored blocks of the prompt are on the host or device
    PARTIAL = "partial"  # some are; `problem` says why no more
    CANCELLED = "cancelled"


class PrefetchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a prefetch.

    Attributes:
        first_token: Position in the prompt of the first fetched token.
        fetched_tokens: Number of tokens whose blocks were fetched from storage to the host; 0 while
            the prefetch runs, and after a cancel.
        problem: Reason why no more blocks were fetched; null if there is no such reason.
    """

    prefetch_id: str
    state: PrefetchState
    prompt_tokens: int
    first_token: int
    fetched_tokens: int
    problem: str | None


class PinBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to protect the cached blocks of a prompt from eviction.

    Attributes:
        ttl_s: Seconds until the pin ends.
        soft: True to let the blocks be evicted after all blocks without a pin.
    """

    ttl_s: PinSeconds = 600.0
    soft: bool = False


class PinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A pin, which protects the cached blocks of a prompt from eviction.

    Attributes:
        num_tokens: Number of leading tokens of the prompt that are pinned, in whole blocks.
        prompt_tokens: Number of tokens of the prompt.
        soft: True if the blocks may be evicted after all blocks without a pin.
        expires_in_s: Seconds until the pin ends.
    """

    pin_id: str
    num_tokens: int
    prompt_tokens: int
    soft: bool
    expires_in_s: float


class PinsAnswer(msgspec.Struct, frozen=True):
    pins: list[PinAnswer]


_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"  # URL parsers silently drop line ends
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TicketState(Enum):
    """The state of a hand-off ticket, by which a decode node claims a published prompt.

    OPEN: The prompt is being published; the ticket is not written yet. FAILED: The producer gave up
    the publish. LOST: The producer's liveness lease expired before the end of the publish. WHOLE:
    The prompt is published, and a decode node can claim it. INCOMPLETE: As WHOLE, but a block of
    the prompt is missing in storage. CLAIMED: A decode node has claimed the prompt. EXPIRED: The
    ticket's time is over. INCOMPATIBLE: This node cannot use the KV of the ticket's producer.
    DAMAGED: The stored ticket differs from the written one.
    """

    OPEN = "open"
    FAILED = "failed"
    LOST = "lost"
    WHOLE = "whole"
    INCOMPLETE = "incomplete"
    CLAIMED = "claimed"
    EXPIRED = "expired"
    INCOMPATIBLE = "incompatible"
    DAMAGED = "damaged"


class TicketAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a hand-off ticket, by which a decode node claims a published prompt.

    Attributes:
        detail: A sentence about the cause of the state; "" if there is none.
        num_tokens, num_blocks: Number of tokens and of blocks of the prompt; null if not known.
        present_blocks: Number of the prompt's leading blocks that are in storage; null unless the
            state is "whole" or "incomplete".
        producer: The node that published the prompt; null if not known.
        claimer: The node that claimed the prompt; null before the claim.
        expires_at: Time at which the ticket expires, in Unix seconds; null if not known.
    """

    ticket_id: str
    state: TicketState
    detail: str = ""
    num_tokens: int | None = None
    num_blocks: int | None = None
    present_blocks: int | None = None
    producer: str | None = None
    claimer: str | None = None
    expires_at: float | None = None


class TierName(Enum):
    DEVICE = "device"
    HOST = "host"


class TierAnswer(msgspec.Struct, frozen=True, kw_only=True):
    capacity_blocks: int
    used_blocks: int
    block_bytes: int


class TiersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity and state of the node's tiers.

    Attributes:
        storage: State of each attached store; empty if the node has no storage tier.
    """

    device: TierAnswer
    host: TierAnswer
    storage: list[StoreState]


class StorageBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store to use as the storage tier.

    Attributes:
        url: URL of the store, in the form of the setting storage.url.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=_ONE_LINE)]


class QuotaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest number of blocks that a tenant may have on each tier; null for no limit.

    If a quota is full, new blocks of the tenant replace older blocks of the same tenant.
    """

    device_blocks: Count | None = None
    host_blocks: Count | None = None


class QuotaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The quota of a tenant.

    Attributes:
        stored_under: Prefix of the names of the tenant's stored blocks.
        device_blocks, host_blocks: Largest number of the tenant's blocks on the tier; null for no
            limit.
    """

    tenant: str
    stored_under: str
    device_blocks: int | None
    host_blocks: int | None


class ResizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new capacity of a tier.

    Attributes:
        blocks: New capacity in blocks, at most the number for which memory was allocated at the
            start.
        deadline_s: Seconds to wait for blocks in use, if the new capacity is smaller. After that,
            the call fails and leaves the capacity unchanged.
    """

    tier: TierName
    blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    deadline_s: WaitSeconds = 30.0


class LifeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the node (draining, paused, asleep), and the numbers of its requests."""

    is_draining: bool
    is_paused: bool
    is_asleep: bool
    running_requests: int
    waiting_requests: int


class ResetAnswer(msgspec.Struct, frozen=True):
    """The outcome of a reset, or of a removal of all blocks.

    Attributes:
        held_copies: Number of block copies on device and host that were not removed, because
            requests, pins or running copies use them.
        removed_values: Number of values that were deleted from storage.
    """

    held_copies: int
    removed_values: int = 0


class SleepBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to free the device's memory.

    Attributes:
        keep_blocks: True to copy blocks that are only on the device to the host, until the host is
            full.
        deadline_s: Seconds to wait until all running requests and pins have ended. After that, the
            call fails, and new requests are admitted again.
    """

    keep_blocks: bool = True
    deadline_s: WaitSeconds = 60.0


class WakeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to allocate the device's memory again.

    Attributes:
        device_blocks: Number of blocks to allocate; null for the number before the sleep.
    """

    device_blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class BlockAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One cached block.

    Attributes:
        digest: Key of the block, in hexadecimal; "" for a partial block.
        space: Name of the space (part of the cache for one model, adapter and tenant) that has the
            block; "" for the node's own.
        index: Number of blocks before this one in each prompt that has the block.
        is_tail: True for a partial block at the end of a prompt.
        device, host: State of the block's copy on the tier: absent, incoming or ready.
        is_stored: True if the node assumes, without asking the store, that the block is in storage.
        is_held: True if a request or a pin uses the block, so that it cannot be evicted.
        hits: Number of times that a prompt matched the block.
    """

    digest: str
    space: str
    index: int
    is_tail: bool
    device: str
    host: str
    is_stored: bool
    is_held: bool
    hits: int


class BlocksAnswer(msgspec.Struct, frozen=True):
    """A page of the list of cached blocks.

    Attributes:
        cursor: Cursor of the next page; null on the last page.
    """

    blocks: list[BlockAnswer]
    cursor: str | None


class ConfigAnswer(msgspec.Struct, frozen=True):
    """The configuration of a node.

    Attributes:
        settings: Settings by table; secrets are masked.
        roots: By the name of each space ("" is the node's own), its root in hexadecimal. The root
            takes the place of the previous block's key for the first block of a prompt. Readers of
            KV events need it to compute the keys of a prompt's blocks.
    """

    settings: dict[str, dict[str, Any]]
    roots: dict[str, str]
