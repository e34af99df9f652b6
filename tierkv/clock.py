"""The protocol of clocks, the clocks of this machine, and a clock that follows a store's time."""

from __future__ import annotations

import time
from typing import Protocol

_EXACT_S = 1.0  # an answer that took longer does not replace an earlier one
_SKEW_S = 2.0  # above the error of the measurement, which is half of _EXACT_S


class Clock(Protocol):
    """A monotonic clock and a wall clock."""

    def monotonic(self) -> float:
        """Return seconds that never decrease, for deadlines and durations inside one process."""

    def wall(self) -> float:
        """Return Unix seconds, for expiry times that another machine reads."""


class SystemClock:
    """The operating system's monotonic clock and wall clock, both in seconds."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class StoreClock:
    """The clock of a store, on which all nodes of the store agree.

    Until the store has answered, `wall` returns this machine's wall clock. From then on, it returns
    the store's time, advanced by this machine's monotonic clock, so setting this machine's wall
    clock changes nothing.

    Args:
        ours: this machine's clocks.
    """

    def __init__(self, ours: Clock) -> None:
        self._ours = ours
        self._ahead_s: float | None = None  # the store's time minus `ours.monotonic()`

    def monotonic(self) -> float:
        return self._ours.monotonic()

    def wall(self) -> float:
        if self._ahead_s is None:
            return self._ours.wall()
        return self._ours.monotonic() + self._ahead_s

    @property
    def skew_s(self) -> float | None:
        """Seconds that this machine's wall clock is ahead of the store's; None if unknown."""
        return None if self._ahead_s is None else self._ours.wall() - self.wall()

    def note(self, store_time: float, asked_at: float) -> None:
        """Set the clock to a time that the store has answered.

        An answer that took longer than 1 s is less exact, so it is used only if there is no earlier
        one.

        Args:
            store_time: the answered time, in Unix seconds.
            asked_at: the value of `monotonic()` when the store was asked, in seconds.
        """
        now = self._ours.monotonic()
        if self._ahead_s is None or now - asked_at <= _EXACT_S:
            self._ahead_s = store_time - (asked_at + now) / 2


def is_skew(skew_s: float) -> bool:
    """Return True if a clock difference of `skew_s` seconds is more than a measurement error."""
    return abs(skew_s) > _SKEW_S


def skew_in_words(skew_s: float) -> str:
    """Return the words "this machine's clock is N s ahead of it" or "behind it".

    "It" is the store's clock, which the caller's sentence has named before. `skew_s` is positive if
    this machine's clock is ahead.
    """
    return (
        f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} it"
    )
