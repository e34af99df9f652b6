"""Events about cached blocks, for subscribers such as routers.

No event is made while there is no subscriber. Each subscriber has a bounded queue. A slow
subscriber loses the oldest events and learns their number, so that it can request a list of all
blocks and start again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from tierkv.cache.index import segments
from tierkv.cache.node import TreeNode
from tierkv.errors import BadRequestError

if TYPE_CHECKING:
    from tierkv.cache.groups import CacheGroup  # which only engines need

DEFAULT_CAPACITY = 4096  # events that may wait for one subscriber
MAX_STORED = 65_536  # blocks published as being in storage; beyond it the oldest are forgotten
_GO_AT_ONCE = 1024

ExternalId = str | int | bytes  # an engine's own id of a block


class CacheEventKind(Enum):
    """The kind of change that an event reports."""

    STORED = "stored"  # a copy is complete now, by computing, offload, fetch or flush
    LOADED = "loaded"  # a copy came back to the device from the host
    EVICTED = "evicted"


class CacheEvent(msgspec.Struct, frozen=True):
    """A change of blocks [start, stop) of a prompt on one tier.

    Attributes:
        number: number of the event, one more than that of the event before; a gap means that events
            were dropped.
        kind: the kind of change.
        tier: "device", "host" or "storage".
        space: short name of the fingerprint (model, tenant, adapter); "" for the service's own.
        start: index of the first block.
        stop: index after the last block.
        digests: the key of each block, which depends on all tokens up to the block's end.
        parent: the key of the block before `start`; b"" if `start` is 0.
        tokens: the tokens of the blocks, int32 as bytes; b"" if no subscriber wants tokens.
        is_tail: True for the partial last block of a prompt.
        group: number of the cache group (layers with the same layout and rule of needed blocks)
            that the blocks belong to.
        external_ids: the engine's own id of each block, None for a block without one; () if no
            block has one.
        external_parent: the engine's own id of the block before `start`; None without one.
        session_id: the session that computed the blocks in one of its turns; "" for none.
    """

    number: int
    kind: CacheEventKind
    tier: str
    space: str
    start: int
    stop: int
    digests: tuple[bytes, ...]
    parent: bytes = b""
    tokens: bytes = b""
    is_tail: bool = False
    group: int = 0
    external_ids: tuple[ExternalId | None, ...] = ()
    external_parent: ExternalId | None = None
    session_id: str = ""


class BlockRun(msgspec.Struct, frozen=True):
    """Consecutive blocks of a prompt, in one cache group.

    Attributes:
        space: short name of the fingerprint (model, tenant, adapter); "" for the service's own.
        start: index of the first block in the prompt.
        digests: the key of each block.
        parent: the key of the block before `start`; b"" if `start` is 0.
        tokens: the tokens of the blocks, as little-endian int32 bytes.
        is_tail: True for the partial last block of a prompt.
        group: number of the cache group that the blocks belong to.
    """

    space: str
    start: int
    digests: Sequence[bytes]
    parent: bytes
    tokens: bytes
    is_tail: bool
    group: int = 0

    def part(self, first: int, stop: int) -> BlockRun:
        """Return consecutive blocks of this run as a new run.

        Args:
            first: position of the first block within this run, from 0.
            stop: position after the last block.
        """
        size = len(self.tokens) // len(self.digests)
        return BlockRun(
            self.space,
            self.start + first,
            self.digests[first:stop],
            self.digests[first - 1] if first else self.parent,
            self.tokens[first * size : stop * size],
            self.is_tail,
            self.group,
        )


class EventPoint(NamedTuple):
    """A point in the sequence of cache events, by which later events are recognized.

    Attributes:
        number: number of the last event before the point.
        num_clears: number of times before the point that storage may have lost all of its blocks.
    """

    number: int
    num_clears: int


class _Stored(NamedTuple):
    """A block in storage, with the event that reported it: block `at` of `run`.

    Attributes:
        run: the blocks that the event reported together.
        at: position of the block within `run`.
        number: number of the newest event at the last time when the block was known to be stored.
    """

    run: BlockRun
    at: int
    number: int

    @property
    def parent(self) -> bytes:
        return self.run.digests[self.at - 1] if self.at else self.run.parent


class Subscription:
    """The queue of one subscriber: `async for event in subscription` yields events as they occur.

    Args:
        capacity: largest number of events in the queue; beyond it, the oldest are dropped.
        wants_tokens: True if the subscriber wants the blocks' tokens in the events.

    Attributes:
        num_dropped: number of events dropped because the subscriber was slow.
        wants_tokens: True if the subscriber wants the blocks' tokens, which are the content of
            prompts.
    """

    def __init__(self, capacity: int, *, wants_tokens: bool = False) -> None:
        self.num_dropped = 0
        self.wants_tokens = wants_tokens
        self._capacity = capacity
        self._events: deque[CacheEvent] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: CacheEvent) -> None:
        if len(self._events) >= self._capacity:
            self._events.popleft()
            self.num_dropped += 1
        self._events.append(event)
        self._arrived.set()

    def drain(self) -> list[CacheEvent]:
        """Remove and return all events in the queue, without waiting for more. Thread-safe."""
        found: list[CacheEvent] = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def __aiter__(self) -> AsyncIterator[CacheEvent]:
        return self

    async def __anext__(self) -> CacheEvent:
        """Wait for the next event and return it. The iteration never ends."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class EventListener(Protocol):
    """A receiver of cache events (changes of cached blocks), called on the service's thread.

    Attributes:
        wants_tokens: True if the events must contain the tokens of the blocks.
    """

    @property
    def wants_tokens(self) -> bool: ...

    def put(self, event: CacheEvent) -> None:
        """Receive an event. The call must not block: the cache is being changed at that moment."""


