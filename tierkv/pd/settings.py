"""The settings of hand-offs between nodes: names, lifetimes and deadlines."""

from __future__ import annotations

import ipaddress
from enum import Enum

import msgspec

from tierkv.config import Fixed, all_above_zero
from tierkv.errors import BadRequestError, ConfigError
from tierkv.storage.protocol import check_ttl, is_name

# Seconds that an expired ticket stays in the store, so that a late decode node sees "expired" and
# not "not yet".
EXPIRED_GRACE_S = 120.0
_MAX_PORT = 65_535


class DirectPath(Enum):
    """The ways in which a claiming node reads blocks from another node's memory."""

    AUTO = "auto"  # the first of these that this node can use
    DEVICE = "device"  # processes of one user and machine read each other's planes (CUDA IPC)
    MEMORY = "memory"  # processes of one user on one machine read each other's host tier
    NETWORK = "network"  # Mooncake's transfer engine; only where direct_host is set
    OFF = "off"


class HandoffSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names, lifetimes and deadlines of hand-offs.

    Attributes:
        prefix: first part of every stored name; nodes with different prefixes share nothing in a
            store.
        block_ttl_s: seconds from the last use of a block until the store removes it; null for
            never.
        ticket_ttl_s: seconds that a decode node has to claim a ticket.
        claimed_ttl_s: seconds that a claimed ticket stays in the store, so that it can be claimed
            again.
        producer_lease_s: seconds without a renewal after which a prefill node counts as dead.
        streams: true stores blocks while the prompt is still being computed.
        direct: memory from which nodes read each other's blocks. device or memory (host tier):
            between processes of one machine; network: the host tier of another machine; auto: the
            first of these that this node can use; off: none.
        direct_host: IP address at which other machines reach this node directly; "" for this
            machine only. If set, Mooncake's transfer engine is started, which listens on every
            address without authentication.
        direct_port: TCP port at which claiming nodes ask where blocks lie in this node's memory; 0
            chooses a free port.
        direct_lease_s: seconds that blocks are protected from eviction after a claiming node has
            asked for them. Each further question of the node starts the time anew.
        publish_deadline_s: seconds to store a prompt.
        claim_deadline_s: seconds that a claim waits for its ticket and then for free blocks, in
            total.
        lookup_deadline_s: seconds that a lookup waits for the store.
    """

    prefix: str = "tierkv"
    block_ttl_s: float | None = 86_400.0
    ticket_ttl_s: float = 600.0
    claimed_ttl_s: Fixed[float] = 120.0
    producer_lease_s: Fixed[float] = 3.0
    streams: bool = True
    direct: DirectPath = DirectPath.AUTO
    direct_host: str = ""
    direct_port: int = 0
    direct_lease_s: Fixed[float] = 10.0
    publish_deadline_s: float = 30.0
    claim_deadline_s: float = 10.0
    lookup_deadline_s: Fixed[float] = 2.0

    def __post_init__(self) -> None:
        all_above_zero(
            "handoff",
            self,
            "publish_deadline_s",
            "claim_deadline_s",
            "lookup_deadline_s",
            "direct_lease_s",
        )
        self._check_lifetimes()
        self._check_direct()
        if not is_name(self.prefix) or ":" in self.prefix:
            raise ConfigError(
                "handoff.prefix must be 1 to 64 letters, digits or ._-, the first a letter or "
                f"digit, not {self.prefix[:80]!r}"
            )

    def _check_lifetimes(self) -> None:
        for name in ("ticket_ttl_s", "claimed_ttl_s", "producer_lease_s", "block_ttl_s"):
            value: float | None = getattr(self, name)
            try:
                if value is not None:
                    check_ttl(value + EXPIRED_GRACE_S if name == "ticket_ttl_s" else value)
            except BadRequestError as error:
                raise ConfigError(f"handoff.{name}: {error}") from error
        if self.block_ttl_s is not None and self.block_ttl_s < self.ticket_ttl_s:
            raise ConfigError(
                f"handoff.block_ttl_s ({self.block_ttl_s:g} s) must be at least "
                f"handoff.ticket_ttl_s ({self.ticket_ttl_s:g} s)"
            )

    def _check_direct(self) -> None:
        if not 0 <= self.direct_port <= _MAX_PORT:
            raise ConfigError(
                f"handoff.direct_port must be in 0..{_MAX_PORT}, not {self.direct_port}"
            )
        if self.direct is DirectPath.NETWORK and not self.direct_host:
            raise ConfigError(
                'handoff.direct is "network", which needs handoff.direct_host: set it to '
                "this machine's IP address"
            )
        if not self.direct_host:
            return
        try:
            address = ipaddress.ip_address(self.direct_host)
        except ValueError as error:
            raise ConfigError(f"handoff.direct_host must be an IP address: {error}") from error
        if address.is_unspecified or address.is_multicast:
            raise ConfigError(
                f"handoff.direct_host is {self.direct_host}, which other machines "
                "cannot reach: set it to this machine's IP address"
            )
