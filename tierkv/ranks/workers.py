"""The scheduler's side of workers: a device whose blocks lie in other processes.

The service decides as always. What it moves goes as plans to every worker, and a movement is done
when all of them have reported it. Host slots are memory that all processes share, so storage I/O
stays here and no KV byte goes through a socket.
"""

from __future__ import annotations

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
from tierkv.ranks.ledger import Ledger
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

log = logging.getLogger(__name__)

_TICK_S = 0.25
_HELLO_S = 2.0  # a worker says it as soon as it has connected; who says nothing keeps no other out


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
        self.quick_copy_bytes = 0  # a message may wait for room in its socket
        self._shards = tuple(shards)
        self._path = path
        self._links: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._ledger = Ledger(len(shards), late_s=min(5.0, dead_s), dead_s=dead_s)
        self._listener = listen(path)
        self._reader: threading.Thread | None = None
        self._is_closing = False

    @property
    def failure(self) -> str | None:
        return self._ledger.failure

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
        return self._ledger.findings()

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
            link, hello = greeted(end, min(max(deadline - time.monotonic(), 0.001), _HELLO_S))
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
        return RemoteLane(direction, sizes, self.layout.num_layers, self._ledger, self._send)

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        check_copy_within(source_ids, target_ids, planes.num_blocks)
        event = CpuEvent()
        number = self._ledger.begin(tuple(target_ids.tolist()), event.reach)
        self._send(Plan.of(number, "copy", source_ids, target_ids))
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
                for rank in self._ledger.silent():
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
            problem = None if found.problem is None else f"worker {rank}: {found.problem}"
            self._ledger.report(rank, found.number, problem)
        elif isinstance(found, Alive):
            self._ledger.alive(rank)
        else:
            raise StoreCorruptError("a worker sends nothing but reports")

    def _lose(self, rank: int, why: str) -> None:
        text = f"worker {rank} (process {self._pids[rank]}) is lost: {why}"
        if self._ledger.leave(rank, text):
            log.error("%s", text)


_AFTER_TIMEOUT_S = 600.0


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
        ledger: Ledger,
        send: Callable[[Plan], None],
    ) -> None:
        self._direction = direction
        self._sizes = sizes
        self._num_layers = num_layers
        self._ledger = ledger
        self._send = send
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tierkv-{direction.value}")

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        """Workers report the end of a copy, so all layers are done with the last one."""
        check_copy(copy, self._direction, *self._sizes)
        if not len(copy):
            return (done_event(),) * self._num_layers
        event = CpuEvent()
        number = self._ledger.begin(tuple(copy.block_ids.tolist()), event.reach)
        try:
            self._thread.submit(self._begin, copy, number)
        except RuntimeError as error:
            failure = DeviceFailedError("this lane is closed")
            self._ledger.cancel(number, failure)
            raise failure from error
        return (event,) * self._num_layers

    def _begin(self, copy: BlockCopy, number: int) -> None:
        is_load = self._direction is Direction.LOAD
        source, target = (
            (copy.slot_ids, copy.block_ids) if is_load else (copy.block_ids, copy.slot_ids)
        )
        try:
            deadline = time.monotonic() + _AFTER_TIMEOUT_S
            for earlier in copy.after:
                earlier.block_until_done(max(deadline - time.monotonic(), 0.0))
        except TransferError as error:
            self._ledger.cancel(number, error)
            return
        self._send(Plan.of(number, "load" if is_load else "offload", source, target))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
