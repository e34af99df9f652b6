"""A transformers model as the engine of a node, with continuous batching over the cache's blocks.

A step is one forward pass. It computes one token for each request that generates, and chunks of
prompts:

requests --> forward(run, chunk) --> queue
                                       |  one step at a time, on the compute thread
                                       v
                                  PagedModel.forward
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from tierkv.cache.keys import Fingerprint, unpack
from tierkv.cache.layout import Layout
from tierkv.cache.shards import ShardScheme
from tierkv.engine import GenerateRequest
from tierkv.engine_runs import ModelRun, SessionEngine, Tokens1D, logprobs_of
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    DeviceFailedError,
    RequestTooLargeError,
    ShuttingDownError,
    TierKVError,
)
from tierkv.gpu.protocol import Planes
from tierkv.hf.model import PagedModel, load_model
from tierkv.hf.paged import Pages, TokenRun
from tierkv.hf.sampling import TokenChoice, choose
from tierkv.hf.settings import TransformersSettings
from tierkv.model_tokenizer import read_tokenizer
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.tasks import background, outlast
from tierkv.threads import Threads, start_thread
from tierkv.tokenizers import Tokenizer, TokensOnly

log = logging.getLogger(__name__)

_MAX_TURNS = 8  # turns of the loop between two steps; a request needs two, more with a commit


@dataclass(slots=True, eq=False)
class _Call:
    """A chunk of one request's tokens, queued for a step or being computed.

    Attributes:
        run: The request.
        chunk: int32 [n], tokens of the prompt, or the last generated token.
        outcome: The future of the token chosen after the chunk. Its result is None if no token is
            chosen, because the chunk is followed by more tokens that the request already has.
    """

    run: ModelRun
    chunk: Tokens1D
    outcome: asyncio.Future[int | None]

    @property
    def is_prompt(self) -> bool:
        return len(self.chunk) > 1


class TransformersEngine(SessionEngine):
    """A `SessionEngine` that computes all requests with one transformers model.

    Args:
        service: The node's cache service, which has the blocks and the block tables.
        model: The model that computes.
        tokenizer: The tokenizer of the model.
        settings: Sizes of chunks and reservations, and the time limit of loads.
    """

    def __init__(
        self,
        service: Service,
        model: PagedModel,
        tokenizer: Tokenizer,
        settings: TransformersSettings,
    ) -> None:
        super().__init__(
            service,
            tokenizer,
            chunk_tokens=settings.chunk_tokens,
            load_timeout_s=settings.load_timeout_s,
            reserve_tokens=settings.reserve_tokens,
        )
        self._model = model
        self._thread: Threads | None = None
        self._queue: list[_Call] = []
        self._under_way: Sequence[_Call] = ()
        # Requests of the last step that may queue a further token.
        self._expected: set[ModelRun] = set()
        self._has_calls = asyncio.Event()
        self._planes: Planes | None = None
        self._pages: Pages | None = None

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    def check(self, job: GenerateRequest) -> None:
        """Check a job before it is admitted.

        Raises:
            BadRequestError: a token id of the job is outside the model's vocabulary.
        """
        most = self._model.vocab_size - 1
        if job.tokens and int(unpack(job.tokens).max()) > most:
            raise BadRequestError(f"a token of this model must be in 0..{most}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute the engine's steps in a thread while the `with` block runs.

        The service must be running before and until after the `with` block.
        """
        for num_tokens, seconds in self._model.speeds:
            self._service.note_prefill(num_tokens, seconds)
        self._thread = Threads(1, "tierkv-compute")
        try:
            async with background({"tierkv-steps": self._work()}):
                yield
        finally:
            self._thread.shutdown(wait=True)  # idle, since every step has been waited for

    async def forward(self, run: ModelRun, chunk: Tokens1D) -> int | None:
        if not run.is_loaded:
            await self._wait_for_loads(run)
        if self._thread is None or self._service.failure is not None:
            raise ShuttingDownError(self._service.failure or "this node is shutting down")
        call = _Call(run, chunk, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        self._expected.discard(run)
        self._has_calls.set()
        await outlast({call.outcome}, on_cancel=lambda: self._withdraw(call))
        return call.outcome.result()

    async def _wait_for_loads(self, run: ModelRun) -> None:
        """Wait until the request's cached tokens are on the device, if other requests run.

        Otherwise return at once, because the model can compute its first layers while others load.
        """
        gate = run.session.request.gate
        if gate.is_open(gate.num_layers - 1):
            run.is_loaded = True
        elif self._queue or self._under_way:
            await gate.layer(gate.num_layers - 1, self._load_timeout_s)
            run.is_loaded = True

    def _withdraw(self, call: _Call) -> None:
        if call in self._queue:
            self._queue.remove(call)
            call.outcome.cancel()

    # Steps

    async def _work(self) -> None:
        """Run steps of the model for the queued calls, until this task is cancelled.

        A running step ends before the cancel takes effect. Calls that have no outcome by then fail
        with ShuttingDownError.
        """
        try:
            while True:
                await self._has_calls.wait()
                await self._wait_for_last_step()
                calls = self._under_way = self._next_calls()
                if calls:
                    await self._step(calls)
                self._under_way = ()
                if not self._queue:
                    self._has_calls.clear()
        finally:
            for call in [*self._queue, *self._under_way]:
                if not call.outcome.done():
                    call.outcome.set_exception(ShuttingDownError("this node is shutting down"))
            self._queue.clear()

    async def _wait_for_last_step(self) -> None:
        """Wait some turns of the loop for the requests of the last step to queue their next token.

        Late requests would otherwise form a second batch, and each token would cost two steps.
        """
        for _ in range(_MAX_TURNS):
            await asyncio.sleep(0)
            if not self._expected:
                break
        self._expected.clear()

    def _next_calls(self) -> Sequence[_Call]:
        """Remove the calls of the next step from the queue, and return them.

        A step has one token of each request that generates, and prompt chunks of up to
        `chunk_tokens` tokens together, in order of arrival. A request with cached tokens that are
        still being loaded gets a step of its own: other requests neither wait for the load nor fail
        with it.
        """
        alone = next((call for call in self._queue if not call.run.is_loaded), None)
        if alone is not None:
            self._queue.remove(alone)
            return [alone]
        calls = [call for call in self._queue if not call.is_prompt]
        prompts = [call for call in self._queue if call.is_prompt]
        room = self._chunk_tokens
        for call in sorted(prompts, key=lambda one: one.run.started):
            if len(call.chunk) > room and room < self._chunk_tokens:
                break
            calls.append(call)
            room -= len(call.chunk)
        self._queue = [call for call in self._queue if call not in calls]
        return calls

    async def _step(self, calls: Sequence[_Call]) -> None:
        assert self._thread is not None, "the engine is running"
        future = asyncio.wrap_future(self._thread.submit(self._compute, calls))
        try:
            await outlast({future}, on_cancel=lambda: None)
            tokens = future.result()
        except Exception as error:  # noqa: BLE001 - raised in each of the requests
            for call in calls:
                call.outcome.set_exception(_translated(error))
            return
        for call, token in zip(calls, tokens, strict=True):
            call.outcome.set_result(token)
            self._expected.add(call.run)
        first = calls[0]
        if len(calls) == 1 and first.is_prompt and first.run.call_s is not None:
            self._service.note_prefill(len(first.chunk), first.run.call_s)

    def _compute(self, calls: Sequence[_Call]) -> list[int | None]:
        """Run one forward pass on the compute thread; return the new token of each call.

        The token is None for a call whose chunk is not the last one of the request's known tokens.
        """
        stream, started = self._service.device.compute_stream, time.monotonic()
        loading = [call.run for call in calls if not call.run.is_loaded]

        def before_layer(layer: int) -> None:
            for run in loading:
                run.session.request.gate.wait_on(stream, layer, self._load_timeout_s)

        pieces = [
            TokenRun(
                call.chunk,
                call.run.num_fed,
                call.run.session.request.block_table,
                call.run.is_last(call.chunk),
            )
            for call in calls
        ]
        wanting = [
            call.run for call, piece in zip(calls, pieces, strict=True) if piece.wants_logits
        ]
        choices = [_choice(run) for run in wanting]
        with self._service.device.computing():
            logits = self._model.forward(self._bound_pages(), pieces, before_layer)
            tokens = choose(logits, choices) if choices else []
            for run, row, token in zip(wanting, logits, tokens, strict=True):
                if run.job.num_logprobs is not None:
                    one = row.float().cpu().numpy()
                    run.chosen_logprobs = logprobs_of(one, token, run.job.num_logprobs)
            chosen = iter(tokens)
        took = time.monotonic() - started
        for call in calls:
            call.run.call_s = None if loading else took
            call.run.is_loaded = True
        return [next(chosen) if piece.wants_logits else None for piece in pieces]

    def _bound_pages(self) -> Pages:
        if self._pages is None or self._planes is not self._service.planes:
            self._planes = self._service.planes
            self._pages = self._model.pages([_tensor(one) for one in self._planes.arrays])
        return self._pages


def _in_own_thread(load: Callable[[], PagedModel]) -> PagedModel:
    """Call `load` in a new thread, and return its result.

    OpenMP keeps a pool of worker threads for each thread that computes, and pools with more threads
    than cores wake up slowly. The pool of the new thread ends with it: SmolLM2-135M on 2 cores then
    takes 69 ms for a token; with a pool of the main thread, 83 ms or more.
    """
    loaded: Future[PagedModel] = Future()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # noqa: BLE001 - raised below
            loaded.set_exception(error)

    start_thread(run, "tierkv-model")  # a daemon, so that Ctrl-C need not wait for the load
    return loaded.result()


def _choice(run: ModelRun) -> TokenChoice:
    job, cut = run.job, len(run.prompt) - run.job.answered_tokens
    earlier: list[int] = run.prompt[max(cut, 0) :].tolist() if job.answered_tokens else []
    answer = [*earlier, *run.tokens]
    return TokenChoice(job.sampling, run.prompt[: max(cut, 0)], answer, run.excluded_tokens)


def _tensor(array: object) -> torch.Tensor:
    found: torch.Tensor = (
        torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
    )
    return found


def _translated(error: Exception) -> Exception:
    if isinstance(error, TierKVError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        found: TierKVError = RequestTooLargeError(
            "the device has no memory left for this step: lower transformers.chunk_tokens or "
            f"cache.device_blocks ({error})"
        )
    elif isinstance(error, torch.AcceleratorError):
        found = DeviceFailedError(f"the device has failed: {error}")
    else:
        return error
    found.__cause__ = error
    return found


class TransformersSpec:
    """The layout, tokenizer and identity of a transformers model, as the `EngineSpec` of a node.

    The model is loaded at the first use of an attribute that needs it.

    Args:
        path: A directory or a GGUF file with the model.
        settings: The settings of the engine.
        cache: The settings of the cache; only block size and tensor parallelism are read.
        device: The device of the node, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: The path is empty, or `cache` asks for tensor parallelism.
    """

    takes_media = False
    takes_adapters = False

    def __init__(
        self, path: str, settings: TransformersSettings, cache: CacheSettings, device: str
    ) -> None:
        if cache.tensor_parallel > 1:
            raise ConfigError(
                f"cache.tensor_parallel is {cache.tensor_parallel}, and the engine transformers "
                "computes on one device: set it to 1"
            )
        if not path:
            raise ConfigError(
                "the engine transformers needs a model: set node.model (--model) to its directory "
                "or GGUF file"
            )
        self._path = Path(path).expanduser()
        self._settings = settings
        self._block_size = cache.block_size
        self._device = torch.device(device)

    @cached_property
    def model(self) -> PagedModel:
        """The model, loaded onto the device at the first access."""
        return _in_own_thread(self._load)

    def _load(self) -> PagedModel:
        model = load_model(self._path, self._settings.dtype, self._device)
        return PagedModel(model, self._block_size, self._settings.max_context)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self._path.is_dir() and not (self._path / "tokenizer.json").is_file():
            return TokensOnly(self.model.vocab_size, self.model.end_tokens)
        return read_tokenizer(self._path)

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def shards(self) -> ShardScheme:
        return ShardScheme(self.layout, {})

    def fingerprint(self, tenant: str) -> Fingerprint:
        return self.model.fingerprint(tenant)

    def open(self, service: Service) -> TransformersEngine:
        return TransformersEngine(service, self.model, self.tokenizer, self._settings)
