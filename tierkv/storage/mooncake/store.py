"""The store on Mooncake, a cluster of a master and providers.

Providers are nodes that lend memory for values; the master records which provider has a value.
Values move between the caller's buffers and the providers over TCP or RDMA, without a copy in
tierkv. Mooncake has no empty values, no times to live (it evicts the least recently used values),
and no listing. Its calls block, so threads make them. If a provider stops answering, such a thread
is blocked for some seconds, and the caller's buffers stay in use for that time.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from queue import SimpleQueue
from threading import Event
from typing import TypeVar, cast
from urllib.parse import urlsplit

import numpy as np

from tierkv.errors import ConfigError, StoreCorruptError, StoreUnavailableError, how_to_install
from tierkv.storage.base import (
    BaseStore,
    WorkerThreads,
    copy_into,
    flat,
    room_for,
    why_unreachable,
)
from tierkv.storage.mooncake.client import (
    Config,
    MooncakeClient,
    MooncakeSettings,
    Package,
    environment,
)
from tierkv.storage.protocol import (
    Buffer,
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    check_name,
    check_names,
    check_ttl,
    too_long,
)

# Scratch memory for one call's pieces outside the pools: headers, tails and slices of other sizes.
# Pieces that exceed it are used in place, which works over TCP only.
_SCRATCH_BYTES = 4 << 20
_LOCAL_BUFFER_BYTES = 64 << 20  # Mooncake's own buffer, for values that are read one by one
_MAX_READS = 10  # for one small value that is being replaced
_NO_SPACE = -200
_NOT_FOUND = -704
_ABSENT = frozenset({_NOT_FOUND, -703})  # -703: the value is being written
_NOT_MOVED = -800  # the provider moved no bytes, or buffers are too long
# The master does not answer; the client waits 4 s if there is none, its deadline if it hangs.
_NO_ANSWER = frozenset({-900, -901})
# Values in one call of the client: 8 of 2 MiB are read at 1.25 GB/s, single ones at 0.73 GB/s.
_AT_ONCE = 8

Item = TypeVar("Item")
Pieces = Sequence[memoryview]


class MooncakeValues:
    """Blocking reads and writes of batches of values, with Mooncake's client.

    Thread-safe. The client is connected from the constructor to `close`. When a call returns, the
    copies into or out of its buffers have ended. If a machine that has values stops answering, a
    batch fails after some seconds (`MooncakeSettings.halt_s`). Batches that are passed the same
    `given_up` event fail at once afterwards.
    """

    def __init__(
        self,
        address: tuple[str, int],
        url: str,
        settings: MooncakeSettings,
        pools: Sequence[memoryview] = (),
    ) -> None:
        """Connect to the master.

        Args:
            address: host and port of the master.
            url: URL of the store, for errors.
            settings: addresses, protocol, replicas and time limits of the client.
            pools: the memory of this node that contains most values, to be registered for RDMA.

        Raises:
            StoreUnavailableError: the master cannot be reached, or the package cannot be loaded.
        """
        for variable, value in environment(settings).items():
            os.environ.setdefault(variable, value)
        self._url = url
        self._settings = settings
        self._max_pieces = settings.max_pieces
        self._package = _load_package()
        try:
            _check_master_answers(address, settings.connect_timeout_s)
        except OSError as error:
            why = why_unreachable(error)
            raise StoreUnavailableError(f"{url} cannot be reached {why}") from error
        self._client: MooncakeClient = self._package.MooncakeDistributedStore()
        status = self._client.setup(
            settings.local_host,
            "P2PHANDSHAKE",
            0,  # memory is lent by providers, not by this node
            _LOCAL_BUFFER_BYTES,
            settings.protocol,
            settings.rdma_devices,
            f"{address[0]}:{address[1]}",
        )
        if status:
            raise StoreUnavailableError(f"{url} cannot be reached (Mooncake's error {status})")
        self._memory = KnownMemory(
            self._client,
            pools if settings.is_rdma else (),
            num_users=2 * settings.num_threads,
        )
        try:
            self._memory.register()
        except StoreUnavailableError:
            self.close()
            raise

    def close(self) -> None:
        self._memory.unregister()
        self._client.close()

    def ping(self) -> None:
        """Check that the master answers.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        self.present(["ping"])  # its `health_check` does not ask the master

    def present(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, True if it has a value.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        statuses = self._client.batch_is_exist(list(names)) if names else []
        for status in statuses:
            if status < 0 and status != _NOT_FOUND:
                raise StoreUnavailableError(
                    f"{self._url} does not answer (Mooncake's error {status})"
                )
        return [status == 1 for status in statuses]

    def delete(self, names: Sequence[str]) -> int:
        """Remove values; return how many of them existed.

        Raises:
            StoreUnavailableError: the master did not remove a value.
        """
        if not names:
            return 0
        # The removal is forced: a value that was just read has a lease, which protects its memory.
        statuses = self._client.batch_remove(list(names), True)  # noqa: FBT003
        for status in statuses:
            if status not in {0, _NOT_FOUND}:
                raise StoreUnavailableError(
                    f"{self._url} did not remove a value (Mooncake's error {status})"
                )
        return statuses.count(0)

    def batches_to_get(self, items: Sequence[GetItem]) -> list[Sequence[GetItem]]:
        """Divide `items` into batches, each for one call of `get`."""
        return _batches(items, [len(item.into) for item in items], self._max_pieces)

    def batches_to_put(self, items: Sequence[PutItem]) -> list[Sequence[PutItem]]:
        """Divide `items` into batches, each for one call of `put`."""
        return _batches(items, [len(item.parts) for item in items], self._max_pieces)

    def get(self, items: Sequence[GetItem], given_up: Event) -> list[GetOutcome]:
        """Read values into their buffers, and return one outcome per value.

        Args:
            items: one batch of `batches_to_get`.
            given_up: shared by all batches of a caller. A batch that waits long and gets no answer
                sets the event; batches that begin later then fail at once.
        """
        if given_up.is_set():
            return [GetOutcome(GetStatus.FAILED, self._unsent(item.name)) for item in items]
        rooms = [flat(item.into) for item in items]
        statuses = self._read([item.name for item in items], rooms, given_up)
        return [
            self._get_outcome(item, room, status, given_up)
            for item, room, status in zip(items, rooms, statuses, strict=True)
        ]

    def _read(
        self, names: Sequence[str], rooms: Sequence[Pieces], given_up: Event
    ) -> Sequence[int]:
        """Read values into buffers of exactly their length, and block the thread meanwhile.

        Return each value's length in bytes or an error number. `given_up` is set if Mooncake is
        slow, so that the caller's later batches fail at once.
        """
        landings = [
            # More buffers than a call may have are replaced by one of the same total size.
            views
            if len(views) <= self._max_pieces
            else [memoryview(bytearray(sum(map(len, views))))]
            for views in rooms
        ]
        started = time.monotonic()
        with self._memory.known(landings) as (known, scattered):
            statuses = self._client.batch_get_into_multi_buffers(
                list(names),
                [[pointer(view) for view in views] for views in known],
                [[len(view) for view in views] for views in known],
            )
            for view, copy in scattered:
                view[:] = copy
        self._check_slow(statuses, started, given_up)
        for views, landed, status in zip(rooms, landings, statuses, strict=True):
            if landed is not views and status == len(landed[0]):
                copy_into(landed[0], views)
        return statuses

    def _get_outcome(self, item: GetItem, room: Pieces, status: int, given_up: Event) -> GetOutcome:
        num_bytes = status
        if not (given_up.is_set() or status in _ABSENT or status in _NO_ANSWER):
            if status < 0:  # buffers that are too long or too short cause many different errors
                num_bytes = self._client.get_size(item.name)
            if 0 < num_bytes < item.room_bytes:
                [status] = self._read([item.name], [room_for(num_bytes, room)], given_up)
        if _ABSENT.intersection((status, num_bytes)):
            return GetOutcome(GetStatus.MISS)
        if num_bytes > item.room_bytes:
            return too_long(item, num_bytes)
        if status == num_bytes > 0:
            return GetOutcome(GetStatus.HIT, num_bytes=num_bytes)
        return GetOutcome(GetStatus.FAILED, f"{item.name}: Mooncake's error {status}")

    def get_small(self, name: str, max_bytes: int) -> bytes | None:
        """Return a small value; None if there is none.

        Args:
            name: name of the value.
            max_bytes: largest accepted length of the value.

        Raises:
            StoreCorruptError: the value is longer than `max_bytes`.
            StoreUnavailableError: the value cannot be read.
        """
        num_bytes = self._client.get_size(name)
        if num_bytes in _ABSENT:
            return None
        if num_bytes < 0:
            raise StoreUnavailableError(
                f"{self._url} does not answer (Mooncake's error {num_bytes})"
            )
        if num_bytes > max_bytes:
            raise StoreCorruptError(
                f"{name} has {num_bytes} bytes, more than the limit of {max_bytes}"
            )
        # Mooncake replaces a value in place: a concurrent read returns parts of both.
        content, before = self._client.get(name), b""
        for _ in range(_MAX_READS):
            if not content:
                raise StoreUnavailableError(f"{self._url} removed {name} during the read")
            if content == before:
                return content
            content, before = self._client.get(name), content
        raise StoreUnavailableError(
            f"{name} was replaced in {self._url} during each of {_MAX_READS} reads: try again"
        )

    def put(self, items: Sequence[PutItem], given_up: Event) -> list[PutOutcome]:
        """Write values, and return one outcome per value.

        If several nodes write a value with the same name at once, only one of them sends the bytes;
        the other nodes are told at once that the value is stored.

        Args:
            items: the values; the batches of `batches_to_put` have the largest size that is
                allowed.
            given_up: an event that the caller shares between all its batches. A call sets this
                event if Mooncake gives no answer for `halt_s / 2` seconds or more. A call that
                begins with the event set writes nothing, and its outcomes are FAILED.
        """
        if given_up.is_set():
            return [PutOutcome(PutStatus.FAILED, self._unsent(item.name)) for item in items]
        started = time.monotonic()
        states = self._client.batch_is_exist([item.name for item in items])
        outcomes = [self._put_one(item, state) for item, state in zip(items, states, strict=True)]
        fresh = [at for at, outcome in enumerate(outcomes) if outcome is None]
        statuses = self._put_fresh([items[at] for at in fresh])
        for at, status in zip(fresh, statuses, strict=True):
            outcomes[at] = _put_outcome(items[at], status)
        self._check_slow([*states, *statuses], started, given_up)
        return [outcome for outcome in outcomes if outcome is not None]

    def _put_one(self, item: PutItem, state: int) -> PutOutcome | None:
        """Write one item, if it cannot be part of a batch, and return the outcome.

        The result is None if the caller must write the item in a batch. `state` is Mooncake's
        answer to the question if a value of this name exists: 1 if it exists, 0 if not, or an error
        number.
        """
        if not item.num_bytes:
            reason = f"{item.name} is empty, and Mooncake stores no empty values"
            return PutOutcome(PutStatus.FAILED, reason)
        if state in _NO_ANSWER:
            return _put_outcome(item, state)
        if item.leaves_existing and state == 1:
            return PutOutcome(PutStatus.EXISTED)
        if item.only_new:
            return self._put_new(item)
        if item.keep_existing:
            return None
        content = b"".join(item.completed())
        config = self._config(is_pinned=True)
        return _put_outcome(item, self._client.upsert(item.name, content, config))

    def _put_fresh(self, items: Sequence[PutItem]) -> Sequence[int]:
        if not items:
            return []
        values = [
            parts
            if len(parts := flat(item.completed())) <= self._max_pieces
            else [memoryview(b"".join(parts))]
            for item in items
        ]
        with self._memory.known(values) as (known, copies):
            for view, copy in copies:
                copy[:] = view
            return self._client.batch_put_from_multi_buffers(
                [item.name for item in items],
                [[pointer(view) for view in views] for views in known],
                [[len(view) for view in views] for views in known],
                self._config(is_pinned=False),
            )

    def _put_new(self, item: PutItem) -> PutOutcome:
        content = b"".join(item.completed())
        status = self._client.put(item.name, content, self._config(is_pinned=True))
        # If there is a value, Mooncake keeps it, and returns 0, too.
        if status == 0 and self._client.get(item.name) != content:
            return PutOutcome(PutStatus.EXISTED)
        return _put_outcome(item, status)

    def _config(self, *, is_pinned: bool) -> Config:
        config = self._package.ReplicateConfig()
        config.replica_num = self._settings.replicas
        if is_pinned:
            config.soft_pin_action = self._package.SoftPinAction.ENABLE
        return config

    def _check_slow(self, statuses: Sequence[int], started: float, given_up: Event) -> None:
        """Set `given_up` if Mooncake gave no answer and took at least `halt_s / 2` seconds.

        The caller's later batches do not ask Mooncake once `given_up` is set.
        """
        is_silent = any(status == _NOT_MOVED or status in _NO_ANSWER for status in statuses)
        if is_silent and time.monotonic() - started >= self._settings.halt_s / 2:
            given_up.set()

    def _unsent(self, name: str) -> str:
        return f"{name}: {self._url} does not answer"


class KnownMemory:
    """The memory of this node that is registered with Mooncake's client, as RDMA requires.

    The memory consists of the node's buffers, and of scratch memory: bytes of a value that lie
    outside the buffers are copied through it. Without buffers no memory is registered, and nothing
    is copied.

    Args:
        client: Mooncake's client.
        pools: the node's buffers; empty if the transport needs no registered memory.
        num_users: number of calls that can use scratch memory at the same time.
    """

    def __init__(self, client: MooncakeClient, pools: Pieces, *, num_users: int) -> None:
        self._client = client
        self._scratch: SimpleQueue[memoryview] = SimpleQueue()
        self._pools = [pool.cast("B") for pool in pools if pool.nbytes]
        if self._pools:
            memory = memoryview(bytearray(num_users * _SCRATCH_BYTES))
            self._pools.append(memory)
            for at in range(0, len(memory), _SCRATCH_BYTES):
                self._scratch.put(memory[at : at + _SCRATCH_BYTES])
        self._ranges = [range(start := pointer(p), start + len(p)) for p in self._pools]
        self._registered: list[int] = []

    def register(self) -> None:
        """Register the node's buffers and the scratch memory with Mooncake's client.

        Raises:
            StoreUnavailableError: the client refuses a range of memory.
        """
        for where in self._ranges:
            if status := self._client.register_buffer(where.start, len(where)):
                raise StoreUnavailableError(
                    f"Mooncake cannot register {len(where)} bytes of host memory "
                    f"(Mooncake's error {status})"
                )
            self._registered.append(where.start)

    def unregister(self) -> None:
        while self._registered:
            self._client.unregister_buffer(self._registered.pop())

    @contextmanager
    def known(
        self, values: Sequence[Pieces]
    ) -> Iterator[tuple[Sequence[Pieces], Sequence[tuple[memoryview, memoryview]]]]:
        """Yield registered memory for values, which Mooncake can read and write.

        A piece of a value that lies in registered memory is yielded unchanged. For another piece, a
        view of scratch memory is yielded. The caller must copy the bytes from the piece to this
        view before a write, and back after a read. A piece that is too large for the scratch memory
        is yielded unchanged. The call blocks while all scratch memory is in use.

        Args:
            values: the pieces of each value.

        Yields:
            The memory of each value, piece by piece; and the pairs of a piece and its view of
                scratch memory.
        """
        if not self._pools:
            yield values, ()
            return
        scratch = self._scratch.get()
        try:
            at, known, copies = 0, [], []
            for pieces in values:
                mine = []
                for piece in pieces:
                    end = at + len(piece)
                    if end > len(scratch) or self._has(piece):
                        mine.append(piece)
                        continue
                    mine.append(scratch[at:end])
                    copies.append((piece, mine[-1]))
                    at = end
                known.append(mine)
            yield known, copies
        finally:
            self._scratch.put(scratch)

    def _has(self, piece: memoryview) -> bool:
        start = pointer(piece)
        return any(start in where and start + len(piece) <= where.stop for where in self._ranges)


def pointer(view: Buffer) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _check_master_answers(address: tuple[str, int], timeout_s: float) -> None:
    # The client would retry for minutes, and with a frozen master its `setup` stops all Python
    # threads for 4 s.
    with socket.create_connection(address, timeout_s) as connection:
        # The master closes a connection after bytes that are not a request.
        connection.sendall(b"?")
        with suppress(ConnectionResetError):
            connection.recv(1)


def _batches(
    items: Sequence[Item], num_pieces: Sequence[int], max_pieces: int
) -> list[Sequence[Item]]:
    batches: list[Sequence[Item]] = []
    first = count = 0
    for at, pieces in enumerate(num_pieces):
        # An item with more than `max_pieces` buffers moves through one buffer, see `_read`.
        more = pieces if pieces <= max_pieces else 1
        if at > first and (at - first == _AT_ONCE or count + more > max_pieces):
            batches.append(items[first:at])
            first, count = at, 0
        count += more
    return [*batches, items[first:]] if items else []


def _load_package() -> Package:
    try:
        return cast("Package", importlib.import_module("mooncake.store"))
    except ImportError as error:
        raise StoreUnavailableError(
            f"Mooncake's package cannot be loaded ({error}): {how_to_install('mooncake')} and, on "
            "Debian, libibverbs1"
        ) from error


def _put_outcome(item: PutItem, status: int) -> PutOutcome:
    if status == 0:
        return PutOutcome(PutStatus.STORED)
    kind = PutStatus.FULL if status == _NO_SPACE else PutStatus.FAILED
    return PutOutcome(kind, f"{item.name}: Mooncake's error {status}")


ACCEPTED = "mooncake://master-host:port"


class MooncakeStore(BaseStore):
    """A `Store` on a Mooncake cluster.

    When its memory is full, Mooncake evicts values that can be replaced (tickets) last.

    If several nodes put a value with the same name at once, only one node sends the bytes. The
    other nodes get STORED or EXISTED immediately, although the value cannot be read yet.
    """

    def __init__(self, url: str, settings: MooncakeSettings) -> None:
        """Parse `url`; entering `running()` connects.

        Args:
            url: URL of the master: mooncake://host:port.
            settings: settings of the client.

        Raises:
            ConfigError: the URL names no master.
        """
        self._address = _master(url)
        self._settings = settings
        # A frozen provider blocks a thread for seconds. Reads, writes, and questions to the master,
        # which wait for no provider, therefore have separate threads.
        self._askers = WorkerThreads(self.url, settings.num_threads)
        self._opener = WorkerThreads(self.url, 1)
        self._readers = WorkerThreads(self.url, settings.num_threads)
        self._writers = WorkerThreads(self.url, settings.num_threads)
        self._values: MooncakeValues | None = None
        self._pools: Sequence[memoryview] = ()

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Set the memory that values will be read into and written from.

        Call this method before `running()`. Over RDMA, the memory is registered with the network
        card. A value in other memory is copied through a small buffer; if it is larger than that
        buffer, reading or writing it fails.

        Args:
            pools: the memory, such as all host slots.
        """
        self._pools = tuple(pools)

    @property
    def url(self) -> str:
        host, port = self._address
        return f"mooncake://{host}:{port}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True, has_ttl=False, has_listing=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        def connect() -> MooncakeValues:
            return MooncakeValues(self._address, self.url, self._settings, self._pools)

        async with (
            self._opener.running(),
            # Outlives the threads below.
            self._opener.holding(connect, MooncakeValues.close) as values,
            self._askers.running(),
            self._readers.running(),
            self._writers.running(),
        ):
            self._values = values
            try:
                yield
            finally:
                self._values, self._pools = None, ()

    async def ping(self) -> None:
        await self._askers.run(self._opened().ping)

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        values = self._opened()
        return await self._askers.run(lambda: values.present(names))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        values = self._values
        if values is None:
            return [GetOutcome(GetStatus.FAILED, f"{self.url} is closed")] * len(items)
        given_up = Event()
        parts = await self._readers.run_each(
            lambda batch: values.get(batch, given_up), values.batches_to_get(items)
        )
        return [outcome for part in parts for outcome in part]

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        values = self._opened()
        return await self._readers.run(lambda: values.get_small(name, max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        values = self._values
        if values is None:
            return [PutOutcome(PutStatus.FAILED, f"{self.url} is closed")] * len(items)
        given_up = Event()
        parts = await self._writers.run_each(
            lambda batch: values.put(batch, given_up), values.batches_to_put(items)
        )
        return [outcome for part in parts for outcome in part]

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        values = self._opened()
        return await self._writers.run(lambda: values.delete(names))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Return the number of `names` that have a value.

        No lifetime is extended: values in Mooncake have none.
        """
        check_ttl(ttl_s)
        return sum(await self.present(names))

    def _opened(self) -> MooncakeValues:
        if self._values is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        return self._values


def _master(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if host is None or not port or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"the storage URL names no Mooncake master; accepted: {ACCEPTED}")
    return host, port
