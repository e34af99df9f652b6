"""The scheduler's side of workers: a device whose blocks lie in other processes.

The service decides as always. What it moves goes as plans to every worker, and a movement is done
when all of them have reported it. Host slots are memory that all processes share, so storage I/O
stays here and no KV byte goes through a socket.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import (
    ConfigError,
    DeviceFailedError,
    LayoutError,
    StoreCorruptError,
    TransferError,
)
from tierkv.gpu.cpu import CallerStream, CpuEvent, check_copy, check_copy_within, done_event
from tierkv.gpu.protocol import (
    BlockCopy,
    Direction,
    Event,
    HostSlots,
    Ids,
    Lane,
    Planes,
    Sharing,
    Stream,
)
from tierkv.ranks.ledger import Outcome, Ranks
from tierkv.ranks.link import (
    Alive,
    Hello,
    HostRegion,
    Link,
    LinkClosedError,
    NotTaken,
    Plan,
    Report,
    SharedMemory,
    greeted,
    listen,
    read,
)
from tierkv.ranks.memory import pieces, shared_slots, side_by_side

log = logging.getLogger("tierkv.workers")

_TICK_S = 0.25


class WorkerDevice:
    """The devices of `len(shards)` worker processes as one. shards[r]: the layout of rank r.

    path: of the Unix socket at which it listens from now on; its directory should be private.
    dead_s: a worker that owes a report and has been silent for so long is given up.
    The service's layout is `layout`. A worker that dies, or is given up, is the end of the device:
    its blocks are lost, so `failure` names it and every movement fails. Start anew then.
    """

    def __init__(self, path: str, shards: Sequence[Layout], *, dead_s: float = 30.0) -> None:
        self.layout = side_by_side(shards)
        self.name = f"{len(shards)} workers at {path}"
        self.array_module: ModuleType = np
        self.compute_stream: Stream = CallerStream()  # workers order copies against their own
        self.sharing: Sharing | None = None  # the planes are the workers'
        self._shards = tuple(shards)
        self._path = path
        self._links: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._movements = Movements(len(shards), dead_s=dead_s)
        self._listener = listen(path)
        self._reader: threading.Thread | None = None
        self._is_closing = False

    @property
    def failure(self) -> str | None:
        return self._movements.failure

    @property
    def status(self) -> str:
        if self.failure is not None:
            return self.failure
        return f"{len(self._links)} of {len(self._shards)} workers at {self._path}"

    def computing(self) -> AbstractContextManager[None]:
        """Nothing computes here: workers do."""
        return nullcontext()

    def findings(self) -> list[str]:
        """Workers that are gone or late, named, with what they owe."""
        return self._movements.findings()

    def accept(self, deadline_s: float) -> None:
        """Wait, on a thread that may block, until every worker has connected. Raises ConfigError
        after `deadline_s`, or if one does not fit."""
        deadline = time.monotonic() + deadline_s
        while len(self._links) < len(self._shards):
            missing = sorted(set(range(len(self._shards))) - self._links.keys())
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                raise ConfigError(
                    f"workers {missing} did not connect within {deadline_s:g} s"
                ) from None
            self._greet(end, deadline)
        self._reader = threading.Thread(target=self._read, name="tierkv-workers", daemon=True)
        self._reader.start()

    def _greet(self, end: socket.socket, deadline: float) -> None:
        try:
            link, hello = greeted(end, max(deadline - time.monotonic(), 0.001))
        except (LinkClosedError, StoreCorruptError) as error:
            log.warning("what connected at %s is no worker: %s", self._path, error)
            return
        try:
            self._check(hello)
        except ConfigError as error:
            with suppress(LinkClosedError):
                link.send(NotTaken(str(error)))
            link.close()
            raise
        self._links[hello.rank] = link
        self._pids[hello.rank] = link.peer_pid()
        self._num_blocks[hello.rank] = hello.num_blocks

    def _check(self, hello: Hello) -> None:
        if not 0 <= hello.rank < len(self._shards) or hello.rank in self._links:
            raise ConfigError(f"there is no place for a worker of rank {hello.rank}")
        if hello.layout_digest != self._shards[hello.rank].digest:
            raise ConfigError(f"worker {hello.rank} has another layout than its shard")

    # Device

    def allocate_planes(self, layout: Layout, num_blocks: int) -> Planes:
        """The workers have the memory; this counts its blocks."""
        if layout.digest != self.layout.digest:
            raise LayoutError("the service's layout is not that of the workers' shards")
        if self._reader is None:
            raise ConfigError("accept() the workers before the service is opened")
        for rank, found in sorted(self._num_blocks.items()):
            if found != num_blocks:
                raise ConfigError(
                    f"worker {rank} has {found} blocks, the service wants {num_blocks}"
                )
        return RemotePlanes(layout, num_blocks)

    def allocate_host(self, layout: Layout, num_slots: int) -> HostSlots:
        """Memory that all workers have mapped by the time they get their first plan."""
        host = shared_slots(num_slots, layout.block_bytes)
        try:
            for rank, piece in enumerate(pieces(self._shards)):
                region = HostRegion(num_slots, layout.block_bytes, piece.start, piece.stop)
                self._links[rank].send(SharedMemory((region,)), descriptors=[host.descriptor])
        except LinkClosedError as error:
            host.close()
            raise ConfigError(f"a worker went before the service was open: {error}") from error
        return host

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        sizes = (planes.num_blocks, host.num_slots)
        return RemoteLane(direction, sizes, self.layout.num_layers, self._movements, self._send)

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        check_copy_within(source_ids, target_ids, planes.num_blocks)
        event = self._movements.begin(tuple(target_ids.tolist()))
        self._send(Plan.of(event.number, "copy", source_ids, target_ids))
        return event

    def close(self) -> None:
        """Let the workers go: each finishes what it copies, and its `serve` returns."""
        self._is_closing = True
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        for link in self._links.values():
            link.shutdown()
        if self._reader is not None:
            self._reader.join()
        for link in self._links.values():
            link.close()

    # Workers

    def _send(self, plan: Plan) -> None:
        for rank, link in self._links.items():
            try:
                link.send(plan)
            except LinkClosedError as error:
                self._lose(rank, str(error))

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link.fileno(), selectors.EVENT_READ, rank)
            while not self._is_closing and selector.get_map():
                for key, _ in selector.select(_TICK_S):
                    if not self._take(key.data):
                        selector.unregister(key.fd)
                for rank in self._movements.silent():
                    self._lose(rank, "it is silent, and owes reports")

    def _take(self, rank: int) -> bool:
        """Read what rank has sent; whether there can be more."""
        try:
            for record in self._links[rank].receive():
                self._heard(rank, record)
        except (LinkClosedError, StoreCorruptError) as error:
            if not self._is_closing:
                self._lose(rank, str(error))
            return False
        return True

    def _heard(self, rank: int, record: bytes) -> None:
        found = read(record)
        if isinstance(found, Report):
            self._movements.report(rank, found.number, found.problem)
        elif isinstance(found, Alive):
            self._movements.alive(rank)
        else:
            raise StoreCorruptError("a worker sends nothing but reports")

    def _lose(self, rank: int, why: str) -> None:
        self._movements.leave(rank, f"worker {rank} (process {self._pids[rank]}) is lost: {why}")


_AFTER_TIMEOUT_S = 600.0
Send = Callable[[Plan], None]


class RemoteEvent(CpuEvent):
    """The end of movement `number` on all ranks."""

    def __init__(self, number: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.number = number
        self.blocks = blocks
        self.begun = time.monotonic()


class Movements:
    """The ledger. Any thread; what it answers to is told outside of its lock."""

    def __init__(self, num_ranks: int, *, dead_s: float) -> None:
        self.failure: str | None = None
        self._dead_s = dead_s
        self._ranks = Ranks(num_ranks, late_s=min(5.0, dead_s), dead_s=dead_s)
        self._heard = dict.fromkeys(range(num_ranks), time.monotonic())
        self._events: dict[int, RemoteEvent] = {}
        self._problems: dict[int, str] = {}
        self._gone: set[int] = set()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def begin(self, blocks: tuple[int, ...]) -> RemoteEvent:
        """A movement that every rank will be sent. Raises DeviceFailedError if a rank is lost."""
        with self._lock:
            if self.failure is not None:
                raise DeviceFailedError(self.failure, blocks=blocks)
            event = RemoteEvent(next(self._numbers), blocks)
            self._ranks.begin(event.number, time.monotonic())
            self._events[event.number] = event
            return event

    def report(self, rank: int, number: int, problem: str | None) -> None:
        now = time.monotonic()
        with self._lock:
            self._heard[rank] = now
            if number not in self._events:
                return  # it was given up
            if problem is not None:
                self._problems[number] = f"worker {rank}: {problem}"
            self._ranks.report(rank, number, now, failed=problem is not None)
            over = self._over([number])
        _tell(over)

    def cancel(self, event: RemoteEvent, error: TransferError) -> None:
        """A movement was not sent to anybody after all."""
        with self._lock:
            if self._events.pop(event.number, None) is None:
                return  # the device was lost meanwhile, and the event has been told
            for rank in self._ranks.missing(event.number):
                self._ranks.report(rank, event.number, self._heard[rank], failed=True)
            self._ranks.end(event.number)
        event.reach(error)

    def alive(self, rank: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._heard[rank] = now
            self._ranks.alive(rank, now)

    def leave(self, rank: int, why: str) -> None:
        """A rank is lost, and with it the device: what it owes has failed."""
        with self._lock:
            if rank in self._gone:
                return
            self._gone.add(rank)
            if self.failure is None:
                self.failure = why
            log.error("%s", why)
            self._ranks.leave(rank, why)
            over = self._over(list(self._events))
        _tell(over)

    def silent(self) -> list[int]:
        """Ranks that have owed a report, and not been heard of, for `dead_s`."""
        latest = time.monotonic() - self._dead_s
        with self._lock:
            owing = {
                rank
                for event in self._events.values()
                if event.begun < latest
                for rank in self._ranks.missing(event.number)
            }
            return [rank for rank in owing if self._heard[rank] < latest]

    def findings(self) -> list[str]:
        with self._lock:
            return self._ranks.findings(time.monotonic())

    def _over(self, numbers: list[int]) -> list[tuple[RemoteEvent, TransferError | None]]:
        over: list[tuple[RemoteEvent, TransferError | None]] = []
        for number in numbers:
            if self._ranks.outcome(number) is Outcome.PENDING:
                continue
            event, problem = self._events.pop(number), self._problems.pop(number, None)
            error: TransferError | None = None
            if self._ranks.end(number) is Outcome.FAILED:
                if problem is None and self.failure is not None:
                    error = DeviceFailedError(self.failure, blocks=event.blocks)
                else:
                    error = TransferError(str(problem), blocks=event.blocks)
            over.append((event, error))
        return over


def _tell(over: list[tuple[RemoteEvent, TransferError | None]]) -> None:
    for event, error in over:
        event.reach(error)


class RemotePlanes:
    """Blocks in other processes: they are counted here, and seen there."""

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks

    @property
    def arrays(self) -> Sequence[npt.NDArray[np.uint8]]:
        raise LayoutError("the planes of workers are in the workers' processes")

    def close(self) -> None:
        """Nothing of it is here."""


class RemoteLane:
    """One direction of all workers. Its thread waits for what a copy comes after, and sends."""

    def __init__(
        self,
        direction: Direction,
        sizes: tuple[int, int],
        num_layers: int,
        movements: Movements,
        send: Send,
    ) -> None:
        self._direction = direction
        self._sizes = sizes
        self._num_layers = num_layers
        self._movements = movements
        self._send = send
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tierkv-{direction.value}")

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        """Workers report the end of a copy, so all layers are done with the last one."""
        check_copy(copy, self._direction, *self._sizes)
        if not len(copy):
            return (done_event(),) * self._num_layers
        event = self._movements.begin(tuple(copy.block_ids.tolist()))
        try:
            self._thread.submit(self._begin, copy, event)
        except RuntimeError as error:
            raise DeviceFailedError("this lane is closed") from error
        return (event,) * self._num_layers

    def _begin(self, copy: BlockCopy, event: RemoteEvent) -> None:
        is_load = self._direction is Direction.LOAD
        source, target = (
            (copy.slot_ids, copy.block_ids) if is_load else (copy.block_ids, copy.slot_ids)
        )
        try:
            deadline = time.monotonic() + _AFTER_TIMEOUT_S
            for earlier in copy.after:
                earlier.block_until_done(max(deadline - time.monotonic(), 0.0))
        except TransferError as error:
            self._movements.cancel(event, error)
            return
        self._send(Plan.of(event.number, "load" if is_load else "offload", source, target))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
