"""The promises of every store: named, opaque values in batches, one outcome per item, in order.

A `Notifier` carries hints between the users of a store that there is a new value. A store knows
nothing of blocks, layouts or checksums: see `transfer.storage_io`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from tierkv.cache.keys import NameRun
from tierkv.errors import BadRequestError

LOOK = ""  # the message without content: read the store
_MESSAGE = re.compile(r"[A-Za-z0-9]{0,32}")
_MAX_WAITING = 64


def check_message(message: str) -> str:
    """Return `message`, which must be short and plain enough for every kind of notifier."""
    assert _MESSAGE.fullmatch(message), "a message has up to 32 letters and digits"
    return message


class Listener:
    """The messages of one topic for one waiter.

    Attributes:
        is_live: True if messages arrive as they are sent; if False, the waiter has to poll the
            store.
    """

    def __init__(self) -> None:
        self.is_live = False
        self._heard: deque[str] = deque(maxlen=_MAX_WAITING)
        self._came = asyncio.Event()

    def hear(self, message: str) -> None:
        self._heard.append(message)
        self._came.set()

    async def next(self, timeout_s: float) -> str | None:
        """Return the next message, None if none came in `timeout_s` seconds."""
        if not self._heard:
            self._came.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        return self._heard.popleft()


class Notifier(Protocol):
    """Hints between the users of one store that there is a new value; topics are names of values.

    A message may be lost, come twice, or come late. A listener therefore reads the store first,
    again after each message, and from time to time without one.
    """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return the notifier's lifetime, within that of its store.

        Failures of hints are never raised.
        """

    async def notify(self, topic: str, message: str = LOOK) -> None:
        """Send `message` to the listeners of `topic`. Never fails; takes as long as one question.

        Args:
            topic: name of a value.
            message: up to 32 letters and digits.
        """

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        """Listen to `topic`. Messages can be missed until `is_live` turns true; LOOK comes then."""


class Topics:
    """The listeners of this process, by topic."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[Listener]] = {}
        self.changed = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    @property
    def wanted(self) -> set[str]:
        return set(self._listeners)

    @contextmanager
    def listening(self, topic: str, *, is_live: bool) -> Iterator[Listener]:
        """Yield a listener of a topic for the time of the body.

        Args:
            topic: Name of the topic.
            is_live: True if messages of the topic arrive now; False if the listener has to poll.
        """
        listener = Listener()
        listener.is_live = is_live
        self._listeners.setdefault(topic, set()).add(listener)
        self.changed.set()
        try:
            yield listener
        finally:
            others = self._listeners[topic]
            others.discard(listener)
            if not others:
                del self._listeners[topic]
                self.changed.set()

    def hear(self, topic: str, message: str) -> None:
        """Pass a message to a topic's listeners. Text that is no message counts as LOOK.

        Args:
            topic: Name of the topic.
            message: The message, perhaps from a writer outside tierkv.
        """
        if not _MESSAGE.fullmatch(message):
            message = LOOK
        for listener in self._listeners.get(topic, ()):
            listener.hear(message)

    def turn(self, topic: str, *, is_live: bool) -> None:
        """Set whether messages of a topic arrive, and send its listeners LOOK for missed messages.

        Args:
            topic: Name of the topic.
            is_live: True if messages arrive now; False if listeners have to poll.
        """
        for listener in self._listeners.get(topic, ()):
            listener.is_live = is_live
            listener.hear(LOOK)

    def turn_all(self, *, is_live: bool) -> None:
        for topic in self.wanted:
            self.turn(topic, is_live=is_live)


class Polling:
    """The `Notifier` of a store without messages: listeners have to poll."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def notify(self, topic: str, message: str = LOOK) -> None:
        """Do nothing."""

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:  # noqa: ARG002 - the protocol's
        yield Listener()


class Hub:
    """The `Notifier` within one process and one event loop."""

    def __init__(self) -> None:
        self.topics = Topics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def notify(self, topic: str, message: str = LOOK) -> None:
        """Send a message to this process's listeners of a topic; see Notifier.notify.

        Args:
            topic: Name of the topic.
            message: The message.
        """
        self.topics.hear(topic, check_message(message))

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self.topics.listening(topic, is_live=True)


