"""So many at a time, first come, first served; all who wait can be sent away at once."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from tierkv.errors import TierKVError


class Turns:
    """num_places: who has one is not counted as waiting. Synchronous but for `take`."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def take(self) -> None:
        """Return with a place, which `give_back` gives back. Raises what `send_away` was given."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # its turn had come, and has gone to the next
                    self._queue.remove(turn)
            elif turn.exception() is None:
                self.give_back()  # it came with the cancel
            raise

    def give_back(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def send_away(self, error: TierKVError) -> int:
        """Let all who wait raise `error`; how many they were."""
        turns = [turn for turn in self._queue if not turn.done()]
        self._queue.clear()
        for turn in turns:
            turn.set_exception(error)
        return len(turns)
