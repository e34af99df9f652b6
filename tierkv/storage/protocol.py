"""The protocol of stores: opaque bytes, each value under a name, read and written in batches.

Each item of a batch has an outcome of its own, in the order of the items. A `Notifier` sends hints
between the users of one store: "the value of this name is new". A store knows nothing of blocks,
layouts or checksums; `transfer.storage_io` turns blocks into values.
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

EMPTY_MESSAGE = ""  # the message without content: read the store
_MESSAGE = re.compile(r"[A-Za-z0-9]{0,32}")
_MAX_WAITING = 64


def check_message(message: str) -> str:
    """Return `message`, which must have at most 32 letters and digits.

    Every kind of notifier can send such a message.
    """
    assert _MESSAGE.fullmatch(message), "a message has up to 32 letters and digits"
    return message


class Listener:
    """The messages that one waiter receives about one topic, the name of a value.

    Attributes:
        is_live: True while messages arrive when they are sent. While False none arrive, and the
            waiter has to read the store from time to time.
    """

    def __init__(self) -> None:
        self.is_live = False
        self._heard: deque[str] = deque(maxlen=_MAX_WAITING)
        self._came = asyncio.Event()

    def hear(self, message: str) -> None:
        self._heard.append(message)
        self._came.set()

    async def next(self, timeout_s: float) -> str | None:
        """Return the next message; None if none arrived within `timeout_s` seconds."""
        if not self._heard:
            self._came.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        return self._heard.popleft()


class Notifier(Protocol):
    """Hints between the users of one store that a value is new; a topic is the name of a value.

    A message may be lost, arrive twice, or arrive late. A listener therefore reads the store first,
    again after each message, and from time to time without a message.
    """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which messages are sent and received.

        Enter it while the store itself is running. Failures to send or receive a hint are never
        raised.
        """

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """Send `message` to the listeners of `topic`.

        Never fails, and takes about as long as one question to the store.

        Args:
            topic: name of a value.
            message: up to 32 letters and digits; EMPTY_MESSAGE means "read the store".
        """

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        """Return a context manager that yields a `Listener` of `topic`.

        Messages sent while the listener's `is_live` is False are lost. When `is_live` turns True
        the listener receives EMPTY_MESSAGE, "read the store".
        """


class Topics:
    """The listeners in this process, by topic."""

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
        """Pass a received message to the listeners of its topic.

        Text that is no message of tierkv is passed as EMPTY_MESSAGE, "read the store".

        Args:
            topic: name of the topic.
            message: the received text, perhaps from a writer outside tierkv.
        """
        if not _MESSAGE.fullmatch(message):
            message = EMPTY_MESSAGE
        for listener in self._listeners.get(topic, ()):
            listener.hear(message)

    def turn(self, topic: str, *, is_live: bool) -> None:
        """Set `is_live` of a topic's listeners.

        The listeners also receive EMPTY_MESSAGE, "read the store", since messages may have been
        lost before.

        Args:
            topic: name of the topic.
            is_live: True if messages arrive from now on; False if listeners have to poll.
        """
        for listener in self._listeners.get(topic, ()):
            listener.is_live = is_live
            listener.hear(EMPTY_MESSAGE)

    def turn_all(self, *, is_live: bool) -> None:
        for topic in self.wanted:
            self.turn(topic, is_live=is_live)


