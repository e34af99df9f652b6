"""Gives turns to those that wait: who is next, whether it fits, and what stands in the way."""

from __future__ import annotations

import asyncio

from tierkv.cache.node import Tier
from tierkv.errors import OutOfBlocksError, OverQuotaError, TierKVError
from tierkv.sched.growing import Growing
from tierkv.sched.limits import TenantLimits
from tierkv.sched.parking import Parking
from tierkv.sched.planner import AdmissionPlan, plan_admission
from tierkv.sched.request import Request
from tierkv.sched.running import Running
from tierkv.sched.starting import Starting
from tierkv.sched.tiers import Tiers
from tierkv.sched.waiting import Waiting, WaitingLine

# Turns in line per turn of the loop: 2 to 19 ms, the most where each copies a shared tail, after
# which others have theirs (2-core x86-64 VM, 2026-11-21; 32 held the loop for 75 ms).
_SLICE = 8


class Admitting:
    """The first in line is never overtaken because it is large: while there is no room for it,
    nobody is admitted. Those that run and want more blocks come before all that wait."""

    def __init__(  # noqa: PLR0913 - what a turn looks at
        self,
        tiers: Tiers,
        line: WaitingLine,
        running: Running,
        *,
        starting: Starting,
        growing: Growing,
        limits: TenantLimits,
        parking: Parking,
    ) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._device_pool = tiers.pools[Tier.DEVICE]
        self._line = line
        self._running = running
        self._starting = starting
        self._growing = growing
        self._limits = limits
        self._parking = parking
        self.pauses: set[str] = set()  # why nobody is admitted
        self._is_pumping = False
        self._pumps_again = False
        self._next_pump: asyncio.Handle | None = None  # for the rest of the line
        self._over_quota: set[str] = set()  # tenants, in this round, that wait for themselves
        self._stuck: Waiting | None = None  # the first in line, for whom there was no room

    @property
    def is_paused(self) -> bool:
        return bool(self.pauses)

    def admit_or_join(self, waiting: Waiting) -> Request | None:
        """The request, if nobody is before it and it fits; else it is in line, and its outcome
        tells. Raises what makes it unfit."""
        if self._is_first(waiting):
            try:
                plan = plan_admission(self._index, self._device_pool, waiting.spec)
                wait = self._parking.worth_a_wait(waiting, plan)
                if wait is None:
                    request = self._start(waiting, plan)
                    self._line.given(waiting.tenant, waiting.spec.num_blocks)
                    return request
            except OutOfBlocksError:
                pass
            else:
                self._line.join(waiting)
                self._parking.park(waiting, wait)
                return None
        self._line.join(waiting)
        if self.is_paused:
            waiting.release_fetched()
        if not self._is_stuck_still():
            self.pump()
        return None

    def _start(self, waiting: Waiting, plan: AdmissionPlan) -> Request:
        request = self._starting.try_start(waiting, plan)
        self._parking.started(waiting)
        return request

    def _is_first(self, waiting: Waiting) -> bool:
        """Whether it would have the next turn, with nobody else in line."""
        is_open = not (self.is_paused or self._is_pumping or len(self._line))
        return is_open and self._may_go(waiting)

    def pump(self) -> None:
        """Give turns while there is somebody to admit."""
        if self._is_pumping:
            self._pumps_again = True  # called from within, by what the loop below lets go
            return
        if self._next_pump is not None:
            return  # this turn of the loop has had its slice; the rest of the line is next
        self._stuck = None
        if self._line.is_idle:
            return
        self._is_pumping = self._pumps_again = True
        try:
            num_turns = 0
            while self._pumps_again and num_turns < _SLICE:
                self._pumps_again = False
                num_turns += self._admit_waiting(_SLICE - num_turns)
        finally:
            self._is_pumping = False
        if num_turns >= _SLICE and self._next_pump is None:
            self._next_pump = asyncio.get_running_loop().call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._next_pump = None
        self.pump()

    def _is_stuck_still(self) -> bool:
        """Whether the first in line is who it was when there was no room, of which there is no
        more now."""
        return self._stuck is not None and self._is_busy() and self._next() is self._stuck

    def _admit_waiting(self, most: int) -> int:
        """Give up to `most` turns; how many there were, fewer if there is nothing more to do."""
        self._parking.bring_back()
        self._over_quota.clear()
        for num_turns in range(most):
            if self.is_paused:
                return num_turns
            waiting = self._next()
            if waiting is None:
                return num_turns
            try:
                self._limits.check(waiting.spec)
                plan = plan_admission(self._index, self._device_pool, waiting.spec)
                wait = self._parking.worth_a_wait(waiting, plan)
                if wait is not None:
                    self._parking.park(waiting, wait)
                    continue
                request = self._start(waiting, plan)
            except OverQuotaError:
                if self._is_busy(waiting.tenant) or not self._unblock(waiting, waiting.tenant):
                    self._over_quota.add(waiting.tenant)
                continue
            except OutOfBlocksError:
                is_busy = self._is_busy()
                if not is_busy and self._unblock(waiting):
                    continue
                self._stuck = waiting if is_busy else None
                return num_turns
            except TierKVError as error:
                self._line.leave(waiting)
                waiting.outcome.set_exception(error)
                continue
            self._line.admitted(waiting, waiting.spec.num_blocks)
            waiting.outcome.set_result(request)
        return most

    def _next(self) -> Waiting | None:
        """The first in line whose tenant may have one more running."""
        while (waiting := self._line.next(self._may_go)) is not None:
            if not waiting.outcome.done():
                return waiting
            self._line.leave(waiting)  # cancelled; its task has not run yet
        return None

    def _may_go(self, waiting: Waiting) -> bool:
        spec = waiting.spec
        requests, blocks = self._running.of_tenant(spec.prompt.space)
        limits, space = self._limits.of(spec), spec.prompt.space
        if waiting.outcome.done() or not limits.allow(1, spec.num_blocks):
            return True  # it leaves the line
        if space in self._over_quota or self._growing.holds_up(space):
            return False
        return limits.allow(requests + 1, blocks + spec.num_blocks)

    def _is_busy(self, tenant: str | None = None) -> bool:
        """Whether something is under way whose end makes room: of this tenant, or of anybody."""
        if self._tiers.is_at_work(tenant):
            return True
        return bool(self._running.by_id) if tenant is None else self._running.has_tenant(tenant)

    def _unblock(self, first: Waiting, tenant: str | None = None) -> bool:
        """Whether something was let go so that the first in line may fit now.

        Called when nothing runs, or nothing of the tenant whose quota is full. Then only what
        waiting requests hold stands in the way: what they had fetched, the last in line lets go
        first; and then the block of which the first would have copied a part.
        """
        if self._line.let_go_of_last(tenant):
            return True
        if first.uses_partial:
            first.uses_partial = False
            return True
        return False
