"""The staging ring of a lane: who may write where, and after which event. Accounts only."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from tierkv.errors import LayoutError
from tierkv.gpu.protocol import Event

E = TypeVar("E", bound=Event)

_ALIGNMENT = 256


class Ring(Generic[E]):
    """`capacity` bytes, handed out in turn. Positions count on for ever; the place is the rest.

    |<------------- capacity ------------->|
    | in use | in use |   next   |  in use (oldest) |
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._taken: int | None = None
        self._in_use: deque[tuple[int, E]] = deque()  # (first position, used until)

    def take(self, num_bytes: int) -> tuple[int, E | None]:
        """The offset of the next `num_bytes`, and the event before which they must not be written
        (None if nothing new need be waited for: whoever writes has waited, in order, for the events
        of earlier takes). `use_until` must follow. Raises LayoutError if they are more than the
        ring has."""
        assert self._taken is None, "use_until follows each take"
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > self.capacity:
            raise LayoutError(
                f"one block needs {num_bytes} bytes of staging, the ring has {self.capacity}: "
                "raise staging_bytes"
            )
        start = self._head
        if start % self.capacity + num_bytes > self.capacity:
            start += self.capacity - start % self.capacity
        self._head = start + num_bytes
        freed_by: E | None = None
        while self._in_use and self._in_use[0][0] < self._head - self.capacity:
            _, freed_by = self._in_use.popleft()  # events come in order: the last one covers all
        self._taken = start
        return start % self.capacity, freed_by

    def use_until(self, event: E) -> None:
        """What was taken last is in use until `event`."""
        assert self._taken is not None, "take comes first"
        self._in_use.append((self._taken, event))
        self._taken = None
        while self._in_use[0][1].is_done and len(self._in_use) > 1:
            self._in_use.popleft()

    def reset(self) -> None:
        """Nothing is in use any more."""
        self._taken = None
        self._in_use.clear()
