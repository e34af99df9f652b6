"""How many bytes may be copied down in the background at once, and that loads go first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Turn:
    num_bytes: int
    granted: asyncio.Future[None]


class ByteBudget:
    """At most `max_bytes` in flight, in the order of asking; a bigger piece goes alone.

    is_busy: whether something more urgent is on its way. While it is, one piece at a time goes, so
    that the background lives on, but leaves the bandwidth to the others. After that has changed,
    `look_again` lets more go.
    """

    def __init__(self, max_bytes: int, is_busy: Callable[[], bool]) -> None:
        self.max_bytes = max_bytes
        self.bytes_in_flight = 0
        self.most_in_flight = 0
        self._is_busy = is_busy
        self._num_in_flight = 0
        self._line: deque[_Turn] = deque()

    @property
    def num_waiting(self) -> int:
        return sum(not turn.granted.cancelled() for turn in self._line)

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the turn of `num_bytes`; they are in flight until the body ends."""
        turn = _Turn(num_bytes, asyncio.get_running_loop().create_future())
        self._line.append(turn)
        self.look_again()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if not turn.granted.cancelled() and turn.granted.done():
                self._ended(turn)
            else:
                turn.granted.cancel()  # it may have left the line meanwhile
                self.look_again()  # those behind it may fit
            raise
        try:
            yield
        finally:
            self._ended(turn)

    def _ended(self, turn: _Turn) -> None:
        self.bytes_in_flight -= turn.num_bytes
        self._num_in_flight -= 1
        self.look_again()

    def look_again(self) -> None:
        """Let go what may go now."""
        while self._line:
            turn = self._line[0]
            if turn.granted.cancelled():
                self._line.popleft()
                continue
            fits = self.bytes_in_flight + turn.num_bytes <= self.max_bytes
            if self._num_in_flight and (not fits or self._is_busy()):
                return
            self._line.popleft()
            self._num_in_flight += 1
            self.bytes_in_flight += turn.num_bytes
            self.most_in_flight = max(self.most_in_flight, self.bytes_in_flight)
            turn.granted.set_result(None)

    def findings(self) -> list[str]:
        """What is wrong, in words, when nothing is on its way."""
        if self.bytes_in_flight or self._num_in_flight:
            return [f"nothing runs, but {self.bytes_in_flight} bytes of copies down are counted"]
        return []
