"""The cache's events for those outside: for HTTP clients one bounded ring that all of them read at
their own pace, for routers batches over ZeroMQ.

A batch is three frames: topic, number (8 bytes, big-endian), and msgpack [time, [event ...], rank]:
the format that vLLM publishes and that SGLang, Dynamo and llm-d share. Numbers count up by one; a
gap means that batches are lost. A second socket (ROUTER) answers a number (after an empty frame)
with all batches from it on that are still kept, and with the number -1 at their end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import msgspec
import numpy as np

from tierkv.api.settings import EventForm, EventsSection
from tierkv.cache.node import CopyState, Tier, TreeNode
from tierkv.errors import ConfigError, how_to_install
from tierkv.sched.events import CacheEvent, Happening
from tierkv.service import Service
from tierkv.tasks import background, task_group

log = logging.getLogger("tierkv.events")

RING_EVENTS = 8192
KEEP_S = 60.0  # without a reader: so long a client may take to come back and miss nothing


@dataclass(slots=True)
class Reader:
    """What one client has seen: `number` of its feed's run `epoch`. num_lost: since it came; what
    a client missed that came back too late is not known, and counts as one."""

    epoch: int
    number: int
    num_lost: int = 0


class EventFeed:
    """Listens to the cache while somebody reads, and for KEEP_S seconds after. Use it inside
    `running()`; `close` ends every reading."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ring: deque[CacheEvent] = deque(maxlen=RING_EVENTS)
        self._last = 0  # the number of the ring's newest event; they are counted up, without gaps
        self._epoch = 0
        self._num_readers = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with task_group() as self._tasks:
            try:
                yield
            finally:
                self.close()
                self._stop()

    def close(self) -> None:
        """The node drains: nobody is told more than what has happened until now."""
        self._is_closed = True
        self._wake()

    @asynccontextmanager
    async def reading(self, epoch: int | None, number: int) -> AsyncIterator[Reader]:
        """A reader of what comes after event `number` of the run `epoch`, or from now on."""
        self._listen()
        reader = Reader(self._epoch, self._last)
        if epoch == self._epoch and number <= self._last:
            reader.number = number
        elif epoch is not None:
            reader.num_lost = 1
        self._num_readers += 1
        try:
            yield reader
        finally:
            self._num_readers -= 1
            if not self._num_readers and not self._is_closed:
                loop = asyncio.get_running_loop()
                self._ending = loop.call_later(KEEP_S, self._stop)

    async def next(self, reader: Reader, *, most: int, timeout_s: float) -> list[CacheEvent] | None:
        """Up to `most` events, in order; none after `timeout_s` seconds without, None at the end.

        A reader that fell behind the ring goes on with its oldest event, the loss counted.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while reader.number >= self._last and not self._is_closed:
                    await self._changed.wait()
        except TimeoutError:
            return []
        if reader.number >= self._last or not self._ring:
            return None
        oldest = self._last - len(self._ring) + 1
        if reader.number < oldest - 1:
            reader.num_lost += oldest - 1 - reader.number
            reader.number = oldest - 1
        first = reader.number + 1 - oldest
        events = list(islice(self._ring, first, first + most))
        reader.number += len(events)
        return events

    def _listen(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._listening is None and not self._is_closed:
            assert self._tasks is not None, "the feed is running"
            self._epoch = secrets.randbits(48)  # a node that restarts does not go on counting
            self._listening = self._tasks.create_task(self._run(), name="tierkv-events")

    def _stop(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._ring.clear()

    async def _run(self) -> None:
        with self._service.tiers.events.subscribe(RING_EVENTS) as subscription:
            num_dropped = 0
            async for event in subscription:
                if subscription.num_dropped > num_dropped:
                    self._ring.clear()  # a gap: whoever has not read this far has lost something
                    self._last += subscription.num_dropped - num_dropped
                    num_dropped = subscription.num_dropped
                self._ring.append(event)
                self._last += 1
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


_MOST_BLOCKS = 1024  # of one batch, which takes a millisecond to encode
_QUEUED_EVENTS = 65_536  # that wait to be published; then the oldest are lost
_KEPT_BATCHES = 10_000  # for replays, as vLLM keeps them
_KEPT_BYTES = 64 << 20
_LINGER_MS = 500  # for subscribers to be sent the last batch when the node ends
_REPLAYED_AT_ONCE = 64  # batches between two turns of the loop
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_REQUEST_FRAMES = 3  # who asks, an empty one, the first number
_RANK = 0
_MEDIUM = {"device": "GPU", "host": "CPU", "storage": "STORAGE"}  # vLLM's words
_CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


class KvEventPublisher:
    """Publishes what the cache holds to routers. Use it inside `running()`.

    Whole blocks only: routers know no others. The first batch says that nothing is cached, and so
    does the last. Where events came faster than they were sent, the numbers have a gap, everything
    is declared gone, and what is cached is told again. num_batches: sent. num_lost: events that
    were dropped. name: of the node, for the topic.
    """

    def __init__(self, service: Service, settings: EventsSection, name: str) -> None:
        self.num_batches = 0
        self.num_lost = 0
        self._service = service
        self._settings = settings
        fingerprint = service.fingerprint
        self._topic = f"kv@{name}@{fingerprint.model}".encode()
        self._block_size = fingerprint.layout.block_size
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listens; says at the end that all is gone. Does nothing without an endpoint. Raises
        ConfigError if an address cannot be listened on or the package is missing."""
        if not self._settings.endpoint:
            yield
            return
        zmq = _zmq()
        with zmq.asyncio.Context() as context:
            publisher = context.socket(zmq.PUB, socket_class=zmq.Socket)
            replayer = context.socket(zmq.ROUTER)
            try:
                publisher.setsockopt(zmq.SNDHWM, _KEPT_BATCHES)
                replayer.setsockopt(zmq.SNDHWM, _KEPT_BATCHES + 1)
                _bind(zmq, publisher, "endpoint", self._settings.endpoint)
                work = {"tierkv-kv-events": self._publish(publisher)}
                if self._settings.replay:
                    _bind(zmq, replayer, "replay", self._settings.replay)
                    work["tierkv-kv-replays"] = self._replay(replayer)
                self._send(publisher, [_CLEARED])
                log.info("cache events are published at %s", self._settings.endpoint)
                async with background(work):
                    yield
                self._send(publisher, [_CLEARED])
            finally:
                publisher.close(linger=_LINGER_MS)
                replayer.close(linger=0)

    async def _publish(self, publisher: Any) -> None:  # noqa: ANN401 - ZeroMQ's
        events = self._service.tiers.events
        wants_tokens = self._settings.token_ids
        with events.subscribe(_QUEUED_EVENTS, wants_tokens=wants_tokens) as subscription:
            async for event in subscription:
                waiting = [event, *subscription.take()]
                num_lost = subscription.num_dropped - self.num_lost
                if num_lost:
                    log.warning("%d cache events were lost: all is told again", num_lost)
                    self.num_lost = subscription.num_dropped
                    self._number += 1  # the gap by which a router knows
                    self._send(publisher, [_CLEARED])
                    await self._tell_all(publisher)
                    continue
                for batch in _batches(waiting):
                    self._send(publisher, [self._encoded(one) for one in batch])
                    await asyncio.sleep(0)

    async def _tell_all(self, publisher: Any) -> None:  # noqa: ANN401 - ZeroMQ's
        """What is cached now. What happens meanwhile is queued, and told after it."""
        index, events = self._service.index, self._service.tiers.events
        nodes = [child for root in index.spaces.roots() for child in root.children.values()]
        while nodes:
            node = nodes.pop()
            if node.parent is None or node.parent.children.get(node.key) is not node:
                continue  # it went meanwhile
            nodes.extend(node.children.values())
            for tier, first, stop in () if node.is_tail else _ready(node):
                for run in events.runs(node, first, stop):
                    told = CacheEvent.of(0, Happening.STORED, tier, run)
                    self._send(publisher, [self._encoded(told)])
            await asyncio.sleep(0)

    def _encoded(self, event: CacheEvent) -> dict[str, Any]:
        hashes = [self._hash(digest) for digest in event.digests]
        if event.kind is Happening.EVICTED:
            return {
                "type": "BlockRemoved",
                "block_hashes": hashes,
                "medium": _MEDIUM[event.tier],
            }
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": self._hash(event.parent) if event.parent else None,
            "token_ids": np.frombuffer(event.tokens, "<i4").tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": _MEDIUM[event.tier],
            "lora_name": None,
        }

    def _hash(self, digest: bytes) -> bytes | int:
        if self._settings.form is EventForm.MAP:
            return digest
        return int.from_bytes(digest[-_NUMBER_BYTES:], "big")

    def _send(self, publisher: Any, events: list[dict[str, Any]]) -> None:  # noqa: ANN401
        """Never waits: a subscriber that is too slow for its queue misses it, and sees a gap."""
        in_order = self._settings.form is EventForm.ARRAY
        told = [list(event.values()) for event in events] if in_order else events
        batch = msgspec.msgpack.encode([time.time(), told, _RANK])
        number = self._number.to_bytes(_NUMBER_BYTES, "big")
        publisher.send_multipart((self._topic, number, batch))
        self._kept.append((self._number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._number += 1
        self.num_batches += 1

    async def _replay(self, replayer: Any) -> None:  # noqa: ANN401 - ZeroMQ's
        while True:
            frames = await replayer.recv_multipart()
            if len(frames) != _REQUEST_FRAMES or len(frames[-1]) != _NUMBER_BYTES:
                log.warning("a replay was asked for in %d frames that are no request", len(frames))
                continue
            client, first = frames[0], int.from_bytes(frames[-1], "big")
            kept = [(number, batch) for number, batch in self._kept if number >= first]
            for at, (number, batch) in enumerate(kept):
                told = number.to_bytes(_NUMBER_BYTES, "big")
                await replayer.send_multipart((client, b"", self._topic, told, batch))
                if at % _REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await replayer.send_multipart((client, b"", b"", _END, b""))


def _zmq() -> Any:  # noqa: ANN401 - a module that may be missing
    try:
        import zmq.asyncio  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"events.endpoint needs ZeroMQ: {how_to_install('events')}") from error
    return zmq


def _bind(zmq: Any, socket: Any, name: str, address: str) -> None:  # noqa: ANN401 - ZeroMQ's
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"events.{name} {address} cannot be listened on: {error}") from error


def _batches(events: list[CacheEvent]) -> Iterator[list[CacheEvent]]:
    """Of whole blocks, in order; each of one event or of at most _MOST_BLOCKS blocks."""
    batch: list[CacheEvent] = []
    num_blocks = 0
    for event in events:
        if event.is_tail:
            continue
        if batch and num_blocks + len(event.digests) > _MOST_BLOCKS:
            yield batch
            batch, num_blocks = [], 0
        batch.append(event)
        num_blocks += len(event.digests)
    if batch:
        yield batch


def _ready(node: TreeNode) -> Iterator[tuple[str, int, int]]:
    """Runs of the node's path blocks that are whole on a tier: its name, the first, the end."""
    for tier in Tier:
        at = node.start
        for state, group in groupby(node.copies[tier].states.tolist()):
            stop = at + len(list(group))
            if state == CopyState.READY:
                yield tier.name.lower(), at, stop
            at = stop
