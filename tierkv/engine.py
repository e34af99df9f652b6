"""The protocol between a node and the engine that computes for it.

    settings --> EngineSpec              description: identity, layout, tokenizer
                   | open(service)
                   v
                 NodeEngine              operations: generate, prefill, decode
                   | Session per request
                   v
                 Service                 blocks, block tables, gates, publishes and claims

An engine has one `Session` per request. It admits or claims the request, computes all tokens that
are not cached, and commits, publishes and ends the request. Before a layer reads cached KV that is
still being loaded, the engine waits at the request's `LayerGate`. Batching, sampling and CUDA
graphs are left to the engine.

A new engine is a module with an `EngineSpec` and a row in `tierkv/engines.py`; a node cannot load
an engine from another package. The easiest way is a subclass of `SessionEngine`
(`tierkv/engine_runs.py`), which admits, claims, commits, publishes, preempts and recovers requests.
The subclass defines `forward`, `check`, `running` and `max_positions`.
`tierkv/refmodel/engine.py` is the shortest complete example.
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
    """The parameters for choosing a token from the logits.

    Attributes:
        temperature: divisor of the logits, at least 0; 0 always chooses the most likely token.
        seed: seed of the request's random numbers, 0 to 2**64 - 1; the same seed gives the same
            text.
        top_k: number of most likely tokens that may be chosen; 0 for all.
        top_p: share of the probability, above 0 and at most 1. Only the most likely tokens that
            together have this share may be chosen.
        min_p: 0 to 1. Only tokens with at least `min_p` times the probability of the most likely
            token may be chosen.
        repetition_penalty: above 0. For tokens in the prompt or the answer, positive logits are
            divided by it, and negative logits are multiplied by it.
        presence_penalty: subtracted from the logit of each token that is in the answer; -2 to 2.
        frequency_penalty: subtracted from a token's logit once for each time that the token is in
            the answer; -2 to 2.

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
        """Return the parameters as text by name, in the form that tickets store.

        Two samplings that choose the same tokens for all logits have the same text.
        """
        penalties = {name: self._text(name) for name in self.unusual(_PENALTIES)}
        if self.is_greedy:
            return {"temperature": "0"} | penalties
        return {
            "temperature": self._text("temperature"),
            "seed": str(self.seed),
            "top_k": str(self.top_k),
            **{name: self._text(name) for name in self.unusual(_SHARES)},
            **penalties,
        }

    def unusual(self, names: Sequence[str]) -> list[str]:
        """Return the names in `names` of parameters that differ from their defaults."""
        usual = Sampling.__dataclass_fields__
        return [name for name in names if self._value(name) != usual[name].default]

    def check_only(self, names: Sequence[str]) -> None:
        """Check that no parameter is used that the engine does not support.

        Every engine supports temperature and seed.

        Args:
            names: names of the other parameters that the engine supports.

        Raises:
            BadRequestError: another parameter differs from its default; the error names it.
        """
        others = [name for name in ("top_k", *_SHARES, *_PENALTIES) if name not in names]
        if used := self.unusual(others):
            raise BadRequestError(f"the engine of this node does not have {used[0]}: leave it out")

    def _text(self, name: str) -> str:
        return str(float(self._value(name)))  # an integer too has the text of a float

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
    """Log probabilities of tokens at one position of an answer (natural logarithms).

    Sampling parameters such as the temperature have no effect on them.

    Attributes:
        chosen: the log probability of the chosen token.
        top: the most likely tokens, each with its log probability, in descending order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class OnTokens(Protocol):
    """A callback that receives the tokens of an answer after each step of the model."""

    def __call__(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = (), /
    ) -> None:
        """Receive all tokens of the answer so far.

        Args:
            tokens: the tokens. There are fewer than in the call before if the request has started
                again.
            logprobs: log probabilities for each token, None for a token that came with a ticket;
                empty if the request asks for none.
        """


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to generate tokens.

    Attributes:
        request_id: id of the request, unique among the requests that run or wait.
        tokens: the prompt's tokens, as little-endian int32 bytes (`cache.keys.pack` makes them).
        max_tokens: largest number of tokens to generate, at least 1.
        sampling: the parameters for choosing tokens.
        uses_cache: False to compute every token and cache nothing.
        on_tokens: called on the event loop after each step, with all tokens generated so far; None
            for no calls. If cached tokens could not be loaded, the request starts again, and the
            next call has fewer tokens. The callable must not block, raise an error or keep the
            list.
        space: name of the space (the part of the index for one tenant and adapter), from
            `Service.space_of_tenant`; "" for the space of the service's own tenant.
        answered_tokens: number of tokens at the end of the prompt that are the beginning of the
            answer. Penalties and `min_tokens` count them as tokens of the answer.
        ignores_end: True to continue after tokens that end an answer.
        min_tokens: number of tokens of the answer before which neither an end token nor a stop text
            can end the answer.
        stops: texts that end the answer and are not part of its text; none may be empty.
        num_logprobs: number of most likely tokens whose log probabilities are returned with those
            of the chosen token; None to return no log probabilities.
        session_id: id of the session (conversation) that the request is a turn of; "" for none.

    Raises:
        BadRequestError: `tokens` are not whole int32 numbers of 0 or more, or `max_tokens` is below
            1.
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
        tokens: the tokens of the answer, including those that came with a ticket.
        text: the text of `tokens`, without the stop text.
        prompt_tokens: number of tokens of the prompt.
        computed_tokens: number of prompt tokens that this node computed.
        matched: numbers of cached prompt tokens, by the tier where they were found.
        load_problem: the reason why cached tokens were computed instead of loaded; None if all were
            loaded.
        queue_s: seconds from the call until the request had its blocks, including the fetch from
            storage or the wait for a ticket.
        first_token_s: seconds from the call to the first token that this node computed.
        total_s: seconds from the call to the end.
        finish_reason: "length" if `max_tokens` was reached, "stop" if an end token of the model or
            a stop text ended the answer.
        logprobs: log probabilities for each token, None for a token that came with a ticket; empty
            if the request asks for none.
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
    """The result of a prefill.

    Attributes:
        generation: the outcome, with the first token of the answer.
        published: the outcome of the publish; None if the call did not wait for it.
    """

    generation: Generation
    published: Published | None


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        generated_tokens: tokens that the engine chose.
        computed_tokens: tokens whose KV the model computed, of prompts and answers.
        failed_loads: number of times that cached tokens had to be computed because they could not
            be loaded.
        preemptions: number of times that a running request gave its blocks up, because it needed
            more and none were free.
    """

    generated_tokens: int = 0
    computed_tokens: int = 0
    failed_loads: int = 0
    preemptions: int = 0