class CacheEvents:
    """The cache events of one service, and their subscribers.

    Args:
        digests_of: returns the keys of blocks [start, stop) of the path (a prefix in the index)
            that ends in a node; called only while there is a subscriber.
        is_retired: returns True for a node that no request can match any more. The blocks of such a
            node appear in no event.

    Attributes:
        groups: the engine's cache groups (layers with the same layout that need the same blocks);
            () if there is only the service's own layout.
        indexed: number of the cache group whose blocks are in the index.
        other_blocks: returns the blocks of the other cache groups that are on the host now.
        max_names: largest number of engines' block ids that are remembered; if there are more, the
            oldest are forgotten.
    """

    def __init__(
        self,
        digests_of: Callable[[TreeNode, int, int], list[bytes]],
        is_retired: Callable[[TreeNode], bool],
    ) -> None:
        self.groups: Sequence[CacheGroup] = ()
        self.indexed = 0
        self.other_blocks: Callable[[], Iterable[BlockRun]] = tuple
        self.max_names = 0
        self._names: OrderedDict[bytes, ExternalId] = OrderedDict()
        self._digests_of = digests_of
        self._is_retired = is_retired
        self._subscriptions: list[EventListener] = []
        self._number = 0
        self._num_clears = 0
        self._stored: OrderedDict[bytes, _Stored] = OrderedDict()  # by digest, the oldest first
        # By digest of a block, the blocks of `_stored` that follow it.
        self._below: dict[bytes, dict[bytes, None]] = {}

    @property
    def has_listeners(self) -> bool:
        return bool(self._subscriptions)

    @contextmanager
    def subscribe(
        self, capacity: int = DEFAULT_CAPACITY, *, wants_tokens: bool = False
    ) -> Iterator[Subscription]:
        """Yield a subscription to events, which lasts until the `with` block ends.

        Args:
            capacity: largest number of events in the subscription's queue, at least 1; beyond it,
                the oldest are dropped.
            wants_tokens: True if the subscriber wants the blocks' tokens in the events.

        Yields:
            The subscription.

        Raises:
            BadRequestError: the capacity is below 1.
        """
        if capacity < 1:
            raise BadRequestError(
                f"a subscription's capacity must be at least 1 event, not {capacity}"
            )
        subscription = Subscription(capacity, wants_tokens=wants_tokens)
        with self.subscribed(subscription):
            yield subscription

    @contextmanager
    def subscribed(self, listener: EventListener) -> Iterator[None]:
        """Call `listener.put` with each published event until the `with` block ends."""
        self._subscriptions.append(listener)
        try:
            yield
        finally:
            self._subscriptions.remove(listener)
            if not self._subscriptions:
                self._stored.clear()
                self._below.clear()

    def publish(
        self,
        kind: CacheEventKind,
        tier: str,
        node: TreeNode,
        start: int,
        stop: int,
        *,
        session_id: str = "",
    ) -> None:
        """Send all subscribers a change of blocks [start, stop) of a path (a prefix in the index).

        Each node of the path that has any of these blocks gets an event of its own.

        Args:
            kind: the kind of change.
            tier: "device", "host" or "storage".
            node: the node of the index at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.
            session_id: the session that computed the blocks in one of its turns; "" for none.
        """
        if not self._subscriptions:
            return
        for run in self.runs(node, start, stop):
            self.publish_run(kind, tier, run, session_id)

    def runs(self, node: TreeNode, start: int, stop: int) -> list[BlockRun]:
        """Describe blocks [start, stop) of a path for the subscribers of cache events.

        Args:
            node: the node of the index at the end of the path (a prefix in the index).
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.

        Returns:
            One `BlockRun` for each node of the path that has some of the blocks, in order. The list
                is empty if nobody has subscribed to events, or if no request can match the blocks
                any more.
        """
        if not self._subscriptions or start >= stop or self._is_retired(node):
            return []
        wants_tokens = any(one.wants_tokens for one in self._subscriptions)
        runs = []
        for part, i, j in segments(node, start, stop):
            first = part.start + i
            above = part if i else part.parent
            parent = b""
            if first and above is not None:
                [parent] = self._digests_of(above, first - 1, first)
            digests = self._digests_of(part, first, part.start + j)
            runs.append(
                BlockRun(
                    part.space.name,
                    first,
                    digests,
                    parent,
                    part.tokens_of(i, j) if wants_tokens else b"",
                    part.is_tail,
                    self.indexed,
                )
            )
        return runs

    # Blocks in storage are published once, until they are lost; `stored` lists them.

    def now(self) -> EventPoint:
        """Return the present position in the sequence of cache events.

        A caller keeps the position to find out later which events were published after it.
        """
        return EventPoint(self._number, self._num_clears)

    def publish_stored(self, runs: Iterable[BlockRun], since: EventPoint) -> None:
        """Send an event to subscribers that blocks are in storage.

        Blocks for which such an event was sent before are left out.

        Args:
            runs: blocks that storage has.
            since: the point at which the write or the lookup of the blocks began. If storage has
                lost all of its blocks after that point, no event is sent.
        """
        if not self._subscriptions or since.num_clears != self._num_clears:
            return
        for run in runs:
            is_new = [digest not in self._stored for digest in run.digests]
            at = 0
            for digest, new in zip(run.digests, is_new, strict=True):
                if not new:
                    known = self._stored[digest]
                    self._stored[digest] = _Stored(known.run, known.at, self._number)
                    self._stored.move_to_end(digest)
            for new, group in groupby(is_new):
                first, at = at, at + len(list(group))
                if new:
                    part = run.part(first, at)
                    for index, digest in enumerate(part.digests):
                        known = self._stored[digest] = _Stored(part, index, self._number)
                        self._below.setdefault(known.parent, {})[digest] = None
                    self.publish_run(CacheEventKind.STORED, "storage", part)
        if len(self._stored) > MAX_STORED:
            self._lose(list(islice(self._stored, _GO_AT_ONCE)))

    def asking(self) -> Callable[[bytes], None]:
        """Return a function that tells subscribers which blocks have left storage.

        Call `asking` before a lookup in storage. After the lookup, call the returned function with
        the key of each block that was not found. The function publishes that this block and the
        blocks after it are no longer in storage. Blocks that were stored after the call of
        `asking`, and the blocks after these, are left out.
        """
        since = self.now()

        def missing(digest: bytes) -> None:
            lost, pending = [], [digest]
            while pending:
                one = pending.pop()
                known = self._stored.get(one)
                if known is not None and known.number >= since.number:
                    continue
                if known is not None:
                    lost.append(one)
                pending.extend(self._below.get(one, ()))
            self._lose(lost)

        return missing

    def publish_not_stored(self, node: TreeNode, start: int, stop: int) -> None:
        """Publish that storage may no longer have blocks [start, stop) of a path.

        A path is a prefix in the index.

        Args:
            node: the node of the index at the end of the path.
            start: index of the first block.
            stop: index after the last block.
        """
        if self._stored:
            for run in self.runs(node, start, stop):
                self._lose([digest for digest in run.digests if digest in self._stored])

    def publish_storage_lost(self) -> None:
        """Send an EVICTED event to subscribers for every block that events reported as stored.

        Call this when storage may have lost all of its blocks.
        """
        self._num_clears += 1
        self._lose(list(self._stored))

    def is_stored(self, digest: bytes) -> bool:
        """Return whether the block is in storage, according to the events recorded so far."""
        return digest in self._stored

    def stored(self) -> list[BlockRun]:
        """Return the blocks in storage according to the events so far, the oldest first."""
        return _joined(self._stored.values())

    def _lose(self, digests: Sequence[bytes]) -> None:
        lost = [self._stored.pop(digest) for digest in digests]
        for block, digest in zip(lost, digests, strict=True):
            below = self._below[block.parent]
            del below[digest]
            if not below:
                del self._below[block.parent]
        for run in _joined(lost):
            self.publish_run(CacheEventKind.EVICTED, "storage", run)

    def note_name(self, digest: bytes, name: ExternalId) -> None:
        """Remember an engine's own id of a block; later events about the block contain it.

        Args:
            digest: key of the block.
            name: the engine's id.
        """
        self._names[digest] = name
        self._names.move_to_end(digest)
        while len(self._names) > self.max_names:
            self._names.popitem(last=False)

    def event(
        self, kind: CacheEventKind, tier: str, run: BlockRun, session_id: str = ""
    ) -> CacheEvent:
        """Return an event about blocks without publishing it.

        Args:
            kind: the kind of change.
            tier: "device", "host" or "storage".
            run: the blocks that the event names.
            session_id: the session that computed the blocks in one of its turns; "" for none.

        Returns:
            The event, with the number of the last published event.
        """
        names: tuple[ExternalId | None, ...] = ()
        parent = None
        if self._names:
            names = tuple(map(self._names.get, run.digests))
            parent = self._names.get(run.parent)
            if all(name is None for name in names):
                names = ()
        return CacheEvent(
            number=self._number,
            kind=kind,
            tier=tier,
            space=run.space,
            start=run.start,
            stop=run.start + len(run.digests),
            digests=tuple(run.digests),
            parent=run.parent,
            tokens=run.tokens,
            is_tail=run.is_tail,
            group=run.group,
            external_ids=names,
            external_parent=parent,
            session_id=session_id,
        )

    def publish_run(
        self, kind: CacheEventKind, tier: str, run: BlockRun, session_id: str = ""
    ) -> None:
        """Publish one event about blocks, which need not be in the index any more.

        Args:
            kind: the kind of change.
            tier: "device", "host" or "storage".
            run: the blocks that the event names.
            session_id: the session that computed the blocks in one of its turns; "" for none.
        """
        self._number += 1
        event = self.event(kind, tier, run, session_id)
        for subscription in self._subscriptions:
            subscription.put(event)


def _joined(blocks: Iterable[_Stored]) -> list[BlockRun]:
    runs: list[BlockRun] = []
    run: BlockRun | None = None
    first = stop = 0
    for block in blocks:
        if block.run is run and block.at == stop:
            stop += 1
            continue
        if run is not None:
            runs.append(run.part(first, stop))
        run, first, stop = block.run, block.at, block.at + 1
    if run is not None:
        runs.append(run.part(first, stop))
    return runs
