"""What a scrape reads about storage: bytes, failures, and how each store is doing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from tierkv.api.families import counter, gauge, total
from tierkv.observe import Stats
from tierkv.storage.breaker import BreakerState
from tierkv.transfer.storage_io import StorageStats
from tierkv.transfer.tier import StoreState


def storage(stats: Stats) -> Iterator[Metric]:
    counts = stats.storage or StorageStats()
    yield counter(
        "tierkv_transfer_bytes",
        "Bytes that have arrived",
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
        "Blocks that the store did not read or write",
        ("op", "kind"),
        {("read", "failed"): counts.failed_reads, ("write", "failed"): counts.failed_writes},
    )
    yield total(
        "tierkv_integrity_failures",
        "Stored blocks that were not what was written",
        counts.damaged_blocks,
    )


def stores(states: Iterable[StoreState]) -> Iterator[Metric]:
    """By tenant that has a store of its own; "" is the common one."""
    by_tenant = {state.tenant: state for state in states}
    yield gauge(
        "tierkv_circuit_state",
        "1 for the state that the store's circuit breaker is in",
        ("tenant", "state"),
        {
            (tenant, state.value): int(store.circuit == state.value)
            for tenant, store in by_tenant.items()
            for state in BreakerState
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
            "Time in which the store was left alone because it failed",
            {tenant: store.degraded_s for tenant, store in by_tenant.items()},
        ),
        (
            "tierkv_storage_retries",
            "Reads that were tried again",
            {tenant: store.retries for tenant, store in by_tenant.items()},
        ),
        (
            "tierkv_storage_refused_operations",
            "Operations that failed at once, since the store is left alone or has too many",
            {tenant: store.refused for tenant, store in by_tenant.items()},
        ),
        (
            "tierkv_storage_dropped_writes",
            "Writes dropped because more was written than the store takes",
            {tenant: store.dropped_writes for tenant, store in by_tenant.items()},
        ),
    ):
        yield counter(name, text, ("tenant",), {(t,): value for t, value in values.items()})
