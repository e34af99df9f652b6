"""The longest turn of an event loop, in processor time of its thread: a busy machine adds none."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LoopTurns:
    """What each turn of the running loop takes while `measured` is entered.

    longest_s: processor seconds of the loop's thread in the longest turn so far.
    total_s: processor seconds of all turns so far.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.total_s = 0.0
        self._is_measuring = False
        self._began_at = 0.0

    @contextmanager
    def measured(self) -> Iterator[LoopTurns]:
        """Measure every turn of the running loop until the body ends.

        The loop does not sleep meanwhile, and garbage is not collected: how long that takes depends
        on everything else in the process.
        """
        loop = asyncio.get_running_loop()

        def turn() -> None:
            if self._is_measuring:
                self._note()
                loop.call_soon(turn)

        collected = gc.isenabled()
        gc.disable()
        self._is_measuring, self._began_at = True, time.thread_time()
        loop.call_soon(turn)
        try:
            yield self
        finally:
            self._note()  # the turn in which the body ends
            self._is_measuring = False
            if collected:
                gc.enable()

    def _note(self) -> None:
        now = time.thread_time()
        took_s, self._began_at = now - self._began_at, now
        self.longest_s = max(self.longest_s, took_s)
        self.total_s += took_s
