"""The metrics of a node, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

import tierkv
from tierkv import tasks
from tierkv.api.node import Node
from tierkv.cache.node import BOUNDS_S, TICKS_PER_S, AgeCounts
from tierkv.engine import Generation
from tierkv.errors import HandoffError
from tierkv.observe import Stats
from tierkv.pd.tickets import HandoffProblem
from tierkv.storage.protocol import BreakerState
from tierkv.threads import in_thread
from tierkv.transfer.mover import LayerTimes
from tierkv.transfer.storage_io import StorageStats
from tierkv.transfer.tier import StoreState


def gauge(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> Metric:
    """Return a Prometheus metric of type gauge.

    Args:
        name: Name of the metric.
        text: Help text of the metric.
        labels: Names of the labels.
        values: The metric's value for each combination of label values, which are in the order of
            `labels`.
    """
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def counter(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> Metric:
    """Return a Prometheus metric of type counter.

    Args:
        name: Name of the metric, without `_total`.
        text: Help text of the metric.
        labels: Names of the labels.
        values: The metric's value for each combination of label values, which are in the order of
            `labels`.
    """
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: dict[tuple[str, ...], float]
) -> Metric:
    for combination, value in values.items():
        family.add_metric(combination, value)
    return family


def total(name: str, text: str, value: float) -> Metric:
    """Return a Prometheus metric of type counter, without labels.

    Args:
        name: Name of the metric, without `_total`.
        text: Help text of the metric.
        value: Value of the metric.
    """
    return counter(name, text, (), {(): value})


def ages(name: str, text: str, counts: AgeCounts) -> Metric:
    """Return a Prometheus metric of type histogram, for ages in seconds.

    Args:
        name: Name of the metric.
        text: Help text of the metric.
        counts: Number of ages in each bucket, and the sum of all ages.
    """
    family = HistogramMetricFamily(name, text)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts.counts), strict=True))
    family.add_metric((), buckets, counts.total_ticks / TICKS_PER_S)
    return family


class _ProcessUse(Collector):
    """A collector of this process's memory, CPU time and open files, as of the last `read`."""

    def __init__(self) -> None:
        self._source = ProcessCollector(registry=None)
        self._found: list[Metric] = []

    async def read(self) -> None:
        self._found = await in_thread(lambda: list(self._source.collect()))

    def collect(self) -> list[Metric]:
        return self._found


class _TaskFailures(Collector):
    def collect(self) -> Iterator[Metric]:
        yield total(
            "tierkv_task_failures",
            "Failures of background tasks (notifications, probes, lease renewals), "
            "which were restarted",
            tasks.failures.total(),
        )


