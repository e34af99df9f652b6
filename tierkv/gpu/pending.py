"""An event of work that is on its way to a stream: submitted, refused, or not there yet."""

from __future__ import annotations

import threading
import time

from tierkv.errors import GateTimeoutError, TransferError
from tierkv.gpu.protocol import Event


class PendingEvent:
    """Stands for an event that a lane's thread will record.

    progress: notified by that thread whenever events have got on; shared by all of a lane.
    line, position: see Ordered.
    """

    __slots__ = ("_error", "_event", "_progress", "line", "position")

    def __init__(self, progress: threading.Condition, line: object, position: int) -> None:
        self._progress = progress
        self._event: Event | None = None
        self._error: TransferError | None = None
        self.line = line
        self.position = position

    def submitted(self, event: Event) -> None:
        """Called once, by the lane's thread, which holds `progress`; or else `failed`."""
        self._event = event

    def failed(self, error: TransferError) -> None:
        self._error = error

    @property
    def is_done(self) -> bool:
        if self._event is not None:
            return self._event.is_done
        if self._error is not None:
            raise self._error.with_traceback(None)  # it is asked often: else every answer is kept
        return False

    def wait_until_submitted(self, timeout_s: float) -> Event:
        """The event that has been recorded. Raises GateTimeoutError, or what kept it from it."""
        if self._event is None:
            with self._progress:
                self._progress.wait_for(
                    lambda: self._event is not None or self._error is not None, timeout_s
                )
        if self._event is not None:
            return self._event
        if self._error is not None:
            raise self._error.with_traceback(None)
        raise GateTimeoutError(f"the copy was not submitted within {timeout_s:g} s")

    def block_until_done(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        event = self.wait_until_submitted(timeout_s)
        event.block_until_done(max(deadline - time.monotonic(), 0.0))
