"""The protocol between a node and the engine that computes for it.

    settings --> EngineSpec              description: identity, layout, tokenizer
                   | open(service)
                   v
                 NodeEngine              operations: generate, prefill, decode
                   | Session per request
                   v
                 Service                 blocks, block tables, gates, publishes and claims

An engine has one `Session` per request: it admits or claims the request, computes all tokens that
are not cached, waits at the request's `LayerGate` before each layer with cached KV that is still
being loaded, commits the computed tokens, publishes them, and ends the request. Batching, sampling
and CUDA graphs are left to the engine.

A new engine is a module with an `EngineSpec` and a row in `tierkv/engines.py`; nodes load no engine
from another package today. Subclass `SessionEngine` (`tierkv/engine_runs.py`): it admits, claims,
commits, publishes, preempts and recovers; the methods `forward`, `check`, `running` and
`max_positions` are left to write. `tierkv/refmodel/engine.py` is the shortest complete example.
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
    """The rule for choosing a token from the logits.

    Attributes:
        temperature: divisor of the logits, at least 0; 0 chooses the best token.
        seed: seed of the request's random numbers; the same seed gives the same text.
        top_k: number of best tokens that may be chosen; 0 for all.
        top_p: the best tokens that together have at least this share of the probability may be
            chosen; above 0, at most 1.
        min_p: a token may be chosen only if its probability is at least this share of the best
            token's; 0 to 1.
        repetition_penalty: the logits of tokens that are in the prompt or the answer are divided by
            this if positive, and multiplied by it if negative; above 0.
        presence_penalty: subtracted from the logit of each token that is in the answer; -2 to 2.
        frequency_penalty: subtracted from a token's logit for each time the token is in the answer;
            -2 to 2.

    Raises:
        BadRequestError: a number is out of range.
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
        """Return the parameters as text, for tickets.

        Two samplings have the same text if they choose the same tokens for all logits.
        """
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
        """Return those of the fields `names` that do not have their default value."""
        usual = Sampling.__dataclass_fields__
        return [name for name in names if self._value(name) != usual[name].default]

    def check_only(self, names: Sequence[str]) -> None:
        """Check that only supported fields are used; temperature and seed always are.

        Args:
            names: further fields that the engine supports.

        Raises:
            BadRequestError: another field is used; the error names it.
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
    """Natural logarithms of token probabilities at one position of an answer, before any sampling.

    Attributes:
        chosen: that of the chosen token.
        top: the most likely tokens, each with its logarithm, the most likely one first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class OnTokens(Protocol):
    """A callback for the tokens of an answer."""

    def __call__(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = (), /
    ) -> None:
        """Receive all tokens so far; see `GenerateRequest.on_tokens`.

        Args:
            tokens: the tokens.
            logprobs: the log probabilities of each token, if the request asks for them.
        """


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for tokens.

    Attributes:
        request_id: the scheduler's id of the request.
        tokens: the prompt, packed as `cache.keys.pack` packs it.
        max_tokens: most tokens to generate, at least 1.
        sampling: the rule for choosing tokens.
        uses_cache: False computes every token and leaves nothing cached, as a node without a cache
            does; tests compare other paths with this one.
        on_tokens: called on the event loop after each step with all tokens generated so far; with
            fewer tokens than the last time if cached tokens could not be loaded and the request
            begins again. The callable must not block, raise or keep the list.
        space: name of the space of the tenant and adapter, from `Service.space_of_tenant`; "" for
            the service's own.
        answered_tokens: number of tokens at the prompt's end that are an earlier part of the
            answer: penalties and `min_tokens` count them.
        ignores_end: True continues after tokens that end an answer.
        min_tokens: number of tokens of the answer before which no token that ends it is chosen.
        stops: texts that end the answer and are not part of its text; none may be empty.
        num_logprobs: number of most likely tokens with wanted log probabilities, beside the chosen
            token; None for no log probabilities.
        session_id: session that the request is a turn of; "" without one.

    Raises:
        BadRequestError: `tokens` are not packed tokens, or `max_tokens` is below 1.
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
    session_id: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        pack(self.tokens)


