"""The engine of nodes that run the reference model, a small model in NumPy.

One thread computes, and reads and writes the KV in the cache's blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import Layout
from tierkv.cache.shards import ShardScheme
from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.engine import GenerateRequest
from tierkv.engine_runs import ModelRun, SessionEngine, Tokens1D, logprobs_of
from tierkv.errors import ShuttingDownError
from tierkv.model_tokenizer import read_tokenizer
from tierkv.refmodel.checkpoint import open_checkpoint
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import TOKENIZER, Floats, ReferenceModel, sample
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.tasks import outlast
from tierkv.threads import Threads
from tierkv.tokenizers import Tokenizer


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the reference engine.

    Attributes:
        chunk_tokens: largest number of prompt tokens per call of the model. A cancelled request
            waits for the end of one call.
        load_timeout_s: seconds that a call may wait for a layer that is being loaded.
        weights_dir: directory where the nodes of this machine share the float32 weights of a model,
            one file for each model; "" stores the weights in each node's own memory.
    """

    chunk_tokens: int = 256
    weights_dir: str = ""
    load_timeout_s: Fixed[float] = 30.0

    def __post_init__(self) -> None:
        all_at_least_one("engine", self, "chunk_tokens")
        all_above_zero("engine", self, "load_timeout_s")


class ReferenceEngine(SessionEngine):
    """A `SessionEngine` that computes with the reference model on one CPU thread.

    Args:
        service: the node's cache service, which has the blocks and the block tables.
        model: the model that computes.
        settings: size of chunks, and the time limit of loads.
        tokenizer: the tokenizer of the model.
    """

    def __init__(
        self,
        service: Service,
        model: ReferenceModel,
        settings: EngineSettings,
        tokenizer: Tokenizer = TOKENIZER,
    ) -> None:
        super().__init__(
            service,
            tokenizer,
            chunk_tokens=settings.chunk_tokens,
            load_timeout_s=settings.load_timeout_s,
        )
        self._model = model
        self._thread: Threads | None = None

    @property
    def max_positions(self) -> int:
        return self._model.config.max_positions

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the thread that computes, until the `async with` block ends.

        The service must be running before this context is entered, and until after it is left.
        """
        self._thread = Threads(1, "tierkv-compute")
        try:
            yield
        finally:
            self._thread.shutdown(wait=True)  # idle, since callers wait for their calls

    def check(self, job: GenerateRequest) -> None:
        job.sampling.check_only(("top_k",))

    async def forward(self, run: ModelRun, chunk: Tokens1D) -> int | None:
        assert self._thread is not None, "the engine is running"
        try:
            call = self._thread.submit(self._call_model, run, chunk)
        except RuntimeError:  # the thread has ended, after a failure of the node
            why = self._service.failure or "this node is shutting down"
            raise ShuttingDownError(why) from None
        future = asyncio.wrap_future(call)
        # Without effect once the thread has begun the call.
        await outlast({future}, on_cancel=call.cancel)
        logits = future.result()
        if len(chunk) > 1 and run.call_s is not None:  # prompt tokens, not a generated one
            self._service.note_prefill(len(chunk), run.call_s)
        if not run.is_last(chunk):
            return None
        masked = logits
        if excluded := run.excluded_tokens:
            masked = logits.copy()
            masked[sorted(excluded)] = -np.inf
        token = sample(masked, run.job.sampling, run.num_known)
        if run.job.num_logprobs is not None:
            run.chosen_logprobs = logprobs_of(logits, token, run.job.num_logprobs)
        return token

    def _call_model(self, run: ModelRun, tokens: Tokens1D) -> Floats:
        request, stream = run.session.request, self._service.device.compute_stream

        def before_layer(layer: int) -> None:
            if not run.is_loaded:
                request.gate.wait_on(stream, layer, self._load_timeout_s)

        waits = not run.is_loaded and bool(request.loads)
        started = time.monotonic()
        with self._service.device.computing():
            logits = self._model.forward(
                tokens=tokens,
                start=run.num_fed,
                block_table=request.block_table,
                planes=self._service.planes.arrays,
                before_layer=before_layer,
            )
        run.call_s = None if waits else time.monotonic() - started
        run.is_loaded = True
        return logits


class ReferenceSpec:
    """The `EngineSpec` of the reference model.

    Args:
        config: the sizes of the built-in model, and the type of KV.
        settings: the settings of the engine.
        cache: the settings of the cache; only block size and tensor parallelism are read.
        path: GGUF file or directory of a Llama-shaped model to serve instead of the built-in one;
            "" for none.

    Raises:
        ConfigError: there is no model at `path`, or it is not supported.
    """

    takes_media = False
    takes_adapters = False

    def __init__(
        self, config: ModelConfig, settings: EngineSettings, cache: CacheSettings, path: str = ""
    ) -> None:
        self._checkpoint = open_checkpoint(Path(path)) if path else None
        self._config = config
        if self._checkpoint is not None:
            self._config = replace(self._checkpoint.config, kv_dtype=config.kv_dtype)
        self._tokenizer: Tokenizer = read_tokenizer(Path(path)) if path else TOKENIZER
        self._settings = settings
        self._cache = cache

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def layout(self) -> Layout:
        return self._config.layout(self._cache.block_size)

    @property
    def shards(self) -> ShardScheme:
        return self._config.shards(self._cache.block_size)

    def fingerprint(self, tenant: str) -> Fingerprint:
        return Fingerprint(
            model=self._config.name,
            revision=self._config.weights_id,
            layout=self.layout,
            tenant=tenant,
        )

    def open(self, service: Service) -> ReferenceEngine:
        checkpoint, shared = self._checkpoint, self._settings.weights_dir
        model = ReferenceModel(
            self._config,
            self._cache.block_size,
            service.device.array_module,
            tensor_parallel=self._cache.tensor_parallel,
            weights=None if checkpoint is None else checkpoint.weights(shared),
        )
        return ReferenceEngine(service, model, self._settings, self._tokenizer)
