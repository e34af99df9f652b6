"""Sizes and rules of the tiers, as settings."""

from __future__ import annotations

import msgspec

from tierkv.cache.eviction import EvictionKind, EvictionPolicy, WritePolicy, make_policy
from tierkv.cache.node import Quota, check_quota
from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.errors import ConfigError
from tierkv.sched.eviction import Watermarks
from tierkv.sched.tenants import Limits
from tierkv.sched.worth import FetchPolicy


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and rules of the tiers.

    block_size: tokens of a block. device_blocks, host_blocks: how many the tier has room for.
    host_max_blocks: up to how many blocks the host tier may grow while it runs; memory for them is
        taken at the start (on a machine without a GPU, what is not used costs nothing). 0 is
        host_blocks.
    host_write: when a block is copied to the host. storage_write: when it is stored.
    host_after_hits, storage_after_hits: how many hits it takes, with write_through_selective.
    background_copy_bytes: copies down by rule that may be on their way at once.
    fetch_deadline_s: how long a request waits for storage before it computes instead; by policy
        (see `FetchPolicy`), since the last arrival or in all.
    fetch_policy: whether it waits so long, or only while that is estimated to be faster than
        computing, which the engine tells (Service.note_prefill), or else is observed.
    tenant: the name of who owns the blocks of this node; others' have other keys.
    max_tenants: fingerprints that are open at once for tenants by name. tenant_*, request_blocks:
        what each of them may have, None for any: slots of a tier, requests that run, device blocks
        of those together, device blocks of one request.
    device_eviction, host_eviction: which blocks go first. *_low_watermark, *_high_watermark: shares
        of a tier; with fewer free slots than the low one, blocks go ahead of need up to the high.
    tensor_parallel: over how many ranks the heads of each block are split.
    """

    block_size: int = 16
    device_blocks: int = 2048
    host_blocks: int = 4096
    host_max_blocks: int = 0
    host_write: WritePolicy = WritePolicy.SELECTIVE
    host_after_hits: int = 2
    storage_write: WritePolicy = WritePolicy.NONE
    storage_after_hits: int = 2
    background_copy_bytes: Fixed[int] = 256 << 20
    fetch_deadline_s: float = 10.0
    fetch_policy: FetchPolicy = FetchPolicy.BEST_EFFORT
    tenant: str = ""
    max_tenants: int = 256
    tenant_device_blocks: int | None = None
    tenant_host_blocks: int | None = None
    tenant_requests: int | None = None
    tenant_running_blocks: int | None = None
    request_blocks: int | None = None
    tensor_parallel: int = 1
    device_eviction: EvictionKind = EvictionKind.LRU
    host_eviction: EvictionKind = EvictionKind.LRU
    device_low_watermark: float = 0.0
    device_high_watermark: float = 0.0
    host_low_watermark: float = 0.0
    host_high_watermark: float = 0.0

    @property
    def host_slots(self) -> int:
        """Slots that the host tier may ever have."""
        return self.host_max_blocks or self.host_blocks

    def watermarks(self) -> tuple[Watermarks, Watermarks]:
        return (
            Watermarks(self.device_low_watermark, self.device_high_watermark),
            Watermarks(self.host_low_watermark, self.host_high_watermark),
        )

    def limits(self) -> Limits:
        """Return the limits of each tenant that has none of its own."""
        return Limits(self.tenant_requests, self.tenant_running_blocks, self.request_blocks)

    def quota(self) -> Quota:
        """Return the quota of each tenant by name, in device and host blocks."""
        return self.tenant_device_blocks, self.tenant_host_blocks

    def policies(self) -> tuple[EvictionPolicy, EvictionPolicy]:
        return (
            make_policy(self.device_eviction, self.device_blocks),
            make_policy(self.host_eviction, self.host_blocks),
        )

    def __post_init__(self) -> None:
        self.watermarks()  # refuses what cannot be
        self.limits()
        check_quota(self.quota())
        all_at_least_one("cache", self, "block_size", "device_blocks", "host_blocks", "max_tenants")
        all_at_least_one("cache", self, "host_after_hits", "storage_after_hits", "tensor_parallel")
        all_at_least_one("cache", self, "background_copy_bytes")
        if self.host_slots < self.host_blocks:
            raise ConfigError(
                f"cache.host_max_blocks ({self.host_max_blocks}) must be at least "
                f"cache.host_blocks ({self.host_blocks}), or 0 for no reserve"
            )
        all_above_zero("cache", self, "fetch_deadline_s")