@dataclass(frozen=True, slots=True)
class Generation:
    """The outcome of a request on this node.

    Attributes:
        tokens: generated tokens, those of a ticket included.
        text: the text of `tokens`.
        prompt_tokens: number of tokens of the prompt.
        computed_tokens: number of prompt tokens that were computed here.
        matched: numbers of prompt tokens that were found in each tier.
        load_problem: the reason why cached tokens had to be computed after all; None if none had
            to.
        queue_s: seconds from the call to the admission, including the fetch from storage or the
            wait for a ticket.
        first_token_s: seconds from the call to the first token that this node has computed.
        total_s: seconds from the call to the end.
        finish_reason: "length" at `max_tokens`, "stop" at the model's own end of text or at a stop
            text.
        logprobs: the log probabilities of each token, None for the tokens of a ticket; empty if the
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
        generation: the outcome, with the first token.
        published: the outcome of the publish; None if the call did not wait for it.
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
    """An engine that computes for a node.

    Use it while its `running()` is open, inside that of the service. Every method may be cancelled:
    it then ends when no kernel uses the request's blocks any more, and these have been released.
    """

    @property
    def stats(self) -> EngineStats: ...

    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def generate(self, job: GenerateRequest) -> Generation:
        """Generate up to `job.max_tokens` tokens, using and filling the cache.

        Cached tokens that fail to load are computed; `load_problem` has the reason.

        Raises:
            BadRequestError: the engine cannot serve the request.
            TierKVError: any error of `Session.admit`.
            DeviceFailedError: the device is lost.
        """
        ...

    async def prefill(
        self, job: GenerateRequest, ticket_id: str, *, waits_for: PublishWait
    ) -> Prefilled:
        """Compute the prompt and its first token, and publish both under a ticket for `decode`.

        `job.max_tokens` is ignored. Once the prompt is computed, a cancel ends only the wait for
        the publish. An earlier cancel fails the ticket, and decode nodes that wait for it are
        notified.

        Args:
            job: the request.
            ticket_id: the id of the ticket on all nodes.
            waits_for: the event after which the call returns.

        Returns:
            The outcome.

        Raises:
            HandoffError: storage does not accept the prompt.
            DuplicateRequestError: another prompt uses the ticket's id.
            TierKVError: any error of `generate`.
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
        """Claim a published prompt, and generate the same tokens as `generate` would.

        Args:
            job: the request; a ticket with first tokens sampled by other parameters is refused as
                incompatible.
            ticket_id: the id of the ticket on all nodes.
            policy: the part of the prompt that may be computed if it cannot be fetched.
            deadline_s: seconds to wait for the ticket; None for the service's setting.

        Returns:
            The outcome, and the ticket; None if no ticket came and the policy let the engine
                compute.

        Raises:
            HandoffError: the claim failed; the reason is a HandoffProblem.
            TierKVError: any error of `Session.claim`.
        """
        ...


class EngineSpec(Protocol):
    """An engine before it runs: the facts that a node needs to build the service, and its start."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def takes_media(self) -> bool:
        """True if prompts may have media (images, audio, video)."""
        ...

    @property
    def takes_adapters(self) -> bool:
        """True if prompts may name an adapter."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of a block, with the planes of all ranks."""
        ...

    @property
    def shards(self) -> ShardScheme:
        """The division of a block over tensor-parallel ranks."""
        ...

    def fingerprint(self, tenant: str) -> Fingerprint:
        """Return the identity of this engine's KV.

        It is equal on two nodes exactly if one can use the blocks of the other.

        Args:
            tenant: name or secret of the node's own tenant.
        """
        ...

    def open(self, service: Service) -> NodeEngine:
        """Make the engine over `service`, which has a device with the layout of this spec.

        The node calls it before the service runs, on a thread that may block, under the device's
        `computing()`. Load weights here.
        """
        ...
