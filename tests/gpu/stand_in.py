"""A stand-in for a GPU, on this machine's memory; stand_in_cupy.py puts CuPy and a driver over it.

Streams really are asynchronous: one thread takes steps (a piece of a copy, a tile of a kernel) of
whichever stream it likes, in an order drawn from a seed, so that a wait that is missing somewhere
tears a block sooner or later. Memory that is freed is poisoned, and whoever touches what is neither
allocated nor registered loses the GPU. Calls fail as a test tells them to. What it cannot show is
what CUDA itself does, and how fast; for that there are the tests marked `gpu`.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INVALID_VALUE, NOT_READY, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = (
    1,
    600,
    700,
    712,
    713,
)
_STICKY = {ILLEGAL_ADDRESS, 719}
_TILE = np.dtype([("first", "<u8"), ("stride", "<i8"), ("block_byte", "<u4"), ("size", "<u4")])
_HEADS = {  # of a kernel's argument; block ids follow
    "gather": (*("<u8",) * 2, *("<u4",) * 4),
    "scatter": (*("<u8",) * 2, *("<u4",) * 4),
    "within": ("<u8", "<u4", "<u4"),
}
_IDS = 960

Steps = Iterator[None]


class CUDAError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


@dataclass(frozen=True, slots=True)
class _Work:
    steps: Steps
    may_start: Callable[[], bool] = lambda: True


@dataclass
class Gpu:
    """fail: calls, by name, and the statuses with which the next ones of them fail; 0 is fine."""

    random: random.Random
    fail: dict[str, list[int]] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)  # by address
    registered: dict[int, int] = field(default_factory=dict)  # bytes by address
    lost: int = 0  # the sticky error
    _streams: dict[int, list[_Work]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _last_id: int = 1000

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name="stand-in", daemon=True).start()

    def new_id(self) -> int:
        with self._changed:
            self._last_id += 1
            return self._last_id

    def status(self, call: str) -> int:
        """Of a call that is made now."""
        with self._changed:
            due = self.fail.get(call)
            told = due.pop(0) if due else 0
            if told in _STICKY:
                self._lose(told)
            return self.lost or told

    def check(self, call: str) -> None:
        status = self.status(call)
        if status:
            raise CUDAError(status)

    def submit(
        self, stream: int, steps: Steps, may_start: Callable[[], bool] = lambda: True
    ) -> None:
        with self._changed:
            self._streams.setdefault(stream, []).append(_Work(steps, may_start))
            self._changed.notify_all()

    def hold(self, stream: int) -> Callable[[], None]:
        """Nothing that comes to `stream` now starts before what this returns has been called."""
        held = [True]
        self.submit(stream, iter(()), lambda: not held)

        def release() -> None:
            with self._changed:
                held.clear()
                self._changed.notify_all()

        return release

    def wait_until_idle(self, stream: int | None = None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.lost
                    or not any(
                        queue
                        for number, queue in self._streams.items()
                        if stream is None or number == stream
                    )
                )
            )
            if self.lost:
                raise CUDAError(self.lost)

    def allocate(self, size: int) -> int:
        raw = np.full(size + 512, 0xCD, np.uint8)
        address: int = raw.ctypes.data + -raw.ctypes.data % 512
        with self._changed:
            self.memory[address] = raw
        return address

    def allocation_of(self, address: int) -> tuple[int, int] | None:
        """Start and size of the allocation that holds the byte."""
        for start, raw in self.memory.items():
            if start <= address < start + len(raw) - 512:
                return start, len(raw) - 512
        return None

    def free(self, address: int) -> None:
        """Waits, as cudaFree does."""
        if not self.lost:
            self.wait_until_idle()
        with self._changed:
            self.memory.pop(address)[:] = 0xDD

    def register(self, address: int, size: int) -> int:
        """It is whole pages that are pinned: two registrations may not share one."""
        first, last = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
        with self._changed:
            for at, length in self.registered.items():
                if first <= (at + length - 1) // mmap.PAGESIZE and at // mmap.PAGESIZE <= last:
                    return ALREADY_REGISTERED
            self.registered[address] = size
            return 0

    def move(self, target: int, source: int, size: int) -> None:
        if self.is_reachable(target, size) and self.is_reachable(source, size):
            ctypes.memmove(target, source, size)
        else:
            self._lose(ILLEGAL_ADDRESS)

    def is_reachable(self, address: int, size: int) -> bool:
        """Whether so many bytes lie within one allocation or registration."""
        spans = [
            *self.registered.items(),
            *((at, len(raw) - 512) for at, raw in self.memory.items()),
        ]
        return any(at <= address and address + size <= at + length for at, length in spans)

    def _lose(self, status: int) -> None:
        self.lost = status
        self._streams.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                ready = [n for n, queue in self._streams.items() if queue and queue[0].may_start()]
                if not ready:
                    self._changed.wait()
                    continue
                number = self.random.choice(ready)
                for _ in range(self.random.choice((1, 1, 3, 20))):
                    if next(self._streams[number][0].steps, self) is self:
                        self._streams[number].pop(0)
                        self._changed.notify_all()
                        break
                    if self.lost:
                        break

    def kernel(self, name: str, argument: int) -> Steps:
        """What csrc/planes.cu does, tile by tile in any order."""
        head = np.dtype([(str(at), kind) for at, kind in enumerate(_HEADS[name])])
        raw = ctypes.string_at(argument, head.itemsize + 4 * _IDS)
        values = np.frombuffer(raw, head, 1)[0].tolist()
        ids = np.frombuffer(raw, np.int32, _IDS, head.itemsize).tolist()
        return self._tiles(name, values, ids)

    def _tiles(self, name: str, values: tuple[int, ...], ids: list[int]) -> Steps:
        if name == "within":
            (table, num_tiles, num_blocks), staging, row_bytes, first = values, 0, 0, 0
        else:
            table, staging, num_tiles, num_blocks, row_bytes, first = values
        pairs = [(row, at) for row in range(num_blocks) for at in range(num_tiles)]
        self.random.shuffle(pairs)
        size = num_tiles * _TILE.itemsize
        if pairs and not self.is_reachable(table, size):
            return self._lose(ILLEGAL_ADDRESS)
        tiles = np.frombuffer(ctypes.string_at(table, size), _TILE).tolist()
        for row, at in pairs:
            plane, stride, block_byte, num_bytes = tiles[at]
            here = plane + ids[row] * stride
            staged = staging + row * row_bytes + block_byte - first
            if name == "within":
                self.move(plane + ids[_IDS // 2 + row] * stride, here, num_bytes)
            elif name == "scatter":
                self.move(here, staged, num_bytes)
            else:
                self.move(staged, here, num_bytes)
            yield

    def pieces(self, pieces: list[tuple[int, int, int]]) -> Steps:
        for target, source, size in pieces:
            self.move(target, source, size)
            yield
