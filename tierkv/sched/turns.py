"""Whose turn it is: by priority, then by tenant, then by arrival; in O(log n), nothing is sorted.

Within one priority, tenants are served in turn by the blocks they were given: the one that was
given least goes next. Within a tenant, the first that came. A priority that was passed over
MAX_PASSED_OVER times by those that came later gives one turn, whatever the others' priority, so
that it is slow and never stopped, and a backlog of low priority does not stop those above.

    priority ── heap of tenants, by blocks given ── each tenant's requests, in the order of arrival

What a tenant was given and the number of its first request only grow, so an entry of a heap is
never too high: one that has become too low is put back where it belongs when it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

MAX_PASSED_OVER = 32


class Entry(Protocol):
    """Who waits. number: in the order of arrival, another one for each."""

    @property
    def number(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int: ...


E = TypeVar("E", bound=Entry)
_Place = tuple[int, int, str]  # given, number of the first, tenant


class _Queue(Generic[E]):
    """One tenant's, in the order of arrival, in which they may come back, too."""

    __slots__ = ("_numbers", "members")

    def __init__(self) -> None:
        self.members: dict[int, E] = {}
        self._numbers: list[int] = []  # a heap; of those that have left as well, till they come up

    def add(self, entry: E) -> None:
        self.members[entry.number] = entry
        heapq.heappush(self._numbers, entry.number)

    def first(self) -> int:
        """The number of the first, of which there is one."""
        while self._numbers[0] not in self.members:
            heapq.heappop(self._numbers)
        return self._numbers[0]


class _Level(Generic[E]):
    """Those of one priority. num_passed: how many were served before its first that came later."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self.num_passed = 0
        self._given = given
        self._queues: dict[str, _Queue[E]] = {}
        self._heap: list[_Place] = []

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, entry: E) -> None:
        queue = self._queues.get(entry.tenant)
        if queue is None:
            queue = self._queues[entry.tenant] = _Queue()
        queue.add(entry)
        if queue.first() == entry.number:
            place = (self._given.get(entry.tenant, 0), entry.number, entry.tenant)
            heapq.heappush(self._heap, place)

    def remove(self, entry: E) -> None:
        queue = self._queues[entry.tenant]
        del queue.members[entry.number]
        if not queue.members:
            del self._queues[entry.tenant]

    def passed_by(self, entry: E) -> None:
        """One of a higher priority is served."""
        first = self._settled()
        self.num_passed += first is not None and first[1] < entry.number

    @property
    def is_overdue(self) -> bool:
        return self.num_passed >= MAX_PASSED_OVER

    def first(self, may_go: Callable[[E], bool], refused: set[str]) -> E | None:
        """The first whose tenant is not `refused`; one that may not go adds its tenant there."""
        aside: list[_Place] = []
        found: E | None = None
        while found is None and (place := self._settled()) is not None:
            tenant = place[2]
            queue = self._queues[tenant]
            entry = queue.members[queue.first()]
            if tenant not in refused and may_go(entry):
                found = entry
                break
            refused.add(tenant)
            aside.append(heapq.heappop(self._heap))
        for place in aside:
            heapq.heappush(self._heap, place)
        return found

    def _settled(self) -> _Place | None:
        """The top of the heap, once it is true."""
        heap, queues = self._heap, self._queues
        while heap:
            given, number, tenant = heap[0]
            queue = queues.get(tenant)
            if queue is None:
                heapq.heappop(heap)
                continue
            truth = (self._given.get(tenant, 0), queue.first(), tenant)
            if truth == heap[0]:
                return truth
            if truth < (given, number, tenant):  # it came back, and was put on the heap again
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, truth)
        return None

    def __iter__(self) -> Iterator[E]:
        for queue in self._queues.values():
            yield from queue.members.values()


class Turns(Generic[E]):
    """given: blocks that each tenant was given; to be changed upwards only."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self._given = given
        self._levels: dict[int, _Level[E]] = {}

    def add(self, entry: E) -> None:
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = _Level(self._given)
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        level.add(entry)

    def remove(self, entry: E) -> None:
        level = self._levels[entry.priority]
        level.remove(entry)
        if not level:
            del self._levels[entry.priority]

    def served(self, entry: E) -> None:
        """It is in turn still, and goes."""
        for priority, level in self._levels.items():
            if priority == entry.priority:
                level.num_passed = 0
            elif priority < entry.priority:
                level.passed_by(entry)

    def first(self, may_go: Callable[[E], bool]) -> E | None:
        """Who goes next. One that may not go refuses the turn for its whole tenant: those behind
        it wait too, or a big request would starve behind small ones of its own."""
        refused: set[str] = set()
        for level in self._in_order():
            if (found := level.first(may_go, refused)) is not None:
                return found
        return None

    def _in_order(self) -> list[_Level[E]]:
        """The highest priority first, but for those that were passed over too often."""
        levels = list(self._levels.values())
        if any(level.is_overdue for level in levels):
            levels.sort(key=lambda level: level.num_passed if level.is_overdue else 0, reverse=True)
        return levels

    def __iter__(self) -> Iterator[E]:
        for level in self._levels.values():
            yield from level
