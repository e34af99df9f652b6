"""The two clocks that tierkv reads, behind a protocol so that tests can set the time."""

from __future__ import annotations

import time
from typing import Protocol

_EXACT_S = 1.0  # an exchange of at most this many seconds replaces an earlier answer
_SKEW_S = 2.0  # a larger difference is real: an exchange of _EXACT_S measures to 0.5 s


class Clock(Protocol):
    """A monotonic clock and a wall clock."""

    def monotonic(self) -> float:
        """Return seconds that never decrease, for deadlines and durations inside one process."""

    def wall(self) -> float:
        """Return Unix seconds, for expiry times that another machine reads."""


class SystemClock:
    """The clocks of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class StoreClock:
    """The clock of a store, which all nodes share; until the store answers, this machine's clock.

    Between two answers of the store, time is measured by the monotonic clock: setting this
    machine's wall clock changes nothing.

    Args:
        ours: this machine's clocks.
    """

    def __init__(self, ours: Clock) -> None:
        self._ours = ours
        self._ahead_s: float | None = None  # the store's wall clock minus our monotonic clock

    def monotonic(self) -> float:
        return self._ours.monotonic()

    def wall(self) -> float:
        if self._ahead_s is None:
            return self._ours.wall()
        return self._ours.monotonic() + self._ahead_s

    @property
    def skew_s(self) -> float | None:
        """Seconds that this machine's clock is ahead of the store's; None while that is unknown."""
        return None if self._ahead_s is None else self._ours.wall() - self.wall()

    def note(self, store_time: float, asked_at: float) -> None:
        """Record the store's time from an answer.

        An answer that took longer than 1 s is used only if there is no earlier one, as it is less
        exact.

        Args:
            store_time: the store's time, in Unix seconds.
            asked_at: `monotonic()` before the question.
        """
        now = self._ours.monotonic()
        if self._ahead_s is None or now - asked_at <= _EXACT_S:
            self._ahead_s = store_time - (asked_at + now) / 2


def is_skew(skew_s: float) -> bool:
    """Return whether two clocks differ by more than the error of the measurement, in seconds."""
    return abs(skew_s) > _SKEW_S


def skew_in_words(skew_s: float) -> str:
    """Return a clause that states how far this machine's clock is ahead of the store's."""
    return (
        f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} it"
    )
