"""What goes over HTTP: the shapes of bodies and answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import asdict

from tierkv.cache.keys import Prompt
from tierkv.cache.tokens import pack
from tierkv.errors import BadRequestError
from tierkv.observe import Lookup
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.pd.ticket import Ticket
from tierkv.refmodel.generation import GenerateRequest, Generation, Prefilled
from tierkv.refmodel.sampling import Sampling
from tierkv.refmodel.text import encode

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class FieldError(BadRequestError):
    """A body that can be read, but whose fields are not what the route takes."""


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `prompt`, text, and `tokens`: a list of integers or, packed, bytes of 32-bit
    little-endian integers (base64 in JSON)."""

    prompt: str | None = None
    tokens: list[int] | bytes | None = None

    def packed(self) -> bytes:
        """The prompt's tokens, packed. Raises FieldError or BadRequestError."""
        if (self.prompt is None) == (self.tokens is None):
            raise FieldError("give exactly one of prompt and tokens")
        if self.prompt is not None:
            return pack(encode(self.prompt))
        assert self.tokens is not None, "one of the two is there"
        return pack(self.tokens)


class LookupBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_id: str | None = None


class SamplingBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_id: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def job(
        self, name: str, prompt: Prompt, max_tokens: int = 1, *, uses_cache: bool = True
    ) -> GenerateRequest:
        """name: what the scheduler calls it. prompt: this body's. Raises BadRequestError."""
        sampling = Sampling(temperature=self.temperature, seed=self.seed, top_k=self.top_k)
        return GenerateRequest(
            name, prompt.tokens, max_tokens, sampling, uses_cache=uses_cache, space=prompt.space
        )


class GenerateBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """use_cache: False computes every token and leaves nothing cached.

    stream: answer with tokens as server-sent events while they come.
    """

    max_tokens: AtLeastOne = 32
    use_cache: bool = True
    stream: bool = False


class PrefillBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ticket_id: what the decode node will ask for; the request's id if it is not given.

    stream: answer with the first token as soon as it is computed, before all is published.
    wait: what to wait for before the answer: published, or nothing beyond the first token.
    """

    ticket_id: str | None = None
    stream: bool = False
    wait: PublishWait = PublishWait.PUBLISHED


class DecodeBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompt and sampling must be those that the prefill node was given.

    deadline_s: how long to wait for the ticket. stream: answer with tokens while they come.
    """

    ticket_id: str
    max_tokens: AtLeastOne = 32
    policy: ClaimPolicy = ClaimPolicy.WHOLE
    deadline_s: Seconds | None = None
    stream: bool = False


class MatchedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens found in each tier; disjoint."""

    device: int
    host: int
    storage: int


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """load_problem: why cached tokens were computed after all, null if they were not."""

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

    @classmethod
    def of(cls, request_id: str, generation: Generation) -> GenerateAnswer:
        matched = generation.matched
        return GenerateAnswer(
            request_id=request_id,
            text=generation.text,
            tokens=generation.tokens,
            prompt_tokens=generation.prompt_tokens,
            computed_tokens=generation.computed_tokens,
            matched=MatchedTokens(
                matched.device_tokens, matched.host_tokens, matched.storage_tokens
            ),
            load_problem=generation.load_problem,
            queue_s=generation.queue_s,
            time_to_first_token_s=generation.first_token_s,
            total_s=generation.total_s,
        )


class DecodeAnswer(GenerateAnswer, frozen=True, kw_only=True):
    """producer: the node that published the prompt, null if no ticket of it came and the policy let
    this node compute instead. first_tokens: those that the producer had generated."""

    ticket_id: str
    producer: str | None
    first_tokens: tuple[int, ...]

    @classmethod
    def of_ticket(
        cls, request_id: str, generation: Generation, ticket_id: str, ticket: Ticket | None
    ) -> DecodeAnswer:
        return DecodeAnswer(
            **asdict(GenerateAnswer.of(request_id, generation)),
            ticket_id=ticket_id,
            producer=ticket.producer if ticket else None,
            first_tokens=ticket.first_tokens if ticket else (),
        )


class PrefillAnswer(GenerateAnswer, frozen=True, kw_only=True):
    """tokens, text: the first token. expires_at: of the ticket, in Unix seconds.

    num_blocks: of the prompt, its tail of tail_tokens included; present_blocks of them were in
        storage already, early_blocks were stored while the prompt was computed. What publishing
        did is null if it was not waited for.
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
        cls, request_id: str, prefilled: Prefilled, ticket_id: str, block_size: int
    ) -> PrefillAnswer:
        published, num_tokens = prefilled.published, prefilled.generation.prompt_tokens
        return PrefillAnswer(
            **asdict(GenerateAnswer.of(request_id, prefilled.generation)),
            ticket_id=ticket_id,
            num_blocks=-(-num_tokens // block_size),
            tail_tokens=num_tokens % block_size,
            present_blocks=published.present_blocks if published else None,
            early_blocks=published.early_blocks if published else None,
            flushed_bytes=published.flushed_bytes if published else None,
            expires_at=published.ticket.expires_at if published else None,
        )


class LookupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt's leading tokens are; disjoint. storage_tokens is null if the store did
    not answer."""

    request_id: str
    num_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None

    @classmethod
    def of(cls, request_id: str, found: Lookup) -> LookupAnswer:
        return LookupAnswer(request_id=request_id, **asdict(found))


class VerifyAnswer(msgspec.Struct, frozen=True):
    """findings: what is wrong with the books, in words; empty if nothing is."""

    findings: list[str]


class PartHealth(msgspec.Struct, frozen=True):
    status: str
    detail: str


class ReadyAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """status: ok or degraded. parts: each dependency, if the question was ?verbose."""

    status: str
    parts: dict[str, PartHealth] | None = None


class LiveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """heartbeat_age_s: since the event loop's last beat, which come every 0.05 s; null while the
    node starts. worst_lag_s: how late one was in the last minute."""

    status: str
    heartbeat_age_s: float | None
    worst_lag_s: float


class VersionAnswer(msgspec.Struct, frozen=True):
    """fingerprint: what must be equal for two nodes to share blocks. stored_under: what the names
    of stored blocks begin with."""

    version: str
    name: str
    role: str
    fingerprint: dict[str, str]
    stored_under: str
