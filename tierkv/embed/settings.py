"""Limits and deadlines of an embedded service, and how it can end."""

from __future__ import annotations

import math

import msgspec

from tierkv.config import all_above_zero
from tierkv.errors import ConfigError, TierKVError


class ServiceFailedError(TierKVError):
    """The service stopped after an error nobody expected (its cause): start another one."""


class ForkedError(TierKVError):
    """This process is a fork, and the service's thread is in its parent: open one here, or fork
    before one is opened."""


class CloseTimeoutError(TierKVError):
    """Closing takes longer than its deadline; it goes on in its thread. The memory that copies in
    flight touch is not given back before they are done."""


class EmbedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """max_calls: calls open at a time, those done that nobody has taken included.
    load_timeout_s: cached blocks that take longer to arrive are computed instead.
    open_deadline_s, close_deadline_s: how long `open` and `close` wait, for memory and the store to
        be there, and for copies to end. grace_s: how long calls may go on once it closes.
    """

    max_calls: int = 4096
    load_timeout_s: float = 30.0
    open_deadline_s: float = 60.0
    close_deadline_s: float = 60.0
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_calls < 1:
            raise ConfigError("embed.max_calls must be at least 1")
        all_above_zero("embed", self, "load_timeout_s", "open_deadline_s", "close_deadline_s")
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise ConfigError("embed.grace_s must be a number that is not negative")
