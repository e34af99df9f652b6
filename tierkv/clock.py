"""The two clocks tierkv reads, behind one seam so that tests can turn the hands."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds that never decrease, for deadlines and durations inside one process."""

    def wall(self) -> float:
        """Return Unix seconds, for expiry times that another machine reads."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
