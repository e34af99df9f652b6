"""A node in one thread and in made-up time, so that a seed is a run, the same each time.

Time goes on only when nothing is ready, and then straight to the next timer. What would run in
another thread runs in a turn of the loop; copies come further when somebody looks at them. A node
in which everybody waits for somebody else has no timer and nothing ready: that is a `StuckError`.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from tests.faulty import FaultyStore
from tests.latch import CopyLatch
from tests.world import World, fingerprint
from tierkv.errors import TransferError
from tierkv.gpu.cpu import CpuDevice, CpuEvent, CpuLane, check_copy, runs_of
from tierkv.gpu.protocol import BlockCopy, Direction, Event, HostSlots, Lane, Planes
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage import base, guard
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.transfer import mover

P = ParamSpec("P")
T = TypeVar("T")


class StuckError(AssertionError):
    """Everybody waits, and nothing will ever happen."""


class _Selector(selectors.DefaultSelector):
    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            found = super().select(0)
            if not found:
                raise StuckError("nothing is ready, and no timer runs:\n" + tasks_in_words())
            return found
        if timeout > 0:
            self.loop.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - as a thread would
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_soon(run)
        return future


class LoopClock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 1e9 + asyncio.get_running_loop().time()


class _AtOnce(Executor):
    """What is submitted has run."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as a thread would
            future.set_exception(error)
        return future


class _LookedAt(CpuEvent):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look_first = look

    @property
    def is_done(self) -> bool:
        self._look_first()
        return super().is_done


class _Lane(CpuLane):
    """Copies one layer at some of the looks at one of its events."""

    def __init__(self, rng: random.Random, direction: Direction, *rest: Any) -> None:
        super().__init__(direction, *rest)
        self._rng = rng
        self._queue: deque[Iterator[None]] = deque()

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        check_copy(copy, self._direction, self._planes.num_blocks, self._host.num_slots)
        events = tuple(_LookedAt(self._look) for _ in range(self._planes.layout.num_layers))
        self._queue.append(self._steps(copy, events))
        return events

    def _look(self) -> None:
        if self._queue and self._rng.random() < 0.3:
            self._go_on()

    def _go_on(self) -> None:
        if next(self._queue[0], self) is self:
            self._queue.popleft()

    def _steps(self, copy: BlockCopy, events: tuple[_LookedAt, ...]) -> Iterator[None]:
        at = 0
        try:
            while not all(event.is_done for event in copy.after):
                yield
            if self._before_copy is not None:
                self._before_copy(copy)
            for at, event in enumerate(events):
                self._copy_layer(copy, runs_of(copy), at)
                event.reach()
                yield
        except Exception as error:  # noqa: BLE001 - as CpuLane does
            failed = TransferError(f"failed at layer {at}: {error}")
            for event in events[at:]:
                event.reach(failed)

    def close(self) -> None:
        while self._queue:
            self._go_on()


class _Device(CpuDevice):
    def __init__(self, rng: random.Random, latch: CopyLatch) -> None:
        super().__init__(latch)
        self._rng = rng

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        return _Lane(self._rng, direction, planes, host, self._before_copy)


@contextmanager
def _one_thread(loop: SimulatedLoop) -> Iterator[None]:
    no_time = SimpleNamespace(monotonic=loop.time, sleep=lambda _: None)
    with (
        patch.object(mover, "Threads", _AtOnce),
        patch.object(mover, "time", no_time),
        patch.object(base, "Threads", _AtOnce),
        patch.object(guard, "random", SimpleNamespace(Random=lambda: random.Random(0))),
    ):
        yield


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, of which nothing leaves this thread."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimulatedLoop)
        with _one_thread(loop):
            return runner.run(work)


def simulated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test of which nothing leaves this thread; see `simulate`."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        simulate(test(*args, **kwargs))

    return run


@asynccontextmanager
async def simulated_world(
    rng: random.Random | None = None, values: MemoryStore | None = None, /, **settings: Any
) -> AsyncIterator[World]:
    """A running node with a memory store. rng: how far copies come. values: the store, if another
    node has filled it. settings: of CacheSettings."""
    latch, clock, who = CopyLatch(), LoopClock(), fingerprint()
    store = FaultyStore(values or MemoryStore(MemorySettings(), clock))
    service = Service(
        _Device(rng or random.Random(1), latch),
        who,
        CacheSettings(block_size=who.layout.block_size, **settings),
        HandoffSettings(),
        store,
    )
    async with service.running():
        yield World(service, latch, store)


def tasks_in_words() -> str:
    """Every task of the loop, and the lines where it waits, outermost first."""
    lines = []
    for task in sorted(asyncio.all_tasks(), key=lambda one: one.get_name()):
        lines.append(task.get_name())
        at: Any = task.get_coro()
        while at is not None:
            frame = getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None)
            if frame is not None:
                code = frame.f_code
                lines.append(f"    {code.co_filename}:{frame.f_lineno} {code.co_name}")
            at = getattr(at, "cr_await", None) or getattr(at, "ag_await", None)
    return "\n".join(lines)
