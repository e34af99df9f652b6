"""The store on Redis: one server, the master that Sentinels name, or a cluster."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from redis.exceptions import RedisError

from tierkv.clock import Clock, StoreClock
from tierkv.errors import BadRequestError, StoreCorruptError, StoreUnavailableError
from tierkv.storage.base import CLOCK_EVERY_S, BaseStore
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    ListPage,
    Notifier,
    PutItem,
    PutOutcome,
    PutStatus,
    StoredValue,
    StoreHealth,
    check_limit,
    check_name,
    check_names,
    check_prefix,
    check_ttl,
)
from tierkv.storage.redis.cluster import ClusterRouter
from tierkv.storage.redis.control import (
    RedisConnection,
    RedisNotifier,
    ask_once,
    connection_factory,
    conversation,
)
from tierkv.storage.redis.node import (
    NAMES_PER_COMMAND,
    KeyCommand,
    Purpose,
    RedisNode,
    Router,
    check_reply,
    cut,
    described,
    expect,
    get_outcome,
    get_request,
    put_outcome,
    put_request,
    question,
)
from tierkv.storage.redis.pool import FixedAddress, Locator, Login, RedisAccess
from tierkv.storage.redis.resp import Refused, Reply, TooLong
from tierkv.storage.redis.url import RedisSettings, RedisUrl, Setup
from tierkv.storage.redis.wire import Address, Unanswered, WireStats, port_of
from tierkv.tasks import supervised
from tierkv.threads import in_thread

_log = logging.getLogger(__name__)

_ADDRESS_PARTS = 2
_LARGE_BYTES = 64 << 10  # a shorter value fits into every server's buffers


class SentinelLocator:
    """A `Locator` that asks Sentinels, the processes that monitor the master and elect a new one.

    The Sentinel that answered last is asked first. After a failover, a connection to the old master
    ends when that server closes it, does not answer, or refuses a write because it is a replica
    now. The next connection then goes to the new master.
    """

    def __init__(self, url: RedisUrl, access: RedisAccess) -> None:
        self._url = url
        self._access = access
        self._sentinels = list(url.addresses)

    async def locate(self) -> Address:
        """Return the master's address.

        Raises:
            StoreUnavailableError: no Sentinel returned an address.
        """
        failures = []
        for sentinel in tuple(self._sentinels):
            try:
                address = await self._ask(sentinel)
            except StoreUnavailableError as error:
                failures.append(str(error))
                continue
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            return address
        raise StoreUnavailableError(
            f"no sentinel of {self._url} returned a master: {'; '.join(failures)}"
        )

    async def _ask(self, sentinel: Address) -> Address:
        settings = self._access.settings
        login = Login(settings.sentinel_username, settings.sentinel_password)
        reply = await ask_once(
            connection_factory(sentinel, self._access, login),
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.service),
            url=f"the sentinel at {sentinel}",
            deadline_s=settings.deadline_s(0) / len(self._sentinels),
        )
        if not isinstance(reply, list) or len(reply) != _ADDRESS_PARTS:
            raise StoreUnavailableError(
                f"the sentinel at {sentinel} knows no service {self._url.service!r}: "
                "use the name of its `sentinel monitor` line in the URL"
            )
        match reply:
            case [bytes(host), bytes(port_text)]:
                port = port_of(port_text.decode("utf-8", "replace"))
                if port is not None:
                    return Address(host.decode("utf-8", "replace"), port)
        raise StoreUnavailableError(
            f"the sentinel at {sentinel} sent an unexpected answer: {reply!r:.80}"
        )


_CURSOR = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,10})+")
# For batches of more writes, handling the replies and making the next batch takes this process
# longer than the server has work.
_MANY_WRITES = 8


__all__ = ["RedisSettings", "RedisStore"]


class RedisStore(BaseStore):
    """A `Store` on Redis. Each value is a Redis string; its key is the value's name.

    The Redis user needs these commands: GET SET EXISTS UNLINK PEXPIRE PING (AUTH, SELECT when
    connecting; in a cluster ASKING and CLUSTER SLOTS), for listings SCAN STRLEN PTTL, and for hints
    PUBLISH SUBSCRIBE UNSUBSCRIBE on channels that are named like the values. TIME is optional:
    without it, `now` returns this machine's time.
    """

    def __init__(self, url: RedisUrl, settings: RedisSettings, clock: Clock) -> None:
        self._url = url
        self._settings = settings
        self._ours = clock
        self._clock = StoreClock(clock)
        self._router: Router | None = None
        self._num_puts = 0  # under way
        self.stats = WireStats()

    @property
    def health(self) -> StoreHealth:
        return StoreHealth(clock_skew_s=self._clock.skew_s)

    def now(self) -> float:
        return self._clock.wall()

    def notifier(self) -> Notifier:
        return RedisNotifier(self._connect_for_messages, self._publish_hint, url=self.url)

    @property
    def url(self) -> str:
        return str(self._url)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True, sends_from_loop=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        files = self._settings.tls if self._url.is_tls else None
        context = None if files is None else await in_thread(files.context)
        login = Login(self._url.username, self._url.password, self._url.db)
        access = RedisAccess(self._settings, login, files, context, self.stats)
        router = _router(self._url, access, self._ours)
        async with router.running():
            await router.ping()
            await self._read_clock(router, access)
            async with supervised(
                {"tierkv-redis-clock": lambda: self._keep_reading_clock(router, access)}
            ):
                self._router = router
                try:
                    yield
                finally:
                    self._router = None

    async def _keep_reading_clock(self, router: Router, access: RedisAccess) -> None:
        while True:
            await asyncio.sleep(CLOCK_EVERY_S)
            await self._read_clock(router, access)

    async def _read_clock(self, router: Router, access: RedisAccess) -> None:
        try:
            new_connection = connection_factory(await router.nodes()[0].locate(), access)
            deadline_s = self._settings.deadline_s(0)
            async with conversation(new_connection, url=self.url, deadline_s=deadline_s) as talk:
                # PING connects, so that the time of connecting is not part of the next exchange.
                await talk.ask([("PING",)])
                asked_at = self._clock.monotonic()
                [reply] = await talk.ask([("TIME",)])
        except StoreUnavailableError as error:
            _log.info("the time of %s is not known: %s", self.url, error)
            return
        match reply:
            case [bytes(seconds), bytes(microseconds)] if (seconds + microseconds).isdigit():
                self._clock.note(int(seconds) + int(microseconds) / 1e6, asked_at)
            case _:
                _log.info(
                    "%s refuses TIME, so each node uses its own clock: allow +time (%.80r)",
                    self.url,
                    reply,
                )

    async def ping(self) -> None:
        await self._opened().ping()

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        return await self._opened().count_leading(names)

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        return [answer == 1 for answer in await self._each("EXISTS", names)]

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        calls = [KeyCommand(item.name, partial(get_request, item)) for item in items]
        replies = await self._carry_out(calls, Purpose.READ)
        return [get_outcome(item, reply) for item, reply in zip(items, replies, strict=True)]

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        call = KeyCommand(name, lambda: question("GET", name, num_bytes=max_bytes))
        [reply] = await self._carry_out([call], Purpose.QUESTION)
        match check_reply(reply, ("GET", name)):
            case None:
                return None
            case bytes(content) if len(content) <= max_bytes:
                return content
            case bytes(content):
                num_bytes = len(content)
            case other:
                num_bytes = expect(TooLong, other).num_bytes
        raise StoreCorruptError(f"{name} has {num_bytes} bytes, more than the limit of {max_bytes}")

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        if self._num_puts and len(items) > _MANY_WRITES:
            # Making this batch has blocked the loop already. Replies to other batches are handled
            # before it is sent: otherwise the server is idle for 0.1 to 0.5 ms between two batches
            # of 32 values of 512 KiB.
            await asyncio.sleep(0)
        self._num_puts += 1
        try:
            calls = [KeyCommand(item.name, partial(put_request, item)) for item in items]
            replies = await self._carry_out(calls, Purpose.WRITE)
            cut = [item for item, reply in zip(items, replies, strict=True) if _is_cut(reply)]
            refusal = await self._refusal_of_size(cut) if cut else None
        finally:
            self._num_puts -= 1
        return [
            refusal if refusal and isinstance(reply, Unanswered) else put_outcome(item, reply)
            for item, reply in zip(items, replies, strict=True)
        ]

    async def _refusal_of_size(self, cut: Sequence[PutItem]) -> PutOutcome | None:
        """Return FULL if the server closed the connection because of a too large value.

        `cut` has the writes that the server did not answer. Return None if there is another
        cause.
        """
        # Such a server sends no error, and answers small requests. The longest interrupted write is
        # therefore repeated between two pings.
        longest = max(cut, key=lambda item: item.num_bytes)
        if longest.num_bytes < _LARGE_BYTES:
            return None
        call = KeyCommand(longest.name, partial(put_request, longest))
        try:
            await self.ping()
            [reply] = await self._carry_out([call], Purpose.WRITE)
            await self.ping()
        except StoreUnavailableError:
            return None
        if not _is_cut(reply):
            return None
        return PutOutcome(
            PutStatus.FULL,
            f"the server closes the connection when a value of {longest.num_bytes} bytes is "
            "written: set its client-query-buffer-limit (and maxmemory-clients) to several times "
            "that size",
        )

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        return sum(await self._each("UNLINK", names))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        check_names(names)
        check_ttl(ttl_s)
        return sum(await self._each("PEXPIRE", names, math.ceil(ttl_s * 1000)))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        position, *passed = _parse_cursor(cursor)
        # The tags come from addresses: after a failover a cursor does not fit the new server.
        nodes = {}
        for node in self._opened().nodes():
            address = await node.locate()
            nodes[zlib.crc32(str(address).encode())] = node, address
        left = [tag for tag in nodes if tag not in passed[:-1]]
        if passed and (current := passed.pop()) in left:
            left = [current, *(tag for tag in left if tag != current)]
        else:  # the first page, or the master that was being listed has left
            position = 0
        values: dict[str, StoredValue] = {}
        while left and len(values) < limit:
            node, address = nodes[left[0]]
            wanted = limit - len(values)
            position, found, moving = await node.list(address, prefix, position, wanted)
            values |= found
            values |= await self._moving_values(moving)
            if position == 0:
                passed.append(left.pop(0))
        after = None if not left else ".".join(map(str, [position, *passed, left[0]]))
        return ListPage(tuple(values.values()), after)

    async def _moving_values(self, names: Sequence[str]) -> dict[str, StoredValue]:
        calls = [
            KeyCommand(name, partial(question, verb, name))
            for name in names
            for verb in ("STRLEN", "PTTL")
        ]
        replies = await self._carry_out(calls, Purpose.QUESTION)
        now = self._ours.wall()
        values: dict[str, StoredValue] = {}
        for name, *pair in zip(names, replies[::2], replies[1::2], strict=True):
            if any(isinstance(reply, Refused) and reply.code == "WRONGTYPE" for reply in pair):
                continue  # another program's
            num_bytes, ttl_ms = [check_reply(reply, (name,)) for reply in pair]
            values |= {v.name: v for v in described(name, num_bytes, ttl_ms, now=now)}
        return values

    async def _publish_hint(self, topic: str, message: str) -> None:
        # Each node of a cluster passes messages to all others. A random one is used, so that a dead
        # node does not lose all hints.
        await random.choice(self._opened().nodes()).ask("PUBLISH", topic, message)

    async def _connect_for_messages(self) -> RedisConnection:
        failure: Exception = StoreUnavailableError(f"{self.url} has no server that can be reached")
        nodes = list(self._opened().nodes())
        random.shuffle(nodes)
        for node in nodes:
            connection = await node.control_connection()
            try:
                await connection.connect()
            except (RedisError, OSError) as error:
                failure = error
                continue
            except BaseException:  # redis-py does not close the socket of a cancelled `connect`
                await connection.disconnect()
                raise
            return connection
        raise failure

    async def _carry_out(
        self, calls: Sequence[KeyCommand], purpose: Purpose
    ) -> Sequence[Reply | Unanswered]:
        if self._router is None:
            return [Unanswered(f"{self.url} is closed")] * len(calls)
        return await self._router.carry_out(calls, purpose)

    async def _each(self, verb: str, names: Sequence[str], *more: int) -> Sequence[int]:
        router = self._opened()
        parts = cut(names, NAMES_PER_COMMAND)
        return [answer for part in parts for answer in await router.each(verb, part, *more)]

    def _opened(self) -> Router:
        if self._router is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        return self._router


def _router(url: RedisUrl, access: RedisAccess, clock: Clock) -> Router:
    if url.setup is Setup.CLUSTER:
        return ClusterRouter(url, access, clock)
    locator: Locator = FixedAddress(url.addresses[0])
    if url.setup is Setup.SENTINEL:
        locator = SentinelLocator(url, access)
    return RedisNode(locator, access, clock, url=str(url))


def _is_cut(reply: Reply | Unanswered) -> bool:
    return isinstance(reply, Unanswered) and reply.is_cut


def _parse_cursor(cursor: str | None) -> list[int]:
    """Return the numbers in a listing's cursor; [0] for None, which starts a listing.

    The first number is SCAN's cursor on the current server. The others are CRCs of server
    addresses: the servers already listed, and last the current server.
    """
    if cursor is None:
        return [0]
    numbers = [int(text) for text in cursor.split(".")] if _CURSOR.fullmatch(cursor) else []
    if not numbers or numbers[0] >= 1 << 64:
        raise BadRequestError(f"{cursor[:80]!r} is not a cursor of this store")
    return numbers
