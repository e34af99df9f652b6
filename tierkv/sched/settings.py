"""Sizes and rules of the tiers, as settings."""

from __future__ import annotations

import msgspec

from tierkv.cache.policies import EvictionKind, EvictionPolicy, make_policy
from tierkv.cache.write_policy import WritePolicy
from tierkv.errors import ConfigError
from tierkv.sched.tiers import Watermarks


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and rules of the tiers.

    host_write: when a block is copied to the host; storage_write: when it is stored.
    fetch_deadline_s: how long a request waits for storage before it computes instead.
    device_eviction, host_eviction: which blocks go first. *_low_watermark, *_high_watermark: shares
        of a tier; with fewer free slots than the low one, blocks go ahead of need up to the high.
    """

    block_size: int = 16
    device_blocks: int = 2048
    host_blocks: int = 4096
    host_write: WritePolicy = WritePolicy.SELECTIVE
    host_after_hits: int = 2
    storage_write: WritePolicy = WritePolicy.NONE
    storage_after_hits: int = 2
    background_copies: int = 4
    fetch_deadline_s: float = 10.0
    tenant: str = ""
    device_eviction: EvictionKind = EvictionKind.LRU
    host_eviction: EvictionKind = EvictionKind.LRU
    device_low_watermark: float = 0.0
    device_high_watermark: float = 0.0
    host_low_watermark: float = 0.0
    host_high_watermark: float = 0.0

    def watermarks(self) -> tuple[Watermarks, Watermarks]:
        return (
            Watermarks(self.device_low_watermark, self.device_high_watermark),
            Watermarks(self.host_low_watermark, self.host_high_watermark),
        )

    def policies(self) -> tuple[EvictionPolicy, EvictionPolicy]:
        return (
            make_policy(self.device_eviction, self.device_blocks),
            make_policy(self.host_eviction, self.host_blocks),
        )

    def __post_init__(self) -> None:
        self.watermarks()  # refuses what cannot be
        for name, least in (
            ("block_size", 1),
            ("device_blocks", 1),
            ("host_blocks", 1),
            ("host_after_hits", 1),
            ("storage_after_hits", 1),
            ("background_copies", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"cache.{name} must be at least {least}")
        if self.fetch_deadline_s <= 0:
            raise ConfigError("cache.fetch_deadline_s must be more than 0")
