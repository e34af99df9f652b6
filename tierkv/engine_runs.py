"""Base class of engines that run a model, and the state of one request in such an engine.

SessionEngine   admits or claims a request, commits, publishes and preempts
     |  calls the model with a chunk of tokens
     v
model           writes their KV through the block table, and returns the next token
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
import numpy.typing as npt

from tierkv import tracing
from tierkv.cache.keys import TOKEN_BYTES, Prompt, count, pack, unpack
from tierkv.engine import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    Generation,
    Prefilled,
    TokenLogprobs,
)
from tierkv.errors import (
    BadRequestError,
    DeviceFailedError,
    HandoffError,
    OutOfBlocksError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.pd.tickets import HandoffProblem, Ticket
from tierkv.sched.request import RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.tasks import outlast
from tierkv.tokenizers import AnswerDecoder, Tokenizer

Tokens1D = npt.NDArray[np.int32]

_COMMIT_EVERY_TOKENS = 64  # number of generated tokens; a commit costs far less than their steps


class ModelRun:
    """The state of one request that the model computes.

    Attributes:
        session: the session of the request.
        job: the request.
        prompt: token ids of the prompt, int32.
        tokens: tokens of the answer so far, including those that came with a ticket.
        num_fed: number of leading tokens of prompt and answer with cached or computed KV.
        room: number of tokens for which the request has blocks.
        cached_tokens: number of prompt tokens that were cached at the admission.
        is_loaded: True once the engine has waited for the loads of cached tokens in all layers.
        may_recover: True if the request gets new blocks and is computed again after a failed load.
            False if that has happened since the admission or the last `resume`: the next failure is
            raised.
        end_tokens: tokens that end the answer; empty if the job ignores them.
        call_s: seconds that the last call of the model took; None if the call waited for loads.
        chosen_logprobs: log probabilities of the token that the last call of the model chose; None
            if the job asks for none.
        started: time at which the engine received the job, in seconds of `time.monotonic()`.
        admitted: time of the last admission or recovery, on the same clock.
        first_token: time of the first computed token, on the same clock; None before that.

    Args:
        session: the session of the request.
        job: the request.
        started: time at which the engine received the job, in seconds of `time.monotonic()`.
        tokenizer: the tokenizer of the model.
    """

    def __init__(
        self, session: Session, job: GenerateRequest, started: float, tokenizer: Tokenizer
    ) -> None:
        self.session = session
        self.job = job
        self._tokenizer = tokenizer
        self.prompt = unpack(job.tokens)
        self.tokens: list[int] = []
        self.num_fed = 0
        self.room = 0
        self.is_loaded = False
        self.may_recover = True
        self.call_s: float | None = None
        self.started = self.admitted = started
        self.first_token: float | None = None
        self.cached_tokens = 0
        self.end_tokens = frozenset[int]() if job.ignores_end else tokenizer.stop_tokens
        self.chosen_logprobs: TokenLogprobs | None = None
        self._logprobs: list[TokenLogprobs | None] = []
        self._text = self._new_text()
        self._earlier_tokens: tuple[int, ...] = ()

    def begin(self) -> None:
        """Set the next token to compute: the first one after the cached tokens of the request.

        Call this after the admission, and after a recovery, which gives the request new blocks.
        Tokens of the answer that were generated since the admission or the last `resume` are
        dropped.
        """
        self._start_after_cached()
        self.tokens = list(self._earlier_tokens)
        self._logprobs = [*self._logprobs[: len(self._earlier_tokens)]]
        self._search_earlier_tokens()
        self.admitted = time.monotonic()
        self.matched = self.session.request.matched
        self.cached_tokens = min(self.num_fed, len(self.prompt))

    def continue_after(self, first_tokens: Sequence[int]) -> None:
        """Set the beginning of the answer to `first_tokens`, which the prefill node generated."""
        self._earlier_tokens = tuple(first_tokens)
        self.tokens = list(first_tokens)
        self._logprobs = [None] * len(first_tokens)
        self._search_earlier_tokens()
        self.report()

    def resume(self) -> None:
        """Set the next token to compute after a preemption: the first one that is no longer cached.

        The answer so far is kept.
        """
        self._earlier_tokens = tuple(self.tokens)
        self.may_recover = True
        self._start_after_cached()

    def _start_after_cached(self) -> None:
        request = self.session.request
        self.num_fed = request.cached_tokens
        self.room = len(request.block_table) * request.spec.prompt.block_size
        self.is_loaded = False

    def _new_text(self) -> AnswerDecoder:
        job = self.job
        return AnswerDecoder(
            self._tokenizer,
            job.tokens,
            num_answered=job.answered_tokens,
            stops=job.stops,
            min_tokens=job.min_tokens,
        )

    def _search_earlier_tokens(self) -> None:
        """Search for stop texts in the tokens from a ticket or from before a preemption."""
        if self.job.stops:
            self._text = self._new_text()
            for token in self._earlier_tokens:
                self._text.feed(token)

    @property
    def num_known(self) -> int:
        """Number of tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def fed(self) -> bytes:
        """The leading tokens of prompt and answer with KV in the run's blocks.

        The tokens are little-endian int32 bytes.
        """
        return (self.job.tokens + pack(self.tokens))[: self.num_fed * TOKEN_BYTES]

    def next_chunk(self, size: int) -> Tokens1D:
        """Return the next tokens to compute, at most `size`; empty if all known tokens have KV."""
        behind = self.num_fed - len(self.prompt)
        if behind < 0:
            return self.prompt[self.num_fed : self.num_fed + size]
        return np.array(self.tokens[behind : behind + size], np.int32)

    def is_last(self, chunk: Tokens1D) -> bool:
        """Return True if `chunk`, the next tokens to compute, ends with the last known token."""
        return self.num_fed + len(chunk) == self.num_known

    def add(self, token: int) -> None:
        """Append a generated token to the answer, and report it to `job.on_tokens`."""
        self.tokens.append(token)
        self._logprobs.append(self.chosen_logprobs)
        if self.job.stops:
            self._text.feed(token)
        if self.first_token is None:
            self.first_token = time.monotonic()
            self.session.has_first_token()
        self.report()

    def report(self) -> None:
        """Call `job.on_tokens` with all tokens of the answer so far."""
        if self.job.on_tokens is None:
            return
        if self.job.num_logprobs is None:
            self.job.on_tokens(self.tokens)
        else:
            self.job.on_tokens(self.tokens, self._logprobs)

    @property
    def has_stopped(self) -> bool:
        """True if an end token of the model or a stop text has ended the answer."""
        return self._text.has_stopped or (bool(self.tokens) and self.tokens[-1] in self.end_tokens)

    @property
    def excluded_tokens(self) -> frozenset[int]:
        """Tokens that must not be chosen next: they would end the answer before `min_tokens`."""
        is_early = self.job.answered_tokens + len(self.tokens) < self.job.min_tokens
        return self.end_tokens if is_early else frozenset()

    @property
    def is_done(self) -> bool:
        return self.has_stopped or len(self.tokens) >= self.job.max_tokens

    def result(self) -> Generation:
        """Return the request's generated tokens, text, counts and times up to now."""
        now = time.monotonic()
        first = now if self.first_token is None else self.first_token
        finish: FinishReason = "stop" if self.has_stopped else "length"
        return Generation(
            tokens=tuple(self.tokens),
            text=self._new_text().text(self.tokens),
            prompt_tokens=len(self.prompt),
            computed_tokens=len(self.prompt) - self.cached_tokens,
            matched=self.matched,
            load_problem=self.session.load_problem,
            queue_s=self.admitted - self.started,
            first_token_s=first - self.started,
            total_s=now - self.started,
            finish_reason=finish,
            logprobs=() if self.job.num_logprobs is None else tuple(self._logprobs),
        )


