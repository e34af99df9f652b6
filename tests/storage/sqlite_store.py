"""A store of one's own: values in an SQLite database. docs/own-store.md says how nodes find it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from tierkv.clock import Clock
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    StoreCorruptError,
    StoreUnavailableError,
)
from tierkv.storage import protocol as p
from tierkv.storage.base import BaseStore, WorkerThreads, copy_into
from tierkv.storage.factory import StoreKind

T = TypeVar("T")
Rows = list[tuple[str, int, float | None]]


@dataclass(frozen=True, slots=True)
class SqliteSettings:
    """journal: how SQLite keeps its journal, `wal` or `delete`."""

    journal: str = "wal"
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.journal not in {"wal", "delete"}:
            raise ConfigError(f"journal must be wal or delete, not {self.journal!r}")


class SqliteStore(BaseStore):
    capabilities = p.Capabilities(is_shared=True, is_durable=True)

    def __init__(self, url: str, settings: SqliteSettings, clock: Clock) -> None:
        self.url, self.settings, self._clock = url, settings, clock
        self._thread = WorkerThreads(url, 1)  # a cancelled caller waits for it: buffers are safe
        self._database: sqlite3.Connection | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._thread.running():
            await self._do(self._open)
            try:
                yield
            finally:
                database, self._database = self._database, None
                if database is not None:
                    await self._thread.run(database.close)

    def _open(self) -> None:
        path = self.url.removeprefix("sqlite://")
        self._database = sqlite3.connect(
            path, self.settings.timeout_s, isolation_level=None, check_same_thread=False
        )
        self._database.execute(f"PRAGMA journal_mode={self.settings.journal}")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS v (name TEXT PRIMARY KEY, value BLOB, ends REAL)"
        )

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await self._thread.run(work)
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"{self.url}: {error}") from error

    def _rows(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        if self._database is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        return self._database.execute(sql, values).fetchall()

    def _value(self, name: str) -> bytes | None:
        sql = "SELECT value FROM v WHERE name = ? AND (ends IS NULL OR ends > ?)"
        rows = self._rows(sql, name, self._clock.wall())
        return bytes(rows[0][0]) if rows else None  # type: ignore[call-overload]

    async def ping(self) -> None:
        await self._do(lambda: self._rows("SELECT 1"))

    async def present(self, names: Sequence[str]) -> list[bool]:
        p.check_names(names)
        return await self._do(lambda: [self._value(name) is not None for name in names])

    async def get_into(self, items: Sequence[p.GetItem]) -> list[p.GetOutcome]:
        try:
            return await self._do(lambda: [self._get_into(item) for item in items])
        except StoreUnavailableError as error:
            return [p.GetOutcome(p.GetStatus.FAILED, str(error))] * len(items)

    def _get_into(self, item: p.GetItem) -> p.GetOutcome:
        value = self._value(item.name)
        if value is None:
            return p.GetOutcome(p.GetStatus.MISS)
        if len(value) > item.room_bytes:
            return p.too_long(item, len(value))
        copy_into(value, item.into)
        return p.GetOutcome(p.GetStatus.HIT, num_bytes=len(value))

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        p.check_name(name)
        value = await self._do(lambda: self._value(name))
        if value is not None and len(value) > max_bytes:
            raise StoreCorruptError(f"{name} has {len(value)} bytes, above {max_bytes}")
        return value

    async def put(self, items: Sequence[p.PutItem]) -> list[p.PutOutcome]:
        try:
            return await self._do(lambda: [self._put(item) for item in items])
        except StoreUnavailableError as error:
            return [p.PutOutcome(p.PutStatus.FAILED, str(error))] * len(items)

    def _put(self, item: p.PutItem) -> p.PutOutcome:
        now = self._clock.wall()
        ends = None if item.ttl_s is None else now + item.ttl_s
        sql = "INSERT INTO v VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value, "
        sql += "ends = excluded.ends WHERE ? OR v.ends <= ? RETURNING name"
        value = b"".join(item.completed())
        stored = self._rows(sql, item.name, value, ends, not item.leaves_existing, now)
        return p.PutOutcome(p.PutStatus.STORED if stored else p.PutStatus.EXISTED)

    async def delete(self, names: Sequence[str]) -> int:
        p.check_names(names)
        now = self._clock.wall()
        sql = "DELETE FROM v WHERE name = ? RETURNING ends IS NULL OR ends > ?"
        gone = await self._do(lambda: [self._rows(sql, name, now) for name in names])
        return sum(bool(rows and rows[0][0]) for rows in gone)

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        p.check_names(names)
        p.check_ttl(ttl_s)
        now = self._clock.wall()
        sql = "UPDATE v SET ends = ? WHERE name = ? AND (ends IS NULL OR ends > ?) RETURNING name"
        told = await self._do(lambda: [self._rows(sql, now + ttl_s, n, now) for n in names])
        return sum(map(len, told))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> p.ListPage:
        p.check_prefix(prefix)
        p.check_limit(limit)
        if cursor is not None and not cursor.startswith(prefix):
            raise BadRequestError(f"{cursor[:80]!r} is not a cursor of this listing")
        sql = "SELECT name, length(value), ends FROM v WHERE substr(name, 1, ?) = ? AND name > ? "
        sql += "AND (ends IS NULL OR ends > ?) ORDER BY name LIMIT ?"
        values = (len(prefix), prefix, cursor or "", self._clock.wall(), limit)
        rows = await self._do(lambda: self._rows(sql, *values))
        page = tuple(p.StoredValue(*row) for row in rows)  # type: ignore[arg-type]
        return p.ListPage(page, page[-1].name if len(page) == limit else None)

    async def usage(self, prefix: str) -> p.Usage:
        page = await self.list(prefix, limit=2**31)
        return p.Usage(len(page.values), sum(value.num_bytes for value in page.values))


SQLITE = StoreKind(SqliteSettings, SqliteStore)  # what the entry point names
