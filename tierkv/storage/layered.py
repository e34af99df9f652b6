"""A store that consists of a near and a far store, such as files in front of Redis.

get: near --miss--> far --hit--> caller, and a copy is made in near
put: far, then near
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from tierkv.config import Fixed
from tierkv.errors import BadRequestError, ConfigError, StoreRefusedError, StoreUnavailableError
from tierkv.storage.base import (
    StoreWrapper,
    WorkerThreads,
    num_leading,
    room_for,
    usage_of_pages,
)
from tierkv.storage.protocol import (
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
    check_limit,
    check_names,
    check_prefix,
    check_ttl,
)
from tierkv.tasks import supervised, task_group

_log = logging.getLogger(__name__)
_PAGE = 1000
_RETRY_S = 1.0
_MAX_NOTED = 10_000
_FOUND = (GetStatus.HIT, GetStatus.DAMAGED)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayeredSettings:
    """The settings of a layered store.

    Attributes:
        near_ttl_s: seconds to live of copies in the near store.
        max_fill_bytes: largest total size of copies that wait to be written to the near store;
            beyond it, no copy is made.
    """

    near_ttl_s: float = 3600.0
    max_fill_bytes: Fixed[int] = 256 << 20

    def __post_init__(self) -> None:
        try:
            check_ttl(self.near_ttl_s)
        except BadRequestError as error:
            raise ConfigError(f"near_ttl_s: {error}") from error


class LayeredStore(StoreWrapper):
    """A `Store` made of a far store with all values and a near store with copies of blocks.

    Only values that never change (blocks) are copied to the near store. Values that can be replaced
    (tickets) are in the far store only, so `get`, which reads them, never asks the near store. A
    write succeeds when the far store has the value. If the near store fails, reads are slower, but
    none fails.

    Args:
        near: the fast store, such as files of this machine.
        far: the store with all values, such as Redis.
        settings: times to live and sizes of the copies.
    """

    def __init__(self, near: Store, far: Store, settings: LayeredSettings) -> None:
        super().__init__(far)
        self._near = near
        self._far = far
        self._settings = settings
        self._copies = NearCopies(near, settings)
        # Names with a value that was damaged at the last read. The next read uses the far store and
        # makes no copy, because the near store may have failed to delete its copy.
        self._suspects: set[str] = set()
        # Names that were last read from the far store; the oldest ones are dropped.
        self._last_read_from_far: OrderedDict[str, None] = OrderedDict()

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        for store in (self._near, self._far):
            store.use_memory(pools)

    @property
    def health(self) -> StoreHealth:
        """The health of the near store, with the clock skew of the far store.

        Failures of the far store are not included, because the GuardedStore around this store
        counts them.
        """
        clock_skew_s = self._far.health.clock_skew_s
        return replace(self._near.health, part=self._near.url, clock_skew_s=clock_skew_s)

    @property
    def url(self) -> str:
        return f"layered:{self._near.url}|{self._far.url}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._near.running(), self._far.running(), self._copies.running():
            yield

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        near = 0
        with suppress(StoreUnavailableError):
            near = await self._near.exists(names)
        if near == len(names):
            return near
        found = near + await self._far.exists(names[near:])
        if found in (near, len(names)):
            return found
        # Each store can have gaps where the other has values. Asking the stores in turns would take
        # 500 questions for 1,000 alternating names; `present` takes 10 ms.
        return found + num_leading(await self.present(names[found:]))

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        found = [False] * len(names)
        with suppress(StoreUnavailableError):
            found = await self._near.present(names)
        left = [at for at, is_near in enumerate(found) if not is_near]
        if left:
            answers = await self._far.present([names[at] for at in left])
            for at, is_far in zip(left, answers, strict=True):
                found[at] = is_far
        return found

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        suspects = self._suspects & {item.name for item in items}
        self._suspects -= suspects
        num_forgets = self._copies.num_forgets
        outcomes = [GetOutcome(GetStatus.MISS)] * len(items)
        asked = [i for i, item in enumerate(items) if item.name not in suspects]
        near = await self._near.get_into([items[i] for i in asked]) if asked else []
        for i, outcome in zip(asked, near, strict=True):
            outcomes[i] = outcome
            self._last_read_from_far.pop(items[i].name, None)
        left = [i for i, outcome in enumerate(outcomes) if outcome.status is not GetStatus.HIT]
        if left:
            far = await self._far.get_into([items[i] for i in left])
            far_hits = {
                i: one.num_bytes
                for i, one in zip(left, far, strict=True)
                if one.status is GetStatus.HIT
            }
            damaged = {items[i].name for i in far_hits if outcomes[i].status is GetStatus.DAMAGED}
            for i, outcome in zip(left, far, strict=True):
                if outcome.status in _FOUND or outcomes[i].status is not GetStatus.DAMAGED:
                    outcomes[i] = outcome
                    self._last_read_from_far[items[i].name] = None
            trusted = [
                (items[i], num_bytes)
                for i, num_bytes in far_hits.items()
                if items[i].name not in suspects
            ]
            await self._copies.make(trusted, damaged, num_forgets)
            while len(self._last_read_from_far) > _MAX_NOTED:
                self._last_read_from_far.popitem(last=False)
        return outcomes

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        outcomes = await self._far.put(items)
        near = [
            replace(item, ttl_s=min(self._settings.near_ttl_s, item.ttl_s or float("inf")))
            for item, outcome in zip(items, outcomes, strict=True)
            if item.keep_existing and outcome.status is PutStatus.STORED
        ]
        if near:
            await self._near.put(near)
        replaced = [item.name for item in items if not item.leaves_existing]
        if replaced:
            self._copies.forget(replaced)
            with suppress(StoreUnavailableError):  # then it returns no old values, either
                await self._near.delete(replaced)
        return outcomes

    async def delete(self, names: Sequence[str]) -> int:
        """Remove values from both stores; return how many of them existed.

        Raises:
            StoreUnavailableError: the far store does not answer.
            StoreRefusedError: the near store does not answer; the far store has removed the values.
        """
        check_names(names)
        # Some values are in one store only.
        num_there = sum(await self.present([*dict.fromkeys(names)]))
        num_far = await self._far.delete(names)
        self._copies.forget(names)  # their values are no longer in the far store
        try:
            await self._near.delete(names)
        except StoreUnavailableError as error:
            raise StoreRefusedError(str(error)) from error  # the far store can still be read
        return max(num_there, num_far)

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """Remove the copies that the last reads of `names` returned, because they are damaged.

        The copy is removed from the store that was read, near or far. An unavailable near store is
        no error.

        Returns:
            True for each name, because the store that was not read may have an undamaged copy.

        Raises:
            StoreUnavailableError: the far store does not answer; some of its copies may remain.
        """
        check_names(names)
        self._copies.forget(names)
        far = {name for name in names if name in self._last_read_from_far}
        near = {*names} - far
        for name in far:
            del self._last_read_from_far[name]
        if len(self._suspects) > _MAX_NOTED:
            self._suspects.clear()
        self._suspects |= near
        if near:
            with suppress(StoreUnavailableError):  # for example on a read-only disk
                await self._near.delete([*near])
        if far:
            await self._far.forget_damaged([*far])
        return [True] * len(names)

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Return one page of the far store's values, then of values that only the near store has.

        Values that only the near store has can still be read, so an operator who wants to remove
        all values must see them.
        """
        check_prefix(prefix)
        check_limit(limit)
        which, slash, inner = ("far/" if cursor is None else cursor).partition("/")
        if not slash or which not in {"far", "near"}:
            raise BadRequestError(f"{(cursor or '')[:80]!r} is not a cursor of this store")
        if which == "far":
            page = await self._far.list(prefix, limit=limit, cursor=inner or None)
            return ListPage(page.values, f"far/{page.cursor}" if page.cursor else "near/")
        try:
            page = await self._near.list(prefix, limit=limit, cursor=inner or None)
        except StoreUnavailableError:
            if inner:
                raise
            return ListPage((), None)  # the near store is down: none of its values can be read
        values = page.values
        with suppress(StoreUnavailableError):
            are_far = await self._far.present([value.name for value in values])
            values = tuple(one for one, is_far in zip(values, are_far, strict=True) if not is_far)
        return ListPage(values, f"near/{page.cursor}" if page.cursor else None)

    async def usage(self, prefix: str) -> Usage:
        return await usage_of_pages(partial(self.list, prefix, limit=_PAGE))


