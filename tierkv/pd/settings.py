"""Names, lifetimes and deadlines of the hand-off, as settings."""

from __future__ import annotations

import msgspec

from tierkv.errors import ConfigError
from tierkv.storage.protocol import is_name


class HandoffSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and lifetimes in storage, and the deadlines of publish and claim, in seconds.

    ticket_ttl_s: how long a decode node has to claim.
    claimed_ttl_s: how long a ticket stays once it was acknowledged, for another node that has to
        claim it after all.
    producer_lease_s: how long a node that says nothing more is believed to go on with its prefills.
    streams: blocks go out while the prompt is still being computed.
    """

    prefix: str = "tierkv"
    block_ttl_s: float | None = 86_400.0
    ticket_ttl_s: float = 600.0
    claimed_ttl_s: float = 120.0
    producer_lease_s: float = 3.0
    streams: bool = True
    publish_deadline_s: float = 30.0
    claim_deadline_s: float = 10.0
    lookup_deadline_s: float = 2.0

    def __post_init__(self) -> None:
        for name in (
            "ticket_ttl_s",
            "claimed_ttl_s",
            "producer_lease_s",
            "publish_deadline_s",
            "claim_deadline_s",
            "lookup_deadline_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"handoff.{name} must be more than 0")
        if not is_name(self.prefix) or ":" in self.prefix:
            raise ConfigError(
                "handoff.prefix must be 1 to 64 letters, digits or ._-, the first a letter or "
                f"digit, not {self.prefix[:80]!r}"
            )
        if self.block_ttl_s is not None and self.block_ttl_s < self.ticket_ttl_s:
            raise ConfigError("handoff.block_ttl_s must not be less than handoff.ticket_ttl_s")
