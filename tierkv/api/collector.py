"""What a scrape reads from the node itself: every count that some part of it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import tierkv
from tierkv.api.node import Node
from tierkv.cache.pool import PoolStats
from tierkv.observe import Stats
from tierkv.storage.breaker import BreakerState
from tierkv.transfer.storage_io import StorageStats
from tierkv.transfer.storage_io_tier import StoreState

_ESTIMATED_TOKENS = 1024


class NodeCollector(Collector):
    """Reads the node's own counts when it is scraped; none of them is kept twice."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> list[Metric]:
        return []  # so that registering does not ask a node that has not started

    def collect(self) -> Iterator[Metric]:
        node = self._node
        yield _gauge(
            "tierkv_build_info",
            "Which tierkv this is",
            ("version", "role"),
            {(tierkv.__version__, node.settings.node.role.value): 1},
        )
        is_ready = node.service.is_ready and not node.is_draining
        yield _gauge("tierkv_ready", "1 while the node takes requests", (), {(): int(is_ready)})
        stats = node.service.stats()
        yield from _tiers(stats, node.service.fingerprint.layout.block_bytes)
        yield from _requests(stats)
        yield from _engine(node)
        yield from _callers(node)
        yield from _handoffs(stats)
        yield from _estimates(node)
        yield from _storage(stats)
        yield from _stores(node.service.storage_state())


def _tiers(stats: Stats, block_bytes: int) -> Iterator[Metric]:
    pools = {"device": stats.device, "host": stats.host}
    yield _gauge(
        "tierkv_tier_capacity_bytes",
        "Room of a tier",
        ("tier",),
        {(tier,): pool.capacity * block_bytes for tier, pool in pools.items()},
    )
    yield _gauge(
        "tierkv_tier_used_bytes",
        "Bytes of a tier's blocks that are cached or lent",
        ("tier",),
        {(tier,): pool.used * block_bytes for tier, pool in pools.items()},
    )
    yield _gauge("tierkv_blocks", "Blocks of a tier", ("tier", "state"), _block_states(pools))
    tiers = stats.tiers
    yield _counter(
        "tierkv_evictions",
        "Copies of blocks that a tier forgot to make room",
        ("tier", "reason"),
        {
            ("device", "capacity"): tiers.evicted_device_blocks,
            ("host", "capacity"): tiers.evicted_host_blocks,
        },
    )
    yield _counter(
        "tierkv_forgotten_blocks",
        "Blocks evicted from device and host with no copy left there",
        (),
        {(): tiers.forgotten_blocks},
    )
    yield _counter(
        "tierkv_skipped_offloads",
        "Blocks not copied to the host because it had no room",
        (),
        {(): tiers.skipped_offloads},
    )
    yield _counter(
        "tierkv_failed_transfers",
        "Copies between host and device that failed",
        (),
        {(): tiers.failed_transfers},
    )


def _block_states(pools: dict[str, PoolStats]) -> dict[tuple[str, ...], float]:
    return {
        (tier, state): count
        for tier, pool in pools.items()
        for state, count in (("free", pool.free), ("used", pool.used))
    }


def _requests(stats: Stats) -> Iterator[Metric]:
    counts = stats.requests
    hits = counts.device_hit_tokens + counts.host_hit_tokens + counts.storage_hit_tokens
    yield _counter(
        "tierkv_lookup_tokens",
        "Prompt tokens of admitted requests, by where they were found",
        ("result",),
        {
            ("hit_device",): counts.device_hit_tokens,
            ("hit_host",): counts.host_hit_tokens,
            ("hit_storage",): counts.storage_hit_tokens,
            ("miss",): counts.prompt_tokens - hits,
        },
    )
    yield _counter(
        "tierkv_admitted_requests",
        "Requests that got their blocks",
        (),
        {(): counts.admitted_requests},
    )
    yield _gauge(
        "tierkv_inflight_requests",
        "Requests that hold blocks, or wait for them",
        ("state",),
        {("running",): stats.running_requests, ("waiting",): stats.waiting_requests},
    )


def _callers(node: Node) -> Iterator[Metric]:
    """What is kept for those who call."""
    desk = node.desk
    yield _gauge(
        "tierkv_open_requests",
        "Requests of engines that compute by themselves, preempted ones included",
        (),
        {(): desk.num_open},
    )
    yield _counter(
        "tierkv_expired_leases",
        "Requests that were ended because nobody had named them for their lease",
        (),
        {(): desk.num_expired},
    )
    yield _counter(
        "tierkv_repeated_requests",
        "Calls that were answered with what an earlier one of the same id had brought about",
        ("kind",),
        {("request",): desk.num_repeats, ("answer",): node.answers.num_repeats},
    )


