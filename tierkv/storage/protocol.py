"""What every store promises: named, opaque values in batches, and one outcome per item, in the
order of the items; and how users of a store tell each other that a value is there.

A store knows nothing of blocks, layouts or checksums: see `transfer.storage_io`.
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

LOOK = ""  # nothing is known but that it is worth looking
_MESSAGE = re.compile(r"[A-Za-z0-9]{0,32}")
_MAX_WAITING = 64


def check_message(message: str) -> str:
    """A message is so short and plain that any way of telling can carry it."""
    assert _MESSAGE.fullmatch(message), "a message has up to 32 letters and digits"
    return message


class Listener:
    """What one waiter hears of one topic. is_live: messages arrive as they are sent; if False, the
    waiter has to read the store again and again."""

    def __init__(self) -> None:
        self.is_live = False
        self._heard: deque[str] = deque(maxlen=_MAX_WAITING)
        self._came = asyncio.Event()

    def hear(self, message: str) -> None:
        self._heard.append(message)
        self._came.set()

    async def next(self, timeout_s: float) -> str | None:
        """The next message, None if none came in `timeout_s` seconds."""
        if not self._heard:
            self._came.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        return self._heard.popleft()


class Notifier(Protocol):
    """Hints between the users of one store that there is something new; topics are names of values.

    A message may be lost, come twice, or come late. So a listener reads the store first, again with
    each message, and now and then without one.
    """

    def running(self) -> AbstractAsyncContextManager[None]:
        """Its lifetime, within that of its store. What goes wrong in it is never raised."""

    async def tell(self, topic: str, message: str = LOOK) -> None:
        """Send `message` (up to 32 letters and digits) to the listeners of `topic`. Never fails;
        takes as long as one question to the store."""

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        """Listen to `topic`. Messages can be missed until `is_live` turns true; LOOK comes then."""


class Topics:
    """Who listens to what, in this process."""

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
        """Anybody may have written it: what is no message is a reason to look."""
        if not _MESSAGE.fullmatch(message):
            message = LOOK
        for listener in self._listeners.get(topic, ()):
            listener.hear(message)

    def turn(self, topic: str, *, is_live: bool) -> None:
        """Set `is_live` of the topic's listeners, and let them look: they may have missed a
        message."""
        for listener in self._listeners.get(topic, ()):
            listener.is_live = is_live
            listener.hear(LOOK)

    def turn_all(self, *, is_live: bool) -> None:
        for topic in self.wanted:
            self.turn(topic, is_live=is_live)


class Polling:
    """`Notifier` of a store that cannot tell: nobody hears anything."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def tell(self, topic: str, message: str = LOOK) -> None:
        """Does nothing."""

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:  # noqa: ARG002 - the protocol's
        yield Listener()


class Hub:
    """`Notifier` within one process and one event loop."""

    def __init__(self) -> None:
        self.topics = Topics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def tell(self, topic: str, message: str = LOOK) -> None:
        self.topics.hear(topic, check_message(message))

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self.topics.listening(topic, is_live=True)


Buffer = bytes | bytearray | memoryview

# Names are made by `cache.keys` only; the pattern keeps out path tricks, globs, CRLF and NUL.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?::[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,7}")


# Redis keeps deadlines in signed milliseconds and old file systems theirs in 31 bits of seconds.
_MAX_TTL_S = 10 * 365 * 86_400.0


