"""The interface of stores, which read and write values (bytes) by name, in batches.

Each item of a batch has its own outcome; outcomes are in the order of the items. Processes that use
one store send each other hints through a `Notifier`: a hint says that a value is new. A store does
not interpret values: `transfer.storage_io` turns blocks into values with checksums.
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
    """Check and return a hint (message to waiting nodes): at most 32 letters and digits.

    A longer message is a bug, and raises AssertionError.
    """
    assert _MESSAGE.fullmatch(message), "a message has up to 32 letters and digits"
    return message


class Listener:
    """A queue of the messages that are sent about one stored value, for one waiting task.

    Attributes:
        is_live: True while messages are delivered as they are sent. While it is False, no message
            arrives, and the waiting task has to read the store from time to time.
    """

    def __init__(self) -> None:
        self.is_live = False
        self._received: deque[str] = deque(maxlen=_MAX_WAITING)
        self._came = asyncio.Event()

    def receive(self, message: str) -> None:
        self._received.append(message)
        self._came.set()

    async def next(self, timeout_s: float) -> str | None:
        """Return the next message; None if none arrived within `timeout_s` seconds."""
        if not self._received:
            self._came.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        return self._received.popleft()


class Notifier(Protocol):
    """A channel for hints between the users of one store: a hint says that a value is new.

    A hint is a message about a topic, which is the name of the value. A message may be lost, arrive
    twice, or arrive late. A listener therefore reads the store first, again after each message, and
    from time to time without a message.
    """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which messages are sent and received.

        Enter it while the store itself is running. Failures to send or receive a message are not
        raised.
        """

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """Send `message` to the listeners of `topic`.

        A failure is not raised. Sending takes about as long as one call of `Store.exists`.

        Args:
            topic: name of a value.
            message: up to 32 letters and digits; EMPTY_MESSAGE means "read the store".
        """

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        """Return a context manager that yields a `Listener` of `topic`.

        Messages sent while the listener's `is_live` is False are lost. When `is_live` becomes True,
        the listener receives EMPTY_MESSAGE, which means "read the store".
        """


