"""Latches instead of sleeps: copies that are held, events that a test ends, cancels at an await."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import TypeVar

from tierkv.errors import GateTimeoutError
from tierkv.gpu.protocol import BlockCopy, Direction

T = TypeVar("T")
PATIENCE_S = 120.0  # after so long a test that waits has failed
EVERY = 1 << 30  # a count of copies that fail, until it is set to 0


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Return once `condition()` holds; other threads work meanwhile."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            pause_s = 0.0005  # grows: a long wait would otherwise burn half a core
            while not condition():
                await asyncio.sleep(pause_s)
                pause_s = min(1.2 * pause_s, 0.01)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {PATIENCE_S:g} s") from None


async def turns(count: int) -> None:
    """Let everything that is ready run, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class CopyLatch:
    """The `before_copy` of a CpuDevice: records copies, holds them, or lets them fail."""

    seen: list[BlockCopy] = field(default_factory=list)
    num_held: int = 0
    _open: dict[Direction, threading.Event] = field(
        default_factory=lambda: {direction: threading.Event() for direction in Direction}
    )
    _failures_due: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))

    def __post_init__(self) -> None:
        self.release()

    def hold(self, *directions: Direction) -> None:
        """Copies of these directions (all, if none is named) wait from now on."""
        for direction in directions or tuple(Direction):
            self._open[direction].clear()

    def release(self, *directions: Direction) -> None:
        for direction in directions or tuple(Direction):
            self._open[direction].set()

    def fail_next(self, direction: Direction, count: int = 1) -> None:
        self._failures_due[direction] = count

    def count(self, direction: Direction) -> int:
        """Copies of this direction that came so far."""
        return sum(copy.direction is direction for copy in self.seen)

    async def until_held(self, count: int = 1) -> None:
        """Return when at least so many copies wait at the latch."""
        await until(lambda: self.num_held >= count, f"{count} held copies")

    def __call__(self, copy: BlockCopy) -> None:
        self.seen.append(copy)
        self.num_held += 1
        try:
            if not self._open[copy.direction].wait(PATIENCE_S):
                raise AssertionError("a test left its latch closed")
        finally:
            self.num_held -= 1
        if self._failures_due[copy.direction]:
            self._failures_due[copy.direction] -= 1
            raise OSError("the copy engine caught fire, as it was told")


class ManualEvent:
    """A device event that a test ends; counts how often it was looked at."""

    def __init__(self, line: object = None, position: int = 0) -> None:
        self.line, self.position = line or object(), position
        self.num_looks = 0
        self._reached = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._reached.set()

    @property
    def is_done(self) -> bool:
        self.num_looks += 1
        if not self._reached.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def block_until_done(self, timeout_s: float) -> None:
        if not self._reached.wait(min(timeout_s, PATIENCE_S)):
            raise GateTimeoutError("the test never ended this event")
        if self._error is not None:
            raise self._error


class CancelPoint:
    """Cancels the task that runs `work` at its `at`-th await, counted from 0.

    late: not while it waits, but in the same moment in which what it waits for comes.
    was_reached: whether there was such an await; if not, `work` ran to its end.
    """

    def __init__(self, at: int, *, late: bool) -> None:
        self._at = at
        self._late = late
        self.was_reached = False

    async def run(self, work: Coroutine[object, None, T]) -> T:
        return await self._drive(work)

    @coroutine
    def _drive(self, work: Coroutine[object, None, T]) -> Generator[object, None, T]:
        count = 0
        sent: BaseException | None = None
        while True:
            try:
                waits_for = work.send(None) if sent is None else work.throw(sent)
            except StopIteration as stop:
                result: T = stop.value
                return result
            sent = None
            if count == self._at:
                self.was_reached = True
                self._cancel(waits_for)
            count += 1
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - handed on to `work`
                sent = error

    def _cancel(self, waits_for: object) -> None:
        task = asyncio.current_task()
        assert task is not None, "run inside a task"
        if self._late and isinstance(waits_for, asyncio.Future):
            waits_for.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


async def cancelled_at(at: int, work: Coroutine[object, None, object], *, late: bool) -> bool:
    """Run `work`, cancel it at its `at`-th await; whether it had one. Errors of its own pass."""
    point = CancelPoint(at, late=late)

    async def drive() -> None:
        try:
            await point.run(work)
        except asyncio.CancelledError:
            if not point.was_reached:
                raise

    async with asyncio.TaskGroup() as group:
        group.create_task(drive())
    return point.was_reached


async def finish(waiting: Awaitable[T]) -> T:
    """The result, or a failure instead of a test that hangs."""
    async with asyncio.timeout(PATIENCE_S):
        return await waiting
