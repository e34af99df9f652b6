"""The queue of waiting requests, ordered by priority, then by space, then by arrival.

Within one priority, the next request comes from the space (part of the index for one fingerprint)
that has received the fewest blocks so far. Requests of one space are admitted in order of arrival.

Low priorities do not starve. If MAX_PASSED_OVER younger requests of higher priority have been
admitted before a priority's first waiting request, this request is admitted next.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierkv.sched.fetch import Fetched
from tierkv.sched.request import Promise, PromiseWait, Request, RequestSpec

MAX_PASSED_OVER = 32


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that is not admitted yet.

    Attributes:
        spec: the engine's specification of the request.
        fetched: the blocks that were fetched from storage for it; None if there are none.
        outcome: future of the running request, or of the error by which the request is refused.
        number: position in the order of arrival, from 0; -1 before `WaitingLine.join`.
        uses_partial: True if the request may copy a cached block that shares only its first tokens
            with the prompt. Set to False if there is too little room for the request while that
            block is protected from eviction.
        wait: the present wait for blocks that another request computes; None without one.
        timer: ends `wait` at its time limit; None without `wait`.
        give_up_at: time after which the request no longer waits for blocks of other requests, in
            seconds of the loop's clock; None before the first such wait.
        parked_at: start of the last such wait, in seconds of the loop's clock.
    """

    spec: RequestSpec
    fetched: Fetched | None
    outcome: asyncio.Future[Request]
    number: int = -1
    uses_partial: bool = True
    wait: PromiseWait | None = None
    timer: asyncio.TimerHandle | None = None
    give_up_at: float | None = None
    parked_at: float = 0.0

    @property
    def space(self) -> str:
        return self.spec.prompt.space

    @property
    def priority(self) -> int:
        return self.spec.priority

    def unpark(self) -> PromiseWait | None:
        """End this request's wait for blocks that another request computes.

        Returns:
            The wait that has ended; None if the request did not wait for such blocks.
        """
        wait, self.wait = self.wait, None
        if wait is not None:
            wait.promise.num_waiting -= 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return wait

    def release_fetched(self) -> None:
        if self.fetched is not None:
            self.fetched.release()


@dataclass(slots=True)
class _Level:
    """The waiting requests of one priority.

    Attributes:
        queues: for each space, a heap of the requests' numbers in the order of arrival. The number
            of a request that left the queue stays until it reaches the top of the heap.
        num_passed: number of requests of higher priority that arrived later than the next request
            of this level and were admitted before it.
    """

    queues: dict[str, list[int]] = field(default_factory=dict)
    num_passed: int = 0


