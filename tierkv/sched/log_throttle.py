"""Throttled warnings for frequent events: one line a second, with a count."""

from __future__ import annotations

import asyncio
import logging

INTERVAL_S = 1.0


class LogThrottle:
    """Logs the first warning at once, and those of the next second in one line at its end.

    Args:
        log: the logger.
        text: format with places for the number of events and the last reason.
    """

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log = log
        self._text = text
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._reason = ""

    def warn(self, reason: str, count: int = 1) -> None:
        """Count events, and log them now or at the end of the running second. Call it on the loop.

        Args:
            reason: the reason; the last one is logged.
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
