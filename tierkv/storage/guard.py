"""`GuardedStore`: deadlines, a circuit breaker and a queue of writes around any store.

reads  -> known missing? -> breaker -> at most max_reads at a time -> deadline -> inner
writes -> queue, bounded -> breaker -> write_batches at a time     -> deadline -> inner
                                ^--- successes and failures are counted ---'
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    MutableSequence,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeVar

from tierkv.cache.keys import is_ticket_name, lists_tails
from tierkv.clock import Clock
from tierkv.config import Fixed, all_above_zero, all_at_least_one, none_negative
from tierkv.errors import (
    StoreDownError,
    StoreRefusedError,
    StoreUnavailableError,
    TierKVError,
)
from tierkv.storage.base import StoreWrapper
from tierkv.storage.protocol import (
    BreakerState,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    StoreHealth,
    Usage,
    check_name,
    check_names,
)
from tierkv.tasks import abandonable, background, outlast, supervised, task_group

_log = logging.getLogger(__name__)
_MAX_TOKENS = 10.0
_MAX_JITTER_S = 0.02
# A failure after more seconds is a timeout, and the caller does not wait for a second one.
_RETRY_WITHIN_S = 0.1
# Seconds after which the store is pinged during an operation, to find out sooner that it hangs.
_LONG_S = 0.25
# An operation is cancelled at its deadline. If it has not ended these seconds later, it is stuck.
_STUCK_S = 0.05
# Bytes that count for each value in addition to its own: 0.16 ms at 100 MB/s. 10,000 small values
# take 0.4 s.
_ITEM_BYTES = 16 << 10
_MAX_WAITING_READS = 1024
_MAX_MISSING = 65_536  # names

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ResilienceSettings:
    """Time limits of operations on a store, its circuit breaker, and the queue of writes.

    Attributes:
        timeout_s: seconds that a read or an existence check may take, without the time for its
            bytes. Set a value above the time limit of the store's own client, whose error messages
            are clearer. A request stops waiting earlier, after cache.fetch_deadline_s, if that is
            shorter.
        slowest_bytes_per_s: lowest accepted transfer rate, in bytes per second. An operation may
            take its timeout and, in addition, the time that its bytes take at this rate.
        write_timeout_s: seconds that a batch of writes may take, without the time for its bytes.
        failures_to_open: number of failed operations in a row after which the store is not used
            until it answers a probe.
        probe_interval_s: seconds between probes of a failed store.
        retries_per_operation: average number of retries per operation: 0.1 allows one retry in ten
            operations. Writes do not count.
        max_reads: largest number of operations, without writes, that are under way at the store; up
            to 1,024 more wait.
        write_batches: largest number of batches of writes under way. For a layered store, this
            number counts for each of its stores.
        max_waiting_write_bytes: largest number of bytes of waiting writes; beyond it, writes of the
            least valuable blocks are dropped.
        full_pause_s: seconds without writes after the store was full.
        negative_ttl_s: seconds for which a name that the store has reported missing is not looked
            up again. At most 65,536 such names are remembered. All are forgotten when a ticket is
            read, because the node that published the ticket has written values.
    """

    timeout_s: float = 3.0
    write_timeout_s: float = 4.0
    slowest_bytes_per_s: Fixed[float] = 100e6
    failures_to_open: Fixed[int] = 5
    probe_interval_s: float = 1.0
    retries_per_operation: Fixed[float] = 0.1
    max_reads: Fixed[int] = 64
    write_batches: Fixed[int] = 2
    max_waiting_write_bytes: Fixed[int] = 512 << 20
    full_pause_s: Fixed[float] = 1.0
    negative_ttl_s: Fixed[float] = 0.5

    def __post_init__(self) -> None:
        positive = ("timeout_s", "write_timeout_s", "slowest_bytes_per_s", "probe_interval_s")
        all_above_zero("", self, *positive)
        all_at_least_one("", self, "failures_to_open", "max_reads", "write_batches")
        none_negative("", self, "retries_per_operation", "full_pause_s", "max_waiting_write_bytes")
        none_negative("", self, "negative_ttl_s")


class GuardedStore(StoreWrapper):
    """A `Store` that limits the time of each operation of another store, `inner`.

    After several failures in a row the circuit breaker opens: operations fail at once until the
    store answers a probe. An operation that uses the caller's buffers may end later than its
    deadline, because it waits until `inner` has stopped using them.
    """

    def __init__(self, inner: Store, settings: ResilienceSettings, clock: Clock) -> None:
        super().__init__(inner)
        self._settings = settings
        self._clock = clock
        self._breaker = Breaker(settings.failures_to_open, clock)
        self._opened = asyncio.Event()
        self._slow = asyncio.Event()  # set when an operation takes long: ping the store
        self._reads = SlotGate(settings.max_reads)
        self._writes = WriteQueue(
            self._write,
            num_writers=settings.write_batches,
            max_bytes=settings.max_waiting_write_bytes,
            owner=inner.url,
        )
        self._num_stuck = 0  # number of stuck batches of writes at the store
        self._full_until = 0.0
        self._write_refusal = ""  # the store's own reason, until it stores something
        self._refused = asyncio.Event()  # set while there is such a reason
        self._refused_bytes = 0
        self._probe_name = ""
        self._missing = NegativeCache(settings.negative_ttl_s, clock)
        self._tokens = _MAX_TOKENS if settings.retries_per_operation else 0.0  # for retries
        self._random = random.Random()
        self._tasks: asyncio.TaskGroup | None = None
        self._recovery_callbacks: MutableSequence[Callable[[], None]] = []
        self._num_retries = self._num_refused = 0

    @property
    def health(self) -> StoreHealth:
        breaker, inner = self._breaker, self.inner.health
        part, circuit, reason = "", breaker.state, breaker.reason
        if breaker.is_closed and inner.circuit not in (None, BreakerState.CLOSED):
            part, circuit, reason = inner.part, inner.circuit, inner.reason
        elif inner.write_refusal and not self._write_refusal:
            part = inner.part
        return StoreHealth(
            circuit=circuit,
            part=part,
            num_opened=breaker.num_opened,
            reason=reason,
            degraded_s=max(breaker.degraded_s, inner.degraded_s),
            write_refusal=self._write_refusal or inner.write_refusal,
            clock_skew_s=inner.clock_skew_s,
            num_retries=self._num_retries,
            num_refused=self._num_refused,
            num_dropped_writes=self._writes.num_dropped,
            waiting_write_bytes=self._writes.waiting_bytes,
            negative_hits=self._missing.num_hits,
        )

    def on_recovery(self, call: Callable[[], None]) -> None:
        if call not in self._recovery_callbacks:  # each attachment passes the callable again
            self._recovery_callbacks.append(call)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the guarded store, and run queued writes and probes, in the `async with` block.

        The breaker is closed at the beginning: the store counts as working.
        """
        self._breaker = Breaker(self._settings.failures_to_open, self._clock)
        self._opened, self._slow = asyncio.Event(), asyncio.Event()  # for this event loop
        self._refused, self._write_refusal = asyncio.Event(), ""
        async with (
            self.inner.running(),
            task_group() as tasks,
            supervised(
                {
                    "tierkv-store-probe": self._keep_probing,
                    "tierkv-store-watch": self._keep_watching,
                    "tierkv-store-write-probe": self._keep_probing_writes,
                }
            ),
            self._writes.running(),
        ):
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None

    # Questions

    async def exists(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        if checked and self._missing.has(checked[0]):
            return 0
        with self._missing.asking() as note_missing:
            found = await self._ask(lambda store: store.exists(checked))
            if found < len(checked):
                note_missing(checked[found])
        return found

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        asked = [name for name in names if not self._missing.has(name)]
        if not asked:
            return [False] * len(names)
        with self._missing.asking() as note_missing:
            answers = await self._ask(lambda store: store.present(asked))
            found = dict(zip(asked, answers, strict=True))
            for name, is_there in found.items():
                if not is_there:
                    note_missing(name)
        return [found.get(name, False) for name in names]

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        if not lists_tails(name):  # the store is asked each time, for example for a ticket
            content = await self._ask(lambda store: store.get(name, max_bytes=max_bytes))
            if content is not None and is_ticket_name(name):
                self._missing.clear()
            return content
        if self._missing.has(name):
            return None
        with self._missing.asking() as note_missing:
            content = await self._ask(lambda store: store.get(name, max_bytes=max_bytes))
            if content is None:
                note_missing(name)
        return content

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        started = self._clock.monotonic()
        may_try_again = True
        while True:
            try:
                await self._acquire_slot()
                try:
                    async with self._within(self._deadline_s(0)):
                        answer = await self._in_own_task(ask)
                finally:
                    self._reads.release()
            except StoreUnavailableError:
                if not (may_try_again and self._allow_retry(started)):
                    raise
            else:
                self._breaker.succeed()
                return answer
            may_try_again = False
            await self._pause()

    def _in_own_task(self, ask: Callable[[Store], Awaitable[T]]) -> Awaitable[T]:
        # A cancelled call raises at once, even if the operation goes on.
        if self._tasks is None:
            raise self._closed()
        return abandonable(
            self._tasks.create_task,
            lambda: self._with_known_errors(ask),
            "tierkv-store-question",
            ended=self._closed,
        )

    async def _with_known_errors(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        try:
            return await ask(self.inner)
        except TierKVError:
            raise
        except Exception as error:
            _log.warning("%s raised an unexpected error", self.url, exc_info=error)
            text = f"{self.url} failed: {type(error).__name__}: {error}"
            raise StoreUnavailableError(text) from error

    def _closed(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"{self.url} is closed")

    # Reads

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        """Read each value into the buffers of its item; return one outcome per item.

        Items that fail quickly are read once more, unless too many reads were repeated lately.
        """
        started = self._clock.monotonic()
        with self._missing.asking() as note_missing:
            outcomes = await self._get_into(items)
            failed = [i for i, outcome in enumerate(outcomes) if outcome.status is GetStatus.FAILED]
            if failed and self._allow_retry(started):
                await self._pause()
                again = await self._get_into([items[i] for i in failed])
                for i, outcome in zip(failed, again, strict=True):
                    outcomes[i] = outcome
            for item, outcome in zip(items, outcomes, strict=True):
                if outcome.status is GetStatus.MISS:
                    note_missing(item.name)
        return outcomes

    async def _get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        """Read values once, and return only when the store no longer uses the buffers."""
        num_bytes = sum(item.room_bytes + _ITEM_BYTES for item in items)
        try:
            await self._acquire_slot()
            try:
                async with self._within(self._deadline_s(num_bytes)):
                    outcomes = await self._with_known_errors(lambda store: store.get_into(items))
            finally:
                self._reads.release()
        except StoreUnavailableError as error:
            return [GetOutcome(GetStatus.FAILED, str(error))] * len(items)
        failures = [one.reason for one in outcomes if one.status is GetStatus.FAILED]
        self._judge(failures, len(items))
        return outcomes

    async def _acquire_slot(self) -> None:
        self._tokens = min(_MAX_TOKENS, self._tokens + self._settings.retries_per_operation)
        self._check_breaker()
        if self._reads.num_waiting >= _MAX_WAITING_READS:
            self._num_refused += 1
            raise StoreUnavailableError(
                f"{self.url} has {self._reads.num_waiting} waiting operations, the "
                "maximum: try again later"
            )
        await self._reads.acquire()
        try:
            self._check_breaker()
        except StoreUnavailableError:
            self._reads.release()
            raise

    # Writes

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        try:
            self._check_breaker()
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        if self._num_stuck == self._settings.write_batches:
            self._num_refused += 1
            reason = (
                f"earlier writes to {self.url} have not ended: no more are accepted until they do"
            )
            return [PutOutcome(PutStatus.FULL, reason)] * len(items)
        for item in items:
            self._missing.forget(item.name)
        try:
            return await self._writes.put(items)
        finally:  # a cancelled put may have written some values, too
            for item in items:
                self._missing.forget(item.name)

    async def _write(self, items: Sequence[PutItem]) -> Sequence[PutOutcome]:
        num_bytes = sum(item.num_bytes for item in items)
        deadline_s = self._deadline_s(num_bytes, self._settings.write_timeout_s)
        try:
            self._check_breaker()
            if self._clock.monotonic() < self._full_until:
                return [PutOutcome(PutStatus.FULL, self._write_refusal)] * len(items)
            async with self._within(deadline_s, writes=True):
                outcomes = await self._with_known_errors(lambda store: store.put(items))
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        self._note_refusal(items, outcomes)
        failures = [one.reason for one in outcomes if one.status is PutStatus.FAILED]
        self._judge(failures, len(items), of_read=False)
        return outcomes

    def _note_refusal(self, items: Sequence[PutItem], outcomes: Sequence[PutOutcome]) -> None:
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.status is PutStatus.FULL and not outcome.accepts_others:
                self._full_until = self._clock.monotonic() + self._settings.full_pause_s
                was_taken = not self._write_refusal
                self._write_refusal = outcome.reason.removeprefix(f"{item.name}: ")
                self._refused_bytes = item.num_bytes
                self._probe_name = f"{item.name.partition(':')[0]}:probe"
                self._refused.set()
                if was_taken:
                    _log.warning("%s refuses writes: %s", self.url, self._write_refusal)
                return
        if self._write_refusal and any(one.status is PutStatus.STORED for one in outcomes):
            self._write_refusal = ""
            self._refused.clear()
            _log.warning("%s accepts writes again", self.url)

    # Deadlines and retries

    def _deadline_s(self, num_bytes: int, timeout_s: float = 0.0) -> float:
        timeout_s = timeout_s or self._settings.timeout_s
        return timeout_s + num_bytes / self._settings.slowest_bytes_per_s

    @asynccontextmanager
    async def _within(self, deadline_s: float, *, writes: bool = False) -> AsyncIterator[None]:
        """Cancel the `with` block after `deadline_s` seconds, and count the failures of the store.

        A timeout counts as a failure, and so does a StoreUnavailableError. A StoreRefusedError does
        not, because the store has answered.
        """
        is_stuck = False

        def late() -> str:
            return f"{self.url} did not answer within {deadline_s * 1000:.0f} ms"

        def note_stuck() -> None:
            # Writes that hang do not open the breaker of a store that answers reads, because each
            # answered read sets the number of failures back to 0.
            nonlocal is_stuck
            is_stuck = True
            self._fail(late(), of_read=not writes)
            if writes:
                self._num_stuck += 1
                if self._num_stuck == self._settings.write_batches:
                    self._writes.give_up(late())

        loop = asyncio.get_running_loop()
        stuck = loop.call_later(deadline_s + _STUCK_S, note_stuck)
        long = loop.call_later(_LONG_S, self._slow.set)
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            if not is_stuck:
                self._fail(late(), of_read=not writes)
            raise StoreUnavailableError(late()) from error
        except StoreRefusedError:
            raise  # no failure: the store has answered, and can be used for other operations
        except StoreUnavailableError as error:
            self._fail(str(error), of_read=not writes)
            raise
        finally:
            stuck.cancel()
            long.cancel()
            self._num_stuck -= is_stuck and writes

    def _allow_retry(self, started: float) -> bool:
        was_quick = self._clock.monotonic() - started <= _RETRY_WITHIN_S
        if not was_quick or self._tokens < 1 or not self._breaker.is_closed:
            return False
        self._tokens -= 1
        self._num_retries += 1
        return True

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(0, _MAX_JITTER_S))

    # The breaker

    def _check_breaker(self) -> None:
        if not self._breaker.is_closed:
            self._num_refused += 1
            raise self._circuit_open()

    def _circuit_open(self) -> StoreDownError:
        return StoreDownError(
            f"{self.url} failed and is not used until it answers a probe: {self._breaker.reason}"
        )

    def _judge(self, failures: Sequence[str], num_items: int, *, of_read: bool = True) -> None:
        """Report a batch to the breaker: a failure if all items failed, a success if none failed.

        A batch in which only some items failed is not reported. `of_read` is False for a batch of
        writes.
        """
        if failures and len(failures) == num_items:
            self._fail(failures[0], of_read=of_read)
        elif not failures:
            self._breaker.succeed(of_read=of_read)

    def _fail(self, reason: str, *, of_read: bool, is_sure: bool = False) -> None:
        if self._breaker.fail(reason, of_read=of_read, is_sure=is_sure):
            _log.warning("%s failed and is not used until it answers a probe: %s", self.url, reason)
            self._opened.set()
            self._num_refused += self._reads.fail_waiting(self._circuit_open())
            self._writes.give_up(reason)

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
                for call in self._recovery_callbacks:
                    call()

    async def _probe(self) -> str | None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._in_own_task(lambda store: store.ping())
        except TimeoutError:
            return f"{self.url} did not answer a probe"
        except StoreUnavailableError as error:
            return str(error)
        return None

    async def _keep_watching(self) -> None:
        # If the ping fails and no other operation was answered, the breaker opens at once: the
        # operation's deadline would come long after requests have stopped waiting.
        while True:
            await self._slow.wait()
            num_answers = self._breaker.num_answers
            if self._breaker.is_closed and (failure := await self._probe()) is not None:
                is_sure = self._breaker.num_answers == num_answers
                self._fail(failure, of_read=True, is_sure=is_sure)
            self._slow.clear()
            await asyncio.sleep(self._settings.probe_interval_s)

    async def _keep_probing_writes(self) -> None:
        """Find out when a store that has refused a write accepts writes again.

        While the store refuses writes, write a test value of the refused size at regular intervals,
        and delete it when the write has succeeded.
        """
        # Callers may have stopped writing, so their writes alone would not show that the store
        # accepts writes again.
        while True:
            await self._refused.wait()
            await asyncio.sleep(self._settings.probe_interval_s)
            value, name = bytes(self._refused_bytes), self._probe_name
            ttl_s = self._settings.probe_interval_s
            [put] = await self._write([PutItem(name, (value,), ttl_s=ttl_s, keep_existing=False)])
            if put.status is PutStatus.STORED:
                with suppress(StoreUnavailableError):
                    await self.delete([name])

    # Listings have no deadline: they take long, and only an operator waits for them

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Return one page of the values under `prefix`, in no particular order, without a deadline.

        Args:
            prefix: start of the values' names: a name, or a name and a colon.
            limit: largest number of values in the page, approximately; at least 1.
            cursor: `cursor` of the previous page; None for the first page.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        return await self._with_known_errors(
            lambda store: store.list(prefix, limit=limit, cursor=cursor)
        )

    async def usage(self, prefix: str) -> Usage:
        return await self._with_known_errors(lambda store: store.usage(prefix))


class SlotGate:
    """A limit on the number of operations that run at the same time.

    Operations that wait are admitted in the order of their calls of `acquire`.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def acquire(self) -> None:
        """Wait until one more operation may run; the caller must call `release` after it.

        Raises:
            TierKVError: `fail_waiting` was called with this error during the wait.
        """
        if self._num_free:
            self._num_free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with suppress(ValueError):  # the slot was passed to the next waiter
                    self._queue.remove(granted)
            elif granted.exception() is None:
                self.release()  # the slot came together with the cancel
            raise

    def release(self) -> None:
        while self._queue:
            granted = self._queue.popleft()
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1

    def fail_waiting(self, error: TierKVError) -> int:
        """Make all waiting calls of `acquire` raise `error`; return their number."""
        waiting = [granted for granted in self._queue if not granted.done()]
        self._queue.clear()
        for granted in waiting:
            granted.set_exception(error)
        return len(waiting)


class Breaker:
    """The state of a circuit breaker, which opens after `failures_to_open` failures in a row.

    The owner of this object probes the store, and refuses operations while the breaker is not
    closed.

    Attributes:
        state: closed, open, or half open (open, and a probe is under way).
        num_opened: number of times that the breaker opened.
        num_answers: number of reads that the store has answered.
        reason: the last failure; "" before the first one.
    """

    def __init__(self, failures_to_open: int, clock: Clock) -> None:
        self._failures_to_open = failures_to_open
        self._clock = clock
        self._num_failures = 0
        self._has_read_failed = False
        self._was_degraded_s = 0.0
        self._opened_at = 0.0  # monotonic
        self.state = BreakerState.CLOSED
        self.num_opened = self.num_answers = 0
        self.reason = ""  # of the last failure

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    @property
    def degraded_s(self) -> float:
        """The total seconds in which the breaker was not closed."""
        now_s = 0.0 if self.is_closed else self._clock.monotonic() - self._opened_at
        return self._was_degraded_s + now_s

    def succeed(self, *, of_read: bool = True) -> None:
        """Record that the store has answered an operation; a closed breaker forgets its failures.

        An open breaker stays open until a probe is answered. After a failed read, only an answered
        read makes the breaker forget the failures, because a disk that hangs still accepts writes
        into memory.

        Args:
            of_read: True if the operation was a read, False if it was a write.
        """
        self.num_answers += of_read
        if self.is_closed and (of_read or not self._has_read_failed):
            self._num_failures = 0
            self._has_read_failed = False

    def fail(self, reason: str, *, of_read: bool = True, is_sure: bool = False) -> bool:
        """Count an operation that the store has not answered.

        Return True if this opened the breaker.

        Args:
            reason: the failure, for logs.
            of_read: False for a write.
            is_sure: True to open the breaker now, whatever the number of failures.
        """
        if not self.is_closed:
            return False
        self._num_failures += 1
        self._has_read_failed |= of_read
        self.reason = reason
        if self._num_failures < self._failures_to_open and not is_sure:
            return False
        self.num_opened += 1
        self._opened_at = self._clock.monotonic()
        self.state = BreakerState.OPEN
        return True

    def begin_probe(self) -> None:
        self.state = BreakerState.HALF_OPEN

    def end_probe(self, failure: str | None) -> None:
        """Close the breaker if the probe was answered, else open it again.

        Args:
            failure: the reason why there was no answer; None if there was one.
        """
        self._num_failures = 0
        self._has_read_failed = False
        if failure is None:
            self._was_degraded_s = self.degraded_s
            self.state = BreakerState.CLOSED
        else:
            self.reason = failure
            self.state = BreakerState.OPEN


@dataclass(eq=False, slots=True)
class _WrittenSince:
    """The names that were written while the store was being asked for missing names.

    Attributes:
        written: the names.
        has_cleared: True if unknown other names may have been written, too.
    """

    written: set[str] = field(default_factory=set)
    has_cleared: bool = False


class NegativeCache:
    """Names that the store has just reported missing, so that the store is not asked again.

    Args:
        ttl_s: seconds for which a name counts as missing.
        clock: the clock that counts these seconds.
    """

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()  # the next to end first
        self._asked: list[_WrittenSince] = []
        self.num_hits = 0

    def has(self, name: str) -> bool:
        """Return True if the store has recently reported that `name` has no value."""
        until = self._until.get(name)
        if until is None or until <= self._clock.monotonic():
            return False
        self.num_hits += 1
        return True

    @contextmanager
    def asking(self) -> Iterator[Callable[[str], None]]:
        """Record which names the store reports missing, for the call in the `with` block.

        Call the yielded function with each missing name. A name that is written before the `with`
        block ends is not recorded, because the store may have answered before the write.
        """
        since = _WrittenSince()
        self._asked.append(since)

        def note(name: str) -> None:
            if not (since.has_cleared or name in since.written):
                self._note(name)

        try:
            yield note
        finally:
            self._asked.remove(since)

    def _note(self, name: str) -> None:
        if not self._ttl_s:
            return
        now = self._clock.monotonic()
        self._until[name] = now + self._ttl_s
        self._until.move_to_end(name)
        while len(self._until) > _MAX_MISSING or next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def forget(self, name: str) -> None:
        """Remove `name`, because it is being written."""
        self._until.pop(name, None)
        for since in self._asked:
            since.written.add(name)

    def clear(self) -> None:
        """Remove all names."""
        self._until.clear()
        for since in self._asked:
            since.has_cleared = True


# Size of one batch: enough for the store's connections, and small enough to end soon.
_BATCH_BYTES = 16 << 20
_BATCH_ITEMS = 64


# Ranks of ended writes are removed when they outnumber those of waiting writes by this.
_STALE_RANKS = 64


@dataclass(eq=False, slots=True)
class _Write:
    """One queued write.

    Attributes:
        serial: order of arrival; the lowest is the oldest.
    """

    serial: int
    item: PutItem
    outcome: asyncio.Future[PutOutcome]

    @property
    def rank(self) -> tuple[bool, float, int]:
        # Items that replace a value (tickets) are dropped last. Other items are dropped in the
        # order of worth, the lowest first; of equal ones the newest first.
        return (not self.item.keep_existing, self.item.worth, -self.serial)


class WriteQueue:
    """A queue of writes, and tasks that write the oldest ones in batches.

    The queue uses the caller's buffers until `put` has returned.

    Args:
        write: writes one batch to the store.
        num_writers: number of tasks, which is the largest number of batches under way.
        max_bytes: largest number of bytes of waiting writes.
        owner: URL of the store, for errors.
    """

    def __init__(
        self,
        write: Callable[[Sequence[PutItem]], Awaitable[Sequence[PutOutcome]]],
        *,
        num_writers: int,
        max_bytes: int,
        owner: str,
    ) -> None:
        self._write = write
        self._num_writers = num_writers
        self._max_bytes = max_bytes
        self._owner = owner
        self._waiting: OrderedDict[int, _Write] = OrderedDict()  # by serial
        self._ranks: list[tuple[bool, float, int]] = []  # a heap, with some of ended writes
        self._serials = count()
        self._came = asyncio.Event()
        self._is_open = False
        self.waiting_bytes = 0
        self.num_dropped = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write queued items until the `async with` block ends.

        At the end, writes that still wait fail, and batches under way are awaited.
        """
        self._came = asyncio.Event()  # of this loop
        writers = {f"tierkv-write-{i}": self._keep_writing() for i in range(self._num_writers)}
        async with background(writers):
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False
                self.give_up(f"{self._owner} is closed")

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Queue `items`, wait until they are written, and return their outcomes.

        If the queued values have more than `max_bytes` bytes together, those of the lowest worth
        are dropped with the outcome FULL. If this call is cancelled, its values that are not being
        written yet are removed from the queue, and the call raises CancelledError once its other
        writes have ended.
        """
        if not self._is_open:
            return [PutOutcome(PutStatus.FAILED, f"{self._owner} is closed")] * len(items)
        loop = asyncio.get_running_loop()
        writes = [_Write(next(self._serials), item, loop.create_future()) for item in items]
        for write in writes:
            self._waiting[write.serial] = write
            self.waiting_bytes += write.item.num_bytes
            heappush(self._ranks, write.rank)
        self._drop_lowest()
        self._came.set()

        def withdraw() -> None:
            for write in writes:
                if write.serial in self._waiting:
                    self._settle(
                        write.serial,
                        PutOutcome(PutStatus.FAILED, "withdrawn, because its caller was cancelled"),
                    )

        await outlast({write.outcome for write in writes}, on_cancel=withdraw)
        return [write.outcome.result() for write in writes]

    def give_up(self, reason: str) -> None:
        """End all waiting writes with the outcome FAILED and `reason`."""
        for serial in list(self._waiting):
            self._settle(serial, PutOutcome(PutStatus.FAILED, reason))

    def _drop_lowest(self) -> None:
        if len(self._ranks) > 2 * len(self._waiting) + _STALE_RANKS:
            self._ranks = [write.rank for write in self._waiting.values()]
            heapify(self._ranks)
        outcome = PutOutcome(
            PutStatus.FULL, f"dropped, because the queue of writes to {self._owner} is full"
        )
        while self.waiting_bytes > self._max_bytes:
            *_, newness = heappop(self._ranks)
            if -newness in self._waiting:
                self.num_dropped += 1
                self._settle(-newness, outcome)

    def _settle(self, serial: int, outcome: PutOutcome) -> None:
        write = self._waiting.pop(serial)
        self.waiting_bytes -= write.item.num_bytes
        write.outcome.set_result(outcome)

    async def _keep_writing(self) -> None:
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            batch = self._pop_batch()
            outcomes: Sequence[PutOutcome] = [
                PutOutcome(PutStatus.FAILED, f"{self._owner} is closed")
            ] * len(batch)
            try:
                outcomes = await self._write([write.item for write in batch])
            finally:
                for write, outcome in zip(batch, outcomes, strict=True):
                    write.outcome.set_result(outcome)

    def _pop_batch(self) -> list[_Write]:
        batch: list[_Write] = []
        num_bytes = 0
        while self._waiting and len(batch) < _BATCH_ITEMS:
            serial, write = next(iter(self._waiting.items()))
            if batch and num_bytes + write.item.num_bytes > _BATCH_BYTES:
                break
            del self._waiting[serial]
            self.waiting_bytes -= write.item.num_bytes
            num_bytes += write.item.num_bytes
            batch.append(write)
        return batch
