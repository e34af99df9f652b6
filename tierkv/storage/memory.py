"""A store in this process's own memory, for a single node, tests and demos."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tierkv.clock import Clock
from tierkv.errors import BadRequestError, ConfigError, StoreCorruptError, StoreUnavailableError
from tierkv.storage.base import BaseStore, copy_into
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    Hub,
    ListPage,
    Notifier,
    PutItem,
    PutOutcome,
    PutStatus,
    StoredValue,
    check_limit,
    check_name,
    check_names,
    check_prefix,
    check_ttl,
    too_long,
)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The settings of a store in memory.

    Attributes:
        capacity_bytes: largest total size of all values, beyond which writes have the outcome FULL;
            None for no limit.
    """

    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and self.capacity_bytes < 0:
            raise ConfigError(
                f"storage.memory.capacity_bytes must be at least 0, not {self.capacity_bytes}"
            )


@dataclass(frozen=True, slots=True)
class _Value:
    content: bytes
    expires_at: float | None


class MemoryStore(BaseStore):
    """A `Store` in a dict. Values outlive `running()`, but not the object.

    Other coroutines run between two values of a batch, so a large batch does not block the loop.
    """

    def __init__(self, settings: MemorySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._values: dict[str, _Value] = {}
        self._num_bytes = 0
        self._none_expires_before = math.inf  # Unix seconds
        self._is_open = False
        self._hub = Hub()

    def now(self) -> float:
        return self._clock.wall()

    def notifier(self) -> Notifier:
        return self._hub

    @property
    def url(self) -> str:
        return "memory://"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=False, is_durable=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    async def ping(self) -> None:
        self._check_open()

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        self._check_open()
        return [self._live(name) is not None for name in names]

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        outcomes = []
        for item in items:
            outcomes.append(self._get_one(item))
            await asyncio.sleep(0)
        return outcomes

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        self._check_open()
        value = self._live(name)
        if value is None:
            return None
        if len(value.content) > max_bytes:
            raise StoreCorruptError(
                f"{name} has {len(value.content)} bytes, more than the limit of {max_bytes}"
            )
        return value.content

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        outcomes = []
        for item in items:
            outcomes.append(self._put_one(item))
            await asyncio.sleep(0)
        return outcomes

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        self._check_open()
        deleted = 0
        for name in names:
            if self._live(name) is not None:
                self._forget(name)
                deleted += 1
        return deleted

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        check_names(names)
        check_ttl(ttl_s)
        self._check_open()
        touched = 0
        for name in names:
            if (value := self._live(name)) is not None:
                self._values[name] = replace(value, expires_at=self._expiry_in(ttl_s))
                touched += 1
        return touched

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        if cursor is not None and not cursor.startswith(prefix):
            raise BadRequestError(f"{cursor[:80]!r} is not a cursor of this listing")
        self._check_open()
        names = sorted(
            name
            for name in self._values
            if name.startswith(prefix) and (cursor is None or name > cursor)
        )
        page = names[:limit]
        return ListPage(
            values=tuple(
                StoredValue(name, len(value.content), value.expires_at)
                for name in page
                if (value := self._live(name)) is not None
            ),
            cursor=page[-1] if len(names) > limit else None,
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailableError(f"{self.url} is closed")

    def _live(self, name: str) -> _Value | None:
        return self._live_at(name, self._clock.wall())

    def _live_at(self, name: str, now: float) -> _Value | None:
        value = self._values.get(name)
        if value is None or value.expires_at is None or value.expires_at > now:
            return value
        self._forget(name)
        return None

    def _forget(self, name: str) -> None:
        self._num_bytes -= len(self._values.pop(name).content)

    def _get_one(self, item: GetItem) -> GetOutcome:
        if not self._is_open:
            return GetOutcome(GetStatus.FAILED, f"{self.url} is closed")
        value = self._live(item.name)
        if value is None:
            return GetOutcome(GetStatus.MISS)
        num_bytes = len(value.content)
        if num_bytes > item.room_bytes:
            return too_long(item, num_bytes)
        copy_into(value.content, item.into)
        return GetOutcome(GetStatus.HIT, num_bytes=num_bytes)

    def _put_one(self, item: PutItem) -> PutOutcome:
        if not self._is_open:
            return PutOutcome(PutStatus.FAILED, f"{self.url} is closed")
        now = self._clock.wall()
        existing = self._live_at(item.name, now)
        if existing is not None and item.leaves_existing:
            return PutOutcome(PutStatus.EXISTED)
        freed = 0 if existing is None else len(existing.content)
        if not self._has_room(item.num_bytes - freed, now):
            return PutOutcome(
                PutStatus.FULL,
                f"{self.url} holds {self._num_bytes} of {self._settings.capacity_bytes} bytes",
                accepts_others=item.num_bytes > (self._settings.capacity_bytes or 0),
            )
        if existing is not None:
            self._forget(item.name)
        expires_at = None if item.ttl_s is None else self._expiry_in(item.ttl_s)
        self._values[item.name] = _Value(b"".join(item.completed()), expires_at)
        self._num_bytes += item.num_bytes
        return PutOutcome(PutStatus.STORED)

    def _has_room(self, num_bytes: int, now: float) -> bool:
        capacity = self._settings.capacity_bytes
        if capacity is None or self._num_bytes + num_bytes <= capacity:
            return True
        if now >= self._none_expires_before:
            for name in list(self._values):
                self._live_at(name, now)
            ends = (value.expires_at for value in self._values.values())
            self._none_expires_before = min(
                (end for end in ends if end is not None), default=math.inf
            )
        return self._num_bytes + num_bytes <= capacity

    def _expiry_in(self, ttl_s: float) -> float:
        expires_at = self._clock.wall() + ttl_s
        self._none_expires_before = min(self._none_expires_before, expires_at)
        return expires_at
