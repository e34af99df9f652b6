"""vLLM's KV connector: prompts cached in host memory and storage, and prefill handed to decode.

Made for the interfaces of vLLM 0.32 and 0.33 (`KVConnectorBase_V1`). vLLM owns the device blocks
and the block tables; tierkv owns the host memory and the storage.

    vLLM's scheduler                                   vLLM's workers, one for each rank
    get_num_new_matched_tokens  looks up what is cached
    update_state_after_alloc    plans a load           handle_preemptions  waits for saves of
                                                                           reused blocks
    build_connector_meta        plans saves; plans  -> start_load_kv, wait_for_save
    update_connector_output  <- reports of copies      get_finished
    request_finished            plans the last save; vLLM keeps the blocks until the save ends

A load copies blocks from host to device, a save copies them from device to host. A plan lists the
blocks to copy. Plans and reports travel in vLLM's own messages between scheduler and workers, and
therefore in the order of vLLM's steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
import time
import uuid
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_cache_spec_kind
from vllm.v1.metrics.utils import create_metric_per_engine

from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import NO_BLOCK, CacheGroup, GroupKind, main_group
from tierkv.cache.keys import Fingerprint, MediaItem, Prompt, prompt_extra
from tierkv.cache.layout import Layout, Plane
from tierkv.cache.shards import ShardScheme
from tierkv.clock import SystemClock
from tierkv.config import from_mapping, renamed
from tierkv.embed.engine_cache import EngineCache, Found
from tierkv.embed.external import NodeHost
from tierkv.embed.host_side import EngineCacheSettings
from tierkv.errors import ConfigError, DeviceFailedError, TierKVError, TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device, Planes
from tierkv.kv_hints import count_fetches
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.link import Plan, remove_left_over
from tierkv.ranks.memory import EnginePlanes, side_by_side
from tierkv.ranks.worker_planes import Finished, RankSocket, WorkerPlanes
from tierkv.sched.events import CacheEventKind, ExternalId
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.protocol import Store
from tierkv.transfer.tier import StorageOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

# Saves begin in every fourth step: the first save of a step takes some 80 us of the scheduler's
# thread, because the CPU's caches are cold, and each further save 30 us. In a step that computes
# more than _MUCH tokens they always begin: the step takes long, and there is much to save. Reports
# of ended copies are read just before, unless a request waits for one.
_SAVES_EVERY = 4
_MUCH = 1024
_MAX_UNDER_WAY = 8  # running steps that are timed
_SAVES_AT_ONCE = 12
_BACKLOG_TURNS = 2  # turns in which a backlog of waiting saves is begun
# A request saves when this many of its tokens are not saved, and at its end: a save costs the same
# for one block as for many.
_SAVED_AT_ONCE = 256
_PAUSE_STEPS = 4  # until the next check of a request that was not in a step
_MAX_WAIT_S = 60.0  # of a step for saves of blocks that it will write
_MAX_PRIVATE = 65_536  # names of blocks with a salt, an adapter, images or a session
_MAX_LOST = 2  # promises to one request that expire before it loads them
# With a single request, the engine waits up to this time for the host tier's answer, which takes
# mostly 0.5 ms. Asking again in the next step takes 5 ms.
_ALONE_S = 0.002
# Number of attention blocks for which host memory has room for each state: vLLM keeps a state only
# at the end of a prompt, and where prompts part.
_BLOCKS_PER_STATE = 4
_COUNTS = {
    "loaded_tokens": "Prompt tokens that were loaded instead of computed",
    "failed_loads": "Loads with a block that did not arrive; their requests were computed",
    "saved_blocks": "Blocks that were copied to host memory and can be found",
    "unsaved_blocks": "Blocks that were not saved, because no host memory was free",
    "published_prompts": "Prompts that were handed over",
    "failed_publishes": "Prompts that could not be handed over",
    "lost_tickets": "Requests with a ticket that could not be claimed",
    "kept_turns": "Turns of sessions with host blocks that are evicted last",
    "fetch_hints": "Hints to fetch a prompt, which were followed",
    "ignored_hints": "Hints of unknown protocols, actions or versions",
}
_ROLE = "kv"  # of a layer's plane
_STATE_ROLE = "state"
TICKET = "tierkv_ticket"  # among a request's kv_transfer_params
_HOST_BYTES = 4 << 30
_SOCKETS = f"tierkv-{os.getuid()}-*.sock"  # of this user's engines, in the temporary directory
_SAVE_BLOCKS = 256  # smallest number of host slots kept ready for saves


@renamed(other_ranks="peer_tensor_parallel", expires_s="promise_ttl_s", least_tokens="min_tokens")
class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`.

    Attributes:
        store: URL of the store (docs/storage.md), "" for host memory alone.
        host_bytes: bytes of host memory for blocks, of this engine's ranks together.
        node: socket of a node on this machine (`tierkv serve --engine external`); the node's host
            memory and store replace `host_bytes` and `store`. "" for none.
        node_key: a token, if the node has an auth file; "" otherwise.
        peer_tensor_parallel: tensor parallel sizes of other instances. This instance also finds the
            blocks of these instances.
        ttl_s: seconds that a block stays in the store; None for as long as the store keeps it.
        revision: revision of the model's weights, if instances with other weights share the store
            under the same model name.
        saves_generated: also save blocks of generated tokens, for prompts that continue them.
        fetch_policy: best_effort fetches blocks from the store only if computing them is estimated
            to take longer; wait_complete fetches all blocks that are stored.
        fetch_deadline_s: seconds that a request waits for the store before it computes.
        claim_deadline_s: seconds that a decode instance waits for a prefill instance's ticket, the
            record that a prompt is stored.
        publish_deadline_s: seconds that storing a prompt with its ticket may take.
        ticket_ttl_s: seconds that a ticket can be used.
        promise_ttl_s: seconds for which found blocks stay on the host for a request that vLLM does
            not schedule.
        session_ttl_s: seconds for which, after each turn of a session, the host evicts the turn's
            blocks only after all other blocks; 0 to treat them like other blocks.
        min_tokens: smallest number of cached tokens to load; vLLM computes fewer tokens itself.
            With host memory in vLLM's process, vLLM also computes the missing tokens if they fit in
            one block. Without a store, a partial block is loaded only together with the full block
            before it. None of this applies to a prompt with a ticket.
        prefix: prefix of all names in the store.
    """

    store: str = ""
    host_bytes: int = _HOST_BYTES
    node: str = ""
    node_key: str = ""
    peer_tensor_parallel: tuple[int, ...] = ()
    ttl_s: float | None = 86_400.0
    revision: str = ""
    saves_generated: bool = True
    fetch_policy: FetchPolicy = FetchPolicy.BEST_EFFORT
    fetch_deadline_s: float = 2.0
    claim_deadline_s: float = 10.0
    publish_deadline_s: float = 30.0
    ticket_ttl_s: float = 600.0
    promise_ttl_s: float = 30.0
    session_ttl_s: float = 300.0
    min_tokens: int = 32
    prefix: str = "tierkv"

    def __post_init__(self) -> None:
        own = {
            "store": bool(self.store),
            "host_bytes": self.host_bytes != _HOST_BYTES,
            "peer_tensor_parallel": bool(self.peer_tensor_parallel),
        }
        if self.node and (given := " and ".join(name for name in own if own[name])):
            raise ConfigError(
                f"node cannot be combined with {given}, which the node's own settings "
                f"decide: remove {given}, or remove node"
            )

    def handoff(self) -> HandoffSettings:
        longest = None if self.ttl_s is None else max(self.ttl_s, self.ticket_ttl_s)
        return HandoffSettings(
            prefix=self.prefix,
            block_ttl_s=longest,
            ticket_ttl_s=self.ticket_ttl_s,
            publish_deadline_s=self.publish_deadline_s,
            claim_deadline_s=self.claim_deadline_s,
        )

    def open(self) -> Store | None:
        return (
            open_guarded_store(self.store, StoreSettings(), SystemClock()) if self.store else None
        )


