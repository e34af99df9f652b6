"""Names of which a store has said that it has none: believed for a moment, so that it is not asked
again by every request for the same prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierkv.clock import Clock


@dataclass(eq=False, slots=True)
class _Meanwhile:
    """What has been written since a question was put."""

    written: set[str] = field(default_factory=set)
    has_cleared: bool = False


class NegativeCache:
    """ttl_s: how long a name is believed to be missing, 0 not at all; max_names: of how many."""

    def __init__(self, ttl_s: float, max_names: int, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._max_names = max_names
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()
        self._asked: list[_Meanwhile] = []
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

    @contextmanager
    def asking(self) -> Iterator[Callable[[str], None]]:
        """While the store is asked, and until its answer has been noted with what this gives: for
        each name that it says it has none of. Not of one that somebody has written meanwhile; the
        answer may be older."""
        meanwhile = _Meanwhile()
        self._asked.append(meanwhile)

        def note(name: str) -> None:
            if not (meanwhile.has_cleared or name in meanwhile.written):
                self._note(name)

        try:
            yield note
        finally:
            self._asked.remove(meanwhile)

    def _note(self, name: str) -> None:
        if not self._ttl_s:
            return
        self._until[name] = self._clock.monotonic() + self._ttl_s
        while len(self._until) > self._max_names:
            self._until.popitem(last=False)

    def forget(self, name: str) -> None:
        """Somebody writes it."""
        self._until.pop(name, None)
        for meanwhile in self._asked:
            meanwhile.written.add(name)

    def clear(self) -> None:
        """Somebody may have written any of them."""
        self._until.clear()
        for meanwhile in self._asked:
            meanwhile.has_cleared = True
