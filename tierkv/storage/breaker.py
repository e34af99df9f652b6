"""A circuit breaker: stops asking a store that fails, and asks again now and then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tierkv.clock import Clock


class BreakerState(Enum):
    CLOSED = "closed"  # operations reach the store
    OPEN = "open"  # they fail at once
    HALF_OPEN = "half_open"  # they fail at once, and one probe is under way


_TRANSITIONS = {
    BreakerState.CLOSED: {BreakerState.OPEN},
    BreakerState.OPEN: {BreakerState.HALF_OPEN},
    BreakerState.HALF_OPEN: {BreakerState.OPEN, BreakerState.CLOSED},
}


def advance(current: BreakerState, to: BreakerState) -> BreakerState:
    assert to in _TRANSITIONS[current], f"a breaker does not go from {current} to {to}"
    return to


@dataclass(frozen=True, slots=True)
class BreakerSnapshot:
    """since: Unix time of the last change. reason: of the failure that opened it last.
    degraded_s: how long it has not been closed, all in all."""

    state: BreakerState
    since: float
    num_opened: int
    reason: str
    degraded_s: float = 0.0


class Breaker:
    """Opens after `failures_to_open` failures with no success in between. Synchronous."""

    def __init__(self, failures_to_open: int, clock: Clock) -> None:
        self._failures_to_open = failures_to_open
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._since = clock.wall()
        self._num_failures = 0
        self._has_read_failed = False
        self._num_opened = 0
        self._reason = ""
        self._degraded_s = 0.0
        self._opened_at = 0.0  # monotonic

    @property
    def is_closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    @property
    def reason(self) -> str:
        return self._reason

    def snapshot(self) -> BreakerSnapshot:
        now = self._clock.monotonic()
        degraded_s = self._degraded_s + (0.0 if self.is_closed else now - self._opened_at)
        return BreakerSnapshot(self._state, self._since, self._num_opened, self._reason, degraded_s)

    def succeed(self, *, of_read: bool = True) -> None:
        """An operation was answered; one that was begun before the breaker opened says nothing, nor
        does a write of reads that failed: a disk can hang that still takes writes into memory."""
        if self.is_closed and (of_read or not self._has_read_failed):
            self._num_failures = 0
            self._has_read_failed = False

    def fail(self, reason: str, *, of_read: bool = True) -> bool:
        """An operation was not answered; whether that has opened the breaker."""
        if not self.is_closed:
            return False
        self._num_failures += 1
        self._has_read_failed |= of_read
        self._reason = reason
        if self._num_failures < self._failures_to_open:
            return False
        self._num_opened += 1
        self._opened_at = self._clock.monotonic()
        self._move(BreakerState.OPEN)
        return True

    def begin_probe(self) -> None:
        self._move(BreakerState.HALF_OPEN)

    def end_probe(self, failure: str | None) -> None:
        """failure: why the probe was not answered; None if it was."""
        self._num_failures = 0
        self._has_read_failed = False
        if failure is None:
            self._degraded_s += self._clock.monotonic() - self._opened_at
            self._move(BreakerState.CLOSED)
            return
        self._reason = failure
        self._move(BreakerState.OPEN)

    def _move(self, to: BreakerState) -> None:
        self._state = advance(self._state, to)
        self._since = self._clock.wall()