class Exposition:
    """All metrics of one process, in the text format of Prometheus.

    Besides the metrics of `collector` and of `registry`, these are the number of failed background
    tasks, and the memory, CPU time and open files of the process (`process_*`, `python_*`).

    Attributes:
        registry: Registry to which further metrics can be added.

    Args:
        collector: Collects metrics of the process's own state at each scrape.
    """

    def __init__(self, collector: Collector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(collector)
        self._use = _ProcessUse()
        self.registry.register(self._use)
        self.registry.register(_TaskFailures())
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the encoded metrics and their content type.

        Args:
            accept: The request's Accept header, which chooses one of the formats of Prometheus.
        """
        await self._use.read()
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


_ESTIMATED_TOKENS = 1024


class NodeCollector(Collector):
    """A Prometheus collector that reads the node's state at each scrape."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> list[Metric]:
        return []  # registering must not call `collect` before the node has started

    def collect(self) -> Iterator[Metric]:
        node = self._node
        yield gauge(
            "tierkv_build_info",
            "Version and role of this node",
            ("version", "role"),
            {(tierkv.__version__, node.settings.node.role.value): 1},
        )
        is_ready = node.service.is_ready and not node.is_draining
        yield gauge("tierkv_ready", "1 while the node accepts requests", (), {(): int(is_ready)})
        yield from self.shown()
        yield _load_layers(node.service.stats().load_layers)
        yield total(
            "tierkv_kv_events_lost",
            "Cache events dropped because the publisher fell behind",
            node.service.publisher.num_lost,
        )
        yield from stores(node.service.storage_state())

    def shown(self) -> Iterator[Metric]:
        """Yield the metrics that the live page shows. The page's feed calls this twice a second."""
        node = self._node
        stats = node.service.stats()
        yield from _tiers(stats, node.service.fingerprint.layout.block_bytes)
        yield from _requests(stats)
        yield from _engine(node)
        yield from _sessions(node)
        yield from _handoffs(stats)
        yield from _estimates(node)
        yield from storage(stats)


def _tiers(stats: Stats, block_bytes: int) -> Iterator[Metric]:
    pools = {"device": stats.device, "host": stats.host}
    yield gauge(
        "tierkv_tier_capacity_bytes",
        "Capacity of a tier in bytes",
        ("tier",),
        {(tier,): pool.capacity * block_bytes for tier, pool in pools.items()},
    )
    yield gauge(
        "tierkv_tier_used_bytes",
        "Bytes of a tier that cached blocks and running requests use",
        ("tier",),
        {(tier,): pool.used * block_bytes for tier, pool in pools.items()},
    )
    yield gauge(
        "tierkv_blocks",
        "Blocks of a tier by state",
        ("tier", "state"),
        {
            (tier, state): count
            for tier, pool in pools.items()
            for state, count in (("free", pool.free), ("used", pool.used))
        },
    )
    tiers = stats.tiers
    yield counter(
        "tierkv_evictions",
        "Copies of blocks that a tier evicted to make room",
        ("tier", "reason"),
        {
            ("device", "capacity"): tiers.evicted_device_blocks,
            ("host", "capacity"): tiers.evicted_host_blocks,
        },
    )
    yield total(
        "tierkv_forgotten_blocks",
        "Blocks evicted from the device and the host, with no copy left in memory",
        tiers.forgotten_blocks,
    )
    yield total(
        "tierkv_skipped_offloads",
        "Blocks not copied to the host because the host tier was full",
        tiers.skipped_offloads,
    )
    yield total(
        "tierkv_failed_transfers",
        "Copies between host and device that failed",
        tiers.failed_transfers,
    )
    yield ages(
        "tierkv_block_lifetime_seconds",
        "Age of blocks at their eviction from memory, since they were first cached",
        tiers.lifetimes,
    )


def _load_layers(times: LayerTimes) -> Metric:
    family = SummaryMetricFamily(
        "tierkv_load_layer_seconds",
        "Time from the start of a load until this layer was on the device, for sampled loads",
        labels=("layer",),
    )
    for layer, total_s in enumerate(times.total_s):
        family.add_metric((str(layer),), times.num_loads, total_s)
    return family


def _requests(stats: Stats) -> Iterator[Metric]:
    counts = stats.requests
    hits = counts.device_hit_tokens + counts.host_hit_tokens
    hits += counts.storage_hit_tokens + counts.direct_hit_tokens
    yield counter(
        "tierkv_lookup_tokens",
        "Prompt tokens of admitted requests, by the tier that had them",
        ("result",),
        {
            ("hit_device",): counts.device_hit_tokens,
            ("hit_host",): counts.host_hit_tokens,
            ("hit_storage",): counts.storage_hit_tokens,
            ("hit_direct",): counts.direct_hit_tokens,
            ("miss",): counts.prompt_tokens - hits,
        },
    )
    yield total(
        "tierkv_recompute_avoided_tokens",
        "Prompt tokens that were found in the cache and not computed",
        hits,
    )
    yield total(
        "tierkv_recompute_avoided_seconds",
        "Estimated time to compute the tokens that were found in the cache",
        counts.recompute_avoided_s,
    )
    yield ages(
        "tierkv_reuse_gap_seconds",
        "Time since the last use of the least recently used block of each match",
        counts.reuse_gaps,
    )
    yield counter(
        "tierkv_missed_tokens",
        "Prompt tokens of admitted requests that were not cached, by reason",
        ("reason",),
        {(reason,): tokens for reason, tokens in counts.missed_tokens.items()},
    )
    yield total(
        "tierkv_admitted_requests", "Requests that received their blocks", counts.admitted_requests
    )
    yield gauge(
        "tierkv_inflight_requests",
        "Requests that hold blocks (running) or wait for blocks (waiting)",
        ("state",),
        {("running",): stats.running_requests, ("waiting",): stats.waiting_requests},
    )


def _sessions(node: Node) -> Iterator[Metric]:
    pins, hints = node.pins, node.hints
    yield gauge(
        "tierkv_sessions",
        "Sessions with a last turn that is evicted after all other blocks",
        (),
        {(): pins.count_sessions()},
    )
    yield counter(
        "tierkv_session_turns",
        "Answered turns of sessions, kept for the next turn or not",
        ("outcome",),
        {("kept",): pins.num_kept_turns, ("not_kept",): pins.num_other_turns},
    )
    yield counter(
        "tierkv_kv_hints",
        "Actions of routers' hints, followed or ignored as unknown",
        ("outcome",),
        {("followed",): hints.num_followed, ("ignored",): hints.num_ignored},
    )


def _handoffs(stats: Stats) -> Iterator[Metric]:
    counts = stats.handoff
    yield counter(
        "tierkv_handoffs",
        "Prompts to be published or claimed, by outcome",
        ("side", "outcome"),
        {
            ("publish", "published"): counts.published_prompts,
            ("publish", "failed"): counts.failed_publishes,
            ("claim", "claimed"): counts.claimed_prompts,
            ("claim", "computed"): counts.claims_without_ticket,
            ("claim", "refused"): counts.refused_claims,
        },
    )
    yield counter(
        "tierkv_direct_blocks",
        "Blocks read directly from other nodes' memory, by path; damaged blocks were "
        "read from storage",
        ("path",),
        {
            ("device",): counts.device_blocks,
            ("memory",): counts.memory_blocks,
            ("network",): counts.network_blocks,
            ("damaged",): counts.damaged_direct_blocks,
        },
    )
    yield total(
        "tierkv_failed_direct_reads",
        "Claims that fell back to storage because the producer's memory could not be read",
        counts.failed_direct_reads,
    )


def _estimates(node: Node) -> Iterator[Metric]:
    estimator = node.service.estimator
    num_bytes = _ESTIMATED_TOKENS * estimator.bytes_per_token
    yield gauge(
        "tierkv_estimated_seconds",
        f"Estimated time to compute or fetch {_ESTIMATED_TOKENS} tokens; 0 before the "
        "first measurement",
        ("way",),
        {
            ("compute",): estimator.prefill.seconds(_ESTIMATED_TOKENS),
            ("fetch",): estimator.tier.transfer_s(num_bytes),
        },
    )
    decided = node.service.stats().decisions
    yield counter(
        "tierkv_decisions",
        "Runs of blocks missing on the device, by the decision to load, fetch, wait or compute",
        ("decision", "tier"),
        {
            ("load", "host"): decided.load_host,
            ("fetch", "storage"): decided.fetch_storage,
            ("wait", "device"): decided.wait_device,
            ("wait", "storage"): decided.wait_storage,
            ("recompute", "device"): decided.recompute_device,
            ("recompute", "storage"): decided.recompute_storage,
            ("recompute_late", "storage"): decided.recompute_late,
        },
    )


def _engine(node: Node) -> Iterator[Metric]:
    if not node.has_engine:
        return
    stats = node.engine.stats
    yield total("tierkv_generated_tokens", "Tokens generated", stats.generated_tokens)
    yield total(
        "tierkv_computed_tokens",
        "Tokens that this node computed keys and values for",
        stats.computed_tokens,
    )
    yield total(
        "tierkv_failed_loads",
        "Requests that computed cached tokens because they did not load",
        stats.failed_loads,
    )


def storage(stats: Stats) -> Iterator[Metric]:
    """Yield metrics of bytes moved between tiers, and of failed and damaged values in storage."""
    counts = stats.storage or StorageStats()
    yield counter(
        "tierkv_transfer_bytes",
        "Bytes moved between tiers, by direction",
        ("direction",),
        {
            ("h2d",): stats.loaded_bytes,
            ("d2h",): stats.offloaded_bytes,
            ("storage_read",): counts.fetched_bytes,
            ("storage_write",): counts.flushed_bytes,
        },
    )
    yield counter(
        "tierkv_storage_errors",
        "Blocks that the store failed to read or write",
        ("op", "kind"),
        {("read", "failed"): counts.failed_reads, ("write", "failed"): counts.failed_writes},
    )
    yield total(
        "tierkv_integrity_failures",
        "Stored blocks and lists of tails that were damaged",
        counts.damaged_blocks + counts.damaged_lists,
    )


def stores(states: Iterable[StoreState]) -> Iterator[Metric]:
    """Yield metrics of the state of each attached store.

    The label `tenant` names the tenant that owns the store; "" is the store of all other tenants.
    """
    by_tenant = {state.tenant: state for state in states}
    yield gauge(
        "tierkv_circuit_state",
        "1 for the current state of the store's circuit breaker",
        ("tenant", "state"),
        {
            (tenant, state.value): int(store.circuit == state.value)
            for tenant, store in by_tenant.items()
            for state in BreakerState
        },
    )
    yield gauge(
        "tierkv_storage_takes_writes",
        "1 if the store accepts writes, 0 if it refused the last writes",
        ("tenant",),
        {(tenant,): int(not store.write_refusal) for tenant, store in by_tenant.items()},
    )
    yield gauge(
        "tierkv_storage_clock_skew_seconds",
        "Seconds that this machine's clock is ahead of that of a store that has a clock",
        ("tenant",),
        {
            (tenant,): store.clock_skew_s
            for tenant, store in by_tenant.items()
            if store.clock_skew_s is not None
        },
    )
    yield gauge(
        "tierkv_storage_waiting_write_bytes",
        "Bytes that wait to be written to the store",
        ("tenant",),
        {(tenant,): store.waiting_write_bytes for tenant, store in by_tenant.items()},
    )
    for name, text, values in (
        (
            "tierkv_storage_degraded_seconds",
            "Time during which the circuit breaker kept operations from the store",
            {tenant: store.degraded_s for tenant, store in by_tenant.items()},
        ),
        (
            "tierkv_storage_retries",
            "Reads that were retried",
            {tenant: store.retries for tenant, store in by_tenant.items()},
        ),
        (
            "tierkv_storage_refused_operations",
            ("Operations refused at once because the circuit is open or too many operations wait"),
            {tenant: store.refused for tenant, store in by_tenant.items()},
        ),
        (
            "tierkv_storage_dropped_writes",
            "Writes dropped because the queue of writes was full",
            {tenant: store.dropped_writes for tenant, store in by_tenant.items()},
        ),
    ):
        yield counter(name, text, ("tenant",), {(t,): value for t, value in values.items()})


OPERATIONS = ("generate", "prefill", "decode")
_STATUS_CLASSES = (2, 4, 5)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """The metrics of a node. Every combination of labels is present from the start, at 0.

    Attributes:
        exposition: All metrics of the process, as /metrics returns them.
    """

    def __init__(self, node: Node) -> None:
        self.exposition = Exposition(NodeCollector(node))
        registry = self.exposition.registry
        self._http = Counter(
            "tierkv_http_requests",
            "Requests answered, by route and class of status",
            ("route", "status"),
            registry=registry,
        )
        self._answers: dict[tuple[str, int], Counter] = {}
        self._first_token = Histogram(
            "tierkv_time_to_first_token_seconds",
            "Time from a request's arrival to the first token computed at this node",
            ("operation",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue = Histogram(
            "tierkv_queue_seconds",
            "Time from a request's arrival to its admission, with its fetch from storage",
            ("operation",),
            buckets=_SECONDS,
            registry=registry,
        )
        lag = Histogram(
            "tierkv_event_loop_lag_seconds",
            "Delay of the event loop for a timer that is due every 50 ms",
            buckets=_LAG_SECONDS,
            registry=registry,
        )
        busy = Histogram(
            "tierkv_event_loop_busy_seconds",
            "Upper bound of the CPU time of the event loop's thread during the loop's delay",
            buckets=_LAG_SECONDS,
            registry=registry,
        )

        def beat(late_s: float, busy_s: float) -> None:
            lag.observe(late_s)
            busy.observe(busy_s)

        node.heartbeat.on_beat = beat
        self._handoff = Counter(
            "tierkv_handoff_failures",
            "Prompts that could not be published or claimed, by reason",
            ("side", "reason"),
            registry=registry,
        )
        for operation in OPERATIONS:
            self._first_token.labels(operation)
            self._queue.labels(operation)
        for side in ("publish", "claim"):
            for reason in (problem.value for problem in HandoffProblem):
                self._handoff.labels(side, reason)

    def know_routes(self, routes: Iterable[str]) -> None:
        """Add counters of HTTP answers for the routes with these paths, starting at 0."""
        for route in routes:
            for status in _STATUS_CLASSES:
                self._answers[route, status] = self._http.labels(route, f"{status}xx")

    def count_answer(self, route: str, status: int) -> None:
        """Count one HTTP answer.

        Args:
            route: Path of the route; it must have been given to `know_routes`.
            status: HTTP status of the answer.
        """
        self._answers[route, status // 100].inc()

    def observe(self, operation: str, generation: Generation) -> None:
        """Record the queue time and the time to first token of one request.

        Args:
            operation: "generate", "prefill" or "decode".
            generation: The engine's result for the request, with the times in seconds.
        """
        self._first_token.labels(operation).observe(generation.first_token_s)
        self._queue.labels(operation).observe(generation.queue_s)

    @contextmanager
    def handing(self, side: str) -> Iterator[None]:
        """Count a failed publish or claim by its reason, if the `with` block raises HandoffError.

        Args:
            side: "publish" or "claim", the operation in the `with` block.

        Raises:
            HandoffError: The `with` block raised this error.
        """
        try:
            yield
        except HandoffError as error:
            self._handoff.labels(side, error.reason).inc()
            raise
