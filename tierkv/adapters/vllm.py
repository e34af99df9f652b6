"""The module that vLLM loads by path: `TierKVConnector`, and a tier for vLLM's own offloading.

`TierKVTier` is a secondary tier of vLLM's KV offloading. vLLM itself copies chunks of several
blocks between GPU and its own host memory, for hybrid models and tensor parallelism, too. This tier
copies the chunks from that host memory to Redis, files or Mooncake and back, so that they outlive
the process and other instances find them. Made for the interfaces of vLLM 0.32 and 0.33
(`vllm.v1.kv_offload.tiering.base.SecondaryTierManager`). In `kv_connector_extra_config`:

    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 8589934592,
    "secondary_tiers": [{
        "type": "TierKVTier", "module_path": "tierkv.adapters.vllm", "store":
            "redis://127.0.0.1:6379/0"
    }]
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tierkv.adapters.vllm_connector import TierKVConnector
from tierkv.embed.page_storage import PageStorage

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["TierKVConnector", "TierKVTier"]

log = logging.getLogger(__name__)


class TierKVTier(SecondaryTierManager):
    """A second tier of vLLM's offloading, which keeps chunks in a tierkv store.

    A chunk is vLLM's name for a block of its host memory. All calls come from vLLM's scheduler
    thread. No call waits for the store, except `drain_jobs`, `shutdown` and the constructor.

    Args:
        offloading_spec: model, layout and ranks, from vLLM.
        primary_kv_view: vLLM's host memory, one row for each chunk.
        tier_type: vLLM's name of this tier.
        backpressure_detector: an object of vLLM, passed to the base class.
        store: URL of the store (docs/storage.md).
        ttl_s: seconds that a chunk stays in the store after its last use; None for as long as the
            store keeps it.
        deadline_s: seconds after which a lookup without an answer counts as a miss.
        revision: revision of the model's weights, if instances with other weights share the store
            under the same model name.
        locality: "LOCAL" or "REMOTE", the place of the chunks in vLLM's KV events; None if the
            events name no place.
        enable_kv_events: True to report stored chunks in vLLM's KV events.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(  # noqa: PLR0913 - vLLM passes the first four and the configuration
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        store: str,
        ttl_s: float | None = 86_400.0,
        deadline_s: float = 2.0,
        revision: str = "",
        locality: str | None = None,
        enable_kv_events: bool = False,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._emits = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []
        identity = _identity(offloading_spec) | {"revision": revision}
        pages = np.asarray(primary_kv_view).view(np.uint8)
        self._storage = PageStorage(store, ttl_s=ttl_s, deadline_s=deadline_s)
        self._storage.open()
        self._pages = self._storage.pool(identity, pages)
        self._verdicts: dict[OffloadKey, bool | None] = {}  # None: no answer yet
        self._num_asking: Counter[OffloadKey] = Counter()  # running requests that looked a key up
        self._asked_by: dict[str, set[OffloadKey]] = {}
        self._to_ask: list[OffloadKey] = []
        self._asked: list[tuple[list[OffloadKey], Future[list[bool]]]] = []
        self._jobs: dict[int, tuple[TransferJob, Future[list[bool]]]] = {}
        log.info("vLLM's chunks are kept in %s", self._storage.url)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT or MISS for a chunk; RETRY until the store has answered.

        The keys of all lookups in one scheduler step go to the store in one batch, at the step's
        end.

        Args:
            key: vLLM's key of the chunk.
            req_context: the request that looks the chunk up.
        """
        self._collect_answers()
        asked = self._asked_by.setdefault(req_context.req_id, set())
        if key not in asked:
            asked.add(key)
            self._num_asking[key] += 1
        if key not in self._verdicts:
            self._verdicts[key] = None
            self._to_ask.append(key)
        verdict = self._verdicts[key]
        if verdict is None:
            return LookupResult.RETRY
        return LookupResult.HIT if verdict else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        keys = [key for key in self._to_ask if key in self._verdicts]
        self._to_ask.clear()
        if keys:
            self._asked.append((keys, self._pages.present(keys)))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the store's answers about chunks that no other running request has looked up.

        A later request asks the store about these chunks again, because they may have expired.
        """
        for key in self._asked_by.pop(req_context.req_id, ()):
            self._num_asking[key] -= 1
            if not self._num_asking[key]:
                del self._num_asking[key]
                self._verdicts.pop(key, None)

    def submit_store(self, job_metadata: TransferJob) -> None:
        future = self._pages.store(list(job_metadata.keys), job_metadata.chunk_ids.tolist())
        self._jobs[job_metadata.job_id] = (job_metadata, future)

    def submit_load(self, job_metadata: TransferJob) -> None:
        future = self._pages.load(list(job_metadata.keys), job_metadata.chunk_ids.tolist())
        self._jobs[job_metadata.job_id] = (job_metadata, future)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect_answers()
        done = [job_id for job_id, (_, future) in self._jobs.items() if future.done()]
        return [self._result(*self._jobs.pop(job_id)) for job_id in done]

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._asked or self._to_ask)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        wait([future for _, future in self._jobs.values()])

    def shutdown(self) -> None:
        self._storage.close()

    def _collect_answers(self) -> None:
        for keys, future in [pair for pair in self._asked if pair[1].done()]:
            self._asked.remove((keys, future))
            answers = future.result() if future.exception() is None else [False] * len(keys)
            for key, answer in zip(keys, answers, strict=True):
                # A load that has failed since the lookup has set False: keep it.
                if key in self._verdicts and self._verdicts[key] is None:
                    self._verdicts[key] = answer

    def _result(self, job: TransferJob, future: Future[list[bool]]) -> JobResult:
        keys = list(job.keys)
        answers = future.result() if future.exception() is None else [False] * len(keys)
        good = [key for key, is_good in zip(keys, answers, strict=True) if is_good]
        if job.is_promotion:
            # A later lookup must miss: a hit would make vLLM repeat the load that failed.
            for key in set(keys).difference(good):
                if key in self._verdicts:
                    self._verdicts[key] = False
        elif good and self._emits:
            event = OffloadingEvent(good, self.medium, removed=False, locality=self.locality)
            self._events.append(event)
        return JobResult(
            job.job_id,
            success=len(good) == len(keys),
            successful_keys=tuple(good) if job.is_promotion and good else None,
            transfer_bytes=len(good) * self.block_size_bytes,
        )


def _identity(spec: OffloadingSpec) -> dict[str, str]:
    """Return the settings that determine the bytes of a stored chunk (some blocks of vLLM).

    Instances of vLLM with equal settings share the chunks in the store.
    """
    config, parallel = spec.config, spec.config.parallel
    ranks = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    is_portable = parallel.is_parallelism_agnostic or config.replicated_layout
    groups = [(group.tokens_per_block, tuple(group.layer_names)) for group in config.groups]
    return {
        # The order of bytes within a block is private to vLLM's attention backend.
        "engine": f"vllm {'.'.join(vllm.__version__.split('.')[:2])}",
        "device": current_platform.device_type,
        "model": config.model.name,
        "dtype": str(config.model.dtype),
        "groups": repr(groups),
        "blocks_per_chunk": str(spec.blocks_per_chunk),
        "tokens_per_hash": str(spec.tokens_per_hash),
        "layout": repr((config.kv_cache_layout, config.canonical_layout)),
        "ranks": "any" if is_portable else repr(ranks),
    }
