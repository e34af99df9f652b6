"""The reference model as the engine of a node: computes over the cache's blocks, on one thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv import tracing
from tierkv.cache.keys import TOKEN_BYTES, Fingerprint, Prompt, count, pack, unpack
from tierkv.cache.layout import Layout
from tierkv.cache.shards import ShardScheme
from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.engine import EngineStats, GenerateRequest, Generation, Prefilled
from tierkv.errors import (
    BadRequestError,
    DeviceFailedError,
    HandoffError,
    ShuttingDownError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.pd.tickets import HandoffProblem, Ticket
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import TOKENIZER, Floats, ReferenceModel, sample
from tierkv.sched.request import RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.tasks import outlast
from tierkv.threads import Threads

Tokens1D = npt.NDArray[np.int32]


class ModelRun:
    """One request on its way through the model."""

    def __init__(self, session: Session, job: GenerateRequest, started: float) -> None:
        self.session = session
        self.job = job
        self.prompt = unpack(job.tokens)
        self.tokens: list[int] = []
        self.num_fed = 0  # number of tokens with KV in the blocks
        self.is_loaded = False  # every layer's cached tokens have been waited for
        self.logits: Floats | None = None  # of the last call
        self.call_s: float | None = None  # seconds of that call, None if it waited for loads
        self.started = self.admitted = started
        self.first_token: float | None = None
        self._given: tuple[int, ...] = ()

    def begin(self) -> None:
        """Start from the cached tokens of the request, which has new blocks."""
        self.num_fed = self.session.request.cached_tokens
        self.tokens = list(self._given)
        self.is_loaded = False
        self.admitted = time.monotonic()
        self.matched = self.session.request.matched
        self.cached_tokens = self.num_fed

    def go_on_from(self, first_tokens: Sequence[int]) -> None:
        """Continue after `first_tokens`, which another node has generated."""
        self._given = tuple(first_tokens)
        self.tokens = list(first_tokens)
        self.tell()

    @property
    def fed(self) -> bytes:
        """All tokens with KV in the blocks, packed: all but the last generated one."""
        return (self.job.tokens + pack(self.tokens))[: self.num_fed * TOKEN_BYTES]

    def next_chunk(self, size: int) -> Tokens1D:
        """Return up to `size` tokens that are known and not fed; empty if there are none."""
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
        """Report all tokens so far to the listener of the job."""
        if self.job.on_tokens is not None:
            self.job.on_tokens(self.tokens)

    def result(self) -> Generation:
        now = time.monotonic()
        first = now if self.first_token is None else self.first_token
        return Generation(
            tokens=tuple(self.tokens),
            text=TOKENIZER.decode(self.tokens),
            prompt_tokens=len(self.prompt),
            computed_tokens=len(self.prompt) - self.cached_tokens,
            matched=self.matched,
            load_problem=self.session.load_problem,
            queue_s=self.admitted - self.started,
            first_token_s=first - self.started,
            total_s=now - self.started,
        )


log = logging.getLogger(__name__)

_COMMIT_EVERY_TOKENS = 64  # generated ones; a commit costs far less than a step of the model


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the reference engine.

    chunk_tokens: prompt tokens per call of the model; a cancel waits for one call at most.
    load_timeout_s: seconds that a call may wait for a layer that is being loaded.
    """

    chunk_tokens: int = 256
    load_timeout_s: Fixed[float] = 30.0

    def __post_init__(self) -> None:
        all_at_least_one("engine", self, "chunk_tokens")
        all_above_zero("engine", self, "load_timeout_s")


