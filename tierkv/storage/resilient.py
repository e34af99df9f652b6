"""A store that fails fast and leaves a failing store alone, around one that does not.

reads  -> negative cache -> guard, with a retry ----------> inner
writes -> queue, bounded -> guard, write_batches at a time -> inner
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

from tierkv.cache.keys import tells_of_blocks
from tierkv.clock import Clock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.base import StoreAround, present, use_memory
from tierkv.storage.guard import BreakerSnapshot, BreakerState, Guard, ResilienceSettings
from tierkv.storage.notify import Notifier, notifier_of
from tierkv.storage.protocol import (
    Capabilities,
    CheckedNames,
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

# What a value costs beside its bytes, as bytes: 0.16 ms at 100 MB/s. 10,000 small ones took 0.4 s.
_ITEM_BYTES = 16 << 10

__all__ = ["ResilienceSettings", "ResilienceSnapshot", "ResilientStore"]

T = TypeVar("T")


@runtime_checkable
class MadeOfStores(Protocol):
    """A store that is made of others, which can have breakers of their own."""

    @property
    def parts(self) -> Sequence[Store]: ...


@dataclass(frozen=True, slots=True)
class ResilienceSnapshot:
    """For metrics and readiness: a store whose breaker is not closed is degraded, not unready."""

    breaker: BreakerSnapshot
    num_retries: int
    num_refused: int  # operations that failed at once: breaker open, too many waiting, or stuck
    num_dropped_writes: int
    waiting_write_bytes: int
    negative_hits: int


class ResilientStore(StoreAround):
    """`Store`. Every answer comes within the deadline, if the inner store gives buffers back in
    time when it is cancelled; while the breaker is open, at once."""

    def __init__(self, inner: Store, settings: ResilienceSettings, clock: Clock) -> None:
        self.inner = inner
        self._settings = settings
        self._clock = clock
        self._guard = Guard(inner, settings, clock)
        self._writes = WriteQueue(
            self._put,
            num_writers=settings.write_batches,
            max_bytes=settings.max_waiting_write_bytes,
            owner=inner.url,
        )
        self._full_until = 0.0
        self._num_stuck = 0  # of the batches of writes at the store
        self._missing = NegativeCache(settings.negative_ttl_s, settings.negative_names, clock)
        self._guard.when_open(self._writes.give_up)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def notifier(self) -> Notifier:
        return notifier_of(self.inner)

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        use_memory(self.inner, pools)

    def when_back(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the store answers again: it may have lost all it had."""
        self._guard.when_back(call)

    def snapshot(self) -> ResilienceSnapshot:
        return ResilienceSnapshot(
            self._guard.breaker(),
            self._guard.num_retries,
            self._guard.num_refused,
            self._writes.num_dropped,
            self._writes.waiting_bytes,
            self._missing.num_hits,
        )

    def weakest(self) -> tuple[str, BreakerSnapshot]:
        """Its own breaker, or that of a store it is made of where only that one is left alone; and
        whose that is, "" its own. degraded_s: the longest of them all."""
        found = "", self._guard.breaker()
        if not isinstance(self.inner, MadeOfStores):
            return found
        longest_s = found[1].degraded_s
        for part in self.inner.parts:
            if isinstance(part, ResilientStore):
                other = part.snapshot().breaker
                longest_s = max(longest_s, other.degraded_s)
                if found[1].state is BreakerState.CLOSED and other.state is not BreakerState.CLOSED:
                    found = part.url, other
        return found[0], replace(found[1], degraded_s=longest_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.inner.running(), self._guard.running(), self._writes.running():
            yield

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        return await self._guard.asked(lambda: ask(self.inner))

    async def exists(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        known = self._missing.first(checked)
        if known == 0 and names:
            return 0
        asked = checked if known == len(checked) else CheckedNames(checked[:known])
        with self._missing.asking() as note_missing:
            found = await self._guard.retried(lambda: self.inner.exists(asked))
            if found < len(asked):
                note_missing(asked[found])
        return found

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        asked = [name for name in names if self._missing.first([name])]
        if not asked:
            return [False] * len(names)
        with self._missing.asking() as note_missing:
            answers = await self._guard.retried(lambda: present(self.inner, asked))
            found = dict(zip(asked, answers, strict=True))
            for name, is_there in found.items():
                if not is_there:
                    note_missing(name)
        return [found.get(name, False) for name in names]

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        with self._missing.asking() as note_missing:
            outcomes = [*await self._get_into_twice(items)]
            for item, outcome in zip(items, outcomes, strict=True):
                if outcome.status is GetStatus.MISS:
                    note_missing(item.name)
        return outcomes

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        content = await self._guard.retried(lambda: self.inner.get(name, max_bytes=max_bytes))
        if content is not None and tells_of_blocks(name):
            self._missing.clear()
        return content

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        try:
            self._guard.check()
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        if self._num_stuck == self._settings.write_batches:
            self._guard.num_refused += 1
            return [PutOutcome(PutStatus.FULL, f"what is written to {self.url} hangs")] * len(items)
        for item in items:
            self._missing.forget(item.name)
        try:
            return await self._writes.put(items)
        finally:  # of a cancelled put, too, some may have been written
            for item in items:
                self._missing.forget(item.name)

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        return await self.inner.list(prefix, limit=limit, cursor=cursor)

    async def usage(self, prefix: str) -> Usage:
        return await self.inner.usage(prefix)

    # Reads

    async def _get_into_twice(self, items: Sequence[GetItem]) -> Sequence[GetOutcome]:
        """What failed at once is tried again, within the budget."""
        started = self._clock.monotonic()
        outcomes = [*await self._get_into(items)]
        failed = [i for i, outcome in enumerate(outcomes) if outcome.status is GetStatus.FAILED]
        if failed and self._guard.may_retry(started):
            await self._guard.pause()
            again = await self._get_into([items[i] for i in failed])
            for i, outcome in zip(failed, again, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def _get_into(self, items: Sequence[GetItem]) -> Sequence[GetOutcome]:
        num_bytes = sum(item.num_bytes + _ITEM_BYTES for item in items)
        try:
            outcomes = await self._guard.asked(
                lambda: self.inner.get_into(items), num_bytes=num_bytes, lends_buffers=True
            )
        except StoreUnavailableError as error:
            return [GetOutcome(GetStatus.FAILED, str(error))] * len(items)
        self._guard.judge(
            [outcome.reason for outcome in outcomes if outcome.status is GetStatus.FAILED],
            len(items),
        )
        return outcomes

    # Writes

    async def _put(self, items: Sequence[PutItem]) -> Sequence[PutOutcome]:
        try:
            self._guard.check()
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        if self._clock.monotonic() < self._full_until:
            reason = f"{self.url} was full a moment ago"
            return [PutOutcome(PutStatus.FULL, reason)] * len(items)
        num_bytes = sum(item.num_bytes for item in items)
        is_stuck = False

        def note_stuck(reason: str) -> None:
            """Reads may be answered all the while, so that the breaker does not open."""
            nonlocal is_stuck
            is_stuck = True
            self._num_stuck += 1
            if self._num_stuck == self._settings.write_batches:
                self._writes.give_up(reason)

        try:
            outcomes = await self._guard.within(
                lambda: self.inner.put(items),
                self._guard.deadline_s(num_bytes, self._settings.write_timeout_s),
                of_read=False,
                when_stuck=note_stuck,
            )
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)
        finally:
            self._num_stuck -= is_stuck
        if any(one.status is PutStatus.FULL and not one.takes_others for one in outcomes):
            self._full_until = self._clock.monotonic() + self._settings.full_pause_s
        self._guard.judge(
            [outcome.reason for outcome in outcomes if outcome.status is PutStatus.FAILED],
            len(items),
            of_read=False,
        )
        return outcomes


class NegativeCache:
    """ttl_s: how long a name is believed to be missing, 0 not at all; max_names: of how many."""

    def __init__(self, ttl_s: float, max_names: int, clock: Clock) -> None:
        self._ttl_s = ttl_s
        self._max_names = max_names
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()
        self._asked: list[_Meanwhile] = []
        self.num_hits = 0

    def first(self, names: Sequence[str]) -> int:
        """Index of the first name believed to be missing; their number if there is none."""
        if not self._until:
            return len(names)
        now = self._clock.monotonic()
        for index, name in enumerate(names):
            if self._until.get(name, 0.0) > now:
                self.num_hits += 1
                return index
        return len(names)

    @contextmanager
    def asking(self) -> Iterator[Callable[[str], None]]:
        """While the store is asked, and until its answer has been noted with what this gives: for
        each name that it says it has none of. Not of one that somebody has written meanwhile; the
        answer may be older."""
        meanwhile = _Meanwhile()
        self._asked.append(meanwhile)

        def note(name: str) -> None:
            if not (meanwhile.has_cleared or name in meanwhile.written):
                self._note(name)

        try:
            yield note
        finally:
            self._asked.remove(meanwhile)

    def _note(self, name: str) -> None:
        if not self._ttl_s:
            return
        self._until[name] = self._clock.monotonic() + self._ttl_s
        while len(self._until) > self._max_names:
            self._until.popitem(last=False)

    def forget(self, name: str) -> None:
        """Somebody writes it."""
        self._until.pop(name, None)
        for meanwhile in self._asked:
            meanwhile.written.add(name)

    def clear(self) -> None:
        """Somebody may have written any of them."""
        self._until.clear()
        for meanwhile in self._asked:
            meanwhile.has_cleared = True


@dataclass(eq=False, slots=True)
class _Meanwhile:
    """What has been written since a question was put."""

    written: set[str] = field(default_factory=set)
    has_cleared: bool = False
