"""The seam between a node and the engine that computes for it.

    settings --> EngineSpec              description: identity, layout, tokenizer
                   | open(service)
                   v
                 NodeEngine              operations: generate, prefill, decode
                   | Session per request
                   v
                 Service                 blocks, block tables, gates, publishes and claims

An engine drives one `Session` per request: it admits or claims, computes all tokens that are not
cached, waits at the request's `LayerGate` before each layer that still loads cached KV, commits the
computed tokens, publishes, and ends. Batching, sampling and CUDA graphs are the engine's own.

A new engine is a module with an `EngineSpec` and a row in `tierkv/engines.py`; nodes take none from
another package today. Subclass `SessionEngine` (`tierkv/engine_runs.py`): it admits, claims,
commits, publishes, preempts and recovers, and leaves `forward`, `check`, `running` and
`max_positions`. `tierkv/refmodel/engine.py` is the shortest whole example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tierkv.cache.keys import Fingerprint, pack
from tierkv.cache.layout import Layout
from tierkv.cache.shards import ShardScheme
from tierkv.errors import BadRequestError
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published, PublishWait
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Matched
from tierkv.service import Service
from tierkv.tokenizers import Tokenizer

FinishReason = Literal["length", "stop"]


_SHARES = ("top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of a token among the logits.

    Attributes:
        temperature: Divisor of the logits; 0 chooses the best token.
        seed: Seed of a request; the same seed gives the same text.
        top_k: Number of best tokens that may be chosen; 0 for all.
        top_p: Share of the probability that the tokens which may be chosen have together, at least.
        min_p: Least probability of a token that may be chosen, as a share of the best token's.
        repetition_penalty: Divisor of the positive logits of tokens in the prompt and the answer,
            and factor of the negative ones.
        presence_penalty: Amount taken from the logit of each token in the answer.
        frequency_penalty: Amount taken from a logit for each time its token is in the answer.

    Raises:
        BadRequestError: A number is out of range.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def readable(self) -> dict[str, str]:
        """Return the words of a ticket, equal where the same tokens are chosen by any logits."""
        penalties = {name: str(self._value(name)) for name in self.unusual(_PENALTIES)}
        if self.is_greedy:
            return {"temperature": "0"} | penalties
        return {
            "temperature": str(float(self.temperature)),
            "seed": str(self.seed),
            "top_k": str(self.top_k),
            **{name: str(self._value(name)) for name in self.unusual(_SHARES)},
            **penalties,
        }

    def unusual(self, names: Sequence[str]) -> list[str]:
        """Return those of the fields `names` that have another value than their default."""
        usual = Sampling.__dataclass_fields__
        return [name for name in names if self._value(name) != usual[name].default]

    def check_only(self, names: Sequence[str]) -> None:
        """Check that only supported fields are used, apart from temperature and seed.

        Args:
            names: Further fields that the engine supports.

        Raises:
            BadRequestError: Another field is used; the error names it.
        """
        others = [name for name in ("top_k", *_SHARES, *_PENALTIES) if name not in names]
        if used := self.unusual(others):
            raise BadRequestError(f"the engine of this node does not have {used[0]}: leave it out")

    def _value(self, name: str) -> float:
        value: float = getattr(self, name)
        return value

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadRequestError(
                f"temperature must be finite and not negative, not {self.temperature}"
            )
        if not 0 <= self.seed < 2**64:
            raise BadRequestError(f"seed must be in [0, 2**64), not {self.seed}")
        if self.top_k < 0:
            raise BadRequestError(f"top_k must not be negative, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise BadRequestError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise BadRequestError(f"min_p must be in 0..1, not {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise BadRequestError(
                f"repetition_penalty must be finite and above 0, not {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(self._value(name)) <= _MAX_PENALTY:
                raise BadRequestError(f"{name} must be in -2..2, not {self._value(name)}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of an answer, before any sampling.

    Attributes:
        chosen: The chosen token's.
        top: The most likely tokens and theirs, the most likely one first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class OnTokens(Protocol):
    """A listener to the tokens of an answer."""

    def __call__(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = (), /
    ) -> None:
        """Accept all tokens so far; see GenerateRequest.on_tokens.

        Args:
            tokens: The tokens.
            logprobs: The log probabilities of each, if the request asks for them.
        """


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for tokens.

    Attributes:
        request_id: The scheduler's name of the request.
        tokens: The prompt, packed as `cache.keys.pack` packs it.
        max_tokens: Number of tokens to generate, at most.
        sampling: The choice of tokens.
        uses_cache: False computes every token and leaves nothing cached, as a node without a cache
            does; tests compare other paths with this one.
        on_tokens: Called on the loop after each step with all tokens generated so far; with fewer
            than the last time if cached tokens did not load and the request begins again. The
            callable must not block, raise or keep the list.
        space: The cache's name of the tenant and adapter, as `Service.space_of_tenant` names it;
            "" for the service's own.
        answered_tokens: Number of tokens at the prompt's end that are an earlier part of the
            answer: penalties and `min_tokens` count them.
        ignores_end: True goes on after tokens that end an answer.
        min_tokens: Number of tokens of the answer before which no token that ends it is chosen.
        stops: Texts that end the answer and are not part of its text; none may be empty.
        num_logprobs: Number of most likely tokens whose log probabilities are wanted beside the
            chosen token's; None for no log probabilities.

    Raises:
        BadRequestError: `tokens` are no tokens, or `max_tokens` is below 1.
    """

    request_id: str
    tokens: bytes
    max_tokens: int = 32
    sampling: Sampling = field(default_factory=Sampling)
    uses_cache: bool = True
    on_tokens: OnTokens | None = field(default=None, compare=False)
    space: str = ""
    answered_tokens: int = 0
    ignores_end: bool = False
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        pack(self.tokens)


