"""The inference engine of a node: runs the reference model over the cache's blocks, one thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tierkv.cache.keys import Prompt
from tierkv.cache.tokens import count
from tierkv.config import all_above_zero
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    DeviceFailedError,
    HandoffError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published, PublishWait
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.generation import GenerateRequest, Generation, Prefilled, Run, Tokens1D
from tierkv.refmodel.model import ReferenceModel
from tierkv.refmodel.paged import Floats
from tierkv.refmodel.publishing import Publishing, Publishings
from tierkv.sched.request import Request
from tierkv.service import Service
from tierkv.tasks import outlast, task_group

log = logging.getLogger("tierkv.engine")

T = TypeVar("T")

LOAD_FAILED = "load_failed"  # a claim's reason beside those of ClaimProblem
_COMMIT_EVERY_TOKENS = 64  # generated ones; a commit costs far less than a step of the model


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """chunk_tokens: prompt tokens per call of the model; a cancel waits for one call at most.
    load_timeout_s: how long a call may wait for a layer that is being loaded."""

    chunk_tokens: int = 256
    load_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"engine.chunk_tokens must be at least 1, not {self.chunk_tokens}")
        all_above_zero("engine", self, "load_timeout_s")


@dataclass(slots=True)
class EngineStats:
    """Counts since the start."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    failed_loads: int = 0


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
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._publishings = Publishings()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving waits for publishes under way; a cancel of them is `stop_publishing`."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierkv-compute")
        try:
            async with task_group() as self._tasks:
                yield
        finally:
            self._thread.shutdown(wait=True)  # idle: every call was waited for by its caller

    def stop_publishing(self) -> None:
        """Give up what is being published; no ticket will exist for it."""
        self._publishings.cancel()

    async def generate(self, job: GenerateRequest) -> Generation:
        """Generate `job.max_tokens` tokens, using and filling the cache.

        Cached tokens that fail to load are computed; the result says so. Raises what
        `Service.admit` raises, and DeviceFailedError.
        """
        self._check(job, job.max_tokens)
        started = time.monotonic()

        async def attempt(load_problem: str | None) -> Generation:
            run = await self._admit(job, started, job.max_tokens - 1, load_problem)
            try:
                await self._first_token(run)
                await self._continue(run)
                return run.result(load_problem)
            finally:
                self._end(run.request)

        return await self._or_recompute(job, attempt)

    async def prefill(
        self,
        job: GenerateRequest,
        ticket_id: str,
        *,
        waits_for: PublishWait = PublishWait.PUBLISHED,
    ) -> Prefilled:
        """Compute the prompt and its first token, and publish them as a ticket for `decode`.

        `job.max_tokens` has no meaning here. Once the prompt is computed, a cancel ends only the
        wait for the publish; before, who waits for the ticket is told that it will not come.
        Raises HandoffError if storage does not take it, DuplicateRequestError if the ticket is
        another prompt's, and what `generate` raises.
        """
        self._check(job, 1)
        if self._service.handoff is None:
            raise HandoffError(
                ClaimProblem.UNAVAILABLE.value,
                "this node has no storage tier: set storage.url to hand prompts over",
            )
        started = time.monotonic()
        await self._service.check_ticket_is_free(ticket_id, self._prompt(job))

        async def attempt(load_problem: str | None) -> Prefilled:
            run = await self._admit(job, started, 0, load_problem)
            publishing = await self._prefill(run, ticket_id)
            if waits_for is PublishWait.NOTHING:
                return Prefilled(run.result(load_problem), None)
            published = await publishing.published()  # the task of it ends the request
            return Prefilled(run.result(load_problem), published)

        return await self._or_recompute(job, attempt)

    async def _prefill(self, run: Run, ticket_id: str) -> Publishing:
        """Compute the prompt while its blocks go out, or before. The publish ends the request; if
        there is none, because it is cancelled or fails, it has ended when this returns."""
        streaming: Publishing | None = None
        sampling = run.job.sampling.readable()
        try:
            if run.job.uses_cache:
                run.stream = self._service.stream(run.request, ticket_id)
            if run.stream is not None:
                streaming = self._start_publish(run, run.stream.run())
            await self._first_token(run)
            if streaming is not None:
                streaming.computed(run.tokens, self._computed(), sampling)
                return streaming
            work = self._service.publish(
                run.request, ticket_id, run.tokens, after=self._computed(), sampling=sampling
            )
            return self._start_publish(run, work)
        except BaseException as error:
            if streaming is None:
                self._end(run.request)
            else:
                await streaming.given_up(_reason(error))
            raise

    async def decode(
        self,
        job: GenerateRequest,
        ticket_id: str,
        *,
        policy: ClaimPolicy = ClaimPolicy.WHOLE,
        deadline_s: float | None = None,
    ) -> tuple[Generation, Ticket | None]:
        """Claim a published prompt and generate what `generate` would have, token for token. A
        ticket whose tokens were not sampled as `job` says is refused as incompatible.

        With ClaimPolicy.RECOMPUTE what cannot be loaded is computed here, and so is all that a
        ticket would have said if none comes. Raises HandoffError, its reason a ClaimProblem or
        LOAD_FAILED, and what `Service.claim` raises.
        """
        self._check(job, job.max_tokens)
        started = time.monotonic()
        request, ticket = await self._service.claim(
            job.request_id,
            ticket_id,
            self._prompt(job),
            max_new_tokens=job.max_tokens - 1,
            policy=policy,
            deadline_s=deadline_s,
            sampling=job.sampling.readable(),
        )
        run = Run(request, job, started)
        try:
            return await self._decode(run, ticket, None), ticket
        except DeviceFailedError:
            raise
        except TransferError as error:
            if policy is ClaimPolicy.WHOLE:
                raise HandoffError(LOAD_FAILED, f"the claimed prompt did not load: {error}") from (
                    error
                )
            problem = self._note_failed_load(job, error)
        run = await self._admit(job, started, job.max_tokens - 1, problem)
        return await self._decode(run, ticket, problem), ticket

    async def _decode(
        self, run: Run, ticket: Ticket | None, load_problem: str | None
    ) -> Generation:
        try:
            if ticket is not None:
                run.tokens.extend(_first_tokens(ticket)[: run.job.max_tokens])
                run.tell()
            await self._continue(run)
            return run.result(load_problem)
        finally:
            self._end(run.request)

    async def _or_recompute(
        self, job: GenerateRequest, attempt: Callable[[str | None], Awaitable[T]]
    ) -> T:
        """`attempt(None)`; if cached tokens did not load, `attempt` again with the reason."""
        try:
            return await attempt(None)
        except DeviceFailedError:
            raise
        except TransferError as error:
            if not job.uses_cache:
                raise
            problem = self._note_failed_load(job, error)
        return await attempt(problem)

    def _note_failed_load(self, job: GenerateRequest, error: TransferError) -> str:
        log.warning("request %s computes all, its load failed: %s", job.request_id, error)
        self.stats.failed_loads += 1
        return str(error)

    # Steps of a run

    def _check(self, job: GenerateRequest, num_new: int) -> None:
        end = count(job.tokens) + num_new
        if end > self._model.config.max_positions:
            raise BadRequestError(
                f"prompt and output have {end} tokens; the model takes "
                f"{self._model.config.max_positions}"
            )

    def _prompt(self, job: GenerateRequest) -> Prompt:
        return Prompt(job.tokens, self._model.layout.block_size, space=job.space)

    async def _admit(
        self, job: GenerateRequest, started: float, room: int, load_problem: str | None
    ) -> Run:
        """Admit the request, with nothing cached if that did not load."""
        request = await self._service.admit(
            job.request_id,
            self._prompt(job),
            max_new_tokens=room,
            uses_cache=job.uses_cache and load_problem is None,
        )
        return Run(request, job, started)

    async def _first_token(self, run: Run) -> None:
        logits = await self._feed(run)
        assert logits is not None, "an admission leaves one token to compute"
        self._add(run, logits)
        await self._commit(run)

    async def _continue(self, run: Run) -> None:
        """Generate up to max_tokens, and commit all that was fed."""
        while len(run.tokens) < run.job.max_tokens:
            logits = await self._feed(run)
            assert logits is not None, "the last token is not fed yet"
            self._add(run, logits)
            if len(run.tokens) % _COMMIT_EVERY_TOKENS == 0:
                await self._commit(run)
        await self._commit(run)

    async def _feed(self, run: Run) -> Floats | None:
        """Write the KV of all known tokens that have none; the logits that follow the last one."""
        logits = None
        while len(chunk := run.next_chunk(self._settings.chunk_tokens)):
            logits = await self._forward(run, chunk)
            self.stats.computed_tokens += len(chunk)
            if run.stream is not None:
                await self._commit(run)
                run.stream.advance(run.num_fed, self._computed())
        return logits

    async def _commit(self, run: Run) -> None:
        if run.job.uses_cache:
            await self._service.commit(run.request, run.fed, after=self._computed())

    def _add(self, run: Run, logits: Floats) -> None:
        run.add(logits)
        self.stats.generated_tokens += 1

    def _end(self, request: Request) -> None:
        self._service.end(request, after=self._computed())

    def _computed(self) -> tuple[Event, ...]:
        """What the kernels submitted so far end with; nothing on a device that is lost, where none
        runs any more, so that requests can still be ended."""
        try:
            return (self._service.device.compute_stream.record(),)
        except DeviceFailedError:
            return ()

    # Publishing

    def _start_publish(self, run: Run, work: Coroutine[None, None, Published]) -> Publishing:
        assert self._tasks is not None, "the engine is running"
        return self._publishings.start(
            self._tasks, work, lambda: self._end(run.request), run.stream
        )

    # The compute thread

    async def _forward(self, run: Run, tokens: Tokens1D) -> Floats:
        """One call of the model. A cancel is raised after the thread has left the planes."""
        assert self._thread is not None, "the engine is running"
        call = self._thread.submit(self._call_model, run, tokens)
        future = asyncio.wrap_future(call)
        await outlast({future}, on_cancel=lambda: _forget(call))
        future.result()
        assert run.logits is not None, "the call has ended well"
        run.num_fed += len(tokens)
        if len(tokens) > 1 and run.call_s is not None:  # prompt tokens, not a generated one
            self._service.note_prefill(len(tokens), run.call_s)
        return run.logits

    def _call_model(self, run: Run, tokens: Tokens1D) -> None:
        request, stream = run.request, self._service.device.compute_stream

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
    """Raises HandoffError if the ticket names none, or some that this model does not have."""
    if not ticket.first_tokens:
        raise HandoffError(ClaimProblem.INCOMPLETE.value, "the ticket does not say the first token")
    if max(ticket.first_tokens) >= VOCAB_SIZE:
        raise HandoffError(ClaimProblem.DAMAGED.value, "the ticket's first tokens are no bytes")
    return ticket.first_tokens
