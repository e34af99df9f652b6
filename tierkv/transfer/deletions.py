"""Deletions of all that a service has stored, for example before new weights are loaded.

The class `Deletions` records the deletions. By this record, a read or write of storage finds out
that its block is from before a deletion, and must not be used or stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tierkv.errors import StoreRefusedError, StoreUnavailableError


class Deletions:
    """The deletions of all values of a service, and the writes that must not undo them.

    Deletions are counted as generations: a block or ticket belongs to the generation in which it
    was computed or queued for storage, and each deletion begins the next generation. Blocks and
    tickets of an earlier generation are no longer written, and reads that began before the deletion
    return nothing. Nothing is read or written during a deletion, nor after a failed deletion until
    another one succeeds.

    Attributes:
        generation: number of deletions begun so far.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._num_under_way = 0
        self._has_failed = False
        self._num_writes = 0
        self._no_writes = asyncio.Event()
        self._no_writes.set()

    @property
    def bars_reads(self) -> bool:
        """True while values must not be read from storage, because they are being deleted.

        After a failed deletion, this stays True until another deletion succeeds.
        """
        return self._has_failed or self._num_under_way > 0

    def refusal(self, generation: int) -> str:
        """Return the reason why content of `generation` may not be written now; "" if it may be."""
        if generation != self.generation:
            return "the cache was deleted after this content was computed: compute the prompt again"
        if self._num_under_way:
            return "the stored values are being deleted: try again when the deletion has ended"
        if self._has_failed:
            return "a deletion of the stored values has failed: repeat it"
        return ""

    def check(self, generation: int) -> None:
        """Raise an error if a deletion of the stored values has begun since `generation` was read.

        Args:
            generation: an earlier value of the attribute `generation`.

        Raises:
            StoreRefusedError: a deletion has begun.
        """
        if generation != self.generation:
            raise StoreRefusedError(self.refusal(generation))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make deletions of all values wait while this context is entered.

        Write to the store inside this context. Directly before entering it, call `refusal` to check
        that the value may still be written; there must be no `await` between the two.
        """
        self._num_writes += 1
        self._no_writes.clear()
        try:
            yield
        finally:
            self._num_writes -= 1
            if not self._num_writes:
                self._no_writes.set()

    @asynccontextmanager
    async def deleting(self, deadline_s: float) -> AsyncIterator[None]:
        """Begin the next generation, and wait until no write is under way; then enter the context.

        Inside it, the caller must remove the stored values. If the caller's code raises, the
        deletion counts as failed.

        Args:
            deadline_s: seconds to wait for writes that are under way.

        Raises:
            StoreUnavailableError: the writes did not end in time; the context was not entered.
        """
        self.generation += 1
        self._num_under_way += 1
        is_done = False
        try:
            await self._until_nothing_is_written(deadline_s)
            yield
            is_done = True
        finally:
            self._num_under_way -= 1
            self._has_failed = not is_done

    async def _until_nothing_is_written(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._no_writes.wait()
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"{self._num_writes} writes to storage have not ended within {deadline_s:g} s, so "
                "stored values were not deleted: repeat the deletion when the store answers"
            ) from error