class NearCopies:
    """A queue of copies of the far store's values, and a task that writes them to the near store.

    Attributes:
        num_forgets: number of calls of `forget`, which discards copies of deleted values. A reader
            compares the numbers before and after a read to find out if values were deleted in
            between.
    """

    def __init__(self, near: Store, settings: LayeredSettings) -> None:
        self._near = near
        self._settings = settings
        self._waiting: dict[str, PutItem] = {}
        self._num_bytes = 0
        self._being_written = ""  # the name of the copy that is being written
        self.num_forgets = 0
        self._came = asyncio.Event()
        self._copier = WorkerThreads(near.url, 1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._came = asyncio.Event()  # of this loop
        try:
            async with (
                self._copier.running(),
                supervised({"tierkv-near-fill": self._keep_filling}),
            ):
                yield
        finally:  # the copies may be outdated when the store is opened again
            self.forget(list(self._waiting))

    async def make(
        self, read_items: Sequence[tuple[GetItem, int]], damaged: set[str], num_forgets: int
    ) -> None:
        """Copy values that were read from the far store, and queue the copies for the near store.

        Values that would raise the bytes in the queue above `max_fill_bytes` are not copied.

        Args:
            read_items: items that were read, each with the length of its value in bytes. Their
                buffers may be changed as soon as the call has returned.
            damaged: names of values that are damaged in the near store; a copy replaces the damaged
                value.
            num_forgets: `self.num_forgets` before the read. If the number has changed since, some
                of the values may have been deleted, and no copy is queued.

        Raises:
            CancelledError: the call was cancelled; no copy is queued, and no buffer is in use.
        """
        copied: list[tuple[GetItem, int]] = []
        for item, num_bytes in read_items:
            fits = self._num_bytes + num_bytes <= self._settings.max_fill_bytes
            if fits and item.name not in self._waiting:
                self._num_bytes += num_bytes
                copied.append((item, num_bytes))
        if not copied:
            return
        try:  # in a thread: copying 2 MiB takes 0.5 ms, or 5 ms into new memory
            contents = await self._copier.run(
                lambda: [b"".join(room_for(num_bytes, item.into)) for item, num_bytes in copied]
            )
        except BaseException as error:
            self._num_bytes -= sum(num_bytes for _, num_bytes in copied)
            if isinstance(error, StoreUnavailableError):
                return  # the store was closed during the copy; the values were read correctly
            raise
        for (item, num_bytes), content in zip(copied, contents, strict=True):
            if item.name in self._waiting or num_forgets != self.num_forgets:
                self._num_bytes -= num_bytes
                continue
            keeps = item.name not in damaged
            ttl_s = self._settings.near_ttl_s
            self._waiting[item.name] = PutItem(item.name, (content,), ttl_s, keep_existing=keeps)
        self._came.set()

    def forget(self, names: Sequence[str]) -> None:
        """Discard the copies of `names`, because these values are deleted or replaced.

        A copy that is being written is deleted from the near store afterwards.
        """
        self.num_forgets += 1
        for name in names:
            item = self._waiting.pop(name, None)
            if item is not None:
                self._num_bytes -= item.num_bytes
            if name == self._being_written:
                self._being_written = ""

    async def _keep_filling(self) -> None:
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            name = self._being_written = next(iter(self._waiting))
            item = self._waiting.pop(name)
            self._num_bytes -= item.num_bytes
            [outcome] = await self._near.put([item])
            if outcome.status is PutStatus.FAILED:
                _log.debug("a value was not copied to the near store: %s", outcome.reason)
            if self._being_written != name:  # `forget` was called for it in the meantime
                with suppress(StoreUnavailableError):
                    await self._near.delete([name])
            self._being_written = ""


class OpensLater(StoreWrapper):
    """A `Store` that tries every second to open another store, `inner`, until it succeeds.

    Operations fail until then. A node can thus start while its near store is down.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._refusal = f"{inner.url} is closed"  # "" while it is open

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Try to open the store once on entering the `async with`, and continue even if that fails.

        Inside the `async with`, opening is tried again every second until it succeeds.

        Raises:
            ConfigError: the store's settings are wrong.
        """
        tried, left = asyncio.Event(), asyncio.Event()
        async with task_group() as tasks:
            opening = tasks.create_task(self._keep_open(tried, left), name="tierkv-near-store")
            try:
                await tried.wait()
                yield
            finally:
                if self._refusal:
                    opening.cancel()
                self._refusal = f"{self.url} is closed"
                left.set()

    async def _keep_open(self, tried: asyncio.Event, left: asyncio.Event) -> None:
        while True:
            try:
                async with self.inner.running():
                    self._refusal = ""
                    tried.set()
                    await left.wait()
                    return
            except (StoreUnavailableError, ConfigError) as error:  # such as TLS files that are gone
                if left.is_set() or (not tried.is_set() and isinstance(error, ConfigError)):
                    raise
                if not tried.is_set():
                    _log.warning(
                        "%s cannot be opened and is not used until it can: %s", self.url, error
                    )
                self._refusal = str(error)
                tried.set()
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        if self._refusal:
            raise StoreUnavailableError(self._refusal)
        return await ask(self.inner)
