"""Requests that stand aside while another one computes the blocks that they want."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tierkv.sched.computing import Computing, Wait
from tierkv.sched.planner import AdmissionPlan
from tierkv.sched.starting import SchedulerStats
from tierkv.sched.waiting import Waiting, WaitingLine


class Parking:
    """on_timeout: called when a wait is up, and its request is back in line."""

    def __init__(
        self,
        line: WaitingLine,
        computing: Computing,
        stats: SchedulerStats,
        on_timeout: Callable[[], None],
    ) -> None:
        self._line = line
        self._computing = computing
        self._stats = stats
        self._on_timeout = on_timeout

    def worth_a_wait(self, waiting: Waiting, plan: AdmissionPlan) -> Wait | None:
        """What to stand aside for; None if it is better to start now, which `started` is told."""
        waiting.passes_by = None
        spec = waiting.spec
        if not spec.uses_cache or not self._computing.num_promises:
            return None
        now = asyncio.get_running_loop().time()
        if waiting.give_up_at is not None and now >= waiting.give_up_at:
            return None
        stop = spec.max_cached_tokens // spec.prompt.block_size
        wait = self._computing.possible_wait(plan.match, spec.prompt, stop, now)
        if wait is None or self._computing.is_worth_it(wait):
            return wait
        waiting.passes_by = wait
        return None

    def started(self, waiting: Waiting) -> None:
        if waiting.passes_by is not None:
            self._computing.passed_by(waiting.passes_by)

    def park(self, waiting: Waiting, wait: Wait) -> None:
        """It is in line, and stands aside from now on."""
        self._stats.shared_waits += waiting.give_up_at is None
        self._computing.waits()
        now = asyncio.get_running_loop().time()
        self._line.stand_aside(waiting, wait, now, lambda: self._wait_is_up(waiting))

    def bring_back(self) -> None:
        """Those whose blocks are there, or will not come, have their old place again."""
        for waiting in self._line.whose_wait_is_over():
            wait = self._line.come_back(waiting)
            assert wait is not None, "it stood aside"
            self._note(waiting, wait, was_worth_it=wait.promise.first >= wait.stop)

    def _wait_is_up(self, waiting: Waiting) -> None:
        wait = self._line.come_back(waiting)
        assert wait is not None, "the timer ends with the wait"
        waiting.give_up_at = 0.0  # no more of this: it computes
        self._note(waiting, wait, was_worth_it=False)
        self._on_timeout()

    def _note(self, waiting: Waiting, wait: Wait, *, was_worth_it: bool) -> None:
        self._stats.lost_waits += not was_worth_it
        waited_s = asyncio.get_running_loop().time() - waiting.parked_at
        self._computing.note_wait(wait, waited_s, was_worth_it=was_worth_it)
