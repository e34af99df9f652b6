"""How long a request waits for storage, and what happens when that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.sched.estimate import FetchPolicy

# How long a store that was told to stop may take to leave the buffers before the request goes on
# without it. Most leave within a turn of the loop, and then the fetch ends as any other.
LEAVE_S = 0.05


class Patience:
    """When to give up: `deadline_s` after the start, or sooner; after each arrival, if the policy
    is to wait for all there is.

    scope: what is cancelled then. on_stuck: called if LEAVE_S later it has not ended.
    """

    def __init__(
        self,
        scope: asyncio.Timeout,
        deadline_s: float,
        policy: FetchPolicy,
        on_stuck: Callable[[], None],
    ) -> None:
        self.policy = policy
        self._scope = scope
        self._deadline_s = deadline_s
        self._on_stuck = on_stuck
        self._last = self.now() + deadline_s
        self._timer = self._timer_at(self._last)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Afterwards nobody is stuck."""
        try:
            yield
        finally:
            self._timer.cancel()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def until(self, seconds: float | None) -> None:
        """Give up after so many seconds from now; None for the deadline."""
        latest = self._last
        self._reschedule(latest if seconds is None else min(latest, self.now() + seconds))

    def arrived(self) -> None:
        if self.policy is FetchPolicy.WAIT_COMPLETE:
            self._last = self.now() + self._deadline_s
            self._reschedule(self._last)

    def _reschedule(self, when: float) -> None:
        self._scope.reschedule(when)
        self._timer.cancel()
        self._timer = self._timer_at(when)

    def _timer_at(self, when: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when + LEAVE_S, self._on_stuck)
