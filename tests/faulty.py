"""A store that fails on demand, around one that does not: for tests of whatever uses a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tests.latch import until
from tierkv.errors import StoreUnavailableError
from tierkv.storage.base import StoreWrapper
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
)

T = TypeVar("T")


class FaultyStore(StoreWrapper):
    """`Store` that passes every operation on to `inner`, less the faults that were asked for.

    An operation (any method with an await, lifetime aside) waits out `delay_s`, then at the latch
    if that is closed, then fails if it is its turn to, and only then reaches `inner`.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._latch = asyncio.Event()
        self._latch.set()
        self._is_firm = False
        self._passes_reads = False
        self._failing: frozenset[str] = frozenset()
        self._num_held = 0
        self._failures_due = 0
        self._flips: list[int] = []
        self.num_operations = 0
        self.num_reads = 0  # of these, all but writes
        self.delay_s = 0.0

    def hold(self) -> None:
        """Close the latch: operations that come to it wait there, until a cancel or `release`."""
        self._latch.clear()
        self._is_firm = self._passes_reads = False

    def hold_writes(self, *, firmly: bool = False) -> None:
        """Like `hold` or `hold_firmly`, for `put` alone."""
        self.hold()
        self._is_firm = firmly
        self._passes_reads = True

    def hold_firmly(self) -> None:
        """Like `hold`, but a cancelled caller waits for `release` too, as one must whose buffers
        a thread or a network card is still using."""
        self.hold()
        self._is_firm = True

    def release(self) -> None:
        self._latch.set()

    def let_through(self) -> None:
        """Let those go that wait at the latch now; it stays closed for all that come after."""
        self._latch.set()
        self._latch = asyncio.Event()

    @property
    def num_held(self) -> int:
        """Operations that wait at the latch."""
        return self._num_held

    async def until_held(self, num_operations: int) -> None:
        """Return when at least so many operations wait at the latch."""
        await until(lambda: self._num_held >= num_operations, f"{num_operations} held operations")

    def fail_next(self, num_operations: int) -> None:
        """Let so many operations fail as if the store did not answer."""
        self._failures_due = num_operations

    def fail_items(self, *names: str) -> None:
        """Let reads of these names fail from now on, as if they were on a node that is down."""
        self._failing = frozenset(names)

    def flip_next_get(self, *bits: int) -> None:
        """Flip one bit in each of the next values read; bit 0 is the lowest of the first byte."""
        self._flips.extend(bits)

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        await self._pass()
        return await ask(self.inner)

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        try:
            await self._pass()
        except StoreUnavailableError as error:
            return [GetOutcome(GetStatus.FAILED, str(error))] * len(items)
        outcomes = await self.inner.get_into(items)
        for at, item in enumerate(items):
            if item.name in self._failing:
                outcomes[at] = GetOutcome(GetStatus.FAILED, f"{item.name} fails, as it was told")
        for at, item in enumerate(items):
            if self._flips and outcomes[at].status is GetStatus.HIT:
                _flip(item.into, self._flips.pop(0))
                outcomes[at] = GetOutcome(GetStatus.HIT)  # a digest would be of what came before
        return outcomes

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        await self._pass()
        content = await self.inner.get(name, max_bytes=max_bytes)
        if content is None or not self._flips:
            return content
        flipped = bytearray(content)
        _flip((memoryview(flipped),), self._flips.pop(0))
        return bytes(flipped)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        try:
            await self._pass(is_write=True)
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        return await self.inner.put(items)

    async def _pass(self, *, is_write: bool = False) -> None:
        """Wait and fail as asked. Raises StoreUnavailableError."""
        self.num_operations += 1
        self.num_reads += not is_write
        await asyncio.sleep(self.delay_s)
        self._num_held += 1
        try:
            if is_write or not self._passes_reads:
                await self._wait_at_latch()
        finally:
            self._num_held -= 1
        if self._failures_due:
            self._failures_due -= 1
            raise StoreUnavailableError(f"{self.url} does not answer, as it was told")

    async def _wait_at_latch(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        latch = self._latch  # `let_through` leaves those who come later another
        while not latch.is_set():
            try:
                await latch.wait()
            except asyncio.CancelledError as error:
                if not self._is_firm:
                    raise
                cancelled = error
        if cancelled is not None:
            raise cancelled


def _flip(views: Sequence[memoryview], bit: int) -> None:
    at = bit // 8
    for view in views:
        if at < view.nbytes:
            view.cast("B")[at] ^= 1 << bit % 8
            return
        at -= view.nbytes
    raise AssertionError(f"the value has no bit {bit}")
