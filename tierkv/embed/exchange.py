"""Calls from an engine's threads to the service's thread: made at once, answered later.

An engine's thread takes no lock and never waits when it makes a call or polls: a wait for a lock
gives up the GIL, and the thread may get the GIL back only 5 ms later. Therefore each step of the
methods here is one operation on a dict or deque, which no other thread can interrupt.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from tierkv import tracing
from tierkv.errors import GateTimeoutError, TierKVError

T = TypeVar("T")


class QueueFullError(TierKVError):
    """There are too many open calls: collect finished calls with `poll`, and call again."""


class AbortedError(TierKVError):
    """The call was cancelled, or its request was aborted, before there was a result."""


class Answer(Enum):
    """The state of a call to the service's thread: still running, done, or refused."""

    READY = "ready"  # `result()` returns the result
    ASK_AGAIN = "ask_again"  # not done yet: ask again in the next step
    REFUSED = "refused"  # `error` has the reason; there is no result


class Call(Generic[T]):
    """A call to the service's thread, and its result once it is done. Any thread may read it.

    Attributes:
        number: number of the call in its exchange.
        kind: name of the method that made the call.
        request_id: id of the request that the call is about; "" for none.
        span: tracing context of the caller; None without tracing.
        answer: ASK_AGAIN until the call is done, then READY or REFUSED.
        error: reason of a refused call; None otherwise.
    """

    __slots__ = ("_bell", "_callbacks", "_exchange", "_result", "answer", "error", "kind", "number",
                 "request_id", "span")  # fmt: skip

    def __init__(self, exchange: Exchange, number: int, kind: str, request_id: str) -> None:
        self.number = number
        self.kind = kind
        self.request_id = request_id
        self.span = tracing.context()
        self.answer = Answer.ASK_AGAIN
        self.error: TierKVError | None = None
        self._result: T | None = None
        self._exchange = exchange
        self._bell: threading.Event | None = None
        self._callbacks: deque[Callable[[], None]] = deque()

    @property
    def is_done(self) -> bool:
        return self.answer is not Answer.ASK_AGAIN

    def result(self) -> T:
        """Return the result of a finished call.

        After that, `poll` does not return the call any more.

        Raises:
            TierKVError: the call was refused with this error.
            GateTimeoutError: the call is not done.
        """
        if self.answer is Answer.ASK_AGAIN:
            raise GateTimeoutError(f"{self} is not done yet: ask again after the next poll()")
        self._exchange.pop(self)
        if self.error is not None:
            raise self.error
        return cast("T", self._result)

    def wait(self, timeout_s: float) -> T:
        """Block this thread until the call is done, and return its result.

        The thread must not run an event loop.

        Args:
            timeout_s: longest time to block, in seconds.

        Raises:
            GateTimeoutError: the call is not done after `timeout_s` seconds; it continues.
            TierKVError: the call was refused.
        """
        bell = threading.Event()
        self.when_done(bell.set)
        self._exchange.flush()
        if not bell.wait(timeout_s):
            raise GateTimeoutError(
                f"{self} was not done within {timeout_s:g} s: wait longer, or cancel the call"
            )
        return self.result()

    async def finished(self) -> T:
        """Wait, on the caller's own event loop, until the call is done; return its result.

        Cancelling this wait does not cancel the call.

        Raises:
            TierKVError: the call was refused.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        self.when_done(wake)
        self._exchange.flush()
        await done.wait()
        return self.result()

    def when_done(self, wake: Callable[[], None]) -> None:
        """Call `wake` once the call is done, or now if it is done already.

        Args:
            wake: must be quick and must not raise; called on this thread or on the service's.
        """
        self._callbacks.append(wake)
        if self.is_done:
            self.run_callbacks()

    def cancel(self) -> None:
        """Ask for a cancellation, unless the call is done.

        A cancelled call releases the blocks and slots that it has acquired.
        """
        self._exchange.cancel(self)

    def settle(self, result: T | None, error: TierKVError | None) -> None:
        """Set the result or the error of the call. Only the exchange calls this.

        Args:
            result: the result of a call that succeeded.
            error: the error of a call that failed; None for success.
        """
        self._result = result
        self.error = error
        self.answer = Answer.READY if error is None else Answer.REFUSED
        self.run_callbacks()

    def run_callbacks(self) -> None:
        """Run the callbacks given to `when_done` that no thread has run yet."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # another thread took the last one
            callback()

    def __str__(self) -> str:
        return f"{self.kind} of {self.request_id!r}" if self.request_id else self.kind


Work = Callable[..., Any]


