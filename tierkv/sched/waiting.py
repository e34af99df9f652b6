"""Who is admitted next: by priority, then by tenant, then by arrival; and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierkv.errors import ConfigError
from tierkv.sched.computing import Wait
from tierkv.sched.fetcher import Fetched
from tierkv.sched.request import Request, RequestSpec

# Whoever has been passed over so often goes next, whatever the others' priority.
MAX_PASSED_OVER = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one tenant may run at once; None is no limit of its own.

    requests: running ones. blocks: device blocks that they hold together. request_blocks: of each.
    """

    requests: int | None = None
    blocks: int | None = None
    request_blocks: int | None = None

    def __post_init__(self) -> None:
        for what in (self.requests, self.blocks, self.request_blocks):
            if what is not None and what < 1:
                raise ConfigError("a limit of running requests or blocks is at least 1")

    def allow(self, running: int, blocks: int) -> bool:
        """Whether so many requests with so many blocks are within the limits."""
        return (self.requests is None or running <= self.requests) and (
            self.blocks is None or blocks <= self.blocks
        )


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that is not admitted yet. fetched: what was brought from storage for it.

    wait: for blocks that another request computes; timer: ends it. give_up_at: when the last such
    wait of this request ends, seconds on the loop's clock, None before the first.
    """

    spec: RequestSpec
    fetched: Fetched | None
    outcome: asyncio.Future[Request]
    number: int = 0
    passed_over: int = 0
    uses_partial: bool = True  # False once that has stood in the request's own way
    wait: Wait | None = None
    timer: asyncio.TimerHandle | None = None
    give_up_at: float | None = None

    @property
    def tenant(self) -> str:
        return self.spec.prompt.space

    @property
    def is_parked(self) -> bool:
        return self.wait is not None and not self.wait.is_over

    def park(self, wait: Wait, now: float, on_timeout: Callable[[], None]) -> None:
        """Stay aside until the wait is over, in one way or another."""
        if self.give_up_at is None:
            self.give_up_at = now + wait.patience_s
        self.wait = wait
        wait.claim.num_waiting += 1
        left_s = min(wait.patience_s, self.give_up_at - now)
        self.timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), on_timeout)

    def unpark(self) -> Wait | None:
        """Go on; what it waited for, if it did."""
        wait, self.wait = self.wait, None
        if wait is not None:
            wait.claim.num_waiting -= 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return wait

    def let_go(self) -> None:
        self.unpark()
        if self.fetched is not None:
            self.fetched.release()


@dataclass(slots=True)
class WaitingLine:
    """The line. Within one priority, tenants are served in turn by the blocks they were given:
    the one that was given least goes next. Within a tenant, the first that came."""

    _line: list[Waiting] = field(default_factory=list)
    _given: dict[str, int] = field(default_factory=dict)
    _num_ever: int = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line)

    def __contains__(self, waiting: object) -> bool:
        return waiting in self._line

    def join(self, waiting: Waiting) -> None:
        waiting.number = self._num_ever
        self._num_ever += 1
        # A tenant that comes (back) starts level with those who wait, not with an old credit.
        present = {other.tenant for other in self._line}
        if waiting.tenant not in present:
            least = min((self._given.get(tenant, 0) for tenant in present), default=0)
            self._given[waiting.tenant] = max(self._given.get(waiting.tenant, 0), least)
        self._line.append(waiting)

    def leave(self, waiting: Waiting) -> None:
        waiting.unpark()
        self._line.remove(waiting)

    def forget(self, tenant: str) -> None:
        """A tenant that is no more."""
        self._given.pop(tenant, None)

    def admitted(self, waiting: Waiting, num_blocks: int) -> None:
        """It leaves with `num_blocks`; those that came before it have been passed over."""
        self._line.remove(waiting)
        self._given[waiting.tenant] = self._given.get(waiting.tenant, 0) + num_blocks
        for other in self._line:
            other.passed_over += other.number < waiting.number

    def findings(self) -> list[str]:
        """What is wrong, in words."""
        ids = [one.spec.request_id for one in self._line]
        wrong = [f"request {one!r} waits twice" for one in sorted(set(ids)) if ids.count(one) > 1]
        for one in self._line:
            if (one.wait is None) != (one.timer is None):
                wrong.append(f"request {one.spec.request_id!r} waits for blocks without an end")
            if one.wait is not None and one.wait.claim.num_waiting < 1:
                wrong.append(f"request {one.spec.request_id!r} is not counted by what it waits for")
        return wrong

    def ordered(self) -> list[Waiting]:
        """All of them, next first."""
        return sorted(
            self._line,
            key=lambda one: (
                one.passed_over < MAX_PASSED_OVER,
                -one.spec.priority,
                self._given.get(one.tenant, 0),
                one.number,
            ),
        )