class Topics:
    """The objects (`Listener`) of this process that wait for messages about values of a store.

    Listeners are kept by topic: the name of the stored value that they wait for.

    Attributes:
        changed: event that is set when a topic gets a listener or loses its last one; the code that
            waits for it clears it.
    """

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
        """Yield a listener that receives messages about a value while this context is entered.

        Args:
            topic: name of the value in the store.
            is_live: True if messages about the value arrive now; False if the listener has to read
                the store from time to time.
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

    def deliver(self, topic: str, message: str) -> None:
        """Deliver a received message to the listeners of its topic.

        Text that is not a valid message is passed as EMPTY_MESSAGE, which means "read the store".

        Args:
            topic: name of a value.
            message: the received text, which a writer outside tierkv may have sent.
        """
        if not _MESSAGE.fullmatch(message):
            message = EMPTY_MESSAGE
        for listener in self._listeners.get(topic, ()):
            listener.receive(message)

    def set_live(self, topic: str, *, is_live: bool) -> None:
        """Record whether listeners of a topic receive messages now, and make them read the store.

        Each listener's `is_live` is set, and each gets EMPTY_MESSAGE, which means "read the store":
        earlier messages may be lost.

        Args:
            topic: name of the stored value that the messages are about.
            is_live: True if messages arrive from now on; False if listeners have to read the store
                from time to time.
        """
        for listener in self._listeners.get(topic, ()):
            listener.is_live = is_live
            listener.receive(EMPTY_MESSAGE)

    def set_all_live(self, *, is_live: bool) -> None:
        for topic in self.wanted:
            self.set_live(topic, is_live=is_live)


class Polling:
    """A `Notifier` for stores that cannot send messages. Its listeners have to poll."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """Do nothing, because this store cannot send messages."""

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:  # noqa: ARG002 - the protocol's
        yield Listener()


class Hub:
    """A `Notifier` for senders and listeners in one process, on one event loop."""

    def __init__(self) -> None:
        self.topics = Topics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """Deliver `message` to all listeners of `topic` in this process."""
        self.topics.deliver(topic, check_message(message))

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self.topics.listening(topic, is_live=True)


Buffer = bytes | bytearray | memoryview

# Names are made by `cache.keys` only; the pattern keeps out path tricks, globs, CRLF and NUL.
# A file name has at most 255 bytes.
_NAME = re.compile(
    r"(?=.{1,250}\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?::[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,7}"
)


# Redis stores expiry times as signed milliseconds, and old file systems as 31 bits of seconds.
_MAX_TTL_S = 10 * 365 * 86_400.0


def is_name(name: str) -> bool:
    """Return True if stores accept `name`: 1 to 8 fields, separated by colons, without "..".

    A name has at most 250 characters. A field begins with a letter or digit and continues with
    letters, digits, ".", "_" and "-".
    """
    return _NAME.fullmatch(name) is not None and ".." not in name


def check_name(name: str) -> str:
    """Return `name` if stores accept it as the name of a value.

    A name consists of 1 to 8 fields, separated by colons, and has at most 250 characters. A field
    begins with a letter or digit and continues with letters, digits, ".", "_" and "-"; two dots in
    a row are not accepted.

    Raises:
        BadRequestError: stores do not accept the name.
    """
    if not is_name(name):
        raise BadRequestError(f"{name[:80]!r} is not a valid name of a value")
    return name


class CheckedNames(tuple[str, ...]):
    """Names that `check_names` has accepted, so that a second check returns at once."""

    __slots__ = ()


def check_names(names: Sequence[str]) -> CheckedNames | NameRun:
    """Return `names` if stores accept all of them.

    The result is marked as checked: later calls with it return at once. The names of a `NameRun` (a
    prompt's blocks) differ only in the blocks' hex digests, so only the first one is checked.

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
    # Checking a thousand names together takes 0.25 ms, one by one 0.45 ms.
    if not all(map(_NAME.fullmatch, names)) or ".." in "\n".join(names):
        for name in names:
            check_name(name)
    return CheckedNames(names)


def check_limit(limit: int) -> None:
    """Check the largest number of values in one page of a listing.

    Raises:
        BadRequestError: `limit` is below 1.
    """
    if limit < 1:
        raise BadRequestError(f"the limit of a page must be at least 1 value, not {limit}")


def check_prefix(prefix: str) -> str:
    """Return `prefix` if the names of stored values can begin with it.

    Raises:
        BadRequestError: `prefix` is neither a valid name nor a valid name with a colon after it.
    """
    check_name(prefix.removesuffix(":"))
    return prefix


def check_ttl(ttl_s: float) -> None:
    """Check a time to live, in seconds.

    Raises:
        BadRequestError: `ttl_s` is 0 or less, above ten years, or not finite.
    """
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= _MAX_TTL_S):
        raise BadRequestError(
            f"a time to live must be above 0 s and at most ten years, not {ttl_s} s"
        )


class GetStatus(Enum):
    HIT = "hit"  # every byte of the value is in the caller's buffers, from their start on
    MISS = "miss"  # no such value
    DAMAGED = "damaged"  # the value is longer than the buffers, or fails its checksum
    FAILED = "failed"  # the store did not answer, or not in time


class PutStatus(Enum):
    STORED = "stored"  # durable as far as this store promises durability
    EXISTED = "existed"  # there was a value already, which is unchanged
    FULL = "full"  # the store takes no writes now (no room, a replica ...): do not retry soon
    FAILED = "failed"  # the store did not answer, or not in time; it may or may not have stored


