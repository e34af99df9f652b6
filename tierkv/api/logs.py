"""Where a node's log goes: standard error, one line for what is expected."""

from __future__ import annotations

import logging
import sys

from aiohttp.http_exceptions import HttpProcessingError


class _NoTracebackForBadHttp(logging.Filter):
    """What a client sends that is not HTTP is not our bug: a line says so, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "a connection brought bad HTTP: %s", (_one_line(error),)
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def _one_line(error: HttpProcessingError) -> str:
    return error.message.splitlines()[0][:120] if error.message else type(error).__name__


def log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.server").addFilter(_NoTracebackForBadHttp())