@dataclass
class StepPlans(KVConnectorMetadata):
    """The copies of one step, sent from vLLM's scheduler to all workers.

    Workers carry out the fields in this order. A plan lists the blocks of one transfer.

    Attributes:
        must_wait: True if vLLM has reused blocks that running saves still read: workers wait for
            the saves before they write any block.
        loads: (id of the request, plan) for each load, from host to device.
        saves: one plan for all saves of the step, from device to host; None without saves.
        saving: id of the request of each save in `saves`; a request may occur several times.
        lost: (id of the request, device blocks) for each load that is impossible, because its
            blocks have left the host. The device blocks do not have the content that vLLM expects.
        over: ids of requests that have ended; vLLM may reuse their blocks when their saves have
            ended.
    """

    must_wait: bool = False
    loads: list[tuple[str, Plan]] = field(default_factory=list)
    saves: Plan | None = None
    saving: list[str] = field(default_factory=list)
    lost: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    over: list[str] = field(default_factory=list)

    @property
    def is_nothing(self) -> bool:
        """True if the workers have nothing to do for this step, as in most steps."""
        return not (self.loads or self.saving or self.lost or self.over or self.must_wait)


_NOTHING = StepPlans()  # never changed


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """The plans that workers have finished, sent from the workers to vLLM's scheduler.

    Attributes:
        reports: the result of each plan on each rank.
    """

    reports: list[Finished] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return StepReports(self.reports + other.reports)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """A worker's description of its blocks, sent to the scheduler once at the start.

    Attributes:
        groups: the cache groups (layers with the same layout and the same rule of which blocks they
            need), with the layout of this rank's part of a block.
        backends: names of vLLM's platform and attention backends, and on a CPU its instruction
            sets: they decide the order of bytes within a block.
        heads: number of KV heads of this rank, if a layer's block has the bytes of one head after
            another; 0 if the bytes are in another order.
    """

    groups: tuple[CacheGroup, ...]
    backends: str
    heads: int = 0


