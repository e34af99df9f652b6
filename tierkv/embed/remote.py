"""Movements that several workers carry out: what each owes, and when one is over."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import DeviceFailedError, LayoutError, TransferError
from tierkv.gpu.cpu import CpuEvent, check_copy, done_event
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.sched.plan_wire import Moves
from tierkv.sched.ranks import Outcome, Ranks

log = logging.getLogger("tierkv.workers")

_AFTER_TIMEOUT_S = 600.0
Send = Callable[[int, Moves], None]


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
        self._send(event.number, Moves.of(self._direction.value, source, target))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
