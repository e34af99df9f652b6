"""Limits and deadlines of a store that is left alone when it fails."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ResilienceSettings:
    """timeout_s, slowest_bytes_per_s: a read may take timeout_s and its bytes' time. A little more
        than the store's own deadline, whose errors say more.
    write_timeout_s: the same of a batch of writes, for which no request waits but a hand-off, with
        a deadline of its own.
    failures_to_open: failed operations in a row after which the store is left alone.
    probe_interval_s: how often it is then asked whether it is back.
    retries_per_operation: a budget, over all reads: 0.1 lets one read in ten be tried again.
    max_reads, max_waiting_reads: reads at the store, and waiting for their turn.
    write_batches, max_waiting_write_bytes: writes at the store (for each, where it is made of
        several), and waiting; beyond that the least valuable are dropped.
    full_pause_s: how long nothing is written after the store said it was full.
    negative_ttl_s, negative_names: how long, and of how many names, "there is none" is believed; a
        ticket that is found ends it, since then somebody has written.
    """

    timeout_s: float = 0.3
    write_timeout_s: float = 2.0
    slowest_bytes_per_s: float = 100e6
    failures_to_open: int = 5
    probe_interval_s: float = 1.0
    retries_per_operation: float = 0.1
    max_reads: int = 64
    max_waiting_reads: int = 1024
    write_batches: int = 2
    max_waiting_write_bytes: int = 512 << 20
    full_pause_s: float = 1.0
    negative_ttl_s: float = 0.5
    negative_names: int = 65_536

    def __post_init__(self) -> None:
        for name in ("timeout_s", "write_timeout_s", "slowest_bytes_per_s", "probe_interval_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0, not {value}")
        for name in ("failures_to_open", "max_reads", "max_waiting_reads", "write_batches"):
            count: int = getattr(self, name)
            if count < 1:
                raise ConfigError(f"{name} must be at least 1, not {count}")
        for name in (
            "retries_per_operation", "full_pause_s", "negative_ttl_s", "negative_names",
            "max_waiting_write_bytes",
        ):  # fmt: skip
            number: float = getattr(self, name)
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"{name} must be a number not below 0, not {number}")