class Exchange:
    """An engine's open calls: unanswered ones, and answered ones that `poll` has not returned.

    Attributes:
        failure: error with which new calls are refused; None while calls are accepted.
        holds: True to keep new calls back until `flush` sends them together. The service's thread
            is then woken once in a step of the engine, instead of once for each call (30 us each).
            Methods that wait for a call send all calls that are kept back.

    Args:
        max_calls: largest number of open calls; further calls are refused.
        wake: makes the service's thread call `pop_work`; must not block.
    """

    def __init__(self, max_calls: int, wake: Callable[[], None]) -> None:
        self.failure: TierKVError | None = None
        self.holds = False
        self._max_calls = max_calls
        self._wake = wake
        self._numbers = itertools.count()
        self._pending: dict[int, Call[Any]] = {}
        self._finished: dict[int, Call[Any]] = {}
        self._inbox: deque[tuple[Call[Any], Work]] = deque()
        self._cancels: deque[int] = deque()
        self._bell = threading.Event()

    # The engine's side

    def submit(self, kind: str, request_id: str, work: Work) -> Call[Any]:
        """Make a call and return it.

        If too many calls are open or the service has ended, the returned call is refused already,
        and `poll` does not return it.

        Args:
            kind: name of the method that makes the call.
            request_id: id of the request that the call is about; "" for none.
            work: function that carries out the call on the service's thread.
        """
        call: Call[Any] = Call(self, next(self._numbers), kind, request_id)
        if self.failure is not None:
            call.settle(None, self.failure)
            return call
        if len(self._pending) + len(self._finished) >= self._max_calls:
            text = (
                f"{self._max_calls} calls are open, the maximum: call poll() to collect "
                "finished calls, then try again"
            )
            call.settle(None, QueueFullError(text))
            return call
        self._pending[call.number] = call
        self._inbox.append((call, work))
        if not self.holds:
            self._wake()
        if self.failure is not None:  # the service may have ended without this call
            self.finish(call, error=self.failure)
        return call

    def flush(self) -> None:
        """Wake the service's thread if calls or cancellations wait for it."""
        if self._inbox or self._cancels:
            self._wake()

    def poll(self) -> list[Call[Any]]:
        """Return the calls that have finished since the last poll, in the order of finishing.

        A call is left out if its result was already read. Never blocks.
        """
        if not self._finished:
            return []
        done = [call for call in list(self._finished.values()) if call.is_done]
        return [call for call in done if self._finished.pop(call.number, None) is not None]

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` can return a finished call, at most `timeout_s` seconds.

        Returns:
            True if a call has finished; False after the timeout.
        """
        deadline = time.monotonic() + timeout_s
        self.flush()
        while True:
            self._bell.clear()
            if any(call.is_done for call in list(self._finished.values())):
                return True
            if not self._bell.wait(max(deadline - time.monotonic(), 0.0)):
                return False

    def pop(self, call: Call[Any]) -> None:
        """Remove a finished call, so that `poll` does not return it."""
        self._finished.pop(call.number, None)

    def cancel(self, call: Call[Any]) -> None:
        """Ask the service's thread to cancel a call, unless the call is done."""
        if call.number in self._pending:
            self._cancels.append(call.number)
            if not self.holds:
                self._wake()

    @property
    def num_open(self) -> int:
        return len(self._pending) + len(self._finished)

    # The loop's side

    def pop_work(self) -> tuple[Call[Any], Work] | None:
        """Remove the oldest call that has not started, and return it with the function to run.

        Return None if there is no such call.
        """
        return self._inbox.popleft() if self._inbox else None

    def pop_cancel(self) -> int | None:
        """Return the number of the next call to cancel; None if there is none now."""
        return self._cancels.popleft() if self._cancels else None

    def finish(
        self, call: Call[Any], *, result: object = None, error: TierKVError | None = None
    ) -> None:
        """Set the answer of a call, from any thread. Only the first answer of a call counts.

        Args:
            call: the call to answer.
            result: the result, if the call succeeded.
            error: the reason if the call is refused; None for success.
        """
        if self._pending.pop(call.number, None) is None:
            return
        self._finished[call.number] = call  # first: reading the result removes it
        call.settle(result, error)
        self._bell.set()

    def pending(self) -> list[Call[Any]]:
        """Return the calls that have no answer yet."""
        return list(self._pending.values())

    def refuse(self, error: TierKVError) -> None:
        """Make every new call fail with `error`; running calls continue.

        If new calls were refused before, the first error remains.
        """
        if self.failure is None:
            self.failure = error

    def fail(self, error: TierKVError) -> None:
        """Make all pending calls and all later calls fail with `error`.

        If `refuse` was called before, later calls fail with the error that was passed to the first
        call of `refuse`.
        """
        self.refuse(error)
        for call in self.pending():
            self.finish(call, error=error)
        self._bell.set()

    def fork(self, error: TierKVError) -> None:
        """Refuse all calls in a forked child process, which has no service thread.

        No lock is acquired, because a thread of the parent process may have held it at the fork.
        """
        self.failure = error
        for call in self.pending():
            call.answer, call.error = Answer.REFUSED, error
        self._pending, self._finished = {}, {}
        self._bell = threading.Event()
