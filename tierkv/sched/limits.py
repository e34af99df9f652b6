"""How much of one tenant may run at once, and which requests no waiting would ever admit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.cache.index import Index
from tierkv.cache.node import Tier
from tierkv.cache.pool import BlockPool
from tierkv.errors import ConfigError, RequestTooLargeError
from tierkv.sched.planner import check_size
from tierkv.sched.request import RequestSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one tenant may run at once; None is no limit of its own.

    requests: running ones. blocks: device blocks that they hold together. request_blocks: of each.
    """

    requests: int | None = None
    blocks: int | None = None
    request_blocks: int | None = None

    def __post_init__(self) -> None:
        for what in (self.requests, self.blocks, self.request_blocks):
            if what is not None and what < 1:
                raise ConfigError("a limit of running requests or blocks is at least 1")

    def allow(self, running: int, blocks: int) -> bool:
        """Whether so many requests with so many blocks are within the limits."""
        return (self.requests is None or running <= self.requests) and (
            self.blocks is None or blocks <= self.blocks
        )

    def allow_request(self, blocks: int) -> bool:
        """Whether a request with so many blocks may run when no other does."""
        return self.allow(1, blocks) and (
            self.request_blocks is None or blocks <= self.request_blocks
        )


class TenantLimits:
    """By tenant, a fingerprint's short name; "" is the service's own. Those of tenants not named
    are `default`."""

    def __init__(
        self,
        index: Index,
        device_pool: BlockPool,
        limits: Mapping[str, Limits] | None,
        default: Limits | None,
    ) -> None:
        self._index = index
        self._device_pool = device_pool
        self._limits = dict(limits or {})
        self._default = default or Limits()

    def of(self, spec: RequestSpec) -> Limits:
        return self._limits.get(spec.prompt.space, self._default)

    def set(self, tenant: str, limits: Limits) -> None:
        self._limits[tenant] = limits

    def are_set(self, tenant: str) -> bool:
        return tenant in self._limits

    def forget(self, tenant: str) -> None:
        self._limits.pop(tenant, None)

    def check(self, spec: RequestSpec) -> None:
        """Raise RequestTooLargeError if no waiting would admit it; limits change while it waits."""
        check_size(self._index, self._device_pool, spec)
        num_blocks = spec.num_blocks
        quota = self._index.root_of(spec.prompt).space.quota[Tier.DEVICE]
        if quota is not None and num_blocks > quota:
            raise RequestTooLargeError(
                f"the request needs {num_blocks} blocks, its tenant's quota is {quota}"
            )
        if not self.of(spec).allow_request(num_blocks):
            raise RequestTooLargeError(
                f"the request needs {num_blocks} blocks, more than its tenant's limit"
            )