def _handoffs(stats: Stats) -> Iterator[Metric]:
    counts = stats.handoff
    yield _counter(
        "tierkv_handoffs",
        "Prompts that were to be handed over, by what came of it",
        ("side", "outcome"),
        {
            ("publish", "published"): counts.published_prompts,
            ("publish", "failed"): counts.failed_publishes,
            ("claim", "claimed"): counts.claimed_prompts,
            ("claim", "computed"): counts.claims_without_ticket,
            ("claim", "refused"): counts.refused_claims,
        },
    )
    yield _counter(
        "tierkv_published_blocks",
        "Blocks of published prompts, by whether they went out before the prompt was computed",
        ("when",),
        {
            ("early",): counts.early_blocks,
            ("late",): counts.published_blocks - counts.early_blocks,
        },
    )


def _estimates(node: Node) -> Iterator[Metric]:
    """By which a request fetches, waits or computes."""
    estimator = node.service.estimator
    num_bytes = _ESTIMATED_TOKENS * estimator.bytes_per_token
    yield _gauge(
        "tierkv_estimated_seconds",
        f"What {_ESTIMATED_TOKENS} tokens are expected to take; 0 while nothing is known",
        ("way",),
        {
            ("compute",): estimator.prefill.seconds(_ESTIMATED_TOKENS),
            ("fetch",): estimator.transfer.seconds(num_bytes),
        },
    )
    counts = node.service.stats().requests
    yield _counter(
        "tierkv_shared_waits",
        "Requests that waited for blocks which another one computed, by what came of it",
        ("outcome",),
        {
            ("came",): counts.shared_waits - counts.lost_waits,
            ("lost",): counts.lost_waits,
        },
    )


def _engine(node: Node) -> Iterator[Metric]:
    stats = node.engine.stats
    yield _counter("tierkv_generated_tokens", "Tokens generated", (), {(): stats.generated_tokens})
    yield _counter(
        "tierkv_computed_tokens",
        "Tokens whose KV this node computed",
        (),
        {(): stats.computed_tokens},
    )
    yield _counter(
        "tierkv_failed_loads",
        "Requests whose cached tokens did not load and were computed",
        (),
        {(): stats.failed_loads},
    )


def _storage(stats: Stats) -> Iterator[Metric]:
    storage = stats.storage or StorageStats()
    yield _counter(
        "tierkv_transfer_bytes",
        "Bytes that have arrived",
        ("direction",),
        {
            ("h2d",): stats.loaded_bytes,
            ("d2h",): stats.offloaded_bytes,
            ("storage_read",): storage.fetched_bytes,
            ("storage_write",): storage.flushed_bytes,
        },
    )
    yield _counter(
        "tierkv_storage_errors",
        "Blocks that the store did not read or write",
        ("op", "kind"),
        {("read", "failed"): storage.failed_reads, ("write", "failed"): storage.failed_writes},
    )
    yield _counter(
        "tierkv_integrity_failures",
        "Stored blocks that were not what was written",
        (),
        {(): storage.damaged_blocks},
    )


def _stores(states: Iterable[StoreState]) -> Iterator[Metric]:
    """By tenant that has a store of its own; "" is the common one."""
    stores = {state.tenant: state for state in states}
    yield _gauge(
        "tierkv_circuit_state",
        "1 for the state that the store's circuit breaker is in",
        ("tenant", "state"),
        {
            (tenant, state.value): int(store.circuit == state.value)
            for tenant, store in stores.items()
            for state in BreakerState
        },
    )
    yield _gauge(
        "tierkv_storage_waiting_write_bytes",
        "Bytes that wait to be written to the store",
        ("tenant",),
        {(tenant,): store.waiting_write_bytes for tenant, store in stores.items()},
    )
    for name, text, values in (
        (
            "tierkv_storage_degraded_seconds",
            "Time in which the store was left alone because it failed",
            {tenant: store.degraded_s for tenant, store in stores.items()},
        ),
        (
            "tierkv_storage_retries",
            "Reads that were tried again",
            {tenant: store.retries for tenant, store in stores.items()},
        ),
        (
            "tierkv_storage_refused_operations",
            "Operations that failed at once, since the store is left alone or has too many",
            {tenant: store.refused for tenant, store in stores.items()},
        ),
        (
            "tierkv_storage_dropped_writes",
            "Writes dropped because more was written than the store takes",
            {tenant: store.dropped_writes for tenant, store in stores.items()},
        ),
    ):
        yield _counter(name, text, ("tenant",), {(t,): value for t, value in values.items()})


def _gauge(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for combination, value in values.items():
        family.add_metric(combination, value)
    return family


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for combination, value in values.items():
        family.add_metric(combination, value)
    return family
