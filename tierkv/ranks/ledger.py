"""Several ranks, one decision maker: what all of them have done, and who is dead or late.

Ranks report; nobody asks them, and no collective is in any loop. A movement counts when every rank
has reported it done; one that failed on any rank has failed. So a block counts on a tier exactly
when every rank has its shard there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tierkv.errors import BadRequestError


class Outcome(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class _Movement:
    begun: float
    missing: set[int]
    failed: set[int] = field(default_factory=set)


class Ranks:
    """A ledger. Times are the caller's seconds; `late_s` after its begin a movement is late."""

    def __init__(self, num_ranks: int, *, late_s: float, dead_s: float) -> None:
        if num_ranks < 1 or not 0 < late_s <= dead_s:
            raise ValueError("ranks: at least one, and 0 < late_s <= dead_s")
        self.num_ranks = num_ranks
        self._late_s = late_s
        self._dead_s = dead_s
        self._movements: dict[int, _Movement] = {}
        self._heard: dict[int, float] = {}
        self._left: dict[int, str] = {}

    def begin(self, number: int, now: float) -> None:
        """Movement `number` was sent to every rank."""
        if number in self._movements:
            raise BadRequestError(f"movement {number} has begun already")
        for rank in range(self.num_ranks):
            self._heard.setdefault(rank, now)
        movement = _Movement(now, set(range(self.num_ranks)))
        movement.failed = set(self._left)
        movement.missing -= movement.failed
        self._movements[number] = movement

    def report(self, rank: int, number: int, now: float, *, failed: bool = False) -> Outcome:
        """A rank says it is done, well or not. A second report of the same changes nothing."""
        self.alive(rank, now)
        movement = self._movements.get(number)
        if movement is None:
            raise BadRequestError(f"rank {rank} reports movement {number}, which is not under way")
        if rank in movement.missing:
            movement.missing.discard(rank)
            if failed:
                movement.failed.add(rank)
        return self.outcome(number)

    def alive(self, rank: int, now: float) -> None:
        if not 0 <= rank < self.num_ranks:
            raise BadRequestError(f"there is no rank {rank} of {self.num_ranks}")
        self._heard[rank] = max(now, self._heard.get(rank, now))

    def leave(self, rank: int, why: str) -> None:
        """A rank is gone: everything it has not reported has failed there."""
        self._left[rank] = why
        for movement in self._movements.values():
            if rank in movement.missing:
                movement.missing.discard(rank)
                movement.failed.add(rank)

    def outcome(self, number: int) -> Outcome:
        """PENDING as long as any rank may still touch the slots: a failure elsewhere does not end
        the wait for the others, whose copies go on."""
        movement = self._movements[number]
        if movement.missing:
            return Outcome.PENDING
        return Outcome.FAILED if movement.failed else Outcome.DONE

    def end(self, number: int) -> Outcome:
        """Forget a movement that is over; how it went."""
        outcome = self.outcome(number)
        if outcome is Outcome.PENDING:
            raise BadRequestError(
                f"movement {number} is not over: {self.missing(number)} are missing"
            )
        del self._movements[number]
        return outcome

    def missing(self, number: int) -> tuple[int, ...]:
        return tuple(sorted(self._movements[number].missing))

    def findings(self, now: float) -> list[str]:
        """Ranks that are dead or late, named, with what they owe."""
        wrong = [f"rank {rank} has left: {why}" for rank, why in sorted(self._left.items())]
        owed: dict[int, list[int]] = {}
        for number, movement in self._movements.items():
            if now - movement.begun > self._late_s:
                for rank in movement.missing:
                    owed.setdefault(rank, []).append(number)
        for rank, numbers in sorted(owed.items()):
            # Of a rank that had nothing to do before, nothing was to be heard.
            asked = self._movements[numbers[0]].begun
            silent = now - max(self._heard.get(rank, now), asked)
            state = "is dead, silent" if silent > self._dead_s else "lags, silent"
            wrong.append(
                f"rank {rank} {state} for {silent:.1f} s: owes {len(numbers)} movements, "
                f"the first is {min(numbers)}"
            )
        return wrong
