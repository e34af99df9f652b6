"""What a service can tell about itself: counts, and a recount that finds what is wrong."""

from __future__ import annotations

import msgspec
import numpy as np

from tierkv.cache import invariants
from tierkv.cache.node import Tier
from tierkv.cache.pool import PoolStats
from tierkv.gpu.protocol import Direction
from tierkv.pd.handoff import Handoff
from tierkv.pd.ledger import HandoffStats
from tierkv.sched.computing import Decisions
from tierkv.sched.eviction import TierStats
from tierkv.sched.fetch import Fetcher
from tierkv.sched.scheduler import Scheduler, SchedulerStats
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO, StorageStats


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of everything that is counted."""

    device: PoolStats
    host: PoolStats
    running_requests: int
    waiting_requests: int
    requests: SchedulerStats
    tiers: TierStats
    storage: StorageStats | None
    loaded_bytes: int
    offloaded_bytes: int
    handoff: HandoffStats
    decisions: Decisions


class Lookup(msgspec.Struct, frozen=True):
    """Where a prompt's leading tokens are; disjoint, in order, and as many as an admission finds:
    with the first tokens of a block or tail that only begins the same. One that must compute at
    least one token for its logits finds that one less. storage_tokens: None if the store did not
    answer."""

    num_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None


def stats(scheduler: Scheduler, mover: Mover, storage: StorageIO | None, handoff: Handoff) -> Stats:
    tiers = scheduler.tiers
    return Stats(
        device=tiers.slots.pools[Tier.DEVICE].stats(),
        host=tiers.slots.pools[Tier.HOST].stats(),
        running_requests=len(scheduler.running_requests),
        waiting_requests=scheduler.num_waiting,
        requests=scheduler.stats,
        tiers=tiers.eviction.stats,
        storage=storage.stats if storage else None,
        loaded_bytes=mover.bytes_moved[Direction.LOAD],
        offloaded_bytes=mover.bytes_moved[Direction.OFFLOAD],
        handoff=handoff.stats,
        decisions=tiers.decisions,
    )


def verify(
    scheduler: Scheduler,
    mover: Mover,
    fetcher: Fetcher,
    handoff: Handoff,
    *,
    num_leases: int = 0,
) -> list[str]:
    """Recount leases, slots, states and orphans; what is wrong, in words, [] if nothing is.
    num_leases: that others hold."""
    tiers, index = scheduler.tiers, scheduler.index
    requests = (*scheduler.running_requests, *scheduler.ending_requests)
    private = [request.private_slots() for request in requests]
    wrong = invariants.findings(
        index,
        tiers.slots.pools,
        {
            Tier.DEVICE: np.concatenate([tiers.slots.lent(Tier.DEVICE), *private]).tolist(),
            Tier.HOST: tiers.slots.lent(Tier.HOST).tolist(),
        },
    )
    wrong += scheduler.findings() + tiers.pins.findings()
    is_busy = private or tiers.work.num_tasks or scheduler.num_waiting or mover.num_in_flight
    if is_busy or fetcher.num_held:
        return wrong
    num_out = index.num_held_leases - tiers.pins.num_leases - handoff.source.num_leases
    if num_out != num_leases:
        wrong.append(f"nothing runs, but {num_out} leases are out, not {num_leases}")
    wrong += fetcher.findings() + scheduler.loads.findings()
    return wrong + tiers.copies.findings() + handoff.findings()
