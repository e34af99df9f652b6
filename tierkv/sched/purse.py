"""What all waits for a tier together may cost, whatever each of them is worth by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What waiting in vain may cost in the long run, as a share of computing; and before that, once, as
# computing so many of the largest requests.
SHARE = 0.02
MOST_IN_VAIN = 2.0
_FADING = 0.98  # of what was usual, with each request
MOST_AT_ONCE_S = 0.5  # twice what is waited for one store that hangs


@dataclass(slots=True)
class Purse:
    """Seconds that requests may still wait for a tier in vain: what fetches have saved, less what
    waiting for them and for answers has cost, and SHARE of what computing takes on top.

    Each wait is bounded by itself; this bounds all of them together, where a tier answers in time
    and never has anything, or has nothing but damage.
    """

    seconds: float = 0.0
    usual_s: float = 0.0  # what computing one of the larger requests took lately
    largest_s: float = 0.0

    def allow(self, compute_s: float) -> bool:
        """Whether one more may wait, which could compute instead in so long."""
        if math.isfinite(compute_s):
            self.usual_s = max(compute_s, self.usual_s * _FADING)
            grown = max(compute_s - self.largest_s, 0.0)
            self.largest_s += grown
            self.add(SHARE * compute_s + MOST_IN_VAIN * grown)
        return self.seconds > 0

    def add(self, seconds: float) -> None:
        """So many were saved, or lost. One wait that was far too long is not held against a tier
        for ever."""
        most = MOST_IN_VAIN * self.usual_s
        self.seconds = max(-most, min(self.seconds + seconds, most))

    def fill(self) -> None:
        """Nothing is known of the tier: as at the start."""
        self.seconds = MOST_IN_VAIN * self.usual_s


@dataclass(slots=True)
class Allowance:
    """Seconds that those who need room may wait for a store to make some: SHARE of the time that
    goes by, and MOST_AT_ONCE_S before that. Where a store takes less than engines make, what it
    cannot take is forgotten, or all would go at its speed."""

    seconds: float = MOST_AT_ONCE_S
    is_waiting: bool = False
    _seen_at: float | None = None

    def look(self, now: float) -> bool:
        """Whether one may wait from now on, or go on waiting."""
        went_by = now - (now if self._seen_at is None else self._seen_at)
        self._seen_at = now
        spent = went_by if self.is_waiting else 0.0
        self.seconds = min(self.seconds + SHARE * went_by - spent, MOST_AT_ONCE_S)
        return self.seconds > 0