class NodeEngine(Protocol):
    """An engine that computes for a node.

    Enter `running()` while the service is running, and call the other methods within it. Every
    method may be cancelled. A cancelled call ends only after no kernel uses the request's blocks
    any more and the blocks are released.
    """

    @property
    def stats(self) -> EngineStats: ...

    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def generate(self, job: GenerateRequest) -> Generation:
        """Generate up to `job.max_tokens` tokens, using and filling the cache.

        Cached tokens that cannot be loaded are computed; `Generation.load_problem` has the reason.

        Raises:
            BadRequestError: the engine does not support the request.
            DeviceFailedError: the device has failed.
            TierKVError: the request was not admitted, for example because a request with its id
                runs, or because it needs more blocks than the device has.
        """

    async def prefill(
        self, job: GenerateRequest, ticket_id: str, *, waits_for: PublishWait
    ) -> Prefilled:
        """Compute a prompt and the first token of its answer, and publish both under a ticket.

        `job.max_tokens` is ignored. If the call is cancelled before the prompt is computed, the
        ticket fails, and decode nodes that wait for it are notified. A later cancel ends only the
        wait for the publish.

        Args:
            job: the request.
            ticket_id: the id by which decode nodes claim the prompt.
            waits_for: the event after which the call returns: the end of the publish, or the first
                token.

        Returns:
            The first token, and the outcome of the publish if the call waits for it.

        Raises:
            HandoffError: storage does not accept the prompt.
            DuplicateRequestError: the id names a ticket of another prompt.
            BadRequestError: the engine does not support the request.
            DeviceFailedError: the device has failed.
            TierKVError: the prompt was not computed for another reason, for example because the
                device has too few blocks.
        """

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
            job: the request. Its sampling parameters must be those by which the ticket's first
                tokens were sampled; otherwise the ticket is refused.
            ticket_id: the id under which a prefill node publishes the prompt.
            policy: what the engine computes if the ticket or blocks cannot be read: nothing, the
                missing part or the whole prompt.
            deadline_s: seconds to wait for the ticket; None for the setting `claim_deadline_s`.

        Returns:
            The generated answer, and the claimed ticket. The ticket is None if the engine computed
                the prompt without one.

        Raises:
            HandoffError: the claim failed; its reason is the value of a HandoffProblem.
            TierKVError: the request was not admitted, for example because the device has too few
                blocks.
        """


class EngineSpec(Protocol):
    """The description of an engine, from which a node builds its service and makes the engine."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def takes_media(self) -> bool:
        """True if prompts may have media (images, audio, video)."""

    @property
    def takes_adapters(self) -> bool:
        """True if prompts may name a LoRA adapter."""

    @property
    def layout(self) -> Layout:
        """The layout of a block: the planes of all tensor-parallel ranks."""

    @property
    def shards(self) -> ShardScheme:
        """The division of each block among the tensor-parallel ranks."""

    def fingerprint(self, tenant: str) -> Fingerprint:
        """Return the fingerprint of the KV that this engine computes.

        Two nodes have the same fingerprint exactly if each can use the blocks of the other.

        Args:
            tenant: name or secret of the node's own tenant.
        """

    def open(self, service: Service) -> NodeEngine:
        """Load the weights, and return the engine.

        The node calls this before the service runs, in a thread that may block, inside the context
        `computing()` of the service's device.

        Args:
            service: the cache service. Its device was made with the `layout` of this `EngineSpec`.
        """
