"""Questions to a store that may fail: each has its turn, its deadline, and is judged.

question -> breaker -> at most max_reads at a time -> deadline -> store
                ^------------------- judged -------------------'
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableSequence, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

from tierkv.clock import Clock
from tierkv.errors import ConfigError, StoreRefusedError, StoreUnavailableError, TierKVError
from tierkv.storage.protocol import Store
from tierkv.tasks import abandonable, background, task_group


@dataclass(frozen=True, slots=True)
class ResilienceSettings:
    """timeout_s, slowest_bytes_per_s: a read may take timeout_s and its bytes' time. A little more
        than the store's own deadline, whose errors say more.
    write_timeout_s: the same of a batch of writes, for which no request waits but a hand-off, with
        a deadline of its own.
    failures_to_open: failed operations in a row after which the store is left alone.
    probe_interval_s: how often it is then asked whether it is back.
    retries_per_operation: a budget, over all reads: 0.1 lets one read in ten be tried again.
    max_reads, max_waiting_reads: reads at the store, and waiting for their turn.
    write_batches, max_waiting_write_bytes: writes at the store (for each, where it is made of
        several), and waiting; beyond that the least valuable are dropped.
    full_pause_s: how long nothing is written after the store said it was full.
    negative_ttl_s, negative_names: how long, and of how many names, "there is none" is believed; a
        ticket that is found ends it, since then somebody has written.
    """

    timeout_s: float = 0.3
    write_timeout_s: float = 2.0
    slowest_bytes_per_s: float = 100e6
    failures_to_open: int = 5
    probe_interval_s: float = 1.0
    retries_per_operation: float = 0.1
    max_reads: int = 64
    max_waiting_reads: int = 1024
    write_batches: int = 2
    max_waiting_write_bytes: int = 512 << 20
    full_pause_s: float = 1.0
    negative_ttl_s: float = 0.5
    negative_names: int = 65_536

    def __post_init__(self) -> None:
        for name in ("timeout_s", "write_timeout_s", "slowest_bytes_per_s", "probe_interval_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0, not {value}")
        for name in ("failures_to_open", "max_reads", "max_waiting_reads", "write_batches"):
            count: int = getattr(self, name)
            if count < 1:
                raise ConfigError(f"{name} must be at least 1, not {count}")
        for name in (
            "retries_per_operation", "full_pause_s", "negative_ttl_s", "negative_names",
            "max_waiting_write_bytes",
        ):  # fmt: skip
            number: float = getattr(self, name)
            if not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"{name} must be a number not below 0, not {number}")


class BreakerState(Enum):
    CLOSED = "closed"  # operations reach the store
    OPEN = "open"  # they fail at once
    HALF_OPEN = "half_open"  # they fail at once, and one probe is under way


_TRANSITIONS = {
    BreakerState.CLOSED: {BreakerState.OPEN},
    BreakerState.OPEN: {BreakerState.HALF_OPEN},
    BreakerState.HALF_OPEN: {BreakerState.OPEN, BreakerState.CLOSED},
}


def advance(current: BreakerState, to: BreakerState) -> BreakerState:
    assert to in _TRANSITIONS[current], f"a breaker does not go from {current} to {to}"
    return to


@dataclass(frozen=True, slots=True)
class BreakerSnapshot:
    """since: Unix time of the last change. reason: of the failure that opened it last.
    degraded_s: how long it has not been closed, all in all."""

    state: BreakerState
    since: float
    num_opened: int
    reason: str
    degraded_s: float = 0.0


class Breaker:
    """Opens after `failures_to_open` failures with no success in between. Synchronous."""

    def __init__(self, failures_to_open: int, clock: Clock) -> None:
        self._failures_to_open = failures_to_open
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._since = clock.wall()
        self._num_failures = 0
        self._has_read_failed = False
        self._num_opened = 0
        self._reason = ""
        self._degraded_s = 0.0
        self._opened_at = 0.0  # monotonic

    @property
    def is_closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    @property
    def reason(self) -> str:
        return self._reason

    def snapshot(self) -> BreakerSnapshot:
        now = self._clock.monotonic()
        degraded_s = self._degraded_s + (0.0 if self.is_closed else now - self._opened_at)
        return BreakerSnapshot(self._state, self._since, self._num_opened, self._reason, degraded_s)

    def succeed(self, *, of_read: bool = True) -> None:
        """An operation was answered; one that was begun before the breaker opened says nothing, nor
        does a write of reads that failed: a disk can hang that still takes writes into memory."""
        if self.is_closed and (of_read or not self._has_read_failed):
            self._num_failures = 0
            self._has_read_failed = False

    def fail(self, reason: str, *, of_read: bool = True) -> bool:
        """An operation was not answered; whether that has opened the breaker."""
        if not self.is_closed:
            return False
        self._num_failures += 1
        self._has_read_failed |= of_read
        self._reason = reason
        if self._num_failures < self._failures_to_open:
            return False
        self._num_opened += 1
        self._opened_at = self._clock.monotonic()
        self._move(BreakerState.OPEN)
        return True

    def begin_probe(self) -> None:
        self._move(BreakerState.HALF_OPEN)

    def end_probe(self, failure: str | None) -> None:
        """failure: why the probe was not answered; None if it was."""
        self._num_failures = 0
        self._has_read_failed = False
        if failure is None:
            self._degraded_s += self._clock.monotonic() - self._opened_at
            self._move(BreakerState.CLOSED)
            return
        self._reason = failure
        self._move(BreakerState.OPEN)

    def _move(self, to: BreakerState) -> None:
        self._state = advance(self._state, to)
        self._since = self._clock.wall()


class Turns:
    """num_places: who has one is not counted as waiting. Synchronous but for `take`."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def take(self) -> None:
        """Return with a place, which `give_back` gives back. Raises what `send_away` was given."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # its turn had come, and has gone to the next
                    self._queue.remove(turn)
            elif turn.exception() is None:
                self.give_back()  # it came with the cancel
            raise

    def give_back(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def send_away(self, error: TierKVError) -> int:
        """Let all who wait raise `error`; how many they were."""
        turns = [turn for turn in self._queue if not turn.done()]
        self._queue.clear()
        for turn in turns:
            turn.set_exception(error)
        return len(turns)


_log = logging.getLogger(__name__)
_MAX_TOKENS = 10.0
_MAX_JITTER_S = 0.02
# A failure that took longer was a deadline, and a second one is not what the caller waits for.
_RETRY_WITHIN_S = 0.1
# After its deadline an operation is cancelled; one that has not ended so long after is stuck.
_STUCK_S = 0.05

T = TypeVar("T")


class Guard:
    """Of one store: whether it may be asked, for how long, and what its failures come to."""

    def __init__(self, store: Store, settings: ResilienceSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._begin()
        self._turns = Turns(settings.max_reads)
        self._tokens = _MAX_TOKENS if settings.retries_per_operation else 0.0
        self._random = random.Random()
        self._tasks: asyncio.TaskGroup | None = None
        self._when_back: MutableSequence[Callable[[], None]] = []
        self._when_open: MutableSequence[Callable[[str], None]] = []
        self.num_retries = self.num_refused = 0

    def _begin(self) -> None:
        self._breaker = Breaker(self._settings.failures_to_open, self._clock)
        self._opened = asyncio.Event()

    @property
    def url(self) -> str:
        return self._store.url

    def breaker(self) -> BreakerSnapshot:
        return self._breaker.snapshot()

    def when_back(self, call: Callable[[], None]) -> None:
        if call not in self._when_back:  # told with each attachment
            self._when_back.append(call)

    def when_open(self, call: Callable[[str], None]) -> None:
        """Call `call` with the reason when the store is left alone from then on."""
        self._when_open.append(call)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within that of the store: asks it, while it is left alone, whether it is back. A store
        that is opened again has just answered, whatever it was left for."""
        self._begin()
        async with (
            task_group() as tasks,
            background({"tierkv-store-probe": self._keep_probing()}),
        ):
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None

    # Asking

    async def retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        started = self._clock.monotonic()
        try:
            return await self.asked(ask)
        except StoreUnavailableError:
            if not self.may_retry(started):
                raise
        await self.pause()
        return await self.asked(ask)

    async def asked(
        self, ask: Callable[[], Awaitable[T]], *, num_bytes: int = 0, lends_buffers: bool = False
    ) -> T:
        """One try of one read. lends_buffers: the caller's, which have to come back, so that one
        that is stuck is waited for; and its result is still to be judged."""
        self._tokens = min(_MAX_TOKENS, self._tokens + self._settings.retries_per_operation)
        self.check()
        deadline_s = self.deadline_s(num_bytes, self._settings.timeout_s)
        await self._until_its_turn()
        try:
            if lends_buffers:
                return await self.within(ask, deadline_s)
            answer = await self.within(lambda: self._abandonable(ask), deadline_s)
        finally:
            self._turns.give_back()
        self._breaker.succeed()
        return answer

    async def within(
        self,
        ask: Callable[[], Awaitable[T]],
        deadline_s: float,
        *,
        of_read: bool = True,
        when_stuck: Callable[[str], None] = lambda _: None,
    ) -> T:
        """What `ask` returns, cancelled after `deadline_s`, which is a failure of the store even if
        the cancel has no effect: then `when_stuck` is told. Raises StoreUnavailableError."""
        loop = asyncio.get_running_loop()
        late = f"{self.url} did not answer within {deadline_s * 1000:.0f} ms"
        fail = partial(self._fail, of_read=of_read)

        def note_stuck() -> None:
            fail(late)
            when_stuck(late)

        stuck = loop.call_later(deadline_s + _STUCK_S, note_stuck)
        try:
            async with asyncio.timeout(deadline_s):
                return await ask()
        except TimeoutError as error:
            if stuck.when() > loop.time():
                fail(late)
            raise StoreUnavailableError(late) from error
        except StoreRefusedError:
            raise  # it has answered, and gives others
        except StoreUnavailableError as error:
            fail(str(error))
            raise
        finally:
            stuck.cancel()

    async def _abandonable(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns. A cancel is raised at once, even if `ask` does not end then: a thread
        in a system call on a disk that hangs cannot be cancelled."""
        if self._tasks is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        tasks = self._tasks
        return await abandonable(
            lambda work, name: tasks.create_task(work, name=name),
            ask,
            "tierkv-store-question",
            ended=lambda: StoreUnavailableError(f"{self.url} is closed"),
        )

    async def _until_its_turn(self) -> None:
        """Take one of `max_reads` places. Raises StoreUnavailableError if too many wait for one, or
        the store is left alone meanwhile: those who have the places may be stuck."""
        if self._turns.num_waiting >= self._settings.max_waiting_reads:
            raise self._refused(f"{self.url} has {self._turns.num_waiting} operations waiting")
        await self._turns.take()
        try:
            self.check()
        except StoreUnavailableError:
            self._turns.give_back()
            raise

    # Trying again

    def may_retry(self, started: float) -> bool:
        """Whether the first try failed at once, and the budget, which every operation adds to, has
        a retry left. Takes it."""
        was_quick = self._clock.monotonic() - started <= _RETRY_WITHIN_S
        if not was_quick or self._tokens < 1 or not self._breaker.is_closed:
            return False
        self._tokens -= 1
        self.num_retries += 1
        return True

    async def pause(self) -> None:
        await asyncio.sleep(self._random.uniform(0, _MAX_JITTER_S))

    # Judging

    def deadline_s(self, num_bytes: int, timeout_s: float) -> float:
        return timeout_s + num_bytes / self._settings.slowest_bytes_per_s

    def check(self) -> None:
        if not self._breaker.is_closed:
            self.num_refused += 1
            raise self._left_alone()

    def _left_alone(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.url} is left alone, since it failed: {self._breaker.reason}"
        )

    def _refused(self, reason: str) -> StoreUnavailableError:
        self.num_refused += 1
        return StoreUnavailableError(reason)

    def judge(self, failures: Sequence[str], num_items: int, *, of_read: bool = True) -> None:
        """A batch that failed whole is a failure; one answered whole a success."""
        if failures and len(failures) == num_items:
            self._fail(failures[0], of_read=of_read)
        elif not failures:
            self._breaker.succeed(of_read=of_read)

    def _fail(self, reason: str, *, of_read: bool) -> None:
        if self._breaker.fail(reason, of_read=of_read):
            _log.warning("%s is left alone from now on: %s", self.url, reason)
            self._opened.set()
            self.num_refused += self._turns.send_away(self._left_alone())
            for call in self._when_open:
                call(reason)

    async def _keep_probing(self) -> None:
        while True:
            await self._opened.wait()
            await asyncio.sleep(self._settings.probe_interval_s)
            self._breaker.begin_probe()
            failure = await self._probe()
            self._breaker.end_probe(failure)
            if failure is None:
                self._opened.clear()
                _log.warning("%s answers again", self.url)
                for call in self._when_back:
                    call()

    async def _probe(self) -> str | None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._abandonable(self._store.ping)
        except TimeoutError:
            return f"{self.url} did not answer a probe"
        except StoreUnavailableError as error:
            return str(error)
        return None
