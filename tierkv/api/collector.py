"""What a scrape reads from the node itself: every count that some part of it keeps."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import tierkv
from tierkv.api.collector_storage import storage, stores
from tierkv.api.families import counter, gauge, total
from tierkv.api.node import Node
from tierkv.cache.pool import PoolStats
from tierkv.observe import Stats

_ESTIMATED_TOKENS = 1024


class NodeCollector(Collector):
    """Reads the node's own counts when it is scraped; none of them is kept twice."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> list[Metric]:
        return []  # so that registering does not ask a node that has not started

    def collect(self) -> Iterator[Metric]:
        node = self._node
        yield gauge(
            "tierkv_build_info",
            "Which tierkv this is",
            ("version", "role"),
            {(tierkv.__version__, node.settings.node.role.value): 1},
        )
        is_ready = node.service.is_ready and not node.is_draining
        yield gauge("tierkv_ready", "1 while the node takes requests", (), {(): int(is_ready)})
        stats = node.service.stats()
        yield from _tiers(stats, node.service.fingerprint.layout.block_bytes)
        yield from _requests(stats)
        yield from _engine(node)
        yield from _callers(node)
        yield from _handoffs(stats)
        yield from _estimates(node)
        yield from storage(stats)
        yield from stores(node.service.storage_state())


def _tiers(stats: Stats, block_bytes: int) -> Iterator[Metric]:
    pools = {"device": stats.device, "host": stats.host}
    yield gauge(
        "tierkv_tier_capacity_bytes",
        "Room of a tier",
        ("tier",),
        {(tier,): pool.capacity * block_bytes for tier, pool in pools.items()},
    )
    yield gauge(
        "tierkv_tier_used_bytes",
        "Bytes of a tier's blocks that are cached or lent",
        ("tier",),
        {(tier,): pool.used * block_bytes for tier, pool in pools.items()},
    )
    yield gauge("tierkv_blocks", "Blocks of a tier", ("tier", "state"), _block_states(pools))
    tiers = stats.tiers
    yield counter(
        "tierkv_evictions",
        "Copies of blocks that a tier forgot to make room",
        ("tier", "reason"),
        {
            ("device", "capacity"): tiers.evicted_device_blocks,
            ("host", "capacity"): tiers.evicted_host_blocks,
        },
    )
    yield total(
        "tierkv_forgotten_blocks",
        "Blocks evicted from device and host with no copy left there",
        tiers.forgotten_blocks,
    )
    yield total(
        "tierkv_skipped_offloads",
        "Blocks not copied to the host because it had no room",
        tiers.skipped_offloads,
    )
    yield total(
        "tierkv_failed_transfers",
        "Copies between host and device that failed",
        tiers.failed_transfers,
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
    yield counter(
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
    yield total(
        "tierkv_admitted_requests", "Requests that got their blocks", counts.admitted_requests
    )
    yield gauge(
        "tierkv_inflight_requests",
        "Requests that hold blocks, or wait for them",
        ("state",),
        {("running",): stats.running_requests, ("waiting",): stats.waiting_requests},
    )


def _callers(node: Node) -> Iterator[Metric]:
    """What is kept for those who call."""
    desk = node.desk
    yield gauge(
        "tierkv_open_requests",
        "Requests of engines that compute by themselves, preempted ones included",
        (),
        {(): desk.num_open},
    )
    yield total(
        "tierkv_expired_leases",
        "Requests that were ended because nobody had named them for their lease",
        desk.num_expired,
    )
    yield counter(
        "tierkv_repeated_requests",
        "Calls that were answered with what an earlier one of the same id had brought about",
        ("kind",),
        {("request",): desk.num_repeats, ("answer",): node.answers.num_repeats},
    )


def _handoffs(stats: Stats) -> Iterator[Metric]:
    counts = stats.handoff
    yield counter(
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
    yield counter(
        "tierkv_published_blocks",
        "Blocks of published prompts, by whether they went out before the prompt was computed",
        ("when",),
        {
            ("early",): counts.early_blocks,
            ("late",): counts.published_blocks - counts.early_blocks,
        },
    )
    yield counter(
        "tierkv_direct_blocks",
        "Blocks read straight from other nodes' memory; damaged ones came from storage then",
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
        "Claims that went on through storage since a producer could not be read",
        counts.failed_direct_reads,
    )


def _estimates(node: Node) -> Iterator[Metric]:
    """By which a request fetches, waits or computes."""
    estimator = node.service.estimator
    num_bytes = _ESTIMATED_TOKENS * estimator.bytes_per_token
    yield gauge(
        "tierkv_estimated_seconds",
        f"What {_ESTIMATED_TOKENS} tokens are expected to take; 0 while nothing is known",
        ("way",),
        {
            ("compute",): estimator.prefill.seconds(_ESTIMATED_TOKENS),
            ("fetch",): estimator.transfer.seconds(num_bytes),
        },
    )
    decided = node.service.stats().decisions
    yield counter(
        "tierkv_decisions",
        "Runs of blocks that requests lacked on the device, by what was decided about them",
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
    counts = node.service.stats().requests
    yield counter(
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
    yield total("tierkv_generated_tokens", "Tokens generated", stats.generated_tokens)
    yield total(
        "tierkv_computed_tokens", "Tokens whose KV this node computed", stats.computed_tokens
    )
    yield total(
        "tierkv_failed_loads",
        "Requests whose cached tokens did not load and were computed",
        stats.failed_loads,
    )
