"""What several ranks have done, and who is dead or late.

Ranks report; nobody asks them, and no collective is in any loop. A movement has ended when every
rank has reported it or has left; one that failed on any rank has failed. So a block counts on a
tier exactly when every rank has its shard there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tierkv.errors import DeviceFailedError, TransferError

DEAD_S = 60.0

Ended = Callable[[TransferError | None], object]


@dataclass(slots=True, eq=False)
class _Movement:
    """missing: ranks that have not reported it. problem: what the first that failed said."""

    blocks: tuple[int, ...]
    ended: Ended
    begun: float
    missing: set[int]
    problem: TransferError | None = None


class Ledger:
    """For any thread. late_s: so long after its begin a movement is late; dead_s: a rank that owes
    one for so long, and has been silent, is dead. now: seconds."""

    def __init__(
        self,
        num_ranks: int,
        *,
        late_s: float,
        dead_s: float = DEAD_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None  # why the first rank that left did
        self._late_s = late_s
        self._dead_s = max(dead_s, late_s)
        self._now = now
        self._movements: dict[int, _Movement] = {}
        self._heard = dict.fromkeys(range(num_ranks), now())
        self._left: dict[int, str] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    def begin(self, blocks: tuple[int, ...] = (), ended: Ended = lambda _: None) -> int:
        """The number of a movement that every rank is sent. ended: called once, on the thread that
        hears of it, when no rank touches the blocks any more, with why it failed. Raises
        DeviceFailedError if a rank has left."""
        with self._lock:
            if self.failure is not None:
                raise DeviceFailedError(self.failure, blocks=blocks)
            number = next(self._numbers)
            self._movements[number] = _Movement(blocks, ended, self._now(), set(self._heard))
            return number

    def report(self, rank: int, number: int, problem: str | None = None) -> None:
        """A rank says that it is done, or why it failed; a second time changes nothing."""
        with self._lock:
            self._heard[rank] = self._now()
            movement = self._movements.get(number)
            if movement is None or rank not in movement.missing:
                return
            movement.missing.discard(rank)
            if problem is not None and movement.problem is None:
                movement.problem = TransferError(problem, blocks=movement.blocks)
            over = self._over([number])
        _tell(over)

    def cancel(self, number: int, why: TransferError) -> None:
        """No rank was sent it after all."""
        with self._lock:
            movement = self._movements.pop(number, None)
        if movement is not None:  # else a rank has left meanwhile
            movement.ended(why)

    def alive(self, rank: int) -> None:
        with self._lock:
            self._heard[rank] = self._now()

    def leave(self, rank: int, why: str) -> bool:
        """What the rank owes has failed. False if it has left before."""
        with self._lock:
            if rank in self._left:
                return False
            self._left[rank] = why
            self.failure = self.failure or why
            for movement in self._movements.values():
                if rank in movement.missing:
                    movement.missing.discard(rank)
                    failed = DeviceFailedError(self.failure, blocks=movement.blocks)
                    movement.problem = movement.problem or failed
            over = self._over(list(self._movements))
        _tell(over)
        return True

    def _over(self, numbers: list[int]) -> list[_Movement]:
        return [self._movements.pop(n) for n in numbers if not self._movements[n].missing]

    def silent(self) -> list[int]:
        """Ranks that are dead."""
        with self._lock:
            now = self._now()
            owing = self._owed(now).items()
            return [rank for rank, owed in owing if self._is_dead(rank, owed, now)]

    def _owed(self, now: float) -> dict[int, list[int]]:
        """By rank, the movements that are late."""
        owed: dict[int, list[int]] = {}
        for number, movement in self._movements.items():
            if now - movement.begun > self._late_s:
                for rank in movement.missing:
                    owed.setdefault(rank, []).append(number)
        return dict(sorted(owed.items()))

    def _silent_s(self, rank: int, owed: list[int], now: float) -> float:
        """Of a rank that had nothing to do before, nothing was to be heard."""
        return now - max(self._heard[rank], self._movements[owed[0]].begun)

    def _is_dead(self, rank: int, owed: list[int], now: float) -> bool:
        return self._silent_s(rank, owed, now) > self._dead_s

    def findings(self) -> list[str]:
        """Ranks that have left, are dead or late, by name, with what they owe."""
        with self._lock:
            now = self._now()
            wrong = [f"rank {rank} has left: {why}" for rank, why in sorted(self._left.items())]
            for rank, owed in self._owed(now).items():
                state = "is dead" if self._is_dead(rank, owed, now) else "lags"
                wrong.append(
                    f"rank {rank} {state}, silent for {self._silent_s(rank, owed, now):.1f} s: "
                    f"owes {len(owed)} movements, the first is {owed[0]}"
                )
            return wrong


def _tell(over: list[_Movement]) -> None:
    for movement in over:
        movement.ended(movement.problem)
