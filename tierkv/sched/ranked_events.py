"""Events of several ranks as one, and the ledger that says which rank owes what."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from tierkv.errors import DeviceFailedError, GateTimeoutError, TransferError
from tierkv.gpu.protocol import Event, Stream
from tierkv.sched.ranks import Outcome, Ranks

DEAD_S = 60.0


class RankedEvent:
    """Done when it is on every rank. settled: told once of each rank that is done or has failed;
    None where nobody wants to know."""

    def __init__(
        self, parts: Sequence[Event], settled: Callable[[int], None] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self._settled = settled
        self._lock = threading.Lock()  # a poller's thread and a compute thread may look at once
        self._pending = set(range(len(parts)))
        self._errors: dict[int, TransferError] = {}

    @property
    def is_done(self) -> bool:
        with self._lock:
            for rank in sorted(self._pending):
                try:
                    if not self.parts[rank].is_done:
                        continue
                except TransferError as error:
                    self._errors[rank] = error
                self._pending.discard(rank)
                if self._settled is not None:
                    self._settled(rank)
            if self._pending:
                return False
            if self._errors:
                rank = min(self._errors)
                why = self._errors[rank]
                kind = DeviceFailedError if isinstance(why, DeviceFailedError) else TransferError
                raise kind(f"rank {rank}: {why}", blocks=why.blocks) from why
            return True

    def block_until_done(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in sorted(self._pending):
            try:
                self.parts[rank].block_until_done(max(deadline - time.monotonic(), 0.0))
            except GateTimeoutError as error:
                raise GateTimeoutError(f"rank {rank}: {error}") from error
            except TransferError:
                continue  # it is named below, after the others
        if not self.is_done:
            raise GateTimeoutError(f"the ranks did not finish within {timeout_s:g} s")


class FailedEvent:
    """The event of what a rank did not even begin."""

    def __init__(self, error: TransferError) -> None:
        self._error = error

    @property
    def is_done(self) -> bool:
        raise self._error

    def block_until_done(self, timeout_s: float) -> None:  # noqa: ARG002 - the protocol's
        raise self._error


class RankedStream:
    def __init__(self, parts: Sequence[Stream]) -> None:
        self._parts = tuple(parts)

    def record(self) -> Event:
        return RankedEvent([stream.record() for stream in self._parts])

    def wait(self, event: Event, timeout_s: float) -> None:
        """Each rank's stream waits for its rank's part."""
        deadline = time.monotonic() + timeout_s
        for rank, stream in enumerate(self._parts):
            stream.wait(part_of(event, rank), max(deadline - time.monotonic(), 0.0))


def part_of(event: Event, rank: int) -> Event:
    return event.parts[rank] if isinstance(event, RankedEvent) else event


class Ledger:
    """`Ranks`, told from whichever thread sees an event first."""

    def __init__(self, num_ranks: int, late_s: float, now: Callable[[], float]) -> None:
        self._ranks = Ranks(num_ranks, late_s=late_s, dead_s=max(DEAD_S, late_s))
        self._now = now
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def begin(self) -> Callable[[int], None]:
        """A movement of all ranks has begun; what is returned is told of each where it has ended,
        well or not."""
        with self._lock:
            number = next(self._numbers)
            self._ranks.begin(number, self._now())

        def settled(rank: int) -> None:
            with self._lock:
                if self._ranks.report(rank, number, self._now()) is not Outcome.PENDING:
                    self._ranks.end(number)

        return settled

    def findings(self) -> list[str]:
        with self._lock:
            return self._ranks.findings(self._now())
