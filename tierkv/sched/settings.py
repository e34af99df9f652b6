"""Settings of the tiers: their sizes, and the rules for copies, fetches, eviction and tenants."""

from __future__ import annotations

import msgspec

from tierkv.cache.eviction import EvictionKind, EvictionPolicy, WritePolicy, make_policy
from tierkv.cache.node import Quota, check_quota
from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.errors import ConfigError
from tierkv.sched.worth import FetchPolicy


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the tiers, and the settings of copies between tiers, eviction and quotas.

    Attributes:
        block_size: number of tokens of a block.
        device_blocks: capacity of the device tier in blocks.
        host_blocks: capacity of the host tier in blocks.
        host_max_blocks: capacity to which the host tier may grow at run time, in blocks; 0 for
            host_blocks. Its memory is reserved at the start; without a GPU, unused memory costs
            nothing.
        host_write: time at which a block is copied from the device to the host: none (never),
            write_through (once the block is computed), write_through_selective (after some hits) or
            write_back (when the block is evicted from the device).
        storage_write: time at which a block is copied from the host to storage, with the same
            choices as host_write.
        host_after_hits: number of hits before a block is copied to the host, with
            write_through_selective.
        storage_after_hits: number of hits before a block is copied to storage, with
            write_through_selective.
        background_copy_bytes: largest number of bytes that the copies of host_write have in flight.
            The same limit applies separately to the copies of storage_write.
        fetch_deadline_s: largest number of seconds that a request waits for storage before it
            computes. If fetch_policy is wait_complete, the seconds count from the last arrival of
            blocks; otherwise they are the request's total.
        fetch_policy: length of a request's wait for storage: best_effort waits only while a fetch
            is estimated to be faster than computing, wait_complete while blocks arrive, deadline
            until fetch_deadline_s.
        tenant: name of the owner of this node's blocks; other tenants cannot find them.
        max_tenants: largest number of tenants with blocks at this node.
        tenant_device_blocks: largest number of device blocks of each tenant; null for no limit.
        tenant_host_blocks: largest number of host blocks of each tenant; null for no limit.
        device_eviction: policy of eviction from the device: lru, lfu or s3fifo.
        host_eviction: policy of eviction from the host, with the same choices.
        tensor_parallel: number of ranks over which the heads of each block are split.
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
    tensor_parallel: int = 1
    device_eviction: EvictionKind = EvictionKind.LRU
    host_eviction: EvictionKind = EvictionKind.LRU

    @property
    def host_slots(self) -> int:
        """Largest number of slots that the host tier can grow to."""
        return self.host_max_blocks or self.host_blocks

    def quota(self) -> Quota:
        """Return the largest numbers of device and of host blocks per tenant; None for no limit.

        The settings are `tenant_device_blocks` and `tenant_host_blocks`.
        """
        return self.tenant_device_blocks, self.tenant_host_blocks

    def policies(self) -> tuple[EvictionPolicy, EvictionPolicy]:
        return (
            make_policy(self.device_eviction, self.device_blocks),
            make_policy(self.host_eviction, self.host_blocks),
        )

    def __post_init__(self) -> None:
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