class WaitingLine:
    """The queue of requests that wait for admission.

    The queue can park a request that waits for blocks which another request computes. While it is
    parked, requests behind it are admitted first; it keeps its position in the queue.

    The time to find the next request grows with the number of spaces that have waiting requests,
    not with the number of requests.
    """

    def __init__(self) -> None:
        self._line: dict[int, Waiting] = {}  # by number, which is the order of arrival
        self._by_id: dict[str, Waiting] = {}
        self._given: dict[str, int] = {}
        self._num_of_space: Counter[str] = Counter()
        self._num_ever = 0
        self._levels: dict[int, _Level] = {}  # the highest priority first
        self._served = 0  # largest number of blocks that a space had been given before an admission
        self._parked: dict[Promise, list[tuple[int, int]]] = {}  # heaps of (block, number)
        # Requests with fetched blocks, in order; None after a change of the queue.
        self._holding: list[Waiting] | None = None

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line.values())

    def __contains__(self, waiting: Waiting) -> bool:
        return self._line.get(waiting.number) is waiting

    @property
    def is_idle(self) -> bool:
        """True if no request waits, neither to be admitted nor for another request's blocks."""
        return not self._line and not self._parked

    def find(self, request_id: str) -> Waiting | None:
        return self._by_id.get(request_id)

    def has_space(self, space: str) -> bool:
        return space in self._num_of_space

    def join(self, waiting: Waiting) -> None:
        """Add a request at the end of the queue; its id must differ from all ids in the queue."""
        assert waiting.spec.request_id not in self._by_id, "the request id is already in the queue"
        waiting.number = self._num_ever
        self._num_ever += 1
        space = waiting.space
        # A space that joins counts as given at least as many blocks as any waiting space, so that
        # it has no credit from its idle time. If no space waits, those of the last admission count.
        if space not in self._num_of_space:
            waiting_now = (self._given.get(one, 0) for one in self._num_of_space)
            least = min(waiting_now, default=self._served)
            self._given[space] = max(self._given.get(space, 0), least)
        self._num_of_space[space] += 1
        self._line[waiting.number] = waiting
        self._by_id[waiting.spec.request_id] = waiting
        self._queue(waiting)
        self._holding = None

    def _queue(self, waiting: Waiting) -> None:
        level = self._levels.get(waiting.priority)
        if level is None:
            level = self._levels[waiting.priority] = _Level()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        heapq.heappush(level.queues.setdefault(waiting.space, []), waiting.number)

    def leave(self, waiting: Waiting) -> None:
        waiting.unpark()
        del self._line[waiting.number]
        del self._by_id[waiting.spec.request_id]
        self._num_of_space[waiting.space] -= 1
        if not self._num_of_space[waiting.space]:
            del self._num_of_space[waiting.space]
        self._holding = None

    def forget(self, space: str) -> None:
        """Delete the number of blocks that were given to the requests of a closed space.

        While a space (the part of the index for one fingerprint) is open, this number decides when
        the space's next request is admitted.
        """
        self._given.pop(space, None)

    def given(self, space: str, num_blocks: int) -> None:
        """Record that a request of `space` was admitted with `num_blocks` blocks.

        At equal priority, the waiting requests of the space with the fewest recorded blocks are
        admitted first.

        Args:
            space: name of the space (part of the index for one fingerprint).
            num_blocks: number of blocks that were reserved for the request.
        """
        before = self._given.get(space, 0)
        self._served = max(self._served, before)
        self._given[space] = before + num_blocks

    def admitted(self, waiting: Waiting) -> None:
        """Remove an admitted request from the queue.

        A lower priority whose next request arrived before the admitted request was passed over: the
        count that protects this priority from starving is increased by one.
        """
        for priority, level in self._levels.items():
            if priority == waiting.priority:
                level.num_passed = 0
            elif priority < waiting.priority and (firsts := self._firsts(level)):
                level.num_passed += min(firsts)[1] < waiting.number
        self.leave(waiting)

    def next(self, may_go: Callable[[Waiting], bool]) -> Waiting | None:
        """Return the next request to admit; None if there is none.

        Args:
            may_go: returns True if a request can be admitted now. If it returns False for the first
                request of a space, all other requests of this space are skipped too: small requests
                would otherwise starve a big one.
        """
        found = {priority: self._firsts(level) for priority, level in self._levels.items()}
        self._levels = {one: level for one, level in self._levels.items() if found[one]}
        order = list(self._levels)
        passed = {one: level.num_passed for one, level in self._levels.items()}
        if any(count >= MAX_PASSED_OVER for count in passed.values()):  # goes before all others
            order.sort(key=lambda one: -passed[one] if passed[one] >= MAX_PASSED_OVER else 0)
        refused: set[str] = set()
        for priority in order:
            for _, number in sorted(found[priority]):
                waiting = self._line[number]
                if waiting.space not in refused:
                    if may_go(waiting):
                        return waiting
                    refused.add(waiting.space)
        return None

    def _firsts(self, level: _Level) -> list[tuple[int, int]]:
        firsts = []
        for space, numbers in list(level.queues.items()):
            while numbers and not self._waits_for_turn(numbers[0]):
                heapq.heappop(numbers)
            if numbers:
                firsts.append((self._given.get(space, 0), numbers[0]))
            else:
                del level.queues[space]
        return firsts

    def _waits_for_turn(self, number: int) -> bool:
        waiting = self._line.get(number)
        return waiting is not None and waiting.wait is None

    # Parking

    def park(
        self, waiting: Waiting, wait: PromiseWait, now: float, on_timeout: Callable[[], None]
    ) -> None:
        """Let a request wait for another request's blocks; requests behind it can be admitted.

        Args:
            waiting: a request in the queue.
            wait: the blocks to wait for, and the time limit.
            now: seconds on the loop's clock.
            on_timeout: called at the time limit, unless `unpark` was called before.
        """
        if waiting.give_up_at is None:
            waiting.give_up_at = now + wait.patience_s
        waiting.wait, waiting.parked_at = wait, now
        wait.promise.num_waiting += 1
        left_s = min(wait.patience_s, waiting.give_up_at - now)
        waiting.timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), on_timeout)
        heapq.heappush(self._parked.setdefault(wait.promise, []), (wait.stop, waiting.number))

    def unpark(self, waiting: Waiting) -> PromiseWait | None:
        """End a request's wait for blocks that another request computes.

        The request keeps its position in the queue, and can be admitted again.

        Returns:
            The wait that has ended; None if the request did not wait for such blocks.
        """
        wait = waiting.unpark()
        if wait is not None:
            self._queue(waiting)
        return wait

    def ready_again(self) -> list[Waiting]:
        """Return the parked requests that can end their wait.

        The blocks that they wait for are computed, or will never be. Each request is returned once;
        the caller passes it to `unpark`.
        """
        found: list[Waiting] = []
        for promise, heap in list(self._parked.items()):
            while heap and (promise.is_over or heap[0][0] <= promise.first):
                waiting = self._line.get(heapq.heappop(heap)[1])
                wait = waiting.wait if waiting is not None else None
                if waiting is not None and wait is not None and wait.promise is promise:
                    found.append(waiting)
            if not heap:
                del self._parked[promise]
        return found

    # Fetched blocks

    def release_last_fetched(self, space: str | None = None) -> bool:
        """Release the fetched blocks of the last request in the queue that has any.

        The order is by priority (highest first), then by the number of blocks that a request's
        space (part of the index for one fingerprint) was given before (fewest first), then by
        arrival.

        Args:
            space: name of the space whose requests are considered; None for all spaces.

        Returns:
            True if blocks were released, False if no such request has any.
        """
        if self._holding is None:
            holding = (one for one in self if one.fetched and not one.fetched.is_released)
            self._holding = sorted(
                holding, key=lambda one: (-one.priority, self._given.get(one.space, 0), one.number)
            )
        for one in reversed(self._holding):
            if one.fetched is not None and space in (None, one.space):
                self._holding.remove(one)
                fetched, one.fetched = one.fetched, None
                if not fetched.is_released:
                    fetched.release()
                    return True
        return False

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; [] if there are none."""
        wrong = [
            f"request {one.spec.request_id!r} waits for blocks without a deadline"
            for one in self
            if (one.wait is None) != (one.timer is None)
        ]
        waits = Counter(one.wait.promise for one in self if one.wait is not None)
        wrong.extend(
            (
                f"{count} requests wait for blocks of another request, which counts "
                f"{promise.num_waiting} requests"
            )
            for promise, count in waits.items()
            if promise.num_waiting != count
        )
        queued = {
            number
            for priority, level in self._levels.items()
            for space, numbers in level.queues.items()
            for number in filter(self._waits_for_turn, numbers)
            if (self._line[number].priority, self._line[number].space) == (priority, space)
        }
        if sorted(queued) != [one.number for one in self if one.wait is None]:
            wrong.append("the requests with a turn differ from the requests that wait for a turn")
        if self._num_of_space != Counter(one.space for one in self):
            wrong.append("the number of waiting spaces is wrong")
        if {one.spec.request_id: one for one in self} != self._by_id:
            wrong.append("the waiting requests differ from the requests listed by id")
        return wrong
