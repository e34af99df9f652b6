"""The time that one request, claim or lookup may still wait for storage."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tierkv.sched.worth import SILENT_S, Decision, Estimator

_AT_ONCE = Decision(
    math.inf, 0.0, math.inf, "the caller cannot compute, so it waits for all blocks"
)


class Budget:
    """The seconds that one request, claim or lookup may still wait for storage.

    Every wait for storage runs inside `limit`, which counts its seconds and ends the wait when none
    are left. The store's operation itself continues, because it runs in a task of its own.

    Args:
        deadline_s: upper limit of the seconds spent waiting, whatever the estimates say.
        step_s: after each arrival of blocks, at least this many seconds are left; None if arrivals
            do not extend the deadline.
        estimator: compares fetching with computing, and can end a wait before the deadline. None to
            wait until the deadline, for a caller that cannot compute the tokens or must not.
        is_claim: True if a decode node claims a prompt that a prefill node has computed.

    Attributes:
        may_compute: True if `estimator` can end a wait so that the caller computes the tokens.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        step_s: float | None = None,
        estimator: Estimator | None = None,
        is_claim: bool = False,
    ) -> None:
        self._time = asyncio.get_running_loop().time
        self.is_claim = is_claim
        self.may_compute = estimator is not None
        self._estimator = estimator
        self._step_s = step_s
        self._deadline_s = deadline_s
        self._allowed_s = math.inf  # by the rule
        self._spent_s = 0.0
        self._since = self._heard_at = 0.0
        self._silent_s = math.inf if estimator is None else SILENT_S
        self._scope: asyncio.Timeout | None = None
        self._is_stopped = False

    @property
    def left_s(self) -> float:
        """Seconds until the present wait must end.

        Between two waits, the value is the limit for a wait that begins now.
        """
        most_s = min(self._deadline_s, self._allowed_s) - self._spent()
        if self._scope is None:
            return min(most_s, self._silent_s)
        return min(most_s, self._heard_at + self._silent_s - self._time())

    @property
    def deadline_at(self) -> float:
        """Latest time at which the present wait for storage ends, on the loop's clock.

        The wait ends earlier if computing is estimated to be faster.
        """
        return self._time() + self._deadline_s - self._spent()

    def restrict(self, tokens: int, *, is_answered: bool = False) -> Decision:
        """Decide if a request waits for storage or computes, and limit the wait.

        A later call can shorten the wait further but does not lengthen it.

        Args:
            tokens: number of the prompt's tokens that are on neither device nor host.
            is_answered: True if storage has confirmed that it has these tokens.

        Returns:
            The decision. Without an estimator, the decision is always to wait.
        """
        if self._estimator is None:
            return _AT_ONCE
        verdict = self._estimator.judge(
            tokens, self._time(), is_answered=is_answered, is_claim=self.is_claim
        )
        self._allowed_s = min(self._allowed_s, self._spent() + verdict.wait_s)
        self._silent_s = max(SILENT_S, verdict.fetch_s / 2)
        self._reschedule()
        return verdict

    def arrived(self, rest_s: float | None = None) -> None:
        """Record that blocks, or an answer, came from storage, and extend the wait.

        Args:
            rest_s: estimated seconds until the remaining blocks have arrived; the wait may last
                that long. None to keep the limit that `restrict` has set.
        """
        self._heard_at = self._time()
        if self._step_s is not None:
            self._deadline_s = max(self._deadline_s, self._spent() + self._step_s)
        if rest_s is not None:
            self._allowed_s = max(self._allowed_s, self._spent() + rest_s)
        self._reschedule()

    def restart(self) -> None:
        """Set the seconds spent waiting to 0, because storage has answered in time.

        Call this when the answer says that the awaited ticket is not written yet. The budget then
        limits the time without an answer from storage, not the wait for the ticket.
        """
        self._spent_s = 0.0

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the `with` block, which waits for storage, when the budget has no seconds left.

        The seconds that the `with` block takes are subtracted from the budget.

        Raises:
            TimeoutError: no seconds are left.
        """
        assert self._scope is None, "a request waits for one thing at a time"
        self._since = self._heard_at = self._time()
        try:
            async with asyncio.timeout(None) as self._scope:
                self._reschedule()
                yield
        finally:
            self._spent_s, self._scope = self._spent(), None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Pause the count of seconds inside the `with`, which copies fetched blocks to the device.

        The end of the `with` counts as an arrival of blocks, which can extend the wait for storage.
        """
        self._spent_s, self._is_stopped = self._spent(), True
        self._reschedule()
        try:
            yield
        finally:
            self._is_stopped = False
            self._since = self._time()
            self.arrived()

    def _spent(self) -> float:
        is_waiting = self._scope is not None and not self._is_stopped
        return self._spent_s + (self._time() - self._since if is_waiting else 0.0)

    def _reschedule(self) -> None:
        scope = self._scope
        if scope is not None and not scope.expired():
            left_s = math.inf if self._is_stopped else self.left_s
            scope.reschedule(None if left_s == math.inf else self._time() + left_s)