class ReferenceEngine:
    """Generates, prefills and decodes over `service`, all computing on one thread, "the GPU".

    Use it inside `running()`, within that of the service. Every method may be cancelled: it then
    ends when the thread has left the request's blocks, and these have been given back.
    """

    def __init__(self, service: Service, model: ReferenceModel, settings: EngineSettings) -> None:
        self._service = service
        self._model = model
        self._settings = settings
        self.stats = EngineStats()
        self._thread: Threads | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within `running()` of the service, which waits for publishes under way."""
        self._thread = Threads(1, "tierkv-compute")
        try:
            yield
        finally:
            self._thread.shutdown(wait=True)  # idle: every call was waited for by its caller

    async def generate(self, job: GenerateRequest) -> Generation:
        """See NodeEngine.generate; exactly `job.max_tokens` tokens, since no token ends a text."""
        run = self._run(job, job.max_tokens, job.max_tokens - 1)
        try:
            await run.session.admit()
            run.begin()
            await self._or_recovered(run, lambda: self._first_token(run))
            await self._continue(run)
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
        """See NodeEngine.prefill."""
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
            # A stream has a last word to say, and the request is its until then.
            await outlast({session.over}, on_cancel=lambda: None)
            raise
        self._end(run)  # as soon as it is published
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
        """See NodeEngine.decode."""
        run = self._run(job, job.max_tokens, job.max_tokens - 1, needs_logits=False)
        session = run.session
        try:
            await session.claim(ticket_id, policy, deadline_s, job.sampling.readable())
            run.begin()
            if session.ticket is not None:
                run.go_on_from(_first_tokens(session.ticket)[: job.max_tokens])
            await self._or_recovered(run, lambda: self._continue(run))
            return run.result(), session.ticket
        finally:
            self._end(run)

    async def _or_recovered(self, run: ModelRun, compute: Callable[[], Awaitable[None]]) -> None:
        """Run `compute`; if cached tokens did not load, run it once more without them."""
        try:
            await compute()
            return
        except DeviceFailedError:
            raise
        except TransferError as error:
            if not run.job.uses_cache:
                raise
            run.session.check_may_compute(error)
            problem = str(error)
        self.stats.failed_loads += 1
        await run.session.recover(
            problem, timeout_s=self._settings.load_timeout_s, after=self._computed()
        )
        run.begin()
        await compute()

    # Steps of a run

    def _check(self, job: GenerateRequest, num_new: int) -> None:
        if job.tokens and int(unpack(job.tokens).max()) >= TOKENIZER.vocab_size:
            most = TOKENIZER.vocab_size - 1
            raise BadRequestError(
                f"a token must be in 0..{most}, since the model's tokens are bytes"
            )
        end = count(job.tokens) + num_new
        if end > self._model.config.max_positions:
            raise BadRequestError(
                f"prompt and output have {end} tokens, but the model allows "
                f"{self._model.config.max_positions}: shorten the prompt, or lower "
                "max_tokens"
            )

    def _run(
        self, job: GenerateRequest, num_new: int, room: int, *, needs_logits: bool = True
    ) -> ModelRun:
        self._check(job, num_new)
        spec = RequestSpec(
            job.request_id,
            Prompt(job.tokens, self._model.layout.block_size, space=job.space),
            room,
            needs_logits=needs_logits,
            uses_cache=job.uses_cache,
        )
        return ModelRun(Session(self._service, spec), job, time.monotonic())

    async def _first_token(self, run: ModelRun) -> None:
        with tracing.span("compute"):
            logits = await self._feed(run)
        assert logits is not None, "an admission leaves one token to compute"
        self._add(run, logits)
        await self._commit(run)

    async def _continue(self, run: ModelRun) -> None:
        """Generate up to max_tokens, and commit all that was fed."""
        while len(run.tokens) < run.job.max_tokens:
            logits = await self._feed(run)
            assert logits is not None, "the last token is not fed yet"
            self._add(run, logits)
            if len(run.tokens) % _COMMIT_EVERY_TOKENS == 0:
                await self._commit(run)
        await self._commit(run)

    async def _feed(self, run: ModelRun) -> Floats | None:
        """Write the KV of all known tokens that have none; the logits that follow the last one."""
        logits = None
        while len(chunk := run.next_chunk(self._settings.chunk_tokens)):
            logits = await self._forward(run, chunk)
            self.stats.computed_tokens += len(chunk)
            if run.session.is_streaming:
                await self._commit(run)
        return logits

    async def _commit(self, run: ModelRun) -> None:
        if run.job.uses_cache:
            await run.session.commit(run.fed, after=self._computed())

    def _add(self, run: ModelRun, logits: Floats) -> None:
        run.add(logits)
        self.stats.generated_tokens += 1

    def _end(self, run: ModelRun, reason: str = "the request has ended") -> None:
        run.session.end(after=self._computed(), reason=reason)

    def _computed(self) -> tuple[Event, ...]:
        """Return the event at the end of the kernels submitted so far.

        There is none on a lost device, where no kernel runs any more, so that requests can still
        end.
        """
        try:
            return (self._service.device.compute_stream.record(),)
        except DeviceFailedError:
            return ()

    # The compute thread

    async def _forward(self, run: ModelRun, tokens: Tokens1D) -> Floats:
        """Call the model once. A cancel is raised after the thread has left the planes."""
        assert self._thread is not None, "the engine is running"
        try:
            call = self._thread.submit(self._call_model, run, tokens)
        except RuntimeError:  # the thread has ended, as on a node that failed
            why = self._service.failure or "this node is shutting down"
            raise ShuttingDownError(why) from None
        future = asyncio.wrap_future(call)
        await outlast({future}, on_cancel=lambda: _forget(call))
        future.result()
        assert run.logits is not None, "the call has ended well"
        run.num_fed += len(tokens)
        if len(tokens) > 1 and run.call_s is not None:  # prompt tokens, not a generated one
            self._service.note_prefill(len(tokens), run.call_s)
        return run.logits

    def _call_model(self, run: ModelRun, tokens: Tokens1D) -> None:
        request, stream = run.session.request, self._service.device.compute_stream

        def before_layer(layer: int) -> None:
            if not run.is_loaded:
                request.gate.wait_on(stream, layer, self._settings.load_timeout_s)

        waits = not run.is_loaded and bool(request.loads)
        started = time.monotonic()
        with self._service.device.computing():
            run.logits = self._model.forward(
                tokens=tokens,
                start=run.num_fed,
                block_table=request.block_table,
                planes=self._service.planes.arrays,
                before_layer=before_layer,
            )
        run.call_s = None if waits else time.monotonic() - started
        run.is_loaded = True


def _reason(error: BaseException) -> str:
    """Why a prompt was not computed, in words for another node."""
    if isinstance(error, asyncio.CancelledError):
        return "the prefill was cancelled"
    return str(error) or type(error).__name__


def _forget(call: Future[None]) -> None:
    call.cancel()  # has an effect only if the thread has not begun it


def _first_tokens(ticket: Ticket) -> Sequence[int]:
    """Return the first tokens of `ticket`.

    Raises:
        HandoffError: The ticket has no first token, or one that this model does not have.
    """
    if not ticket.first_tokens:
        raise HandoffError(HandoffProblem.INCOMPLETE.value, "the ticket has no first token")
    if max(ticket.first_tokens) >= TOKENIZER.vocab_size:
        text = "the ticket's first tokens are not tokens of this model"
        raise HandoffError(HandoffProblem.DAMAGED.value, text)
    return ticket.first_tokens


class ReferenceSpec:
    """The reference model as an EngineSpec."""

    takes_media = False
    takes_adapters = False
    tokenizer = TOKENIZER

    def __init__(self, config: ModelConfig, settings: EngineSettings, cache: CacheSettings) -> None:
        self._config = config
        self._settings = settings
        self._cache = cache

    @property
    def layout(self) -> Layout:
        return self._config.layout(self._cache.block_size)

    @property
    def shards(self) -> ShardScheme:
        return self._config.shards(self._cache.block_size)

    def fingerprint(self, tenant: str) -> Fingerprint:
        """See EngineSpec.fingerprint."""
        return Fingerprint(
            model=self._config.name,
            revision=self._config.weights_id,
            layout=self.layout,
            tenant=tenant,
        )

    def open(self, service: Service) -> ReferenceEngine:
        """See EngineSpec.open."""
        model = ReferenceModel(
            self._config,
            self._cache.block_size,
            service.device.array_module,
            tensor_parallel=self._cache.tensor_parallel,
        )
        return ReferenceEngine(service, model, self._settings)