class Digest(Protocol):
    """A checksum that is computed while a value is read: `update` receives all bytes in order.

    A store calls `update` on the event loop or in a thread, with each piece that arrives. One call
    must take at most 20 us for 256 KiB.
    """

    def update(self, piece: memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class GetItem:
    """A value to read: its name, and the buffers to fill in order.

    Attributes:
        into: writable, C-contiguous buffers. A value that is longer than all of them together has
            the outcome DAMAGED.
        digest: function that returns a new `Digest`; called at most once per read. A store may pass
            the value's bytes to the digest as they arrive, so that the caller need not read them
            again. The function or its result may be None, for no digest.

    Raises:
        BadRequestError: stores do not accept the name.
    """

    name: str
    into: tuple[memoryview, ...]
    digest: Callable[[], Digest | None] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        for view in self.into:
            assert view.c_contiguous, "a value is read into contiguous memory"
            assert not view.readonly, "a value is read into writable memory"

    @property
    def room_bytes(self) -> int:
        return sum(view.nbytes for view in self.into)


@dataclass(frozen=True, slots=True)
class GetOutcome:
    """The outcome of one read.

    Attributes:
        status: HIT; MISS if there is no value; DAMAGED if the value is longer than the buffers or
            is damaged; FAILED if the store did not answer in time.
        reason: why the read failed, as a sentence for the log; "" for HIT and MISS.
        num_bytes: length of the value after a HIT. The bytes after the value in the item's buffers
            are undefined.
        digest: the digest that `GetItem.digest` returned, if it received all bytes of a HIT's
            value; otherwise None.
        is_direct: True if the value was read from another node's memory instead of a store.
    """

    status: GetStatus
    reason: str = ""
    num_bytes: int = 0
    digest: Digest | None = None
    is_direct: bool = False


def too_long(item: GetItem, num_bytes: int) -> GetOutcome:
    """Return the outcome DAMAGED, for a value that is longer than the buffers of its item.

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
    """A value to write: the bytes of `parts`, joined. A value may be empty.

    Attributes:
        ttl_s: seconds to live; None for as long as the store keeps the value.
        keep_existing: True to leave an existing value of this name as it is. Use this if all values
            of the name are equal (blocks). False to replace an existing value atomically (tickets).
        only_new: True to leave an existing value as it is, even if `keep_existing` is False. Use
            this if values of the name can differ: the outcome STORED then means that the store has
            this value, not an earlier one.
        worth: benefit of the value to later requests. Only the order of the worths matters: if too
            many writes wait for a slow store, those with the lowest worth are dropped.
        complete: fills in bytes of `parts` that are computed late, such as a checksum. The store
            calls it immediately before sending, possibly more than once and from several threads.
            None if all bytes are already known.

    Raises:
        BadRequestError: stores do not accept the name, or `ttl_s` is 0 or less, or above ten years.
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
            assert memoryview(part).c_contiguous, "a value is written from contiguous memory"
        if self.ttl_s is not None:
            check_ttl(self.ttl_s)

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)

    def completed(self) -> tuple[Buffer, ...]:
        """Call `complete`, which fills in the bytes that are computed late, and return `parts`."""
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
        status: STORED; EXISTED if an existing value was left as it is; FULL if the store refuses
            the write, for lack of room or another reason; FAILED if the store did not answer in
            time and may or may not have stored the value.
        reason: why the write failed, as a sentence for the log; "" if it succeeded.
        accepts_others: True if the store is FULL only for this value, for example because the value
            is larger than the store; other values can be written.
    """

    status: PutStatus
    reason: str = ""
    accepts_others: bool = False


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value in a listing, without its bytes.

    Attributes:
        num_bytes: size of the value.
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
    """The abilities of a store that its callers take into account.

    Attributes:
        is_shared: other processes see the same values.
        is_durable: values outlive the process.
        has_ttl: values expire after `ttl_s`. If False, values stay until the store evicts them
            (Mooncake), or its operator removes them, for example by a bucket's lifecycle rule.
        has_listing: `list` and `usage` work; if False, they raise StoreUnavailableError.
        has_cheap_questions: asking if a value exists costs less than reading it; if False, a lookup
            reads the values.
        sends_from_loop: the store sends values on the event loop, and calls `PutItem.complete` of
            each value there. If False, the store's threads send; the caller should then call
            `complete` in threads of its own beforehand, so that the store's threads only send.
    """

    is_shared: bool
    is_durable: bool
    has_ttl: bool = True
    has_listing: bool = True
    has_cheap_questions: bool = True
    sends_from_loop: bool = False

    @classmethod
    def common_to(cls, every: Sequence[Capabilities]) -> Capabilities:
        """Return the capabilities that all of several stores have.

        Args:
            every: the capabilities of each store.
        """
        return cls(*(all(getattr(one, f.name) for one in every) for f in fields(cls)))


class BreakerState(Enum):
    CLOSED = "closed"  # operations reach the store
    OPEN = "open"  # operations fail at once
    HALF_OPEN = "half_open"  # operations fail at once, and one probe is under way


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """The health of a store, for metrics and readiness. Counts are totals unless stated otherwise.

    Attributes:
        circuit: state of the breaker; None, with counts of 0, for a store without a breaker.
        part: URL of the inner store to which the breaker belongs, if the store consists of several
            stores; "" if the breaker is the store's own.
        num_opened: number of times that the breaker opened.
        reason: the store's last failure that the breaker counted; "" before the first one.
        degraded_s: total seconds in which the breaker was not closed.
        write_refusal: the store's reason for refusing writes, in its own words; "" if it accepts
            them.
        clock_skew_s: seconds by which this machine's clock is ahead of the store's; None if the
            store does not report its time.
        num_retries: operations that were tried a second time.
        num_refused: operations that failed at once, because the breaker was open, too many
            operations were waiting, or all writes were stuck.
        num_dropped_writes: writes that were dropped because too many bytes were waiting.
        waiting_write_bytes: bytes of the writes that are waiting now.
        negative_hits: names that were reported missing without asking the store, because it had
            just reported them missing.
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
    """A backend that stores values (bytes) under names.

    Any number of calls may run at the same time on one event loop, which they never block.

    `get_into` and `put` report a fault of the store in the outcome of each item (FAILED, with a
    reason); other methods raise StoreUnavailableError. A wrong argument, such as an invalid name,
    raises BadRequestError before the store is asked. Operations outside `running()` fail as if the
    store did not answer. The end of `running()` waits for operations under way.

    A reader gets a value whole or not at all, at every moment. If several values of one name are
    put at the same time or in one batch, one of them is stored whole.

    Cancelling one operation does not disturb others. The store uses the caller's buffers until the
    coroutine has ended, also after a cancel.
    """

    @property
    def url(self) -> str:
        """The address of the store without secrets, for logs and status."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def health(self) -> StoreHealth: ...

    def now(self) -> float:
        """Return the store's time in Unix seconds; this machine's time if the store has no clock.

        Use this time for values that other users of the store compare with theirs, such as a
        ticket's expiry.
        """

    def notifier(self) -> Notifier:
        """Return an object that exchanges hints about new values with other users of the store."""

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Announce the memory that contains most buffers of later reads and writes.

        Call this before `running()` is entered. A store with RDMA registers the memory with the
        network card; other stores ignore the call. The memory must not be freed until `running()`
        is left.

        Args:
            pools: the memory, one view per range.
        """

    def on_recovery(self, call: Callable[[], None]) -> None:
        """Register `call`, which is called whenever the store answers again after a failure.

        The store may have lost values by then. Registering the same callable again has no effect.
        """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which the store can be used.

        Entering it checks that the store can be reached.

        Raises:
            StoreUnavailableError: the store cannot be used; the message is a sentence that says
                why.
            ConfigError: a setting is wrong.
        """

    async def ping(self) -> None:
        """Check that the store answers.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def exists(self, names: Sequence[str]) -> int:
        """Return the number of leading `names` that have a value, up to the first that has none.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def present(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, True if it has a value.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        """Read each value into the buffers of its item; return one outcome per item.

        The buffers of an item have undefined content unless its status is HIT.
        """

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Return one small value, such as a ticket; None if there is none.

        Args:
            name: name of the value.
            max_bytes: largest accepted length of the value.

        Raises:
            StoreCorruptError: the value is longer than `max_bytes`.
            StoreUnavailableError: the store does not answer.
        """

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Store each value, whole or not at all; return one outcome per item."""

    async def delete(self, names: Sequence[str]) -> int:
        """Remove values; return how many of them existed.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """Remove the copies that the last reads of `names` returned, because they are damaged.

        Returns:
            For each name, True if another copy may be left, so that reading again is useful. Only a
                store that consists of several stores can have another copy.

        Raises:
            StoreUnavailableError: the store does not answer; some copies may not be removed.
        """

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Set values to expire `ttl_s` seconds from now; return how many of them exist.

        A value without expiry gets one, too.

        Args:
            names: names of the values.
            ttl_s: seconds to live from now on.

        Raises:
            StoreUnavailableError: the store does not answer.
        """

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Return one page of the values under `prefix`, in no particular order.

        A value that exists during the whole listing is listed at least once. A value may be listed
        twice if other values are written or removed during the listing.

        Args:
            prefix: the text with which the values' names begin, one or more fields: `a` also
                matches `ab`, and `a:` matches only names whose first field is `a`.
            limit: largest number of values in the page, approximately; at least 1.
            cursor: `cursor` of the previous page; None for the first page.

        Raises:
            StoreUnavailableError: the store does not answer.
            BadRequestError: the cursor does not belong to this store, or the limit is below 1.
        """

    async def usage(self, prefix: str) -> Usage:
        """Return number and total bytes of the values with names that start with `prefix`.

        The call lists all of these values.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
