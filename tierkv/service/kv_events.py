"""The cache's events for routers, published in batches over ZeroMQ.

A batch has three frames: the topic, the batch's number (8 bytes, big-endian), and msgpack [time,
[event ...], rank]. vLLM publishes this format; SGLang, Dynamo and llm-d use it, too. Each number is
one above the last, so a gap means that batches are lost.

A second socket (ROUTER) replays missed batches. A request is an empty frame and a number. The
answer is every batch from that number on that is still in memory, followed by the number -1.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from ipaddress import ip_address
from itertools import chain, groupby
from typing import Any

import msgspec
import numpy as np

from tierkv.cache.index import Index
from tierkv.cache.keys import Fingerprint
from tierkv.cache.node import CopyState, Tier, TreeNode
from tierkv.errors import ConfigError, how_to_install
from tierkv.sched.events import CacheEvent, CacheEventKind, CacheEvents, ExternalId
from tierkv.sched.log_throttle import LogThrottle
from tierkv.tasks import supervised, task_group

log = logging.getLogger(__name__)

_ENDPOINT = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}|ipc://.+")


class EventForm(Enum):
    """The encoding of cache events, which tell routers about stored and removed blocks.

    MAP: a map of field names to values, with 32-byte hashes (vLLM).

    MAP_INT: such a map, with the last 8 bytes of each hash as an integer (SGLang).

    ARRAY: the values in the order of the fields, with integer hashes (older releases of vLLM and
    SGLang).
    """

    MAP = "map"
    MAP_INT = "map_int"
    ARRAY = "array"


class EventsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of cache events for routers, over ZeroMQ; they need the package extra `events`.

    Every process that reaches an address may read, so an address that is not loopback needs
    node.allow_insecure_bind.

    Attributes:
        endpoint: address at which events are published, such as tcp://127.0.0.1:5557 or
            ipc:///run/tierkv; "" to publish none.
        replay: address that answers requests for missed events; "" for none.
        form: map (hashes of 32 bytes), map_int (hashes as numbers) or array (fields in order).
        token_ids: true publishes the tokens of each block, too. Tokens are the content of prompts.
    """

    endpoint: str = ""
    replay: str = ""
    form: EventForm = EventForm.MAP
    token_ids: bool = False

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay"):
            given = getattr(self, name)
            if given and not _ENDPOINT.fullmatch(given):
                raise ConfigError(
                    f"events.{name} {given!r} is not an address to listen on: use "
                    "tcp://HOST:PORT, with * for every address of this machine, or "
                    "ipc://PATH"
                )
        if self.replay and not self.endpoint:
            raise ConfigError(
                "events.replay needs events.endpoint: set it, or remove events.replay"
            )

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the addresses."""
        found = [_ENDPOINT.fullmatch(one) for one in (self.endpoint, self.replay)]
        hosts = [one["host"].strip("[]") for one in found if one and one["host"]]
        return all(host == "localhost" or _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, or every address
        return False


_MAX_BLOCKS = 1024  # blocks of one batch, which takes 1 ms to encode
_QUEUED_EVENTS = 65_536  # events that wait to be published; beyond it the oldest are dropped
_KEPT_BATCHES = 10_000  # for replays, as vLLM keeps them
_KEPT_BYTES = 64 << 20
_LINGER_MS = 500  # time to send the last batch to subscribers when the node ends
_REPLAYED_AT_ONCE = 64  # batches between two turns of the loop
_REPLAY_QUEUE = 256  # batches that wait for one client: ZeroMQ keeps them in memory
_REPLAY_PATIENCE_S = 1.0  # time for a client to read one batch
_REPLAY_RETRY_S = 0.005  # pause between attempts: ZeroMQ does not report room in a queue
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_REQUEST_FRAMES = 3  # the client, an empty frame, the first number
_RANK = 0
# vLLM's words for tiers and kinds of groups.
_MEDIUM = {"device": "GPU", "host": "CPU", "storage": "STORAGE"}
_KIND = {"FULL": "full_attention", "WINDOW": "sliding_window", "STATE": "mamba"}
_CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


class KvEventPublisher:
    """The publisher of cached blocks and their changes, for routers. Use it inside `running()`.

    Only full blocks are published, because routers do not support tails. A block's hash is the one
    that the engine has given it, otherwise its key. The first and the last batch state that nothing
    is cached. If events come faster than they can be sent, some are dropped. Then one batch number
    is skipped, a batch states that nothing is cached, and all cached blocks are published again.

    Args:
        settings: the addresses and the encoding.
        name: name of the node, for the topic.
        fingerprints: fingerprints by the name of their space; the service's own under "".

    Attributes:
        num_lost: number of events dropped.
    """

    def __init__(
        self, settings: EventsSection, name: str, fingerprints: Mapping[str, Fingerprint]
    ) -> None:
        self.num_lost = 0
        self._settings = settings
        self._name = name
        self._fingerprints = fingerprints
        self._topic = b""
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    @asynccontextmanager
    async def running(self, events: CacheEvents, index: Index) -> AsyncIterator[None]:
        """Publish cache events to subscribers (ZeroMQ) until the `async with` block ends.

        At the start and at the end, an event says that this node has no cached blocks. Nothing is
        published if the settings have no endpoint.

        Args:
            events: the cache events to publish.
            index: the index of cached blocks, from which the complete content of the cache can be
                published again.

        Raises:
            ConfigError: an address in the settings cannot be listened on, or the ZeroMQ package is
                missing.
        """
        if not self._settings.endpoint:
            yield
            return
        self._events, self._index = events, index
        self._topic = f"kv@{self._name}@{self._fingerprints[''].model}".encode()
        zmq = _zmq()
        with zmq.asyncio.Context() as context:
            publisher = context.socket(zmq.PUB, socket_class=zmq.Socket)
            replayer = context.socket(zmq.ROUTER)
            try:
                publisher.setsockopt(zmq.SNDHWM, _KEPT_BATCHES)
                replayer.setsockopt(zmq.SNDHWM, _REPLAY_QUEUE)
                replayer.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise an error instead of a drop
                _bind(zmq, publisher, "endpoint", self._settings.endpoint)
                work = {"tierkv-kv-events": lambda: self._publish(publisher)}
                if self._settings.replay:
                    _bind(zmq, replayer, "replay", self._settings.replay)
                    work["tierkv-kv-replays"] = lambda: self._answer_replays(zmq, replayer)
                self._send(publisher, [_CLEARED])
                log.info("cache events are published at %s", self._settings.endpoint)
                async with supervised(work):
                    yield
                self._send(publisher, [_CLEARED])
            finally:
                publisher.close(linger=_LINGER_MS)
                replayer.close(linger=0)

    async def _publish(self, publisher: Any) -> None:  # noqa: ANN401 - ZeroMQ's
        wants_tokens = self._settings.token_ids
        with self._events.subscribe(_QUEUED_EVENTS, wants_tokens=wants_tokens) as subscription:
            async for event in subscription:
                waiting = [event, *subscription.drain()]
                num_lost = subscription.num_dropped - self.num_lost
                if num_lost:
                    log.warning(
                        "%d cache events were dropped, since the publisher fell behind: "
                        "the whole state is published again",
                        num_lost,
                    )
                    self.num_lost = subscription.num_dropped
                    self._number += 1  # routers notice the gap
                    self._send(publisher, [_CLEARED])
                    await self._publish_all(publisher)
                    continue
                for batch in _batches(waiting):
                    self._send(publisher, [self._encoded(one) for one in batch])
                    await asyncio.sleep(0)

    async def _publish_all(self, publisher: Any) -> None:  # noqa: ANN401 - ZeroMQ's
        """Publish every full block that is cached.

        The caller publishes the events that occur during the call.
        """
        stored = [
            self._events.event(CacheEventKind.STORED, "storage", run)
            for run in self._events.stored()
        ]
        for batch in _batches(stored):
            self._send(publisher, [self._encoded(one) for one in batch])
            await asyncio.sleep(0)
        nodes = [child for root in self._index.spaces.roots() for child in root.children.values()]
        while nodes:
            node = nodes.pop()
            if node.parent is None or node.parent.children.get(node.key) is not node:
                continue  # the node was removed during the wait
            nodes.extend(node.children.values())
            for tier, first, stop in () if node.is_tail else _ready(node):
                for run in self._events.runs(node, first, stop):
                    event = self._events.event(CacheEventKind.STORED, tier, run)
                    self._send(publisher, [self._encoded(event)])
            await asyncio.sleep(0)
        for run in self._events.other_blocks():
            if not run.is_tail:
                event = self._events.event(CacheEventKind.STORED, "host", run)
                self._send(publisher, [self._encoded(event)])

    def _encoded(self, event: CacheEvent) -> dict[str, Any]:
        groups = self._events.groups
        group = groups[event.group] if groups else None
        is_plain = group is None or (len(groups) == 1 and group.kind.name == "FULL")
        names = event.external_ids or (None,) * len(event.digests)
        hashes = [self._hash(*both) for both in zip(names, event.digests, strict=True)]
        if event.kind is CacheEventKind.EVICTED:
            removed = {
                "type": "BlockRemoved",
                "block_hashes": hashes,
                "medium": _MEDIUM[event.tier],
            }
            return removed if is_plain else removed | {"group_idx": event.group}
        own = self._fingerprints[""]
        tokens = event.tokens if self._settings.token_ids else b""
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": (
                self._hash(event.external_parent, event.parent) if event.parent else None
            ),
            "token_ids": np.frombuffer(tokens, "<i4").tolist(),
            "block_size": (group or own.layout).block_size,
            "lora_id": None,
            "medium": _MEDIUM[event.tier],
            "lora_name": self._fingerprints.get(event.space, own).adapter or None,
        }
        if event.session_id and self._settings.form is not EventForm.ARRAY:
            stored["session_id"] = event.session_id
        if group is None or is_plain:
            return stored
        return stored | {
            "extra_keys": None,
            "group_idx": event.group,
            "kv_cache_spec_kind": _KIND[group.kind.name],
            "kv_cache_spec_sliding_window": group.window or None,
        }

    def _hash(self, name: ExternalId | None, digest: bytes) -> bytes | int:
        given = digest if name is None else name.encode() if isinstance(name, str) else name
        if isinstance(given, int) or self._settings.form is EventForm.MAP:
            return given
        return int.from_bytes(given[-_NUMBER_BYTES:], "big")

    def _send(self, publisher: Any, events: list[dict[str, Any]]) -> None:  # noqa: ANN401
        """Send a batch without waiting, so a subscriber with a full queue misses the batch."""
        in_order = self._settings.form is EventForm.ARRAY
        encoded = [list(event.values()) for event in events] if in_order else events
        batch = msgspec.msgpack.encode([time.time(), encoded, _RANK])
        number = self._number.to_bytes(_NUMBER_BYTES, "big")
        publisher.send_multipart((self._topic, number, batch))
        self._kept.append((self._number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _KEPT_BATCHES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._number += 1

    async def _answer_replays(self, zmq: Any, replayer: Any) -> None:  # noqa: ANN401 - ZeroMQ's
        ended = LogThrottle(log, "a replay of events was not sent completely (x%d): %s")
        running: dict[bytes, asyncio.Task[None]] = {}

        async def answer(client: bytes, first: int) -> None:
            try:
                await self._replay(zmq, replayer, client, first)
            except TimeoutError:
                ended.warn(f"the subscriber read nothing for {_REPLAY_PATIENCE_S:g} s")
            except zmq.ZMQError as error:
                ended.warn(f"the subscriber disconnected: {error}")
            finally:
                if running.get(client) is asyncio.current_task():
                    del running[client]

        async with task_group() as tasks:
            while True:
                await asyncio.sleep(0)  # recv returns queued requests without a turn of the loop
                frames = await replayer.recv_multipart()
                if len(frames) != _REQUEST_FRAMES or len(frames[-1]) != _NUMBER_BYTES:
                    ended.warn(f"a message of {len(frames)} frames is not a replay request")
                    continue
                client, first = frames[0], int.from_bytes(frames[-1], "big")
                if client in running:
                    running[client].cancel()
                running[client] = tasks.create_task(answer(client, first))

    async def _replay(self, zmq: Any, replayer: Any, client: bytes, first: int) -> None:  # noqa: ANN401
        kept = [(number, batch) for number, batch in self._kept if number >= first]
        answers = (
            (client, b"", self._topic, number.to_bytes(_NUMBER_BYTES, "big"), batch)
            for number, batch in kept
        )
        for at, answer in enumerate(chain(answers, [(client, b"", b"", _END, b"")])):
            until = time.monotonic() + _REPLAY_PATIENCE_S
            while True:
                try:
                    await replayer.send_multipart(answer, flags=zmq.NOBLOCK)
                    break
                except zmq.Again:
                    if time.monotonic() > until:
                        raise TimeoutError from None
                await asyncio.sleep(_REPLAY_RETRY_S)
            if at % _REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)


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
        raise ConfigError(f"the node cannot listen on events.{name} {address}: {error}") from error


def _batches(events: list[CacheEvent]) -> Iterator[list[CacheEvent]]:
    batch: list[CacheEvent] = []
    num_blocks = 0
    for event in events:
        if event.is_tail:
            continue
        if batch and num_blocks + len(event.digests) > _MAX_BLOCKS:
            yield batch
            batch, num_blocks = [], 0
        batch.append(event)
        num_blocks += len(event.digests)
    if batch:
        yield batch


def _ready(node: TreeNode) -> Iterator[tuple[str, int, int]]:
    for tier in Tier:
        at = node.start
        for state, group in groupby(node.copies[tier].states.tolist()):
            stop = at + len(list(group))
            if state == CopyState.READY:
                yield tier.name.lower(), at, stop
            at = stop