class TierKVStats(KVConnectorStats):
    """The connector's counts in vLLM's scheduler since the last report, by the counter's name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class TierKVMetrics(KVConnectorPromMetrics):
    """The connector's counts as Prometheus counters."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401 - vLLM's arguments
        super().__init__(*given)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:tierkv_{name}", documentation=text, labelnames=self._labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, text in _COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts of one engine to its Prometheus counters.

        Args:
            transfer_stats_data: the counts by name, from `TierKVStats`.
            engine_idx: number of the engine.
        """
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """The KV connector of tierkv, which vLLM loads in its scheduler and in each of its workers.

    With the `kv_role` kv_both it loads and saves blocks, with kv_consumer it only loads, and with
    kv_producer it only saves.

    Args:
        vllm_config: vLLM's configuration.
        role: the process that this connector is for: the scheduler's, or a worker's.
        kv_cache_config: vLLM's device blocks and cache groups.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = from_mapping(ConnectorSettings, given, "kv_connector_extra_config")
        self._scheduler: _SchedulerSide | None = None
        self._worker: _WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(vllm_config, settings, kv_cache_config)
        else:
            self._worker = _WorkerSide(vllm_config, kv_cache_config)

    @property
    def scheduler(self) -> _SchedulerSide:
        assert self._scheduler is not None, "this connector is a worker's"
        return self._scheduler

    @property
    def worker(self) -> _WorkerSide:
        assert self._worker is not None, "this connector is the scheduler's"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """True on a prefill instance, where every prompt must be handed over.

        If vLLM then preempts a request after its prompt is computed and before its last blocks are
        saved, vLLM computes the prompt again.
        """
        return str(self._kv_transfer_config.kv_role) == "kv_producer"

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        self.worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM runs a request only after its loads have ended."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: object,
    ) -> None:
        """Do nothing: `wait_for_save` saves all layers together, at the end of the step.

        Args:
            layer_name: ignored.
            kv_layer: ignored.
            attn_metadata: ignored.
            kwargs: ignored.
        """

    def wait_for_save(self) -> None:
        self.worker.start_saves(self._get_connector_metadata())

    def get_finished(
        self,
        finished_req_ids: set[str],
    ) -> tuple[set[str] | None, set[str] | None]:
        results = self.worker.finished()
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.pop_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.pop_reports()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self._scheduler is None else self._scheduler.pop_counts()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return TierKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return the Prometheus counters of the connector.

        Args:
            vllm_config: vLLM's configuration.
            metric_types: vLLM's classes of metrics.
            labelnames: names of the labels of each counter.
            per_engine_labelvalues: values of the labels, by engine.

        Returns:
            The counters. Never None; vLLM's interface allows None for connectors without counters.
        """
        return TierKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side

    def on_new_request(self, request: Request) -> None:
        self.scheduler.arrive(request)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler.open([metadata[rank] for rank in sorted(metadata)])

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many further prompt tokens can be loaded, and if the load is asynchronous.

        Args:
            request: vLLM's request.
            num_computed_tokens: number of leading tokens whose KV vLLM has in device blocks.

        Returns:
            The number of tokens to load after the first `num_computed_tokens`, None while the
                lookup runs; and True if this number is above 0: all loads are asynchronous.
        """
        found = self.scheduler.find(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of cached tokens into the device blocks that vLLM has allocated for them.

        Args:
            request: vLLM's request.
            blocks: all device blocks of the request.
            num_external_tokens: number of tokens to load; 0 for none.
        """
        if num_external_tokens:
            self.scheduler.load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.receive_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with one cache group, and plan the save of its last blocks.

        Args:
            request: vLLM's request.
            block_ids: device blocks of the request.

        Returns:
            True if vLLM must not reuse the blocks before `get_finished` names the request; and the
                `kv_transfer_params` for the client, with the ticket of a handed-over prompt, or
                None.
        """
        return self.scheduler.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, and plan the save of its last blocks.

        Args:
            request: vLLM's request.
            block_ids: for each cache group, the device blocks of the request.

        Returns:
            True if vLLM must not reuse the blocks before `get_finished` names the request; and the
                `kv_transfer_params` for the client, with the ticket of a handed-over prompt, or
                None.
        """
        return self.scheduler.finish(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool | None:
        self.scheduler.reset()
        return True

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


# In the scheduler's process


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request of vLLM, from its first lookup to its end.

    A ticket is the record by which a prefill instance hands a prompt to a decode instance. A state
    is the recurrent state of a Mamba or linear attention layer after a number of tokens.

    Attributes:
        request: vLLM's request.
        prompt: the tokens of the last lookup or save; None before.
        claims: id of the ticket whose blocks the request loads; None without one.
        publishes: id of the ticket under which the prompt is handed over; None without one.
        num_local: number of leading tokens that vLLM had in device blocks at the last lookup.
        found: by cache group, numbers of the prompt's blocks that the lookup found, after the first
            `num_local` tokens.
        saved: by cache group, number of leading blocks that are on the host or are being copied to
            the host; in a cache group of states, the blocks up to the last saved state.
        boundary: number of tokens before the last state chosen to be saved; 0 without one.
        is_handed_over: True once the prompt's last state is saved, which completes a hand-off.
        has_saves: True while saves run.
        is_loading: True while a load runs.
        num_lost: number of times that found blocks had left the host before their load.
        passed: number of the request's tokens at the last lookup that found too few tokens to load;
            None before. There is no further lookup for the same number of tokens, unless vLLM has
            fewer of them in device blocks than before.
        is_of_old: True if the cache was reset after the request began. Nothing of the request is
            saved then.
        due: number of the step in which a generating request is next checked for enough unsaved
            tokens; None if the request does not generate.
    """

    request: Request
    prompt: Prompt | None = None
    claims: str | None = None
    publishes: str | None = None
    num_local: int = 0
    found: tuple[range, ...] = ()
    saved: list[int] = field(default_factory=list)
    boundary: int = 0
    is_handed_over: bool = False
    has_saves: bool = False
    is_loading: bool = False
    num_lost: int = 0
    passed: int | None = None
    is_of_old: bool = False
    due: int | None = None


class _SchedulerSide:
    """The connector in the scheduler's process, which decides which blocks are loaded and saved.

    All methods are called by vLLM's scheduler thread.

    Args:
        config: vLLM's configuration.
        settings: the connector's settings.
        kv_cache_config: vLLM's device blocks and cache groups.
    """

    def __init__(
        self, config: VllmConfig, settings: ConnectorSettings, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = config.kv_transfer_config
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError(
                "TierKVConnector supports tensor parallelism, but not pipeline "
                "parallelism: set --pipeline-parallel-size 1, not "
                f"{config.parallel_config.pipeline_parallel_size}"
            )
        if transfer.kv_load_failure_policy != "recompute":
            log.warning(
                'a failed load will fail its request: set "kv_load_failure_policy": '
                '"recompute" in --kv-transfer-config to compute instead'
            )
        self.settings = settings
        self._config = config
        self._kv = kv_cache_config
        self._finds: bool = transfer.is_kv_consumer
        self._saves: bool = transfer.is_kv_producer
        self._cache: EngineCache | None = None
        self._groups: tuple[CacheGroup, ...] = ()
        self._main = 0
        self._has_windows = False
        self._states: tuple[int, ...] = ()  # numbers of the cache groups of states
        self._align = 1  # tokens between prefixes at which all groups may have a state
        events = config.kv_events_config
        self._publishes_events = events is not None and events.enable_kv_cache_events
        self._private: OrderedDict[ExternalId, None] = OrderedDict()
        self._owners: OrderedDict[ExternalId, str] = OrderedDict()  # by block, its session
        self._adapters = AdapterDigests()
        self._epoch = b""
        self._tracked: dict[str, _Tracked] = {}
        self._filling: OrderedDict[str, _Tracked] = OrderedDict()  # prompts that are being computed
        # A heap of generating requests with a saved prompt: due step, order among equals, request.
        self._decoding: list[tuple[int, int, _Tracked]] = []
        self._order = itertools.count()
        self._step = 0
        drafts = config.speculative_config
        self._drops_block = drafts is not None and drafts.use_eagle_block_drop()
        self._max_per_step = 1 + (drafts.num_speculative_tokens or 0 if drafts else 0)
        # Ended requests with unsaved blocks, with their device blocks by cache group.
        self._ending: deque[tuple[_Tracked, tuple[list[int], ...]]] = deque()
        # By ended request with running saves: its session, and its saved prompt and answer.
        self._turns: dict[str, tuple[str, Prompt]] = {}
        self._plans = StepPlans()
        self._begun: list[Plan] = []  # saves of this step
        self._counts: Counter[str] = Counter()
        self._has_new_reports = False  # True if workers have reported since the last plan
        self._is_saving_step = False  # True if saves may begin in this step
        self._has_store = bool(settings.store or settings.node)
        # For each running step: the prompt tokens that it computes, and the time of its plan.
        self._computing: deque[tuple[int, float]] = deque(maxlen=_MAX_UNDER_WAY)
        self._heard_at = 0.0
        # Prompt tokens of a step and its seconds, not passed to the cache yet.
        self._speed: tuple[int, float] | None = None
        self._reports: list[Finished] = []  # of ranks, not passed to the cache yet
        self._unpublished: set[str] = set()  # requests with a running publish

    @property
    def cache(self) -> EngineCache:
        assert self._cache is not None, "vLLM's workers have said what their blocks are"
        return self._cache

    def open(self, ranks: Sequence[RankHandshake]) -> None:
        """Open host memory and store for the blocks that the ranks' workers describe."""
        settings, config = self.settings, self._config
        shards = [[group.layout for group in rank.groups] for rank in ranks]
        # With latent attention, or fewer KV heads than ranks, each rank has whole blocks.
        is_same = len(ranks) > 1 and self._kv.kv_tp_replicas == len(ranks)
        scheme = None if is_same or settings.node else self._scheme(ranks)
        if scheme is not None:
            self._groups = (replace(ranks[0].groups[0], layout=scheme.whole),)
        else:
            self._groups = tuple(
                replace(group, layout=group.layout if is_same else side_by_side(of_ranks))
                for group, of_ranks in zip(ranks[0].groups, zip(*shards, strict=True), strict=True)
            )
        if settings.peer_tensor_parallel and scheme is None:
            log.warning(
                "peer_tensor_parallel has no effect: the heads' places in a block of this "
                "model are unknown, so instances with other numbers of ranks cannot "
                "use its blocks (docs/vllm.md)"
            )
        self._groups = _with_shares(self._groups)
        self._main = main_group(self._groups)
        kinds = [group.kind for group in self._groups]
        self._has_windows = GroupKind.WINDOW in kinds
        self._states = tuple(at for at, kind in enumerate(kinds) if kind is GroupKind.STATE)
        layout = self._groups[self._main].layout
        if self._states:
            sizes = [self._groups[at].block_size for at in self._states]
            self._align = math.lcm(layout.block_size, *sizes)
        max_tokens = config.scheduler_config.max_num_batched_tokens
        rules = CacheSettings(
            block_size=layout.block_size,
            storage_write=WritePolicy.WRITE_THROUGH if settings.store else WritePolicy.NONE,
            fetch_deadline_s=settings.fetch_deadline_s,
            fetch_policy=settings.fetch_policy,
        )
        name = f"vllm-{config.kv_transfer_config.engine_id}"
        node = NodeHost(settings.node, name=name, key=settings.node_key) if settings.node else None
        if node is not None and self._publishes_events:
            log.warning(
                "vLLM publishes no KV cache events while it uses a node: set "
                "events.endpoint of the node, and subscribe there"
            )
            self._publishes_events = False
        # A killed engine leaves its socket, and the next engine's socket has another name.
        remove_left_over(Path(tempfile.gettempdir()).glob(_SOCKETS))
        num_ranks = "any number of" if scheme is not None else f"{len(ranks)}"
        self._cache = EngineCache(
            _fingerprint(config, settings, layout, ranks[0].backends, num_ranks),
            self._groups,
            host_bytes=settings.host_bytes,
            cache=rules,
            node=node,
            store=settings.open,
            settings=EngineCacheSettings(
                promise_ttl_s=settings.promise_ttl_s,
                # Slots of two steps: those of one are saved while others are made ready.
                save_blocks=max(_SAVE_BLOCKS, 2 * max_tokens // layout.block_size),
                event_tokens=self._publishes_events,
            ),
            handoff=settings.handoff(),
            storage=StorageOptions(
                scheme=scheme, peer_tensor_parallel=settings.peer_tensor_parallel
            ),
            ranks=RankSocket(_socket_path(config), shards=shards),
            name=name,
        )
        self._cache.open()
        self._cache.hold_calls()
        kept = f"the node at {settings.node}" if node else settings.store or "nowhere else"
        log.info("KV blocks are kept in host memory and %s", kept)

    def _scheme(self, ranks: Sequence[RankHandshake]) -> ShardScheme | None:
        """Return how the ranks share the heads of a whole block.

        The result is None if the engine has several cache groups, or if the ranks' heads together
        are not the model's heads, each once.
        """
        first, total = ranks[0], self._config.model_config.get_total_num_kv_heads()
        if len(first.groups) > 1 or first.heads * len(ranks) != total:
            return None
        shard = first.groups[0].layout
        planes = [replace(one, block_bytes=one.block_bytes * len(ranks)) for one in shard.planes]
        return ShardScheme(Layout(shard.block_size, tuple(planes)), {_ROLE: total})

    # Arrival and lookup of a request

    def arrive(self, request: Request) -> None:
        is_hinted = self._follow_hints(request)
        if (is_hinted or request.session_id) and self._finds and self._has_store:
            tracked = self._track(request)
            is_worth = request.num_tokens >= self.settings.min_tokens
            if tracked is not None and is_worth and self._may_find(tracked, 0):
                self._ask(tracked, 0)

    def _follow_hints(self, request: Request) -> bool:
        hints = request.kv_hints
        if hints is None:
            return False
        num_fetches = count_fetches(hints)
        num_ignored = len(hints.actions) - num_fetches
        self._counts += Counter(fetch_hints=num_fetches, ignored_hints=num_ignored)
        return num_fetches > 0

    def find(self, request: Request, num_computed: int) -> int | None:
        """Return how many tokens can be loaded after the first `num_computed` ones.

        The result is None while the lookup runs.
        """
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked is None or not self._may_find(tracked, num_computed):
            return 0
        if tracked.claims is None and self._has_nothing(tracked, num_computed):
            return 0
        found = self._ask(tracked, num_computed)
        if found is None and len(self._tracked) == 1:
            self.cache.wait_for_lookup(request.request_id, _ALONE_S)
            found = self._ask(tracked, num_computed)
        return None if found is None else self._offered(tracked, num_computed, found)

    def _ask(self, tracked: _Tracked, num_computed: int) -> Found | None:
        request, prompt = tracked.request, tracked.prompt
        names: Sequence[Sequence[ExternalId | None]] = ()
        wanted = self._findable(request.num_tokens)
        if prompt is None or prompt.num_tokens != wanted:
            prompt = self._prompt(tracked, wanted)
            if prompt is None:
                return None
            if self._publishes_events:
                sizes = [group.block_size for group in self._groups]
                blocks = [range(-(-wanted // size)) for size in sizes]
                names = self._hashes(request, blocks, [0] * len(sizes))
            if self._speed is not None:
                self.cache.note_prefill(*self._speed)
                self._speed = None
        return self.cache.lookup(
            request.request_id,
            prompt,
            num_computed,
            ticket=tracked.claims,
            external_ids=names,
        )

    def _offered(self, tracked: _Tracked, num_computed: int, found: Found) -> int | None:
        """Return how many of the found tokens to load, or 0 if they are not worth a load.

        The result is None if the ticket is lost, and the lookup must be repeated without it.
        """
        request, name = tracked.request, tracked.request.request_id
        if found.problem is not None and tracked.claims is not None:
            log.warning("request %r continues without its ticket: %s", name, found.problem)
            tracked.claims = None
            self._counts["lost_tickets"] += 1
            return None
        if found.problem is not None:
            log.debug("request %r computes its prompt from token %d on: %s",
                      name, found.num_there, found.problem)  # fmt: skip
        tracked.num_local = num_computed
        tracked.found = found.blocks
        tracked.saved = [found.num_there // group.block_size for group in self._groups]
        if found.storage_tokens and self.cache.sees_host and not self._publishes_events:
            assert tracked.prompt is not None, "a prompt was looked up"
            self.cache.name_blocks(tracked.prompt, self._main_names(request))
        if found.num_tokens < self.settings.min_tokens and tracked.claims is None:
            self.cache.end_lookup(name)
            tracked.passed = request.num_tokens
            return 0
        return found.num_tokens

    def _has_nothing(self, tracked: _Tracked, num_computed: int) -> bool:
        """Return True and record an empty lookup if a lookup would surely find too few tokens."""
        request, size = tracked.request, self._groups[self._main].block_size
        num_saved = num_blocks = 0
        if not self.cache.sees_host:
            if request.num_tokens >= self.settings.min_tokens:
                return False
        else:
            names = self._main_names(request)
            num_blocks = self.cache.num_on_host(names)
            # A step that computes anyway computes one more block faster than loading it takes.
            least = max(self.settings.min_tokens, size + 1)
            are_few = request.num_tokens - num_computed < least
            # vLLM's block hashes have the adapter's name, which may differ for the same files.
            is_known = not self._has_store and request.lora_request is None
            if not are_few and not (is_known and num_blocks * size <= num_computed):
                return False
            num_saved = self.cache.num_saved(names)
        self.cache.end_lookup(request.request_id)
        tracked.num_local, tracked.found = num_computed, ()
        tracked.saved = [0] * len(self._groups)
        # A hand-off needs its blocks on the host at its end, and other requests' saves may be late.
        tracked.saved[self._main] = num_saved if tracked.publishes is None else num_blocks
        tracked.passed = request.num_tokens
        return True

    def _main_names(self, request: Request) -> Sequence[bytes]:
        size = self._groups[self._main].block_size
        step = size // (self._kv.hash_block_size or size)
        hashes: Sequence[bytes] = request.block_hashes
        return hashes if step == 1 else hashes[step - 1 :: step]

    def _may_find(self, tracked: _Tracked, num_computed: int) -> bool:
        request = tracked.request
        has_passed = tracked.passed == request.num_tokens and num_computed >= tracked.num_local
        has_tried = tracked.num_lost > _MAX_LOST or has_passed
        is_excluded = tracked.is_of_old or request.skip_reading_prefix_cache
        is_excluded |= not self._findable(request.num_tokens)
        return self._finds and not has_tried and not is_excluded

    def _findable(self, num_tokens: int) -> int:
        """Return the largest number of leading tokens that a lookup can find of `num_tokens`.

        With recurrent states, the result is less than `num_tokens`, and a multiple of the smallest
        distance between two states, in tokens.
        """
        if not self._states:
            return num_tokens
        if self._drops_block:
            return max(num_tokens // self._align - 1, 0) * self._align
        return (num_tokens - 1) // self._align * self._align

    def _track(self, request: Request) -> _Tracked | None:
        """Make and return the record of a new request, or None if its KV is not cached.

        Prompt embeddings and resumable requests are not cached, because token ids alone do not
        determine their KV.
        """
        is_plain = request.prompt_embeds is None and not request.resumable
        if not is_plain or not request.prompt_token_ids:
            return None
        tracked = self._tracked[request.request_id] = _Tracked(request)
        params = request.kv_transfer_params
        if params:
            if params.get("do_remote_prefill") and self._finds:
                tracked.claims = params.get(TICKET)
            if params.get("do_remote_decode") and self._saves and self._has_store:
                tracked.publishes = params.get(TICKET) or uuid.uuid4().hex
        return tracked

    def _prompt(self, tracked: _Tracked, num_tokens: int) -> Prompt | None:
        """Return the prompt of the first `num_tokens` tokens.

        The result is None while the LoRA adapter's files are read.
        """
        request, prompt = tracked.request, tracked.prompt
        size = self._groups[self._main].block_size
        if prompt is None:
            extra = self._extra(request)
            if extra is None:
                return None
            is_whole = num_tokens == request.num_prompt_tokens
            given = request.prompt_token_ids if is_whole else request.all_token_ids[:num_tokens]
            tokens = _packed(given)
            if extra or request.mm_features:
                media = [
                    MediaItem(
                        one.mm_position.offset,
                        one.mm_position.length,
                        hashlib.sha256(one.identifier.encode()).digest(),
                    )
                    for one in request.mm_features
                ]
                prompt = Prompt.of(tokens, size, media, extra=extra)
            else:
                prompt = Prompt(tokens, size)
            tracked.prompt = prompt
        elif prompt.num_tokens < num_tokens:
            more = _packed(request.all_token_ids[prompt.num_tokens : num_tokens])
            prompt = tracked.prompt = Prompt(prompt.tokens + more, size, prompt.extras)
        if prompt.num_tokens > num_tokens:
            return Prompt(prompt.tokens[: 4 * num_tokens], size, prompt.extras)
        return prompt

    def _extra(self, request: Request) -> bytes | None:
        """Return bytes that identify the KV besides its tokens; b"" if the tokens are enough.

        The bytes are made of the cache salt, the digest of the LoRA adapter, and a random id of the
        last cache reset. The result is None while the adapter's files are read.
        """
        if request.lora_request is None and not request.cache_salt and not self._epoch:
            return b""
        adapter = b""
        if request.lora_request is not None:
            digest = self._adapters.of(request.lora_request)
            if digest is None:
                return None
            adapter = digest
        salt = (request.cache_salt or "").encode()
        return prompt_extra(salt=salt, adapter=adapter, epoch=self._epoch)

    def load(self, request: Request, block_ids: tuple[list[int], ...], num_tokens: int) -> None:
        name, tracked = request.request_id, self._tracked[request.request_id]
        stop_tokens = tracked.num_local + num_tokens
        ids, firsts, is_lost = [], [], False
        for group, table, wanted in zip(self._groups, block_ids, tracked.found, strict=True):
            stop = min(wanted.stop, -(-stop_tokens // group.block_size))
            is_state = group.kind is GroupKind.STATE
            is_lost |= is_state and wanted.stop * group.block_size != stop_tokens
            ids.append(_named(table[wanted.start : stop], group))
            firsts.append(wanted.start)
        self._wait_for(ids)
        plan = None
        if is_lost:  # vLLM loads fewer tokens than offered, and no state is saved there
            self.cache.release(name)
        else:
            with suppress(DeviceFailedError):  # a rank is lost, and knows it
                plan = self.cache.load(name, ids, firsts)
        tracked.claims = None
        tracked.is_loading = True
        if plan is None:  # the found blocks have left the host
            tracked.num_lost += 1
            self._plans.lost.append((name, tuple(itertools.chain.from_iterable(ids))))
        else:
            self._counts["loaded_tokens"] += num_tokens
            self._plans.loads.append((name, plan))

    def _wait_for(self, block_ids: Iterable[Sequence[int]]) -> None:
        """Make the workers wait for running saves that read blocks which vLLM will overwrite."""
        if self._has_windows or self._states:
            for ids in block_ids:
                self._plans.must_wait = self._plans.must_wait or bool(self.cache.fence(ids))

    def _wait_for_new(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            computed = new.num_computed_tokens  # earlier blocks are only read
            tables = zip(self._groups, new.block_ids, strict=True)
            self._wait_for([ids[computed // group.block_size :] for group, ids in tables])
        for table in filter(None, step.scheduled_cached_reqs.new_block_ids):
            self._wait_for(table)
        if step.kv_cache_block_copies:
            self._wait_for([[copy.dst_block_id for copy in step.kv_cache_block_copies]])

    # Copies of a step

    def plan(self, step: SchedulerOutput) -> StepPlans:
        self._step += 1
        computes_much = step.total_num_scheduled_tokens > _MUCH
        self._is_saving_step = computes_much or self._step % _SAVES_EVERY == 0
        if self._is_saving_step or not self._has_new_reports:
            self._poll()
        self._has_new_reports = False
        for name in step.preempted_req_ids or ():
            self._preempted(name)
        if self._saves:
            self._plan_saves(step)
        if self._has_store and step.num_scheduled_tokens:
            # Without drafts, a generating request has one token in a step.
            num_tokens = step.total_num_scheduled_tokens - len(step.num_scheduled_tokens)
            self._computing.append((num_tokens, time.perf_counter()))
        self.cache.flush()
        return _NOTHING if self._plans.is_nothing else self._pop_plans()

    def _pop_plans(self) -> StepPlans:
        plans, self._plans = self._plans, StepPlans()
        if self._begun:
            plans.saves = self.cache.join(self._begun)
            self._begun = []
        return plans

    def _plan_saves(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            self._begin(new.req_id)
        for name in step.scheduled_cached_reqs.resumed_req_ids:
            self._begin(name)
        if self._has_windows or self._states:
            self._wait_for_new(step)
        if self._states:
            self._save_states(step)
        if self._has_saves():
            self._begin_saves(step)

    def _preempted(self, name: str) -> None:
        self._filling.pop(name, None)
        tracked = self._tracked.get(name)
        if tracked is not None:
            tracked.due = None
            self._plans.must_wait |= tracked.has_saves

    def _begin(self, name: str) -> None:
        tracked = self._tracked.get(name)
        if tracked is not None and not tracked.is_of_old:
            self._filling[name] = tracked

    def _has_saves(self) -> bool:
        if self._is_saving_step:
            return bool(self._ending or self._filling or self._is_due())
        return any(map(self._is_urgent, self._filling.values()))

    def _is_urgent(self, tracked: _Tracked) -> bool:
        return self._has_windows or tracked.publishes is not None

    def _begin_saves(self, step: SchedulerOutput) -> None:
        """Begin a limited number of saves, those of ended requests first.

        Blocks of prompts come next, and blocks of generated tokens last.
        """
        waiting = len(self._ending) + len(self._filling)
        left = max(_SAVES_AT_ONCE, waiting // _BACKLOG_TURNS)
        while self._ending and left:
            tracked, table = self._ending.popleft()
            if not tracked.is_of_old:
                self._save_rest(tracked, table)
                left -= 1
            name = tracked.request.request_id
            self.cache.release(name)
            self._plans.over.append(name)
        for _ in range(min(left, len(self._filling))):
            name, tracked = next(iter(self._filling.items()))
            self._filling.move_to_end(name)
            stop = self._save_filled(tracked, step)
            if stop is not None and stop >= tracked.request.num_tokens:
                del self._filling[name]
                # With states, generated blocks are useful up to a state, and saved with it.
                is_of_use = self.settings.saves_generated and not self._states
                if is_of_use and tracked.publishes is None:
                    self._expect(tracked, stop)
        while left and self._is_due():
            due, _, tracked = heappop(self._decoding)
            if tracked.due == due:
                self._expect(tracked, self._save_filled(tracked, step))
                left -= 1

    def _is_due(self) -> bool:
        return bool(self._decoding) and self._decoding[0][0] <= self._step

    def _expect(self, tracked: _Tracked, stop: int | None) -> None:
        """Schedule the step of the engine in which the request is next checked for tokens to save.

        `stop` is the number of the request's tokens that are computed at the end of the current
        step; None if this step does not run the request.
        """
        pause = _PAUSE_STEPS
        if stop is not None:
            missing = _SAVED_AT_ONCE - (stop - self._num_saved(tracked))
            pause = max(-(-missing // self._max_per_step), 1)
        tracked.due = self._step + pause
        heappush(self._decoding, (tracked.due, next(self._order), tracked))

    def _num_saved(self, tracked: _Tracked) -> int:
        size = self._groups[self._main].block_size
        return tracked.saved[self._main] * size if tracked.saved else 0

    def _save_filled(self, tracked: _Tracked, step: SchedulerOutput) -> int | None:
        """Save a request's full blocks if there are enough new ones.

        Return how many of its tokens are computed at the end of this step, or None if the step does
        not run the request.
        """
        request, main = tracked.request, self._groups[self._main]
        name = request.request_id
        scheduled = step.num_scheduled_tokens.get(name)
        if scheduled is None:
            return None
        stop: int = min(request.num_computed_tokens + scheduled, request.num_tokens)
        whole, filled = request.num_prompt_tokens, stop
        if self._states:  # the last block is saved with the state behind it
            whole = max(self._findable(whole), tracked.boundary)
            filled = min(stop, max(whole - 1, tracked.boundary))
        is_urgent = name in self._filling and self._is_urgent(tracked)
        least = main.block_size if is_urgent else _SAVED_AT_ONCE
        if filled - self._num_saved(tracked) >= least:
            prompt = self._prompt(tracked, max(filled, whole))
            table = step.kv_connector_block_state.get_block_ids(name)
            if prompt is not None and table is not None:
                self._save(tracked, prompt, table, self._stops(tracked, filled))
        return stop

    def _stops(self, tracked: _Tracked, num_tokens: int) -> list[int]:
        stops = [num_tokens // group.block_size for group in self._groups]
        for at in self._states:
            stops[at] = tracked.saved[at] if tracked.saved else 0
        return stops

    def _save_states(self, step: SchedulerOutput) -> None:
        """Save the recurrent states (such as Mamba's) that vLLM has announced for this step.

        With each state, also save the blocks of other cache groups for the tokens before the state.
        """
        offers = dict(step.kv_connector_block_state.boundary_state_offloads)
        for new in step.scheduled_new_reqs:
            at = new.num_computed_tokens
            if at and at % self._align == 0:
                hit = [
                    (group, new.block_ids[group][at // self._groups[group].block_size - 1], at)
                    for group in self._states
                ]
                offers[new.req_id] = hit + offers.get(new.req_id, [])
        for name, offered in offers.items():
            tracked = self._tracked.get(name)
            is_preempted = name in (step.preempted_req_ids or ())
            if tracked is None or tracked.is_of_old or is_preempted:
                continue
            table = step.kv_connector_block_state.get_block_ids(name)
            states = [one for one in offered if self._wants_state(tracked, *one)]
            if states and table is not None:
                self._save_up_to(tracked, states, table)

    def _wants_state(self, tracked: _Tracked, group: int, block: int, num_tokens: int) -> bool:
        size = self._groups[group].block_size
        if group not in self._states or not block or num_tokens % size:
            return False
        if tracked.saved and num_tokens // size <= tracked.saved[group]:
            return False
        if num_tokens <= self._findable(tracked.request.num_prompt_tokens):
            return True
        # A state that drafts were computed on may be corrected after the step.
        is_final = self._max_per_step == 1
        return self.settings.saves_generated and is_final and tracked.publishes is None

    def _save_up_to(
        self,
        tracked: _Tracked,
        states: Sequence[tuple[int, int, int]],
        table: Sequence[Sequence[int]],
    ) -> None:
        """Save recurrent states, and other groups' blocks up to the last state, to the host.

        Each of `states` is (cache group, device block, number of tokens before the state). `table`
        lists the request's device blocks for each cache group.
        """
        boundary = max(num_tokens for _, _, num_tokens in states)
        tracked.boundary = max(tracked.boundary, boundary)
        whole = self._findable(tracked.request.num_prompt_tokens)
        prompt = self._prompt(tracked, max(boundary, whole))
        if prompt is None:
            return
        stops = [boundary // group.block_size for group in self._groups]
        places = {group: [0] * stops[group] for group in self._states}  # 0 is vLLM's null block
        for group, block, num_tokens in states:
            places[group][num_tokens // self._groups[group].block_size - 1] = block
        blocks = [places.get(group, ids) for group, ids in enumerate(table)]
        is_saved = self._save(tracked, prompt, blocks, stops)
        tracked.is_handed_over = is_saved and tracked.publishes is not None and boundary == whole

    def _save(
        self,
        tracked: _Tracked,
        prompt: Prompt,
        table: Sequence[Sequence[int]],
        stops: Sequence[int],
        first_tokens: Sequence[int] = (),
    ) -> bool:
        """Save, for each cache group, the unsaved blocks among its first `stops[group]`.

        `table` lists the request's device blocks for each cache group. Return False if a block is
        not saved, because the host has no room or a rank is lost.
        """
        name = tracked.request.request_id
        firsts = tracked.saved or [0] * len(self._groups)
        ids = [
            _named(blocks[first:stop], group)
            for group, blocks, first, stop in zip(self._groups, table, firsts, stops, strict=True)
        ]
        has_use = self._publishes_events or self.cache.sees_host
        names = self._hashes(tracked.request, ids, firsts) if has_use else ()
        before = self.cache.num_unsaved_blocks
        try:
            plan = self.cache.save(
                name,
                prompt,
                ids,
                firsts,
                ticket=tracked.publishes,
                first_tokens=first_tokens,
                external_ids=names,
            )
        except DeviceFailedError:  # a rank is lost, and knows it
            return False
        if tracked.publishes is not None:
            self._unpublished.add(name)
        if plan is not None:
            tracked.has_saves = True
            self._plans.saving.append(name)
            self._begun.append(plan)
        unsaved = self.cache.num_unsaved_blocks - before
        if unsaved:
            self._counts["unsaved_blocks"] += unsaved
        else:
            tracked.saved = [max(pair) for pair in zip(firsts, stops, strict=True)]
        return not unsaved

    def _hashes(
        self, request: Request, block_ids: Sequence[Sequence[int]], firsts: Sequence[int]
    ) -> list[list[ExternalId | None]]:
        """Return vLLM's hash of each given block of a request, in one list per cache group.

        A tail has None instead of a hash. `firsts` has, for each cache group, the position in the
        request of the first block in that group's `block_ids`.
        """
        size = self._kv.hash_block_size or self._groups[self._main].block_size
        hashes = request.block_hashes
        names: list[list[ExternalId | None]] = []
        for ids, first, group in zip(block_ids, firsts, self._groups, strict=True):
            step = group.block_size // size
            of_group: list[ExternalId | None] = [
                *hashes[(first + 1) * step - 1 : (first + len(ids)) * step : step]
            ]
            names.append(of_group + [None] * (len(ids) - len(of_group)))
        if self._publishes_events and request.session_id:
            _remember(self._owners, names, request.session_id)
        if self._publishes_events and (
            request.lora_request or request.cache_salt or request.mm_features
        ):
            _remember(self._private, names, None)
        return names

    def take_events(self) -> Iterable[KVCacheEvent]:
        for event in self.cache.read_events() if self._publishes_events else ():
            ours = [name for name in event.external_ids if isinstance(name, bytes)]
            if not ours:
                continue
            names, parent = [maybe_convert_block_hash(name) for name in ours], event.external_parent
            medium = MEDIUM_CPU if event.tier == "host" else MEDIUM_STORAGE
            if event.kind is CacheEventKind.EVICTED:
                yield BlockRemoved(block_hashes=names, medium=medium, group_idx=event.group)
            else:
                # A router finds a block by its tokens once vLLM has evicted its own copy. Blocks
                # with a salt, an adapter or images carry no tokens, which would not identify them.
                is_found = (
                    len(names) == len(event.digests)
                    and (event.start == 0 or parent is not None)
                    and self._private.keys().isdisjoint(ours)
                )
                tokens = np.frombuffer(event.tokens, "<i4").tolist() if is_found else []
                yield BlockStored(
                    block_hashes=names,
                    parent_block_hash=(
                        maybe_convert_block_hash(parent)
                        if tokens and isinstance(parent, bytes)
                        else None
                    ),
                    token_ids=tokens,
                    block_size=self._groups[event.group].block_size,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=event.group,
                    session_id=self._owners.get(ours[0]),
                )

    def receive_output(self, output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        if report is not None:
            self._reports += report.reports
        if self._computing:
            self._record_speed()
        is_awaited = self._unpublished or not self._tracked
        if is_awaited or any(one.problem for one in self._reports):
            self._poll()
        self._has_new_reports = True
        for name in output.finished_recving or ():
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.is_loading = False
        if not self._tracked:  # there may be no further step for a while
            self.cache.flush()

    def _record_speed(self) -> None:
        """Record how many tokens the ended scheduler step computed, and in how many seconds.

        The speed is compared with that of fetching. Steps with few tokens are not recorded.
        """
        num_tokens, planned_at = self._computing.popleft()
        now = time.perf_counter()
        seconds = now - max(planned_at, self._heard_at)  # the next may be planned before this ends
        self._heard_at = now
        if num_tokens >= self.settings.min_tokens:
            self._speed = num_tokens, seconds

    def _poll(self) -> None:
        reports, self._reports = self._reports, []
        polled = self.cache.poll(reports)
        for name in polled.saved:
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.has_saves = False
            if name in self._turns:
                self._keep_turn(*self._turns.pop(name))
        for _, failed in polled.loaded:
            if failed:
                self._counts["failed_loads"] += 1
        for _, num_blocks in polled.stored:
            self._counts["saved_blocks"] += num_blocks
        for name, outcome in polled.published:
            is_problem = isinstance(outcome, TierKVError)
            if is_problem:
                log.warning("the prompt of request %r was not handed over: %s", name, outcome)
            self._counts["failed_publishes" if is_problem else "published_prompts"] += 1
            self._unpublished.discard(name)
            self.cache.release(name)

    def _keep_turn(self, session: str, prompt: Prompt) -> None:
        self._counts["kept_turns"] += 1
        self.cache.keep_session(session, prompt, self.settings.session_ttl_s)

    def pop_counts(self) -> TierKVStats | None:
        """Return tierkv's counts since the last call, for vLLM's metrics; None without any.

        While requests run, most engine steps return None and keep the counts for a later step.
        """
        if not self._counts or (self._tracked and not self._is_saving_step):
            return None
        counts = dict(self._counts)
        self._counts.clear()
        return TierKVStats(data=counts)

    # End of a request

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, and return a pair.

        The first element is True if vLLM must not reuse the request's blocks yet. The second has
        the `kv_transfer_params` for the client, or is None.
        """
        name = request.request_id
        tracked = self._tracked.pop(name, None)
        if tracked is None:
            return False, None
        self._filling.pop(name, None)
        tracked.due = None
        if tracked.is_loading:  # the blocks are released when the load has ended
            self.cache.release(name)
            return False, None
        params = None
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens
        if self._saves and is_computed and not tracked.is_of_old:
            if tracked.publishes is not None:
                params = self._save_rest(tracked, block_ids)
            elif self._has_rest(tracked, block_ids):
                self._ending.append((tracked, block_ids))
                return True, None
        if params is None:
            self.cache.release(name)
        if tracked.has_saves:
            self._plans.over.append(name)
        return tracked.has_saves, params

    def _has_rest(self, tracked: _Tracked, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return True if blocks of an ended request must be saved before vLLM frees them.

        A request with a `session_id` is included even if its blocks are saved already, because
        `_save_rest` records its prompt and answer for the session.
        """
        num_tokens = self._num_to_save(tracked, block_ids)
        stops = self._last_stops(tracked, num_tokens)
        is_saved = len(tracked.saved) == len(stops) and all(
            saved >= stop for saved, stop in zip(tracked.saved, stops, strict=True)
        )
        return bool(num_tokens) and (not is_saved or bool(tracked.request.session_id))

    def _num_to_save(self, tracked: _Tracked, block_ids: Sequence[Sequence[int]]) -> int:
        request = tracked.request
        # The last token was sampled, and its KV is not computed. A running step writes only later
        # tokens, and this plan is sent after that step.
        num_tokens: int = min(
            request.num_computed_tokens,
            request.num_tokens - bool(request.num_output_tokens),
            len(block_ids[self._main]) * self._groups[self._main].block_size,
        )
        if num_tokens < request.num_prompt_tokens:
            return 0
        if tracked.publishes is not None or not self.settings.saves_generated:
            num_tokens = request.num_prompt_tokens
        if not self._states:
            return num_tokens
        return self._findable(num_tokens) if tracked.publishes is not None else tracked.boundary

    def _last_stops(self, tracked: _Tracked, num_tokens: int) -> list[int]:
        if self._states:
            return self._stops(tracked, num_tokens)
        return [-(-num_tokens // group.block_size) for group in self._groups]

    def _save_rest(
        self, tracked: _Tracked, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Save an ended request's unsaved blocks.

        If this completes the hand-off of the prompt, return the `kv_transfer_params` with the
        ticket for the client; otherwise return None.
        """
        request, ticket = tracked.request, tracked.publishes
        num_tokens = self._num_to_save(tracked, block_ids)
        if not num_tokens:
            return None
        prompt = self._prompt(tracked, num_tokens)
        if prompt is None:
            return None
        stops = self._last_stops(tracked, num_tokens)
        first_tokens = () if ticket is None else request.output_token_ids[:]
        is_whole = tracked.is_handed_over or self._save(
            tracked, prompt, block_ids, stops, first_tokens
        )
        if request.session_id and self.settings.session_ttl_s > 0:
            if tracked.has_saves:
                self._turns[request.request_id] = (request.session_id, prompt)
            else:
                self._keep_turn(request.session_id, prompt)
        if ticket is None or not is_whole:
            return None
        return {"do_remote_prefill": True, "do_remote_decode": False, TICKET: ticket}

    # The whole cache

    def reset(self) -> None:
        """Exclude all blocks cached so far from lookups, since the weights may have changed."""
        self._epoch = os.urandom(16)
        self.cache.reset()
        self._filling.clear()
        self._decoding.clear()
        self._turns.clear()
        for tracked, _ in self._ending:
            tracked.is_of_old = True
        for name, tracked in self._tracked.items():
            self.cache.release(name)
            tracked.is_of_old |= tracked.request.num_computed_tokens > 0
            tracked.prompt, tracked.claims, tracked.publishes = None, None, None
            tracked.saved, tracked.passed, tracked.due, tracked.boundary = [], None, None, 0
        self.cache.flush()

    def close(self) -> None:
        if self._cache is not None:
            if self._reports:  # the blocks of reported saves are kept
                self._poll()
            self._cache.close()
        self._adapters.close()


def _remember(
    known: OrderedDict[ExternalId, Any], names: Iterable[Iterable[ExternalId | None]], value: object
) -> None:
    """Set `value` for these names, and forget the oldest names beyond `_MAX_PRIVATE`."""
    known.update((name, value) for some in names for name in some if name)
    while len(known) > _MAX_PRIVATE:
        known.popitem(last=False)


def _packed(tokens: list[int]) -> bytes:
    # NumPy would release the GIL, and wait for another thread to give it back.
    packed = array("I")
    packed.fromlist(tokens)
    return packed.tobytes()


def _with_shares(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Give each cache group of recurrent states a fixed share of host memory.

    The host then has room for one state per `_BLOCKS_PER_STATE` blocks of tokens.
    """
    weights = [
        group.layout.block_bytes
        / group.block_size
        / (_BLOCKS_PER_STATE if group.kind is GroupKind.STATE else 1)
        for group in groups
    ]
    if len(groups) == 1:
        return tuple(groups)
    return tuple(
        replace(group, share=weight / sum(weights)) if group.kind is GroupKind.STATE else group
        for group, weight in zip(groups, weights, strict=True)
    )


def _named(table: Sequence[int], group: CacheGroup) -> Sequence[int]:
    """Return a block table with NO_BLOCK in place of vLLM's null blocks (id 0).

    A null block stands for tokens that a sliding window or a recurrent state no longer needs.
    """
    if group.kind is GroupKind.FULL:
        return table
    return [block or NO_BLOCK for block in table]


class AdapterDigests:
    """Digests of the files of LoRA adapters, computed in a thread.

    Adapters with equal files share blocks, even if instances name the adapters differently.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Future[bytes]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tierkv-lora")

    def of(self, adapter: LoRARequest) -> bytes | None:
        """Return the digest of an adapter's files; None while the files are being read.

        An adapter with unreadable files gets a random digest, which excludes its blocks from
        sharing.
        """
        key = (adapter.lora_name, adapter.lora_path)
        if key not in self._known:
            self._known[key] = self._reader.submit(_digest_or_random, *key)
        found = self._known[key]
        return found.result() if found.done() else None

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)


def _digest_or_random(name: str, path: str) -> bytes:
    """Return the digest of an adapter's files; of unreadable ones, bytes that no other has."""
    try:
        return _digest_of_adapter(path)
    except Exception as error:  # noqa: BLE001 - vLLM's own errors, too
        log.warning(
            "the files of the adapter %r cannot be read, so its blocks are not shared: %s",
            name,
            error,
        )
        return os.urandom(32)


def _digest_of_adapter(path: str) -> bytes:
    from vllm.lora.utils import get_adapter_absolute_path  # noqa: PLC0415 - only where there are any

    digest = hashlib.sha256()
    files = sorted(Path(get_adapter_absolute_path(path)).glob("adapter_*"))
    if not files:
        raise FileNotFoundError(f"{path} has no file adapter_*")
    for file in files:
        with file.open("rb") as opened:
            digest.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return digest.digest()


def _fingerprint(
    config: VllmConfig, settings: ConnectorSettings, layout: Layout, backends: str, num_ranks: str
) -> Fingerprint:
    """Return the identity of this engine's blocks; instances with equal identities share blocks."""
    model, cache = config.model_config, config.cache_config
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    media = model.multimodal_config
    options = {  # options that change what the same weights compute, or the images behind a name
        "hf_overrides": model.hf_overrides,
        "mm_processor_kwargs": getattr(media, "mm_processor_kwargs", None),
        "media_io_kwargs": getattr(media, "media_io_kwargs", None),
    }
    options = {name: value for name, value in options.items() if value}
    changed = "+" + json.dumps(options, sort_keys=True, default=str) if options else ""
    return Fingerprint(
        model.model,
        layout,
        revision=f"{model.revision or ''}+{settings.revision}{changed}",
        weight_dtype=f"{model.dtype} {model.quantization or ''} {rope or ''}",
        engine=f"vllm {'.'.join(vllm.__version__.split('.')[:2])}, {num_ranks} ranks, "
        f"drafts {getattr(config.speculative_config, 'method', None)}",
        attention_backend=backends,
        cache_dtype=str(cache.cache_dtype),
        kv_layout=str(cache.kv_cache_layout),
    )


def _socket_path(config: VllmConfig) -> str:
    engine = hashlib.sha256(str(config.kv_transfer_config.engine_id).encode()).hexdigest()
    return str(Path(tempfile.gettempdir(), _SOCKETS.replace("*", engine[:16])))


# In each worker's process


class _WorkerSide:
    """The connector in a worker's process, which copies one rank's blocks.

    All methods are called by the worker's thread.

    Args:
        config: vLLM's configuration.
        kv_cache_config: vLLM's device blocks and cache groups.
    """

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._kv = kv_cache_config
        self._planes: WorkerPlanes | None = None
        self.handshake: RankHandshake | None = None  # None before `register`
        self._loads: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._saves: dict[int, list[str]] = {}  # by plan, the requests that save
        self._num_saves: Counter[str] = Counter()  # running, by request
        self._over: set[str] = set()
        self._lost: list[tuple[str, tuple[int, ...]]] = []
        self._bad_blocks: set[int] = set()
        self._reports: list[Finished] = []

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = [_planes_of(one, self._kv.num_blocks, tensors) for one in self._kv.kv_cache_groups]
        rank = get_tensor_model_parallel_rank()
        device, planes = _on_device([(group.layout, rows) for group, rows in found])
        self._planes = WorkerPlanes(device, planes, rank=rank)
        self._planes.connect(_socket_path(self._config))
        groups = tuple(group for group, _ in found)
        heads = {
            _heads(group.kv_cache_spec, self._kv.num_blocks, tensors[name])
            for group in self._kv.kv_cache_groups
            for name in group.layer_names
        }
        self.handshake = RankHandshake(
            groups, self._backends(), heads.pop() if len(heads) == 1 else 0
        )

    def _backends(self) -> str:
        """Return the names that decide the order of bytes in a block.

        These are the names of vLLM's platform and attention backends, and of a CPU's instruction
        sets.
        """
        layers = self._config.compilation_config.static_forward_context
        found = set()
        for group in self._kv.kv_cache_groups:
            for name in group.layer_names:
                layer = layers[name]
                isa = getattr(getattr(layer, "impl", None), "isa", "")
                found.add(f"{layer.get_attn_backend().get_name()}{isa}")
        if current_platform.is_cpu():  # the order of bytes depends on the processor
            found.add(_cpu_instructions())
        return f"{current_platform.device_type} {' '.join(sorted(found))}"

    @property
    def planes(self) -> WorkerPlanes:
        assert self._planes is not None, "vLLM has registered its blocks"
        return self._planes

    def before_step(self, plans: StepPlans) -> None:
        if plans.must_wait:
            for number, group in itertools.product(
                self._saves, range(len(self._kv.kv_cache_groups))
            ):
                last = self.planes.layouts[group].num_layers - 1
                with suppress(TransferError):  # `finished` reports it
                    self.planes.wait_layer(number, last, _MAX_WAIT_S, group=group)

    def start_loads(self, plans: StepPlans) -> None:
        if plans.is_nothing:
            return
        for name, plan in plans.loads:
            self._loads[plan.number] = (name, tuple(plan.slots()[1].tolist()))
            self.planes.start_loads(plan)
        self._lost += plans.lost
        # Before `start_saves`: vLLM may call `finished` in between.
        self._num_saves.update(plans.saving)
        self._over.update(plans.over)

    def start_saves(self, plans: StepPlans) -> None:
        if plans.saves is not None:
            self._saves[plans.saves.number] = plans.saving
            self.planes.start_saves(plans.saves)

    def finished(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if not (self._loads or self._saves or self._over or self._lost):
            return results
        for name, blocks in self._lost:
            self._loaded(results, name, blocks, is_good=False)
        self._lost.clear()
        for report in self.planes.finished():
            self._reports.append(report)
            if report.number in self._loads:
                name, blocks = self._loads.pop(report.number)
                self._loaded(results, name, blocks, is_good=report.problem is None)
            elif report.number in self._saves:
                self._num_saves.subtract(self._saves.pop(report.number))
        self._num_saves = +self._num_saves
        results.finished_sending = {name for name in self._over if not self._num_saves[name]}
        self._over -= results.finished_sending
        return results

    def _loaded(
        self,
        results: KVConnectorTransferResults,
        name: str,
        blocks: tuple[int, ...],
        *,
        is_good: bool,
    ) -> None:
        results.finished_recving.add(name)
        if not is_good and len(self._kv.kv_cache_groups) > 1:
            results.failed_recving.add(name)
        elif not is_good:
            self._bad_blocks.update(blocks)

    def pop_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def pop_reports(self) -> StepReports | None:
        if not self._reports:
            return None
        reports, self._reports = self._reports, []
        return StepReports(reports)

    def close(self) -> None:
        if self._planes is not None:
            self._planes.close(self._reports, is_process_ending=True)


def _on_device(
    groups: Sequence[tuple[Layout, Sequence[torch.Tensor]]],
) -> tuple[Device, list[Planes]]:
    place = groups[0][1][0].device
    if place.type == "cpu":
        return CpuDevice(), [
            EnginePlanes(layout, [one.numpy() for one in rows]) for layout, rows in groups
        ]
    if not current_platform.is_cuda():
        raise ConfigError(
            "TierKVConnector cannot copy from the memory of "
            f"{current_platform.device_name}: it supports CPU and CUDA"
        )
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - needs CuPy

    stream: int = torch.cuda.current_stream().cuda_stream
    device = CudaDevice(place.index, compute_stream=stream)
    return device, [device.adopt_planes(layout, rows) for layout, rows in groups]


_KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "chunked_local_attention": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
}


def _planes_of(
    group: KVCacheGroupSpec, num_blocks: int, tensors: Mapping[str, torch.Tensor]
) -> tuple[CacheGroup, list[torch.Tensor]]:
    """Return vLLM's group of layers as a `CacheGroup`, and its memory.

    The memory is a tensor uint8 [num_blocks, block_bytes] for each layer.
    """
    spec = group.kv_cache_spec
    name = get_kv_cache_spec_kind(spec).value
    kind = _KINDS.get(name)
    compressed = {_spec_of(spec, layer).tokens_per_state for layer in group.layer_names} - {1, -1}
    if compressed:
        name = f"{name} with {max(compressed)} tokens in one entry"
    elif not spec.prefix_cacheable:
        name = f"{name} that is computed again after a hit"
    if kind is None or compressed or not group.enable_kv_transfer or not spec.prefix_cacheable:
        raise ConfigError(
            f"TierKVConnector caches layers of {', '.join(_KINDS)}, and this model has "
            f"{name}: use OffloadingConnector with TierKVTier (docs/vllm.md)"
        )
    planes: list[Plane] = []
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    for layer in group.layer_names:
        tensor = tensors[layer]
        if tensor.data_ptr() in seen:  # it shares another layer's tensor
            continue
        seen.add(tensor.data_ptr())
        rows = _rows(tensor, num_blocks, layer)
        role, dtype = _ROLE, str(tensor.dtype)
        if kind is GroupKind.STATE:
            role, dtype = _STATE_ROLE, _dtype_of_state(_spec_of(spec, layer))
        has_prefixes = kind is not GroupKind.STATE
        planes.append(Plane(len(planes), role, dtype, rows.shape[1], has_prefixes=has_prefixes))
        found.append(rows)
    window = _window(_spec_of(spec, layer)) if kind is GroupKind.WINDOW else 0
    return CacheGroup(Layout(spec.block_size, tuple(planes)), kind, window), found


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _dtype_of_state(spec: KVCacheSpec) -> str:
    """Return dtype and shape of each array of a recurrent state: "torch.float32[24, 64] ...".

    Raise ConfigError if the setting mamba_cache_mode is not "align".
    """
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            "TierKVConnector saves states of Mamba and linear attention where vLLM's blocks end, "
            f"and the mode of its cache is {spec.mamba_cache_mode!r}: use --enable-prefix-caching"
        )
    parts = zip(spec.shapes, spec.dtypes, strict=True)
    return " ".join(f"{dtype}{list(shape)}" for shape, dtype in parts)


def _window(spec: KVCacheSpec) -> int:
    if get_kv_cache_spec_kind(spec).value == "chunked_local_attention":
        chunk: int = spec.attention_chunk_size
        return chunk
    window: int = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    return window


def _heads(spec: KVCacheSpec, num_blocks: int, tensor: torch.Tensor) -> int:
    """Return the number of KV heads if vLLM stores each head of a block contiguously, otherwise 0.

    `tensor` is vLLM's memory of one layer, with `num_blocks` blocks.
    """
    if get_kv_cache_spec_kind(spec).value != "full_attention":
        return 0
    heads: int = spec.num_kv_heads
    # vLLM's view of a layer is [blocks, heads, tokens, content].
    is_view = tensor.dim() == 4 and tensor.shape[:2] == (num_blocks, heads)  # noqa: PLR2004 - as above
    is_split = is_view and tensor[0].is_contiguous() and not spec.kv_quant_mode.is_per_token_head
    return heads if is_split else 0


def _rows(tensor: torch.Tensor, num_blocks: int, name: str) -> torch.Tensor:
    """Return a view of a layer's KV tensor, uint8 [num_blocks, block_bytes].

    ConfigError is raised if the bytes of a block are not contiguous.
    """
    size, parts = tensor.element_size(), tensor.shape[0] // num_blocks
    stride = tensor.stride(0) * parts * size
    sides = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    inside = 1 + sum((length - 1) * step for length, step in sides)
    start, room = tensor.storage_offset() * size, tensor.untyped_storage().nbytes()
    is_in_one_piece = inside <= tensor.stride(0) and start + stride * num_blocks <= room
    if tensor.shape[0] != parts * num_blocks or not is_in_one_piece:
        raise ConfigError(
            f"the bytes of a block of {name} are not contiguous: set "
            "VLLM_KV_CACHE_LAYOUT to NHD or HND"
        )
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (num_blocks, stride), (stride, 1))


def _cpu_instructions() -> str:
    """Return the instruction sets that decide how vLLM's CPU backend orders the bytes of keys."""
    # Linux allows AMX only to processes that have asked for it, as PyTorch does at its first large
    # product. Without this one, vLLM 0.32 dies of SIGILL if its first prompt is wholly cached.
    able = torch.cpu.get_capabilities()
    if not able.get("amx_tile"):
        return f"{able.get('architecture')} no amx"
    torch.mm(*(torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2)))
    return f"{able.get('architecture')} amx"
