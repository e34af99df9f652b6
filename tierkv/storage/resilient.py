"""A store that fails fast and leaves a failing store alone, around one that does not.

reads  -> negative cache -> breaker -> at most max_reads at a time -> deadline -> retry -> inner
writes -> queue, bounded -> breaker -> write_batches at a time ----> deadline ---------> inner
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, MutableSequence, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from tierkv.clock import Clock
from tierkv.errors import ConfigError, StoreUnavailableError, TierKVError
from tierkv.storage.breaker import Breaker, BreakerSnapshot
from tierkv.storage.negative import NegativeCache
from tierkv.storage.notify import Notifier, notifier_of
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    Usage,
    check_name,
    check_names,
)
from tierkv.storage.write_queue import WriteQueue
from tierkv.tasks import background, task_group

_log = logging.getLogger(__name__)
_MAX_TOKENS = 10.0
_MAX_JITTER_S = 0.02
# A failure that took longer was a deadline, and a second one is not what the caller waits for.
_RETRY_WITHIN_S = 0.1
# After its deadline an operation is cancelled; one that has not ended so long after is stuck.
_STUCK_S = 0.05

T = TypeVar("T")


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
    write_batches, max_waiting_write_bytes: writes at the store, and waiting; beyond that the least
        valuable are dropped.
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


@dataclass(frozen=True, slots=True)
class ResilienceSnapshot:
    """For metrics and readiness: a store whose breaker is not closed is degraded, not unready."""

    breaker: BreakerSnapshot
    num_retries: int
    num_refused: int  # operations that failed at once: breaker open, or too many waiting
    num_dropped_writes: int
    waiting_write_bytes: int
    negative_hits: int


class ResilientStore:
    """`Store`. Every answer comes within the deadline, if the inner store gives buffers back in
    time when it is cancelled; while the breaker is open, at once."""

    def __init__(self, inner: Store, settings: ResilienceSettings, clock: Clock) -> None:
        self.inner = inner
        self._settings = settings
        self._clock = clock
        self._breaker = Breaker(settings.failures_to_open, clock)
        self._opened = asyncio.Event()
        self._reading = asyncio.Semaphore(settings.max_reads)
        self._num_waiting_reads = 0
        self._writes = WriteQueue(
            self._put,
            num_writers=settings.write_batches,
            max_bytes=settings.max_waiting_write_bytes,
            owner=inner.url,
        )
        self._full_until = 0.0
        self._tokens = _MAX_TOKENS if settings.retries_per_operation else 0.0
        self._random = random.Random()
        self._missing = NegativeCache(settings.negative_ttl_s, settings.negative_names, clock)
        self._num_retries = self._num_refused = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._when_back: MutableSequence[Callable[[], None]] = []

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def notifier(self) -> Notifier:
        return notifier_of(self.inner)

    def when_back(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the store answers again: it may have lost all it had."""
        self._when_back.append(call)

    def snapshot(self) -> ResilienceSnapshot:
        return ResilienceSnapshot(
            self._breaker.snapshot(),
            self._num_retries,
            self._num_refused,
            self._writes.num_dropped,
            self._writes.waiting_bytes,
            self._missing.num_hits,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self.inner.running(),
            task_group() as tasks,
            background({"tierkv-store-probe": self._keep_probing()}),
            self._writes.running(),
        ):
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None

    async def ping(self) -> None:
        await self._asked(self.inner.ping)

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        known = self._missing.first(names)
        if known == 0 and names:
            return 0
        asked = names[:known]
        found = await self._retried(lambda: self.inner.exists(asked))
        if found < len(asked):
            self._missing.note(asked[found])
        return found

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        started = self._clock.monotonic()
        outcomes = [*await self._get_into(items)]
        failed = [i for i, outcome in enumerate(outcomes) if outcome.status is GetStatus.FAILED]
        if failed and self._may_retry(started):
            await self._pause()
            again = await self._get_into([items[i] for i in failed])
            for i, outcome in zip(failed, again, strict=True):
                outcomes[i] = outcome
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.status is GetStatus.MISS:
                self._missing.note(item.name)
        return outcomes

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        content = await self._retried(lambda: self.inner.get(name, max_bytes=max_bytes))
        if content is not None:
            self._missing.clear()
        return content

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        for item in items:
            self._missing.forget(item.name)
        outcomes = await self._writes.put(items)
        for item in items:
            self._missing.forget(item.name)
        return outcomes

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        return await self._asked(lambda: self.inner.delete(names))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        check_names(names)
        return await self._asked(lambda: self.inner.touch(names, ttl_s=ttl_s))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        return await self.inner.list(prefix, limit=limit, cursor=cursor)

    async def usage(self, prefix: str) -> Usage:
        return await self.inner.usage(prefix)

    # Reads

    async def _get_into(self, items: Sequence[GetItem]) -> MutableSequence[GetOutcome]:
        num_bytes = sum(item.num_bytes for item in items)
        try:
            outcomes = await self._asked(
                lambda: self.inner.get_into(items), num_bytes=num_bytes, lends_buffers=True
            )
        except StoreUnavailableError as error:
            return [GetOutcome(GetStatus.FAILED, str(error))] * len(items)
        self._judge(
            [outcome.reason for outcome in outcomes if outcome.status is GetStatus.FAILED],
            len(items),
        )
        return outcomes

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        started = self._clock.monotonic()
        try:
            return await self._asked(ask)
        except StoreUnavailableError:
            if not self._may_retry(started):
                raise
        await self._pause()
        return await self._asked(ask)

    async def _asked(
        self, ask: Callable[[], Awaitable[T]], *, num_bytes: int = 0, lends_buffers: bool = False
    ) -> T:
        """One try of one read. lends_buffers: the caller's, which have to come back, so that one
        that is stuck is waited for; and its result is still to be judged."""
        self._tokens = min(_MAX_TOKENS, self._tokens + self._settings.retries_per_operation)
        self._check_breaker()
        deadline_s = self._deadline_s(num_bytes, self._settings.timeout_s)
        await self._until_its_turn(deadline_s)
        late = f"{self.url} did not answer within {deadline_s * 1000:.0f} ms"
        stuck = asyncio.get_running_loop().call_later(deadline_s + _STUCK_S, self._fail, late)
        try:
            if lends_buffers:
                async with asyncio.timeout(deadline_s):
                    answer = await ask()
            else:
                answer = await self._abandonable(ask, deadline_s)
        except TimeoutError as error:
            if not stuck.cancelled() and stuck.when() > asyncio.get_running_loop().time():
                self._fail(late)
            raise StoreUnavailableError(late) from error
        except StoreUnavailableError as error:
            self._fail(str(error))
            raise
        finally:
            stuck.cancel()
            self._reading.release()
        if not lends_buffers:
            self._breaker.succeed()
        return answer

    async def _abandonable(self, ask: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """What `ask` returns. TimeoutError after `deadline_s`, even if it does not end then: a
        thread in a system call on a disk that hangs cannot be cancelled."""
        if self._tasks is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = self._tasks.create_task(_settle(ask, outcome), name="tierkv-store-question")
        try:
            async with asyncio.timeout(deadline_s):
                return await outcome
        finally:
            task.cancel()

    async def _until_its_turn(self, deadline_s: float) -> None:
        """Take one of `max_reads` places. Raises StoreUnavailableError if too many wait for one,
        none is free within `deadline_s`, or the breaker is open by then."""
        if self._num_waiting_reads >= self._settings.max_waiting_reads:
            raise self._refused(
                f"{self.url} has {self._num_waiting_reads} operations waiting for it"
            )
        self._num_waiting_reads += 1
        try:
            async with asyncio.timeout(deadline_s):
                await self._reading.acquire()
        except TimeoutError as error:
            # Those that have the places are stuck, or slow; they are judged, this one is not.
            text = f"{self.url} had no turn for this within {deadline_s * 1000:.0f} ms"
            raise self._refused(text) from error
        finally:
            self._num_waiting_reads -= 1
        try:
            self._check_breaker()
        except StoreUnavailableError:
            self._reading.release()
            raise

    def _may_retry(self, started: float) -> bool:
        """Whether the first try failed at once, and the budget, which every operation adds to, has
        a retry left. Takes it."""
        was_quick = self._clock.monotonic() - started <= _RETRY_WITHIN_S
        if not was_quick or self._tokens < 1 or not self._breaker.is_closed:
            return False
        self._tokens -= 1
        self._num_retries += 1
        return True

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(0, _MAX_JITTER_S))

    # Writes

    async def _put(self, items: Sequence[PutItem]) -> Sequence[PutOutcome]:
        try:
            self._check_breaker()
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        if self._clock.monotonic() < self._full_until:
            reason = f"{self.url} was full a moment ago"
            return [PutOutcome(PutStatus.FULL, reason)] * len(items)
        num_bytes = sum(item.num_bytes for item in items)
        deadline_s = self._deadline_s(num_bytes, self._settings.write_timeout_s)
        try:
            async with asyncio.timeout(deadline_s):
                outcomes = await self.inner.put(items)
        except TimeoutError:
            reason = f"{self.url} did not answer within {deadline_s * 1000:.0f} ms"
            self._fail(reason)
            return [PutOutcome(PutStatus.FAILED, reason)] * len(items)
        if any(outcome.status is PutStatus.FULL for outcome in outcomes):
            self._full_until = self._clock.monotonic() + self._settings.full_pause_s
        self._judge(
            [outcome.reason for outcome in outcomes if outcome.status is PutStatus.FAILED],
            len(items),
        )
        return outcomes

    # The breaker

    def _deadline_s(self, num_bytes: int, timeout_s: float) -> float:
        return timeout_s + num_bytes / self._settings.slowest_bytes_per_s

    def _check_breaker(self) -> None:
        if not self._breaker.is_closed:
            raise self._refused(
                f"{self.url} is left alone, since it failed: {self._breaker.reason}"
            )

    def _refused(self, reason: str) -> StoreUnavailableError:
        self._num_refused += 1
        return StoreUnavailableError(reason)

    def _judge(self, failures: Sequence[str], num_items: int) -> None:
        """A batch that failed whole is a failure; one answered whole a success."""
        if failures and len(failures) == num_items:
            self._fail(failures[0])
        elif not failures:
            self._breaker.succeed()

    def _fail(self, reason: str) -> None:
        if self._breaker.fail(reason):
            _log.warning("%s is left alone from now on: %s", self.url, reason)
            self._opened.set()

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
            await self._abandonable(self.inner.ping, self._settings.timeout_s)
        except TimeoutError:
            return f"{self.url} did not answer a probe"
        except StoreUnavailableError as error:
            return str(error)
        return None


async def _settle(ask: Callable[[], Awaitable[T]], outcome: asyncio.Future[T]) -> None:
    try:
        answer = await ask()
    except TierKVError as error:
        if not outcome.done():
            outcome.set_exception(error)
    else:
        if not outcome.done():
            outcome.set_result(answer)