def logprobs_of(logits: npt.NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    """Return the log probabilities of the chosen token and of the most likely tokens.

    Args:
        logits: float32 [vocab_size], finite or -inf.
        token: the chosen token.
        num_top: number of most likely tokens to return.

    Returns:
        Natural logarithms. `chosen` belongs to `token`. `top` has the most likely tokens in
            descending order, without tokens of probability 0; among equally likely tokens, the
            lower id comes first.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    num_top = min(num_top, len(wide))
    least = np.partition(wide, -num_top)[-num_top] if num_top else np.inf
    likely = np.flatnonzero((wide >= least) & (wide > -np.inf)).tolist()
    likely.sort(key=lambda one: (-wide[one], one))
    top = tuple((one, float(wide[one])) for one in likely[:num_top])
    return TokenLogprobs(float(wide[token]), top)


class SessionEngine(ABC):
    """Base class of engines: has all methods of `NodeEngine`, and a subclass adds the model.

    Enter `running()` while the service is running, and call the other methods within it. Every
    method may be cancelled. A cancelled call ends only after the model no longer uses the request's
    blocks and the blocks are released.

    Args:
        service: the service of the node.
        tokenizer: the tokenizer of the model.
        chunk_tokens: largest number of tokens per call of the model.
        load_timeout_s: seconds to wait for the loads of cached tokens.
        reserve_tokens: number of tokens of the answer for which a request reserves blocks at a
            time. A request that needs more blocks and finds none is preempted. None reserves blocks
            for the whole answer at admission.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        *,
        chunk_tokens: int,
        load_timeout_s: float,
        reserve_tokens: int | None = None,
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._load_timeout_s = load_timeout_s
        self._reserve_tokens = reserve_tokens
        self.stats = EngineStats()

    # Defined by a subclass

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Largest number of tokens of a prompt and its answer together."""

    @abstractmethod
    def check(self, job: GenerateRequest) -> None:
        """Check that the model supports `job`. Its token ids and its length were checked before.

        Raises:
            BadRequestError: the model does not support the job.
        """

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which the engine's threads and tasks run."""

    @abstractmethod
    async def forward(self, run: ModelRun, chunk: Tokens1D) -> int | None:
        """Compute `chunk`, the next tokens of `run`, and write their KV into the request's blocks.

        The method also waits for cached tokens that are being loaded: layer by layer at
        `run.session.request.gate`, or all at once with `run.session.loaded`. The model runs inside
        `device.computing()` of the service. The time of prompt tokens is reported with
        `note_prefill` of the service, and no token of `run.excluded_tokens` is chosen.

        The fields `is_loaded` and `call_s` of `run` are set, and `chosen_logprobs` if the job asks
        for log probabilities. A cancel is raised only after the model no longer uses the blocks.

        Args:
            run: the request. Its first `run.num_fed` tokens are cached or computed.
            chunk: token ids, int32 [n], n at least 1.

        Returns:
            The token that the model chooses after `chunk`; None if the prompt, or the answer so
                far, continues after `chunk`.

        Raises:
            TransferError: cached tokens could not be loaded.
        """

    # The methods of NodeEngine

    async def generate(self, job: GenerateRequest) -> Generation:
        run = self._run(job, job.max_tokens, job.max_tokens - 1)
        try:
            await run.session.admit()
            run.begin()
            await self._or_recovered(run, lambda: self._continue(run))
            return run.result()
        finally:
            self._end(run)

    async def prefill(
        self,
        job: GenerateRequest,
        ticket_id: str,
        *,
        waits_for: PublishWait = PublishWait.PUBLISHED,
    ) -> Prefilled:
        run = self._run(job, 1, 0)
        session, sampling = run.session, job.sampling.readable()

        async def compute() -> None:
            if job.uses_cache:
                await session.stream(ticket_id)
            await self._first_token(run)

        try:
            await session.check_ticket(ticket_id)
            await session.admit()
            run.begin()
            await self._or_recovered(run, compute)
            publishing = session.publish(
                ticket_id, run.tokens, after=self._computed(), sampling=sampling
            )
        except BaseException as error:
            self._end(run, _reason(error))
            # A stream still writes its failure into the ticket, and needs the request until then.
            await outlast({session.over}, on_cancel=lambda: None)
            raise
        self._end(run)  # releases the blocks as soon as the prompt is published
        if waits_for is PublishWait.NOTHING:
            return Prefilled(run.result(), None)
        return Prefilled(run.result(), await publishing.published())

    async def decode(
        self,
        job: GenerateRequest,
        ticket_id: str,
        *,
        policy: ClaimPolicy = ClaimPolicy.WHOLE,
        deadline_s: float | None = None,
    ) -> tuple[Generation, Ticket | None]:
        run = self._run(job, job.max_tokens, job.max_tokens - 1, needs_logits=False)
        session = run.session
        try:
            await session.claim(ticket_id, policy, deadline_s, job.sampling.readable())
            run.begin()
            if session.ticket is not None:
                run.continue_after(self._first_tokens(session.ticket)[: job.max_tokens])
            await self._or_recovered(run, lambda: self._continue(run))
            return run.result(), session.ticket
        finally:
            self._end(run)

    # Steps of a run

    def _run(
        self, job: GenerateRequest, num_new: int, room: int, *, needs_logits: bool = True
    ) -> ModelRun:
        self._check(job, num_new)
        if self._reserve_tokens is not None and job.uses_cache:
            room = min(room, self._reserve_tokens)
        spec = RequestSpec(
            job.request_id,
            Prompt(job.tokens, self._service.settings.block_size, space=job.space),
            room,
            needs_logits=needs_logits,
            uses_cache=job.uses_cache,
            session_id=job.session_id,
        )
        session = Session(self._service, spec)
        return ModelRun(session, job, time.monotonic(), self._tokenizer)

    def _check(self, job: GenerateRequest, num_new: int) -> None:
        size = self._tokenizer.vocab_size
        if job.tokens and int(unpack(job.tokens).max()) >= size:
            raise BadRequestError(f"a token of this model must be in 0..{size - 1}")
        end = count(job.tokens) + num_new
        if end > self.max_positions:
            raise BadRequestError(
                f"prompt and output have {end} tokens, but the model allows {self.max_positions}: "
                "shorten the prompt, or lower max_tokens"
            )
        self.check(job)

    async def _or_recovered(self, run: ModelRun, compute: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await compute()
                return
            except DeviceFailedError:
                raise
            except TransferError as error:
                if not (run.job.uses_cache and run.may_recover):
                    raise
                run.may_recover = False
                run.session.check_may_compute(error)
                problem = str(error)
            self.stats.failed_loads += 1
            await run.session.recover(
                problem, timeout_s=self._load_timeout_s, after=self._computed()
            )
            run.begin()

    async def _first_token(self, run: ModelRun) -> None:
        with tracing.span("compute"):
            token = await self._feed(run)
        assert token is not None, "an admission leaves one token to compute"
        self._add(run, token)
        await self._commit(run)

    async def _continue(self, run: ModelRun) -> None:
        if not run.tokens:
            await self._first_token(run)
        while not run.is_done:
            if run.num_known > run.room:
                await self._grow(run)
            token = await self._feed(run)
            assert token is not None, "the last token is not fed yet"
            self._add(run, token)
            if len(run.tokens) % _COMMIT_EVERY_TOKENS == 0:
                await self._commit(run)
        await self._commit(run)

    async def _grow(self, run: ModelRun) -> None:
        request = run.session.request
        left = run.job.max_tokens - len(run.tokens)
        more = min(left, self._reserve_tokens or left)
        total = run.num_known + more - 1  # the last token is never fed
        try:
            await run.session.extend(total - request.whole_prompt.num_tokens)
            run.room = len(request.block_table) * request.spec.prompt.block_size
        except OutOfBlocksError:
            self.stats.preemptions += 1
            await self._commit(run)
            await run.session.preempt(after=self._computed())
            fed = run.session.request.whole_prompt.num_tokens
            resumed = await run.session.resume(max_new_tokens=max(total - fed, 0))
            assert resumed.cached_tokens <= run.num_known, "only what was fed is cached"
            run.resume()

    async def _feed(self, run: ModelRun) -> int | None:
        token = None
        while len(chunk := run.next_chunk(self._chunk_tokens)):
            token = await self.forward(run, chunk)
            run.num_fed += len(chunk)
            self.stats.computed_tokens += len(chunk)
            if run.session.is_streaming:
                await self._commit(run)
        return token

    async def _commit(self, run: ModelRun) -> None:
        if run.job.uses_cache:
            await run.session.commit(run.fed, after=self._computed())

    def _add(self, run: ModelRun, token: int) -> None:
        run.add(token)
        self.stats.generated_tokens += 1

    def _end(self, run: ModelRun, reason: str = "the request has ended") -> None:
        run.session.end(after=self._computed(), reason=reason)

    def _computed(self) -> tuple[Event, ...]:
        try:
            return (self._service.device.compute_stream.record(),)
        except DeviceFailedError:
            return ()

    def _first_tokens(self, ticket: Ticket) -> Sequence[int]:
        if not ticket.first_tokens:
            raise HandoffError(HandoffProblem.INCOMPLETE.value, "the ticket has no first token")
        if max(ticket.first_tokens) >= self._tokenizer.vocab_size:
            text = "the ticket's first tokens are not tokens of this model"
            raise HandoffError(HandoffProblem.DAMAGED.value, text)
        return ticket.first_tokens


def _reason(error: BaseException) -> str:
    """Return why a prefill failed, as a text for decode nodes that wait for the ticket."""
    if isinstance(error, asyncio.CancelledError):
        return "the prefill was cancelled"
    return str(error) or type(error).__name__
