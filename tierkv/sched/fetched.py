"""What a fetch has come to, while it runs and for who asked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.cache.history import Fate
from tierkv.cache.index import Lease
from tierkv.storage.protocol import GetOutcome, GetStatus


@dataclass(slots=True)
class Fetched:
    """What is on the host now because it was asked for.

    tokens: the prompt's tokens that came from storage for this call. earlier: those that came for
        the same request before it, if its owner says so.
    first_problem: why it ended before the end of the prompt, None if it did not.
    It stays on the host until `release`, which the owner calls once the request is admitted, or
    earlier: then it may be evicted, and the request matches less.
    """

    tokens: range
    first_problem: GetOutcome | None
    _release: Callable[[], None]
    is_released: bool = False
    earlier: tuple[range, ...] = ()

    def release(self) -> None:
        """Let it be evicted again. More than once is as good as once."""
        if not self.is_released:
            self.is_released = True
            self._release()


@dataclass(slots=True)
class Progress:
    """How far a fetch has come. lease: of what the prompt has here by now, the tail aside.

    is_whole: all that storage has of it is here, but for the first tokens of another one's tail.
    waits_since: on the loop's clock, if the request could compute instead and has not waited for
        nothing yet.
    queued_before, arrived_before: bytes that were queued, and that had come since the start, for
    all other fetches when this one began.
    """

    lease: Lease
    fate: Fate | None = None
    tail: Lease | None = None
    num_tokens: int = 0
    first_token: int = 0
    first_problem: GetOutcome | None = None
    is_whole: bool = False
    waits_since: float | None = None
    claimed: list[bytes] = field(default_factory=list)
    was_given_up: bool = False
    expected_bytes: float = 0.0
    began: float = 0.0
    queued_before: float = 0.0
    arrived_before: float = 0.0
    arrived_bytes: float = 0.0

    def ends(self, fate: Fate, reason: str) -> None:
        """It goes no further, for a reason that is not the store's answer."""
        status = GetStatus.MISS if fate is Fate.NOT_WORTH_IT else GetStatus.FAILED
        self.first_problem, self.fate = GetOutcome(status, reason), fate
