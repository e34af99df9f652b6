"""Names of which a store has said that it has none: believed for a moment, so that it is not asked
again by every request for the same prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tierkv.clock import Clock


class NegativeCache:
    """ttl_s: how long a name is believed to be missing, 0 not at all; max_names: of how many."""

    def __init__(self, ttl_s: float, max_names: int, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._max_names = max_names
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()
        self.num_hits = 0

    def first(self, names: Sequence[str]) -> int:
        """Index of the first name believed to be missing; their number if there is none."""
        if not self._until:
            return len(names)
        now = self._clock.monotonic()
        for index, name in enumerate(names):
            if self._until.get(name, 0.0) > now:
                self.num_hits += 1
                return index
        return len(names)

    def note(self, name: str) -> None:
        """The store has just said that it has none."""
        if not self._ttl_s:
            return
        self._until[name] = self._clock.monotonic() + self._ttl_s
        while len(self._until) > self._max_names:
            self._until.popitem(last=False)

    def forget(self, name: str) -> None:
        """Somebody writes it."""
        self._until.pop(name, None)

    def clear(self) -> None:
        """Somebody may have written any of them."""
        self._until.clear()
