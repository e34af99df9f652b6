"""Warnings about frequent events, logged at most once a second with the number of events."""

from __future__ import annotations

import asyncio
import logging

INTERVAL_S = 1.0


class LogThrottle:
    """Logs the first event at once, and the events of the following second as one line at its end.

    Args:
        log: the logger.
        text: format string with two fields: the number of events, and the last reason.
    """

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log = log
        self._text = text
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._reason = ""

    def warn(self, reason: str, count: int = 1) -> None:
        """Log events now, or together with later ones at the end of the second.

        Call this on the event loop's thread.

        Args:
            reason: the reason of the events. A line shows only the reason of its last event.
            count: number of events.
        """
        self._count += count
        self._reason = reason
        if self._timer is None:
            self._log_count()

    def _log_count(self) -> None:
        self._timer = None
        if self._count:
            self._log.warning(self._text, self._count, self._reason)
            self._count = 0
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._log_count)