@dataclass(frozen=True, slots=True)
class Generation:
    """The outcome of a request, and what it took on this node.

    Attributes:
        tokens: Generated tokens, those of a ticket included.
        text: The text of `tokens`.
        prompt_tokens: Number of tokens of the prompt.
        computed_tokens: Number of prompt tokens that were computed here.
        matched: Numbers of prompt tokens that were found in each tier.
        load_problem: Reason why cached tokens were computed after all, None without one.
        queue_s: Seconds from the call to the admission, the fetch from storage or the wait for a
            ticket included.
        first_token_s: Seconds from the call to the first token that this node has computed.
        total_s: Seconds from the call to the end.
        finish_reason: "length" at `max_tokens`, "stop" at the model's own end of text or at a stop
            text.
        logprobs: The log probabilities of each token, None for the tokens of a ticket; empty if the
            request does not ask for them.
    """

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    computed_tokens: int
    matched: Matched
    load_problem: str | None
    queue_s: float
    first_token_s: float
    total_s: float
    finish_reason: FinishReason = "length"
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt.

    Attributes:
        generation: The outcome, with the first token.
        published: The outcome of the publish, None if the call did not wait for it.
    """

    generation: Generation
    published: Published | None


@dataclass(slots=True)
class EngineStats:
    """Counts since the start."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    failed_loads: int = 0
    preemptions: int = 0


class NodeEngine(Protocol):
    """An engine that computes for a node. Use it inside `running()`, within that of the service.

    Every method may be cancelled: it then ends when no kernel uses the request's blocks any more,
    and these have been released.
    """

    @property
    def stats(self) -> EngineStats: ...

    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def generate(self, job: GenerateRequest) -> Generation:
        """Generate up to `job.max_tokens` tokens, using and filling the cache.

        Cached tokens that fail to load are computed; `load_problem` says so.

        Raises:
            BadRequestError: The engine cannot serve the request.
            TierKVError: What `Session.admit` raises.
            DeviceFailedError: The device is lost.
        """
        ...

    async def prefill(
        self, job: GenerateRequest, ticket_id: str, *, waits_for: PublishWait
    ) -> Prefilled:
        """Compute the prompt and its first token, and publish both as a ticket for `decode`.

        `job.max_tokens` has no meaning here. Once the prompt is computed, a cancel ends only the
        wait for the publish. An earlier cancel fails the ticket, and claimers that wait for it are
        notified.

        Args:
            job: The request.
            ticket_id: The name of the ticket on all nodes.
            waits_for: The moment to return.

        Raises:
            HandoffError: Storage does not take the prompt.
            DuplicateRequestError: The ticket is another prompt's.
            TierKVError: Any error of `generate`.
        """
        ...

    async def decode(
        self,
        job: GenerateRequest,
        ticket_id: str,
        *,
        policy: ClaimPolicy,
        deadline_s: float | None,
    ) -> tuple[Generation, Ticket | None]:
        """Claim a published prompt and generate what `generate` would have, token for token.

        Args:
            job: The request; a ticket that was sampled otherwise is refused as incompatible.
            ticket_id: The name of the ticket on all nodes.
            policy: What to do about blocks that do not come.
            deadline_s: Seconds to wait for the ticket; None for the service's own.

        Returns:
            The outcome, and the ticket; None if no ticket came and the policy let the engine
            compute.

        Raises:
            HandoffError: The claim failed; the reason is a HandoffProblem.
            TierKVError: What `Session.claim` raises.
        """
        ...


class EngineSpec(Protocol):
    """An engine before it runs: what a node needs to build the service, and how to start it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def takes_media(self) -> bool:
        """True if prompts may have media."""
        ...

    @property
    def takes_adapters(self) -> bool:
        """True if prompts may name an adapter."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of a block, of all ranks together."""
        ...

    @property
    def shards(self) -> ShardScheme:
        """The split of a block over tensor-parallel ranks."""
        ...

    def fingerprint(self, tenant: str) -> Fingerprint:
        """Return everything that makes the KV of two nodes the same.

        Args:
            tenant: The salt of the node's own tenant.
        """
        ...

    def open(self, service: Service) -> NodeEngine:
        """Return the engine over `service`; the device of `service` has the layout of this spec.

        The node calls it before the service runs, on a thread that may block, under the device's
        `computing()`. Load weights here.
        """
        ...
