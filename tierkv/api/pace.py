"""How much of what clients send is begun in one turn of the event loop; the rest comes after it.

Without it, 10,000 requests that arrive together are all parsed and begun in the one turn that
finds them, and nothing else has the loop for seconds: no timer, no copy, no probe.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

_FIRST = 32
_MOST = 128
_ITEMS = 64  # each of which takes some 20 us
_TURN_S = 0.01  # what a turn should take where there is more to do than it can


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """`items`, so many in each turn of the event loop: for lists that callers may make long."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _ITEMS == 0:
            await asyncio.sleep(0)


class Pace:
    """Lets so many pieces through in each turn as make it last about 10 ms: between 1 and 128,
    by what they have taken lately."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._per_turn = _FIRST
        self._left = _FIRST
        self._began: float | None = None  # this turn, on a monotonic clock; None: nothing came yet
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def lets_through(self) -> bool:
        """Whether one more piece may be taken in this turn; if so, it counts as taken."""
        if self._began is None:
            self._began = time.monotonic()
            self._loop.call_soon(self._loop.call_soon, self._next_turn)
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn, when those that came before it have been called."""
        self._waiting.append(go_on)

    def _next_turn(self) -> None:
        """Runs behind the handlers that this turn began: they were woken before it was called."""
        now = time.monotonic()
        if self._left == 0 and self._began is not None:
            self._adapt(now - self._began)
        self._began, self._left = None, self._per_turn
        if not self._waiting:
            return
        self._began = now
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        self._loop.call_soon(self._next_turn)

    def _adapt(self, took_s: float) -> None:
        if took_s > _TURN_S:
            self._per_turn = max(1, self._per_turn // 2)
        else:
            self._per_turn = min(_MOST, self._per_turn + 4)
