"""When to ask again, and how long to wait before that."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tierkv.client.errors import (
    BrokenOffError,
    NotANodeError,
    RemoteError,
    UnreachableError,
)
from tierkv.errors import ConfigError, TierKVError

_NOT_NOW = (429, 503)
_PROXY_NOT_NOW = (502, 503, 504)  # a proxy in front has no node to ask


@dataclass(frozen=True, slots=True)
class Retries:
    """attempts: in all, the first included. Between two of them passes a random time of up to
    `first_s`, twice that after the next, and so on up to `most_s`; at least what the node says."""

    attempts: int = 4
    first_s: float = 0.05
    most_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_s < 0 or self.most_s < 0:
            raise ConfigError("a call has at least one attempt, and pauses are not negative")

    def allows(self, error: TierKVError, attempt: int, *, is_repeatable: bool) -> bool:
        """Whether to ask again after `error` of attempt number `attempt`, the first being 1.

        is_repeatable: asking twice does no more than asking once. What never reached a node can
        always be asked again.
        """
        if attempt >= self.attempts:
            return False
        if isinstance(error, UnreachableError):
            return True
        if not is_repeatable:
            return False
        if isinstance(error, RemoteError):
            return error.status in _NOT_NOW
        if isinstance(error, NotANodeError):
            return error.status in _PROXY_NOT_NOW
        return isinstance(error, BrokenOffError)

    def pause_s(self, error: TierKVError, attempt: int) -> float:
        """Random, so that clients refused together do not come back together."""
        jitter = random.uniform(0, min(self.most_s, self.first_s * 2 ** (attempt - 1)))
        told = error.retry_after_s if isinstance(error, RemoteError) else None
        return jitter + (told or 0.0)