Buffer = bytes | bytearray | memoryview

# Names are made by `cache.keys` only; the pattern keeps out path tricks, globs, CRLF and NUL.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?::[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,7}")


# Redis keeps deadlines in signed milliseconds and old file systems theirs in 31 bits of seconds.
_MAX_TTL_S = 10 * 365 * 86_400.0


def is_name(name: str) -> bool:
    """Return whether a store accepts `name`."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def check_name(name: str) -> str:
    """Return `name`.

    Raises:
        BadRequestError: a store does not accept the name.
    """
    if not is_name(name):
        raise BadRequestError(f"{name[:80]!r} is not a valid name of a value")
    return name


class CheckedNames(tuple[str, ...]):
    """Names that passed `check_names`; stores around stores need not check them again."""

    __slots__ = ()


def check_names(names: Sequence[str]) -> CheckedNames | NameRun:
    """Return `names`. Names of a run differ in their digests only, so one of them is checked.

    Raises:
        BadRequestError: a store does not accept one of the names.
    """
    if isinstance(names, CheckedNames):
        return names
    if isinstance(names, NameRun):
        if names and not names.is_checked:
            check_name(names[0])
            names.is_checked = True
        return names
    # A thousand names take 0.25 ms, and 0.45 ms one after the other.
    if not all(map(_NAME.fullmatch, names)) or ".." in "\n".join(names):
        for name in names:
            check_name(name)
    return CheckedNames(names)


def check_limit(limit: int) -> None:
    """Check the length of a page.

    Raises:
        BadRequestError: `limit` is below 1.
    """
    if limit < 1:
        raise BadRequestError(f"the limit of a page must be at least 1 value, not {limit}")


def check_prefix(prefix: str) -> str:
    """Return `prefix`: a name, or a name and a colon.

    Raises:
        BadRequestError: it is neither.
    """
    check_name(prefix.removesuffix(":"))
    return prefix


def check_ttl(ttl_s: float) -> None:
    """Check a time to live, in seconds.

    Raises:
        BadRequestError: `ttl_s` is not above 0 and at most ten years.
    """
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= _MAX_TTL_S):
        raise BadRequestError(
            f"a time to live must be above 0 s and at most ten years, not {ttl_s} s"
        )


class GetStatus(Enum):
    HIT = "hit"  # every byte of the value is in the caller's buffers, from their start on
    MISS = "miss"  # no such value
    DAMAGED = "damaged"  # there is one, but it has no room, or it fails its checksum
    FAILED = "failed"  # the store did not answer, or not in time


class PutStatus(Enum):
    STORED = "stored"  # durable as far as this store promises durability
    EXISTED = "existed"  # there was a value already; it was left as it was
    FULL = "full"  # the store takes no writes now (no room, a replica ...): do not retry soon
    FAILED = "failed"  # the store did not answer, or not in time; it may or may not have stored


class Digest(Protocol):
    """A digest of the bytes of one value, given in order, piece by piece.

    `update` is called on the loop or in a thread of the store. 256 KiB may take 20 us.
    """

    def update(self, piece: memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class GetItem:
    """A value to read: its name, and the buffers to fill in order.

    Attributes:
        into: writable, C-contiguous buffers; a value that is longer than all of them is DAMAGED.
        digest: makes a digest that a store may give the bytes as they arrive, while they are in the
            processor's cache.

    Raises:
        BadRequestError: a store does not accept the name.
    """

    name: str
    into: tuple[memoryview, ...]
    digest: Callable[[], Digest | None] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        for view in self.into:
            assert view.c_contiguous, "a value lands in plain memory"
            assert not view.readonly, "a value lands in writable memory"

    @property
    def room_bytes(self) -> int:
        return sum(view.nbytes for view in self.into)


@dataclass(frozen=True, slots=True)
class GetOutcome:
    """The outcome of one read.

    Attributes:
        reason: one sentence for the log; empty for HIT and MISS.
        num_bytes: the length of a HIT's value; bytes behind it in `into` mean nothing.
        digest: the item's digest, if it has received all bytes of a HIT's value; else None.
        is_direct: True for a HIT from another node's memory, not from a store.
    """

    status: GetStatus
    reason: str = ""
    num_bytes: int = 0
    digest: Digest | None = None
    is_direct: bool = False


def too_long(item: GetItem, num_bytes: int) -> GetOutcome:
    """Return the outcome of a value that has no room in an item.

    Args:
        item: The item with its room.
        num_bytes: Size of the value.
    """
    reason = (
        f"{item.name} has {num_bytes} bytes, more than the {item.room_bytes} that were expected"
    )
    return GetOutcome(GetStatus.DAMAGED, reason)


@dataclass(frozen=True, slots=True)
class PutItem:
    """A value to write, given as consecutive `parts`. A value of no bytes is a value.

    Attributes:
        ttl_s: seconds to live; None for as long as the store keeps it.
        keep_existing: leave an existing value, which is the same (block keys). False replaces it
            atomically (tickets).
        only_new: leave an existing value, which may differ: the first one stays.
        worth: of writes that wait for a slow store, those worth least are dropped first.
        complete: fills in the rest of the parts (a checksum). The store calls it, or `completed`,
            right before sending: maybe more than once, and from several threads.

    Raises:
        BadRequestError: a store does not accept the name, or ttl_s is not above 0 and at most ten
            years.
    """

    name: str
    parts: tuple[Buffer, ...]
    ttl_s: float | None = None
    keep_existing: bool = True
    worth: float = 0.0
    only_new: bool = False
    complete: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        for part in self.parts:
            assert memoryview(part).c_contiguous, "a value is made of plain memory"
        if self.ttl_s is not None:
            check_ttl(self.ttl_s)

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)

    def completed(self) -> tuple[Buffer, ...]:
        """Complete the parts and return them."""
        if self.complete is not None:
            self.complete()
        return self.parts

    @property
    def leaves_existing(self) -> bool:
        return self.keep_existing or self.only_new


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """The outcome of one write.

    Attributes:
        takes_others: True for FULL if the store refuses this value only, now and later.
    """

    status: PutStatus
    reason: str = ""
    takes_others: bool = False


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One line of a listing.

    Attributes:
        expires_at: Unix seconds of this machine's clock; None if the value has no TTL.
    """

    name: str
    num_bytes: int
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class ListPage:
    """Part of a listing; `cursor` continues it, None if this was the last part."""

    values: tuple[StoredValue, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    num_values: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The properties of a store.

    Attributes:
        is_shared: other processes see the same values.
        is_durable: values outlive the process.
        has_ttl: values expire; if False, `ttl_s` has no effect, and values stay until the store or
            its owner removes them: for room (Mooncake), or by a bucket's lifecycle rule.
        has_listing: `list` and `usage` work; if False, they raise StoreUnavailableError.
        has_cheap_questions: asking for a value costs less than reading it; if False, a lookup
            reads.
        sends_from_loop: values are completed on the loop (PutItem.complete), one by one. If threads
            send them, other threads complete the next ones at the same time: with Mooncake and 16
            cores put had 0.67 of its client's rate when the same threads did both.
    """

    is_shared: bool
    is_durable: bool
    has_ttl: bool = True
    has_listing: bool = True
    has_cheap_questions: bool = True
    sends_from_loop: bool = False

    @classmethod
    def common_to(cls, every: Sequence[Capabilities]) -> Capabilities:
        """Return the capabilities that all of several stores have."""
        return cls(*(all(getattr(one, f.name) for one in every) for f in fields(cls)))


class BreakerState(Enum):
    CLOSED = "closed"  # operations reach the store
    OPEN = "open"  # operations fail at once
    HALF_OPEN = "half_open"  # operations fail at once, and one probe is under way


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """The health of a store, for metrics and readiness.

    Attributes:
        circuit: state of the breaker; None, with counts of 0, for a store without a breaker.
        part: for a store made of several, the URL of the one with this circuit; "" for its own.
        num_opened: number of times that the breaker opened.
        reason: why it opened last.
        degraded_s: seconds in which it was not closed, in total.
        write_refusal: why the store takes no writes, in its own words; "" if it does.
        clock_skew_s: seconds that this machine's clock is ahead of the store's; None if the store
            does not tell its time.
        num_refused: operations that failed at once: circuit open, too many waiting, or stuck.
    """

    circuit: BreakerState | None = None
    part: str = ""
    num_opened: int = 0
    reason: str = ""
    degraded_s: float = 0.0
    write_refusal: str = ""
    clock_skew_s: float | None = None
    num_retries: int = 0
    num_refused: int = 0
    num_dropped_writes: int = 0
    waiting_write_bytes: int = 0
    negative_hits: int = 0


class Store(Protocol):
    """Named values. Safe for concurrent use from one event loop; never blocks that loop.

    Faults of the store are outcomes of the items (FAILED, with a reason); a method without items
    raises StoreUnavailableError. Wrong use (a bad name) raises BadRequestError before the store is
    asked. Every reader sees a value whole or not at all, at every moment. Before `running()` is
    entered and after it is left all operations fail: FAILED, or StoreUnavailableError.
    Leaving lets operations under way end, in success or failure.

    If several values of one name are put at the same time or in one batch, one is kept whole.

    Cancelling a wait never corrupts a later answer. The caller's buffers may still be written
    (get_into) or read (put) until the coroutine has ended; after a cancel it ends only when the
    store no longer touches them.
    """

    @property
    def url(self) -> str:
        """The address of the store without secrets, for logs and status."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def health(self) -> StoreHealth: ...

    def now(self) -> float:
        """Return the store's time in Unix seconds; this machine's if the store has no clock.

        Times that other users of the store will read are made and compared with this clock.
        """

    def notifier(self) -> Notifier:
        """Return a way to notify other users of the store of new values."""

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Announce the pools of most buffers of reads and writes, before `running()` is entered.

        For stores with a network card that needs registered memory. The pools are plain memory and
        stay until `running()` is left.
        """

    def when_back(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the store answers again after a failure: its values may be lost.

        The same callable given twice is called once.
        """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return the store's lifetime. Entering checks that the store can be used.

        Raises:
            StoreUnavailableError: the store cannot be used, in one clear sentence.
            ConfigError: a setting is wrong.
        """

    async def ping(self) -> None:
        """Return if the store answers.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def exists(self, names: Sequence[str]) -> int:
        """Return the number of leading `names` that have a value.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def present(self, names: Sequence[str]) -> list[bool]:
        """Return for each of `names` whether it has a value.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        """Read each value into its buffers; outcomes contain the lengths.

        With any status but HIT the buffers hold undefined bytes.
        """

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Return one small value (a ticket), None if there is none.

        Args:
            name: the name.
            max_bytes: longest accepted value.

        Raises:
            StoreCorruptError: the value is longer.
            StoreUnavailableError: the store does not answer.
        """

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Store each value, whole or not at all."""

    async def delete(self, names: Sequence[str]) -> int:
        """Forget values; return the number of those that existed.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """Forget the damaged copy that the last read of each of `names` came from.

        Returns:
            For each name whether there may be another copy, in another store that this one is made
                of.

        Raises:
            StoreUnavailableError: the store does not answer; some copies may be left.
        """

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Renew the life of values, and return the number of values that existed.

        A value without expiry gets one.

        Args:
            names: Names of the values.
            ttl_s: Seconds from now that the values live.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Return a page of values with names that start with `prefix`, in no order.

        A value that exists during the whole listing is listed. Values can be listed twice when
        others are written or removed during the listing.

        Args:
            prefix: a name, or a name and a colon.
            limit: about the most values of a page.
            cursor: cursor of the page before, None for the first page.

        Raises:
            StoreUnavailableError: the store does not answer.
            BadRequestError: the cursor is not one of this store, or the limit is below 1.
        """

    async def usage(self, prefix: str) -> Usage:
        """Return values and bytes under `prefix`, from its whole listing.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
