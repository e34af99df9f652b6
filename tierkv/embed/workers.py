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
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType

import numpy as np

from tierkv.cache.layout import Layout
from tierkv.embed.link import Alive, Hello, Link, LinkClosedError, Memory, Report, read
from tierkv.embed.memory import SharedSlots, shared_memory
from tierkv.embed.remote import Movements, RemoteLane, RemotePlanes
from tierkv.embed.shards import pieces, side_by_side
from tierkv.errors import ConfigError, LayoutError, StoreCorruptError
from tierkv.gpu.cpu import CallerStream, check_copy_within
from tierkv.gpu.protocol import Direction, Event, HostSlots, Ids, Lane, Planes, Sharing, Stream
from tierkv.sched.plan_wire import BatchPlan, Moves, encode

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
        self._listener = _listen(path)
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
        end.settimeout(max(deadline - time.monotonic(), 0.001))
        link = Link(end)
        try:
            hello = _hello(link)
            self._check(hello)
        except (LinkClosedError, StoreCorruptError) as error:
            link.close()
            log.warning("what connected at %s is no worker: %s", self._path, error)
            return
        except ConfigError:
            link.close()
            raise
        end.settimeout(None)
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
        size = layout.block_bytes
        descriptor = shared_memory(num_slots * size)
        try:
            for rank, piece in enumerate(pieces(self._shards)):
                memory = Memory(num_slots, size, piece.start, piece.stop)
                self._links[rank].send(memory, descriptor=descriptor)
        except LinkClosedError as error:
            os.close(descriptor)
            raise ConfigError(f"a worker went before the service was open: {error}") from error
        return SharedSlots(descriptor, num_slots, size, slice(0, size))

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        sizes = (planes.num_blocks, host.num_slots)
        return RemoteLane(direction, sizes, self.layout.num_layers, self._movements, self._send)

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        check_copy_within(source_ids, target_ids, planes.num_blocks)
        event = self._movements.begin(tuple(target_ids.tolist()))
        self._send(event.number, Moves.of("copy", source_ids, target_ids))
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

    def _send(self, number: int, moves: Moves) -> None:
        record = encode(BatchPlan(number, (), (moves,)))
        for rank, link in self._links.items():
            try:
                link.send(record)
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


def _hello(link: Link) -> Hello:
    records = link.receive()
    hello = read(records[0]) if records else None
    if not isinstance(hello, Hello):
        raise StoreCorruptError("a worker says hello first, at once")
    return hello


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for workers at {path}: {error}") from error
    return listener


def _is_left_over(path: str) -> bool:
    """Whether it is the socket of a scheduler that was killed: there, and nobody listens."""
    if not os.path.exists(path):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return stat.S_ISSOCK(os.stat(path).st_mode)
    return False