def is_name(name: str) -> bool:
    """Whether a store may be asked about `name`."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def check_name(name: str) -> str:
    """Return `name`, or raise BadRequestError if a store must not be asked about it."""
    if not is_name(name):
        raise BadRequestError(f"{name[:80]!r} is not a name a store accepts")
    return name


class CheckedNames(tuple[str, ...]):
    """Names that `check_names` has let through: stores around stores need not look again."""

    __slots__ = ()


def check_names(names: Sequence[str]) -> CheckedNames | NameRun:
    """Return `names`, or raise BadRequestError if any of them is bad. Names of a run differ in
    their digests only, so that one is looked at."""
    if isinstance(names, CheckedNames):
        return names
    if isinstance(names, NameRun):
        if names and not names.is_checked:
            check_name(names[0])
            names.is_checked = True
        return names
    # A thousand names in 0.25 ms; one after the other takes them 0.45.
    if not all(map(_NAME.fullmatch, names)) or ".." in "\n".join(names):
        for name in names:
            check_name(name)
    return CheckedNames(names)


def check_limit(limit: int) -> None:
    """Raise BadRequestError unless `limit` can be the length of a page."""
    if limit < 1:
        raise BadRequestError(f"a page holds at least 1 value, not {limit}")


def check_prefix(prefix: str) -> str:
    """Return `prefix`, or raise BadRequestError; a prefix is a name or a name and a colon."""
    check_name(prefix.removesuffix(":"))
    return prefix


def check_ttl(ttl_s: float) -> None:
    """Raise BadRequestError unless `ttl_s` is above 0 and at most ten years."""
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= _MAX_TTL_S):
        raise BadRequestError(f"{ttl_s} s is not a time to live: above 0, up to ten years")


class GetStatus(Enum):
    HIT = "hit"  # every byte of the value is in the caller's buffers, from their start on
    MISS = "miss"  # no such value
    DAMAGED = "damaged"  # there is one, but it has no room, or it fails its checksum
    FAILED = "failed"  # the store did not answer, or not in time


class PutStatus(Enum):
    STORED = "stored"  # durable as far as this store promises durability
    EXISTED = "existed"  # there was a value already; it was left as it was
    FULL = "full"  # it refuses what is written now (no room, a replica ...): do not retry soon
    FAILED = "failed"  # the store did not answer, or not in time; it may or may not have stored


class Digest(Protocol):
    """Takes the bytes of one value, in order, piece by piece, on the loop or in a thread of the
    store's. 256 KiB may take 20 us."""

    def update(self, piece: memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class GetItem:
    """Where the value called `name` shall land: the room in `into`, filled in order.

    into: writable, C-contiguous buffers; a value that is longer than all of them is DAMAGED.
    digest: makes a digest that a store may give the bytes as they land, while they are in the
        processor's cache.
    Raises BadRequestError if the name is bad.
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
    """reason: one sentence for the log; empty for HIT and MISS.

    num_bytes: of a HIT, the length of the value; what lies behind it in `into` means nothing.
    digest: of a HIT, the item's if it has been given all bytes of the value, else None.
    is_direct: a HIT of another node's memory, not of a store.
    """

    status: GetStatus
    reason: str = ""
    num_bytes: int = 0
    digest: Digest | None = None
    is_direct: bool = False


def too_long(item: GetItem, num_bytes: int) -> GetOutcome:
    """Return the outcome of a value of `num_bytes` bytes that `item` has no room for."""
    reason = f"{item.name} has {num_bytes} bytes; there is room for {item.room_bytes}"
    return GetOutcome(GetStatus.DAMAGED, reason)


@dataclass(frozen=True, slots=True)
class PutItem:
    """A value given as consecutive `parts`, kept for `ttl_s` seconds (None: as long as it may).

    keep_existing: a value that is there is left as it is: it is the same (block keys). False
        replaces it atomically (tickets).
    only_new: likewise, of values that differ: the first one stays.
    worth: of writes that wait for a slow store, those worth least are dropped first.
    complete: fills in the rest of the parts (a checksum). The store calls it, or `completed`, right
        before it sends them: maybe more than once, and from several threads.
    A value of no bytes is a value. Raises BadRequestError if the name is bad, or ttl_s is not above
    0 and at most ten years.
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
        """`parts`, once they are complete."""
        if self.complete is not None:
            self.complete()
        return self.parts

    @property
    def leaves_existing(self) -> bool:
        return self.keep_existing or self.only_new


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """takes_others: of FULL, that it is this value which the store does not take, now or ever."""

    status: PutStatus
    reason: str = ""
    takes_others: bool = False


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One line of a listing. expires_at is in Unix seconds, None if the value has no TTL."""

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
    """is_shared: other processes see the same values. is_durable: values outlive the process.
    has_ttl: values go when their time is over; without, when the store wants their room.
    has_listing: `list` and `usage` work; without, they raise StoreUnavailableError.
    has_cheap_questions: to ask for a value costs less than to read it; without, a lookup reads.
    sends_from_loop: values are completed there (PutItem.complete), one by one. Where threads send
        them, other threads complete the next ones meanwhile: with Mooncake and 16 cores put came to
        0.67 of its client's when the same threads did both.
    """

    is_shared: bool
    is_durable: bool
    has_ttl: bool = True
    has_listing: bool = True
    has_cheap_questions: bool = True
    sends_from_loop: bool = False

    @classmethod
    def common_to(cls, every: Sequence[Capabilities]) -> Capabilities:
        """What all of several stores can."""
        return cls(*(all(getattr(one, f.name) for one in every) for f in fields(cls)))


class BreakerState(Enum):
    CLOSED = "closed"  # operations reach the store
    OPEN = "open"  # they fail at once
    HALF_OPEN = "half_open"  # they fail at once, and one probe is under way


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """For metrics and readiness.

    circuit: of its breaker; None, and the counts 0, of a store that has none. num_opened: how often
        it has opened. reason: why it did last. degraded_s: how long it was not closed, in all.
    part: of a store made of several, the URL of the one whose circuit this is; "" for its own.
    write_refusal: why it takes no writes, in its own words; "" if it does.
    num_refused: operations that failed at once: circuit open, too many waiting, or stuck.
    """

    circuit: BreakerState | None = None
    part: str = ""
    num_opened: int = 0
    reason: str = ""
    degraded_s: float = 0.0
    write_refusal: str = ""
    num_retries: int = 0
    num_refused: int = 0
    num_dropped_writes: int = 0
    waiting_write_bytes: int = 0
    negative_hits: int = 0


class Store(Protocol):
    """Named values. Safe for concurrent use from one event loop; never blocks that loop.

    Faults of the store are outcomes of the items (FAILED, with a reason), except where a method
    has no items, which raises StoreUnavailableError. Wrong use (a bad name) raises
    BadRequestError before the store is asked. A value is seen whole or not at all, by every reader,
    at every moment. Before `running()` is entered and after it is left the store is out of order:
    FAILED, or StoreUnavailableError. Leaving it lets what is under way end, one way or the other.

    Of several values of one name, put at the same time or in one batch, one is kept whole.

    Cancelling a wait never corrupts a later answer. The caller's buffers may still be written
    (get_into) or read (put) until the coroutine has ended; it ends after a cancel only when the
    store no longer touches them.
    """

    @property
    def url(self) -> str:
        """Where the store is, without secrets: for logs and status."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def health(self) -> StoreHealth: ...

    def notifier(self) -> Notifier:
        """The way to tell its other users that something is there."""

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Before `running()` is entered: most buffers of reads and writes will lie in `pools`,
        plain memory that stays until it is left. For a store whose network card has to know."""

    def when_back(self, call: Callable[[], None]) -> None:
        """Call `call` whenever the store answers again after it did not: it may have lost all it
        had. The same callable given twice is called once."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """The store's lifetime. Entering checks that it can be used and raises
        StoreUnavailableError (or ConfigError) with one clear sentence if not."""

    async def ping(self) -> None:
        """Return if the store answers; raise StoreUnavailableError if not."""

    async def exists(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on and without a gap, have a value.

        Raises StoreUnavailableError.
        """

    async def present(self, names: Sequence[str]) -> list[bool]:
        """Whether each of `names` has a value, each for itself. Raises StoreUnavailableError."""

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        """Bring each value into its buffers; the outcome says how many bytes came. On any status
        but HIT the buffers hold anything."""

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """One small value (a ticket), or None. StoreCorruptError if it is longer than max_bytes.

        StoreUnavailableError if the store does not answer.
        """

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """Store each value, whole or not at all."""

    async def delete(self, names: Sequence[str]) -> int:
        """Forget values; returns how many there were. Raises StoreUnavailableError."""

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """Forget the damaged copy that the last read of each of `names` came from.

        Returns for each whether there may be another copy, in another of the stores that this one
        is made of. Raises StoreUnavailableError; then some of them may be left.
        """

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Let values live for `ttl_s` from now on; returns how many there were. One that lives for
        ever does so no more. Raises StoreUnavailableError."""

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Values whose name starts with `prefix`, in parts of about `limit`, in no order.

        A value that is there all the while is listed; it can be listed twice when values come and
        go meanwhile. Raises StoreUnavailableError, or BadRequestError for a cursor that this store
        did not give or a limit below 1.
        """

    async def usage(self, prefix: str) -> Usage:
        """Values and bytes under `prefix`, from its whole listing. Raises StoreUnavailableError."""
