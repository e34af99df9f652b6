"""The store on one Redis server, through redis-py."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from redis.exceptions import ResponseError

from tierkv.clock import Clock
from tierkv.errors import BadRequestError, ConfigError, StoreCorruptError, StoreUnavailableError
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    ListPage,
    PutItem,
    PutOutcome,
    StoredValue,
    Usage,
    check_limit,
    check_name,
    check_names,
    check_prefix,
    is_name,
)
from tierkv.storage.redis_bulk import BulkLanes, Pace, is_wrong_type
from tierkv.storage.redis_connection import TlsFiles, connection_factory
from tierkv.storage.redis_lanes import Command, RedisLanes, Reply
from tierkv.storage.redis_url import RedisUrl

# Names in one command. The server does nothing else meanwhile; 1,000 take it 1.2 ms.
_NAMES_PER_COMMAND = 512
_SCAN_COUNT = 1000
_CURSOR_CHARS = 20  # of a 64-bit number
_PTTL_NO_EXPIRY = -1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """num_connections: for values; one more is kept for questions, so they never queue behind.
        GET and SET of 64 values of 2 MiB on loopback, uvloop, 2 cores, GB/s: 1.6 and 1.3 with one
        connection, 1.6 and 1.7 with two, 1.1 and 1.7 with four.

    timeout_s: how long the server may take for one exchange, connecting included, apart from the
        time that its bytes take at slowest_bytes_per_s.
    connect_timeout_s: the part of it that connecting may take.
    """

    num_connections: int = 2
    timeout_s: float = 0.25
    connect_timeout_s: float = 0.25
    slowest_bytes_per_s: float = 200e6
    tls: TlsFiles = field(default_factory=TlsFiles)

    def __post_init__(self) -> None:
        if not 1 <= self.num_connections <= 256:  # noqa: PLR2004
            raise ConfigError(f"num_connections must be 1 to 256, not {self.num_connections}")
        for name, number in (
            ("timeout_s", self.timeout_s),
            ("connect_timeout_s", self.connect_timeout_s),
            ("slowest_bytes_per_s", self.slowest_bytes_per_s),
        ):
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(f"{name} must be a number above 0, not {number}")


class RedisStore:
    """`Store` on a Redis server: a name is a key, a value a string, with PX for its time to live.

    Commands: GET SET EXISTS UNLINK SCAN STRLEN PTTL PING (and AUTH SELECT CLIENT when connecting).
    A batch stops at the first exchange that fails: what is left is FAILED without being tried.
    """

    def __init__(self, url: RedisUrl, settings: RedisSettings, clock: Clock) -> None:
        self._url = str(url)
        self._pace = Pace(settings.timeout_s, settings.slowest_bytes_per_s)
        self._clock = clock
        new_connection = connection_factory(
            url, settings.tls, connect_timeout_s=settings.connect_timeout_s
        )
        self._values = RedisLanes(
            new_connection, num_connections=settings.num_connections, url=self._url
        )
        self._bulk = BulkLanes(self._values, settings.num_connections, self._pace)
        self._questions = RedisLanes(new_connection, num_connections=1, url=self._url)

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._questions.running():
            await self.ping()
            async with self._values.running():
                yield

    async def ping(self) -> None:
        await self._question(("PING",))

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        found = 0
        for part in _cut(names, _NAMES_PER_COMMAND):
            leading = await self._count_leading(part)
            found += leading
            if leading < len(part):
                break
        return found

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        return await self._bulk.get_into(items)

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        reply = await self._question(("GET", name), num_bytes=max_bytes)
        if reply is None:
            return None
        content = _expect(bytes, reply)
        if len(content) > max_bytes:
            raise StoreCorruptError(
                f"{name} has {len(content)} bytes, more than the {max_bytes} it may have"
            )
        return content

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return await self._bulk.put(items)

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        deleted = 0
        for part in _cut(names, _NAMES_PER_COMMAND):
            deleted += _expect(int, await self._question(("UNLINK", *part)))
        return deleted

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        position = _parse_cursor(cursor)
        values: dict[str, StoredValue] = {}
        while True:
            position, names = await self._scan(prefix, position, limit)
            values |= {value.name: value for value in await self._describe(names)}
            if position == 0 or len(values) >= limit:
                return ListPage(tuple(values.values()), str(position) if position else None)

    async def usage(self, prefix: str) -> Usage:
        """As in `Store`; a value can be counted twice while the server rebuilds its key table."""
        check_prefix(prefix)
        num_values, num_bytes, position = 0, 0, None
        while position != 0:
            position, names = await self._scan(prefix, position or 0, _SCAN_COUNT)
            values = await self._describe(names)
            num_values += len(values)
            num_bytes += sum(value.num_bytes for value in values)
        return Usage(num_values, num_bytes)

    async def _count_leading(self, names: Sequence[str]) -> int:
        """Bisection: as many questions as `names` has binary digits, 1.4 ms for 1,000 names."""
        if await self._count(names) == len(names):
            return len(names)
        present, gap = 0, len(names)  # names[:present] are all there, names[present:gap] are not
        while gap - present > 1:
            middle = (present + gap) // 2
            if await self._count(names[present:middle]) == middle - present:
                present = middle
            else:
                gap = middle
        return present

    async def _count(self, names: Sequence[str]) -> int:
        return _expect(int, await self._question(("EXISTS", *names)))

    async def _scan(self, prefix: str, position: int, count: int) -> tuple[int, Sequence[str]]:
        # check_prefix lets no glob character through, so there is nothing to escape.
        reply = await self._question(
            ("SCAN", position, "MATCH", f"{prefix}*", "COUNT", min(count, _SCAN_COUNT))
        )
        position_reply, found = _expect(list, reply)
        names = [_expect(bytes, name).decode("ascii", "replace") for name in _expect(list, found)]
        return int(_expect(bytes, position_reply)), [name for name in names if is_name(name)]

    async def _describe(self, names: Sequence[str]) -> Sequence[StoredValue]:
        """What is known of each name, less those that are gone or are not strings."""
        values = []
        now = self._clock.wall()
        for part in _cut(names, _NAMES_PER_COMMAND):
            commands = [(verb, name) for name in part for verb in ("STRLEN", "PTTL")]
            replies = await self._questions.ask(commands, deadline_s=self._pace.deadline_s(0))
            for name, num_bytes, ttl_ms in zip(part, replies[::2], replies[1::2], strict=True):
                if not isinstance(num_bytes, int) or not isinstance(ttl_ms, int):
                    continue
                if ttl_ms >= _PTTL_NO_EXPIRY:  # below it stands "no such key"
                    expires_at = None if ttl_ms == _PTTL_NO_EXPIRY else now + ttl_ms / 1000
                    values.append(StoredValue(name, num_bytes, expires_at))
        return values

    async def _question(self, command: Command, *, num_bytes: int = 0) -> Reply:
        deadline_s = self._pace.deadline_s(num_bytes)
        [reply] = await self._questions.ask([command], deadline_s=deadline_s)
        if isinstance(reply, ResponseError):
            if is_wrong_type(reply):
                raise StoreCorruptError(f"{command[1]!s} is not a string: {reply}") from reply
            raise StoreUnavailableError(f"{self._url} refused {command[0]!s}: {reply}") from reply
        return reply


def _parse_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 0
    is_number = len(cursor) <= _CURSOR_CHARS and cursor.isascii() and cursor.isdecimal()
    if not (is_number and 0 < int(cursor) < 1 << 64):
        raise BadRequestError(f"{cursor[:80]!r} is not a cursor of this store")
    return int(cursor)


def _cut(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))


def _expect(kind: type[T], reply: object) -> T:
    if not isinstance(reply, kind):
        raise StoreUnavailableError(f"a Redis server does not answer {reply!r:.80} to this")
    return reply
