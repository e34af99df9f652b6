"""How a process that serves is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("tierkv.server")


@contextmanager
def told_to_end(hurry: Callable[[], None]) -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; a second signal calls `hurry`, on the loop."""
    told = asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            log.warning("a second signal: not waiting for the work under way")
            hurry()
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield told
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
