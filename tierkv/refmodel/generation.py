"""One generation: what is asked for, how far it is, what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.cache.tokens import TOKEN_BYTES, pack, unpack
from tierkv.errors import BadRequestError
from tierkv.pd.handoff import Published
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.model import Floats
from tierkv.refmodel.sampling import Sampling, decode, sample
from tierkv.sched.request import Matched
from tierkv.service.session import Session

Tokens1D = npt.NDArray[np.int32]
OnTokens = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to generate from.

    tokens: the prompt, packed as `cache.tokens.pack` does.
    uses_cache: False computes every token and leaves nothing cached, as a node without a cache
        would; what other paths are compared with.
    on_tokens: called on the loop after each step, with all tokens generated so far; with fewer
        than the last time if cached tokens did not load and the run begins again. It must not
        block or raise, and must not keep the list.
    space: whose cache it uses, as `Service.space_of_tenant` names it; "" for the service's own.
    Raises BadRequestError if these are no tokens, the model has none such, or none are to be
    generated.
    """

    request_id: str
    tokens: bytes
    max_tokens: int = 32
    sampling: Sampling = field(default_factory=Sampling)
    uses_cache: bool = True
    on_tokens: OnTokens | None = field(default=None, compare=False)
    space: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.tokens and int(unpack(pack(self.tokens)).max()) >= VOCAB_SIZE:
            raise BadRequestError(f"a token must be in 0..{VOCAB_SIZE - 1}: the model reads bytes")


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out, and what it took on this node.

    tokens: generated ones, those that came with a ticket included; text: the same, decoded.
    matched: prompt tokens that were found in each tier; computed_tokens: those computed here.
    load_problem: why cached tokens were not used after all, None if all went well.
    queue_s: until the request was admitted, its fetch from storage or its ticket included.
    first_token_s: until this node had computed its first token; total_s: until the end. Seconds
        from the call, on a monotonic clock.
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


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that is computed; generation holds its first token. published: None if that was
    not waited for."""

    generation: Generation
    published: Published | None


class ModelRun:
    """One request on its way through the model."""

    def __init__(self, session: Session, job: GenerateRequest, started: float) -> None:
        self.session = session
        self.job = job
        self.prompt = unpack(job.tokens)
        self.tokens: list[int] = []
        self.num_fed = 0  # so many tokens have their KV in the blocks
        self.is_loaded = False  # every layer's cached tokens have been waited for
        self.logits: Floats | None = None  # of the last call
        self.call_s: float | None = None  # what that took to compute, None if it waited for loads
        self.started = self.admitted = started
        self.first_token: float | None = None
        self._given: tuple[int, ...] = ()

    def begin(self) -> None:
        """It has blocks, perhaps others than before: go on from what is cached in them."""
        self.num_fed = self.session.request.cached_tokens
        self.tokens = list(self._given)
        self.is_loaded = False
        self.admitted = time.monotonic()
        self.matched = self.session.request.matched
        self.cached_tokens = self.num_fed

    def go_on_from(self, first_tokens: Sequence[int]) -> None:
        """These were generated elsewhere."""
        self._given = tuple(first_tokens)
        self.tokens = list(first_tokens)
        self.tell()

    @property
    def fed(self) -> bytes:
        """The tokens whose KV is in the blocks, packed: all but the last generated one."""
        return (self.job.tokens + pack(self.tokens))[: self.num_fed * TOKEN_BYTES]

    def next_chunk(self, size: int) -> Tokens1D:
        """Up to `size` tokens that are known and not fed; empty if there are none."""
        behind = self.num_fed - len(self.prompt)
        if behind < 0:
            return self.prompt[self.num_fed : self.num_fed + size]
        return np.array(self.tokens[behind : behind + size], np.int32)

    def add(self, logits: Floats) -> None:
        position = len(self.prompt) + len(self.tokens)
        self.tokens.append(sample(logits, self.job.sampling, position))
        if self.first_token is None:
            self.first_token = time.monotonic()
            self.session.has_first_token()
        self.tell()

    def tell(self) -> None:
        """Let who listens know of all tokens there are."""
        if self.job.on_tokens is not None:
            self.job.on_tokens(self.tokens)

    def result(self) -> Generation:
        now = time.monotonic()
        first = now if self.first_token is None else self.first_token
        return Generation(
            tokens=tuple(self.tokens),
            text=decode(self.tokens),
            prompt_tokens=len(self.prompt),
            computed_tokens=len(self.prompt) - self.cached_tokens,
            matched=self.matched,
            load_problem=self.session.load_problem,
            queue_s=self.admitted - self.started,
            first_token_s=first - self.started,
            total_s=now - self.started,
        )