class Polling:
    """The `Notifier` of a store that cannot send messages: listeners have to poll."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """See `Notifier.notify`; nothing is sent."""

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:  # noqa: ARG002 - the protocol's
        yield Listener()


class Hub:
    """A `Notifier` between listeners of one process and one event loop."""

    def __init__(self) -> None:
        self.topics = Topics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """See `Notifier.notify`; only listeners of this process receive the message."""
        self.topics.hear(topic, check_message(message))

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self.topics.listening(topic, is_live=True)


Buffer = bytes | bytearray | memoryview

# Names are made by `cache.keys` only; the pattern keeps out path tricks, globs, CRLF and NUL.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?::[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,7}")


# Redis keeps deadlines in signed milliseconds and old file systems theirs in 31 bits of seconds.
_MAX_TTL_S = 10 * 365 * 86_400.0


def is_name(name: str) -> bool:
    """Return True if stores accept `name`: 1 to 8 fields, separated by colons, without "..".

    A field begins with a letter or digit and continues with letters, digits, ".", "_" and "-".
    """
    return _NAME.fullmatch(name) is not None and ".." not in name


def check_name(name: str) -> str:
    """Return `name` if stores accept it.

    Raises:
        BadRequestError: stores do not accept the name; see `is_name`.
    """
    if not is_name(name):
        raise BadRequestError(f"{name[:80]!r} is not a valid name of a value")
    return name


class CheckedNames(tuple[str, ...]):
    """Names that `check_names` has accepted.

    A store that wraps another need not check them again.
    """

    __slots__ = ()


def check_names(names: Sequence[str]) -> CheckedNames | NameRun:
    """Return `names` if stores accept all of them.

    The names of a `NameRun` (blocks of a prompt in a row) differ only in the hex digests of their
    blocks, so one of them is checked.

    Raises:
        BadRequestError: stores do not accept one of the names.
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
    """Check `limit`, the number of values that one page of a listing may have.

    Raises:
        BadRequestError: `limit` is below 1.
    """
    if limit < 1:
        raise BadRequestError(f"the limit of a page must be at least 1 value, not {limit}")


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is a name, or a name and a colon.

    Raises:
        BadRequestError: the prefix is neither.
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
    """A running checksum of one value: `update` receives all of its bytes in order, piece by piece.

    A store calls `update` on the event loop or in a thread, as the bytes arrive. The call must be
    fast: at most 20 us for 256 KiB.
    """

    def update(self, piece: memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class GetItem:
    """A value to read: its name, and the buffers to fill in order.

    Attributes:
        into: writable, C-contiguous buffers; a value that is longer than all of them together is
            DAMAGED.
        digest: makes a `Digest`. A store may give the value's bytes to it as they arrive, while
            they are in the processor's cache; the reader then need not read them again.

    Raises:
        BadRequestError: stores do not accept the name.
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
        digest: the object that the item's `digest` made, if it has received all bytes of a HIT's
            value; else None.
        is_direct: True for a HIT from another node's memory, not from a store.
    """

    status: GetStatus
    reason: str = ""
    num_bytes: int = 0
    digest: Digest | None = None
    is_direct: bool = False


def too_long(item: GetItem, num_bytes: int) -> GetOutcome:
    """Return the outcome DAMAGED for a value that is longer than the buffers of its item.

    Args:
        item: the item that was to be read.
        num_bytes: size of the value.
    """
    reason = (
        f"{item.name} has {num_bytes} bytes, more than the {item.room_bytes} that were expected"
    )
    return GetOutcome(GetStatus.DAMAGED, reason)


@dataclass(frozen=True, slots=True)
class PutItem:
    """A value to write: the bytes of `parts`, one part after the other. No bytes are a value, too.

    Attributes:
        ttl_s: seconds to live; None for as long as the store keeps the value.
        keep_existing: True leaves a value that exists, for names whose value is always the same
            (blocks). False replaces the value atomically (tickets).
        only_new: True leaves a value that exists, even if it differs: the first value of a name
            stays.
        worth: what the value is worth to later requests. While writes wait for a slow store, those
            worth least are dropped first.
        complete: fills in bytes of the parts that are not known before, such as a checksum. The
            store calls it, or `completed`, right before sending: maybe more than once, and from
            several threads.

    Raises:
        BadRequestError: stores do not accept the name, or ttl_s is not above 0 and at most ten
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
        """Call `complete`, if there is one, and return the parts."""
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
        accepts_others: True for a FULL that concerns this value only, such as one larger than the
            store: other values can be written.
    """

    status: PutStatus
    reason: str = ""
    accepts_others: bool = False


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as a listing shows it.

    Attributes:
        expires_at: Unix seconds of this machine's clock; None if the value has no time to live.
    """

    name: str
    num_bytes: int
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing.

    Attributes:
        cursor: the argument of `Store.list` for the next page; None on the last page.
    """

    values: tuple[StoredValue, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    num_values: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a store, on which its callers' decisions depend.

    Attributes:
        is_shared: other processes see the same values.
        is_durable: values outlive the process.
        has_ttl: values expire; if False, `ttl_s` has no effect, and values stay until the store or
            its owner removes them: for room (Mooncake), or by a bucket's lifecycle rule.
        has_listing: `list` and `usage` work; if False, they raise StoreUnavailableError.
        has_cheap_questions: asking whether a value exists costs less than reading it; if False, a
            lookup reads the values.
        sends_from_loop: the event loop sends values and completes each (PutItem.complete) right
            before. If False, threads send, and other threads had better complete the next values at
            the same time: with Mooncake and 16 cores put had 0.67 of its client's rate when the
            same threads did both.
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
        part: for a store made of several, the URL of the one that the circuit belongs to; "" if the
            circuit is the store's own.
        num_opened: number of times that the breaker opened.
        reason: the reason why the breaker opened last.
        degraded_s: seconds in which the breaker was not closed, in total.
        write_refusal: the reason why the store takes no writes, in its own words; "" if it does.
        clock_skew_s: seconds that this machine's clock is ahead of the store's; None if the store
            does not show its time.
        num_retries: operations that were tried a second time.
        num_refused: operations that failed at once: the breaker was open, too many operations
            waited, or all writes were stuck.
        num_dropped_writes: writes that were dropped, since too many bytes waited.
        waiting_write_bytes: bytes of the writes that wait now.
        negative_hits: names that were reported missing from memory, without asking the store.
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

    A method with items reports a fault of the store as the outcome of each item (FAILED, with a
    reason); a method without items raises StoreUnavailableError. Wrong use (a bad name) raises
    BadRequestError before the store is asked. Every reader sees a value whole or not at all, at
    every moment. Before `running()` is entered and after it is left all operations fail in the same
    way. Leaving `running()` waits until operations under way have ended, in success or failure.

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

        Times that other users of the store will read, such as the expiry of a ticket, are made and
        compared with this clock.
        """

    def notifier(self) -> Notifier:
        """Return an object that exchanges hints about new values with other users of the store."""

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Announce the memory that most buffers of reads and writes lie in.

        Call it before `running()` is entered. A store with RDMA registers this memory with the
        network card; other stores ignore it. The memory must stay in place until `running()` is
        left.
        """

    def when_back(self, call: Callable[[], None]) -> None:
        """Register `call`, which is called whenever the store answers again after a failure.

        The store may have lost values by then. The same callable given twice is called once.
        """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which the store can be used.

        Entering it checks that the store can be reached.

        Raises:
            StoreUnavailableError: the store cannot be used; the message is one sentence that says
                why.
            ConfigError: a setting is wrong.
        """

    async def ping(self) -> None:
        """Check that the store answers.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def exists(self, names: Sequence[str]) -> int:
        """Return the number of `names` with a value before the first name without one.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def present(self, names: Sequence[str]) -> list[bool]:
        """Return for each of `names` True if it has a value.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        """Read each value into the buffers of its item; the outcomes have the lengths.

        With any status but HIT the buffers hold undefined bytes.
        """

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Return one small value (a ticket), None if there is none.

        Args:
            name: name of the value.
            max_bytes: longest accepted value.

        Raises:
            StoreCorruptError: the value is longer.
            StoreUnavailableError: the store does not answer.
        """

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Store each value, whole or not at all; return one outcome per item."""

    async def delete(self, names: Sequence[str]) -> int:
        """Remove values; return the number of those that existed.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """Remove the damaged copies that the last reads of `names` returned.

        Returns:
            For each name True if there may be another copy, in another one of the stores that this
                store consists of.

        Raises:
            StoreUnavailableError: the store does not answer; some copies may be left.
        """

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Let values live for `ttl_s` seconds from now; return the number of those that existed.

        A value without expiry gets one.

        Args:
            names: names of the values.
            ttl_s: seconds from now that the values live.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Return one page of the values with names that start with `prefix`, in no order.

        A value that exists during the whole listing is listed. A value can be listed twice when
        other values are written or removed during the listing.

        Args:
            prefix: a name, or a name and a colon.
            limit: about the most values of a page.
            cursor: cursor of the page before, None for the first page.

        Raises:
            StoreUnavailableError: the store does not answer.
            BadRequestError: the cursor is not one of this store, or the limit is below 1.
        """

    async def usage(self, prefix: str) -> Usage:
        """Return the number and total bytes of the values under `prefix`, by listing them all.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
