"""Copies of blocks between device and host memory, and within the device.

`EventPoller` turns the device's events, such as CUDA events, into asyncio futures. A `LayerGate`
lets an engine wait for one layer of a copy. The mover decides nothing: callers pass ids of slots
and blocks that have been checked.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from operator import add, attrgetter

import msgspec

from tierkv.errors import (
    DeviceFailedError,
    GateTimeoutError,
    ShuttingDownError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import (
    BlockCopy,
    Device,
    Direction,
    Event,
    FailedEvent,
    HostSlots,
    Ids,
    Lane,
    Planes,
    Stream,
)
from tierkv.tasks import outlast, task_group
from tierkv.threads import Threads

# Timers of event loops have a resolution of 1 ms. For 0.3 ms after a new event the poller therefore
# tests the events in each turn of the loop, which resolves short copies at once: 8 MiB take 0.2 ms,
# and a wake-up by a thread takes as long again. While a long copy is in flight the poller does not
# do so, because it would keep the interpreter from the threads that submit the rest of that copy
# and the kernels behind it. After the 0.3 ms a thread tests the first event of each queue of the
# device, and wakes the loop when one is done. Between tests it sleeps 0.1 ms (0.4 ms if all copies
# are long), or a hundredth of the time it has waited, so a wait gets at most 1 % longer. Testing 8
# queues every 0.12 ms takes 7 % of a core.
_EAGER_S = 0.0003
_MAX_EAGER = 8  # with more events in flight, no caller waits for a single short one
_MIN_NAP_S = 0.0001
_LONG_NAP_S = 0.0004
_MAX_NAP_S = 0.001
_NAP_SHARE = 0.01


OnDone = Callable[[TransferError | None], None]


class _Pending(msgspec.Struct, eq=False):
    """An event that is not done, with its callback.

    Attributes:
        on_done: called once: with None when `event` is done, with the error if it failed.
        is_long: True if the work is known to take longer than 1 ms.
        position: number of the event in its queue of the device, for example a CUDA stream. The
            events of one queue are done in the order of these numbers.
    """

    event: Event
    on_done: OnDone
    is_long: bool
    position: int


class EventPoller:
    """A watcher of one device's events: when one is done, it sets a future or calls a function.

    One task watches all events. The task sleeps while there are none.

    Attributes:
        num_in_flight: number of events that are not done yet.
    """

    def __init__(self) -> None:
        self._lines: dict[object, list[_Pending]] = {}  # each in the order of completion
        self.num_in_flight = 0
        self._wake = asyncio.Event()
        self._has_new_events = False  # for the watching thread
        self._is_running = False
        self._eager_until = 0.0
        self._failure: BaseException | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch events while this context is entered.

        The exit waits until every event is done or has failed.
        """
        watcher = Threads(1, "tierkv-poller")
        try:
            async with task_group() as tasks:
                self._is_running = True
                polling = tasks.create_task(self._poll(watcher), name="tierkv-poller")
                try:
                    yield
                finally:  # an error of the body would cancel the task
                    self._is_running = False
                    self._wake_up()
                    await outlast({polling}, on_cancel=lambda: None)
        finally:
            watcher.shutdown(wait=False)  # no event is left to poll

    def done(self, event: Event, *, is_long: bool = False) -> asyncio.Future[None]:
        """Return a future that resolves when `event` is done, or fails with the event's error.

        Cancelling the future does not stop the work that the event belongs to.

        Args:
            event: the event to wait for.
            is_long: True if the work is known to take longer than 1 ms.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def resolve(error: TransferError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        if (outcome := _outcome(event)) is not None:
            resolve(outcome[0])
        else:
            self.call_when_done(event, resolve, is_long=is_long)
        return future

    def call_when_done(self, event: Event, on_done: OnDone, *, is_long: bool = False) -> None:
        """Call `on_done` on the event loop, in a later turn, when an event is done or has failed.

        Args:
            event: the event to wait for.
            on_done: called with None if the event is done, or with its error. An exception from
                `on_done` ends the poller.
            is_long: True if the work is known to take longer than 1 ms.

        Raises:
            ShuttingDownError: the poller is not running.
        """
        if not self._is_running:
            raise ShuttingDownError("the event poller is not running")
        one = _Pending(event, on_done, is_long, event.position)
        insort(self._lines.setdefault(event.line, []), one, key=attrgetter("position"))
        self.num_in_flight += 1
        self._wake_up()

    def call_if_done(self, event: Event, on_done: OnDone) -> bool:
        """Call `on_done` at once if an event is done or has failed.

        Use this in a later turn of the event loop than the one that submitted the work, because
        `on_done` would otherwise run before the submitting code has returned.

        Args:
            event: the event to test.
            on_done: called with None if the event is done, or with its error. An exception from
                `on_done` stops the poller.

        Returns:
            True if `on_done` was called; False if the event is pending or the poller is not
                running.
        """
        outcome = _outcome(event)
        if outcome is None or not self._is_running:
            return False
        try:
            on_done(outcome[0])
        except BaseException as error:  # noqa: BLE001 - it is raised in the poller's task
            self._failure = error
            self._wake_up()
        return True

    def _wake_up(self) -> None:
        self._eager_until = time.monotonic() + _EAGER_S
        self._has_new_events = True
        self._wake.set()

    async def _poll(self, watcher: Threads) -> None:
        try:
            await self._poll_on(watcher)
        except BaseException as error:  # callers would wait for ever: nothing else polls events
            self._is_running = False
            lines, self._lines, self.num_in_flight = self._lines, {}, 0
            for one in (one for line in lines.values() for one in line):
                failure = DeviceFailedError(f"the poller failed: {error!r}")
                # In a turn of its own: an error in one must not stop others.
                asyncio.get_running_loop().call_soon(one.on_done, failure)
            raise

    async def _poll_on(self, watcher: Threads) -> None:
        loop = asyncio.get_running_loop()
        while self._is_running or self._lines:
            if self._failure is not None:
                raise self._failure
            if not self._lines:
                self._wake.clear()
                await self._wake.wait()
                self._complete_ended()  # some events may be done by now
                continue
            if time.monotonic() < self._eager_until and self._may_be_eager():
                await asyncio.sleep(0)
            else:
                self._has_new_events = False
                firsts = [line[0] for line in self._lines.values()]
                await loop.run_in_executor(watcher, self._watch, firsts)
            self._complete_ended()

    def _may_be_eager(self) -> bool:
        if self.num_in_flight > _MAX_EAGER:
            return False
        return not any(one.is_long for line in self._lines.values() for one in line)

    def _complete_ended(self) -> None:
        for key, line in list(self._lines.items()):
            while line and (outcome := _outcome(line[0].event)) is not None:
                one = line.pop(0)
                self.num_in_flight -= 1
                if not line:
                    del self._lines[key]
                one.on_done(outcome[0])

    def _watch(self, firsts: Sequence[_Pending]) -> None:
        began = time.monotonic()
        least_s = _LONG_NAP_S if all(one.is_long for one in firsts) else _MIN_NAP_S
        while not self._has_new_events and not any(_outcome(one.event) for one in firsts):
            nap_s = _NAP_SHARE * (time.monotonic() - began)
            time.sleep(min(max(nap_s, least_s), _MAX_NAP_S))


_DONE = (None,)


def _outcome(event: Event) -> tuple[TransferError | None] | None:
    try:
        return _DONE if event.is_done else None
    except TransferError as error:
        return (error,)


class Submitted(msgspec.Struct, eq=False):
    """The events or the error of a copy that was submitted on the calling thread.

    The class has the methods of a Future that is done, because other copies are submitted on
    another thread and have a Future.
    """

    events: tuple[Event, ...]
    error: TierKVError | None = None

    def done(self) -> bool:
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:  # noqa: ARG002
        return self.error

    def result(self) -> tuple[Event, ...]:
        """Return one event per layer, done when the layer is copied.

        Raises:
            TierKVError: the submission failed.
        """
        if self.error is not None:
            raise self.error
        return self.events


def _submitted(submit: Callable[[], tuple[Event, ...]]) -> Submitted:
    try:
        return Submitted(submit())
    except TierKVError as error:
        return Submitted((), error)


# One event per layer, known once the copy is submitted.
Submission = Submitted | Future[tuple[Event, ...]]


def _events_of(submission: Submission) -> tuple[Event, ...]:
    error = submission.exception()
    if isinstance(error, TierKVError) and not isinstance(error, TransferError):
        error = TransferError(str(error))
    return (FailedEvent(error),) if error else submission.result()


class LayerGate:
    """An object at which an engine waits, layer by layer, for the copies into a request's blocks.

    The copies are the request's own load, loads of the same blocks that other requests started, and
    copies within the device. A gate without copies is open.

    A layer can be waited for at any time and repeatedly, with the same result. If a copy fails at
    one layer, waiting for this layer and for every later one raises.
    """

    def __init__(self, num_layers: int, submissions: Sequence[Submission], poller: EventPoller):
        self.num_layers = num_layers
        self._submissions = tuple(submissions)
        self._poller = poller

    def wait_on(self, stream: Stream, layer: int, timeout_s: float) -> None:
        """Make work submitted to `stream` from now on wait until `layer` has arrived.

        The call can block the calling thread, so call it from an engine's thread and never from the
        event loop.

        Args:
            stream: the engine's stream.
            layer: index of the layer, from 0.
            timeout_s: seconds within which the copy must be submitted; on a CPU stream, within
                which it must be done.

        Raises:
            GateTimeoutError: the copy was not submitted (on a CPU stream: not done) in time.
            TierKVError: the load failed; the error is the load's.
        """
        deadline = time.monotonic() + timeout_s
        for submission in self._submissions:
            try:
                events = _events(submission, max(deadline - time.monotonic(), 0.0))
            except TimeoutError as error:
                raise GateTimeoutError(
                    f"the copy of layer {layer} to the device was not submitted within "
                    f"{timeout_s:g} s"
                ) from error
            stream.wait(events[layer], max(deadline - time.monotonic(), 0.0))

    def is_open(self, layer: int) -> bool:
        """Return True if `layer` has arrived, without blocking.

        Raises:
            TierKVError: the load failed; the error is the load's.
        """
        for submission in self._submissions:
            if not submission.done() or not _events(submission, 0.0)[layer].is_done:
                return False
        return True

    async def layer(self, layer: int, timeout_s: float) -> None:
        """Wait until `layer` has arrived.

        Args:
            layer: index of the layer, from 0.
            timeout_s: seconds to wait.

        Raises:
            GateTimeoutError: the layer did not arrive in time.
            TierKVError: the load failed; the error is the load's.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for submission in self._submissions:
                    if isinstance(submission, Future) and not submission.done():
                        await asyncio.shield(asyncio.wrap_future(submission))
                    await self._poller.done(_events(submission, 0.0)[layer])
        except TimeoutError as error:
            raise GateTimeoutError(
                f"layer {layer} was not on the device within {timeout_s:g} s"
            ) from error

    async def all_layers(self, timeout_s: float) -> None:
        await self.layer(self.num_layers - 1, timeout_s)


def _events(submission: Submission, timeout_s: float) -> tuple[Event, ...]:
    error = submission.exception(timeout_s)
    if error is not None:
        raise error.with_traceback(None)  # repeated raises would make the traceback longer
    return submission.result()


_SHORT_BYTES = 16 << 20  # PCIe 5 moves them in 0.3 ms
# Watching each layer of a load takes turns of the loop, about 3 ms for 32 layers: 1 % at most.
_TIMED_EVERY_S = 0.25


class LayerTimes(msgspec.Struct, frozen=True):
    """Arrival times of layers, in seconds from the submission of a load, over several loads.

    A layer's arrival time includes the wait for earlier loads and the copies of the layers before
    it. The mean time of one layer's copy is the mean arrival time of the layer minus that of the
    layer before. Only a sample of the loads is measured: one at a time, at most four in a second.

    Attributes:
        num_loads: number of measured loads.
        total_s: sum of the arrival times, one number per layer.
        longest_s: longest arrival time, one number per layer.
    """

    num_loads: int
    total_s: tuple[float, ...]
    longest_s: tuple[float, ...]

    def and_one(self, ready_s: Sequence[float]) -> LayerTimes:
        """Return these times with the times of one more load added.

        Args:
            ready_s: arrival time of each layer in the added load, in seconds from the load's
                submission.
        """
        return LayerTimes(
            self.num_loads + 1,
            tuple(map(add, self.total_s, ready_s)),
            tuple(map(max, self.longest_s, ready_s)),
        )


class Movement:
    """A copy of blocks between two tiers or within the device, running or ended."""

    __slots__ = ("_error", "_on_end", "has_ended", "num_bytes", "submission")

    def __init__(self, submission: Submission, num_bytes: int) -> None:
        self.submission = submission
        self.num_bytes = num_bytes
        self.has_ended = False
        self._error: TransferError | None = None
        self._on_end: list[Callable[[], object]] = []

    async def done(self) -> None:
        """Wait until every byte has arrived. Cancelling the wait does not stop the copy.

        Raises:
            TransferError: the copy failed.
        """
        if not self.has_ended:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._on_end.append(lambda: None if ended.done() else ended.set_result(None))
            await ended
        if self._error is not None:
            raise self._error.with_traceback(None)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call `call` on the event loop once the copy has succeeded or failed.

        If the copy has ended already, `call` is called at once.
        """
        if self.has_ended:
            call()
        else:
            self._on_end.append(call)

    def end(self, error: TransferError | None) -> None:
        """Record that the copy has ended and run the callbacks. Only the mover calls this, once.

        Args:
            error: the error of the copy; None if every byte has arrived.
        """
        self.has_ended, self._error = True, error
        calls, self._on_end = iter(self._on_end), []  # a callback may refer to this movement
        try:
            for call in calls:
                call()
        finally:  # after an error of one callback the rest are called, too
            for call in calls:
                asyncio.get_running_loop().call_soon(call)

    @property
    def has_failed(self) -> bool:
        """True if the copy has ended and not all of its bytes have arrived."""
        return self._error is not None


class Mover:
    """Submits the copies between device and host, and within the device.

    Loads and offloads each have a queue of their own on the device (a `Lane`), so both run at the
    same time. A thread submits long copies within the device.

    Args:
        device: the device on whose queues the copies run.
        planes: the memory of the device blocks.
        host: the memory of the host slots.
    """

    def __init__(self, device: Device, planes: Planes, host: HostSlots) -> None:
        self._device = device
        self._planes = planes
        self._host = host
        self._block_bytes = planes.layout.block_bytes
        self.poller = EventPoller()
        self._open_gate = LayerGate(planes.layout.num_layers, (), self.poller)
        self._lanes: dict[Direction, Lane] = {}
        self._submitter: Threads | None = None
        self.num_in_flight = 0
        self._all_ended: asyncio.Future[None] | None = None  # awaited on closing
        self.bytes_moved = {Direction.LOAD: 0, Direction.OFFLOAD: 0}
        none = (0.0,) * planes.layout.num_layers
        self.layer_times = LayerTimes(0, none, none)
        self._times_from = 0.0  # of the loop's clock

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept loads and offloads inside the `with` block.

        When the `with` block ends, also by an error, wait for all copies and close the queues.
        """
        self._submitter = Threads(1, "tierkv-submit")
        try:
            await self._open_lanes()
            async with self.poller.running():
                try:
                    yield
                finally:
                    while self.num_in_flight:
                        self._all_ended = asyncio.get_running_loop().create_future()
                        await outlast({self._all_ended}, on_cancel=lambda: None)
        finally:
            # Blocks the loop on purpose: memory must not be freed under a copy in flight.
            with _closing(self._lanes.values()):
                self._submitter.shutdown(wait=True)

    async def _open_lanes(self) -> None:
        assert self._submitter is not None, "there is a thread"

        def open_all() -> None:
            for direction in Direction:
                self._lanes[direction] = self._device.open_lane(direction, self._planes, self._host)

        opening = asyncio.wrap_future(self._submitter.submit(open_all))
        await outlast({opening}, on_cancel=lambda: None)
        opening.result()

    @property
    def device(self) -> Device:
        return self._device

    @property
    def planes(self) -> Planes:
        """The memory of the device blocks; `reopen` replaces it."""
        return self._planes

    async def suspend(self) -> None:
        """Close the queues of copies, so that the planes can be freed. No copy may be in flight.

        Until `reopen`, no copy can be submitted.
        """
        assert not self.num_in_flight, "suspended only when idle"
        lanes = list(self._lanes.values())
        self._lanes.clear()

        def close() -> None:
            with _closing(lanes):
                pass

        closing = asyncio.get_running_loop().run_in_executor(self._submitter, close)
        await outlast({closing}, on_cancel=lambda: None)
        closing.result()

    async def reopen(self, planes: Planes) -> None:
        """Allow copies between host and device again after `suspend`.

        Args:
            planes: the memory of the device blocks from now on; the number of blocks may differ
                from that before `suspend`.
        """
        assert not self._lanes, "reopened only when suspended"
        self._planes = planes
        await self._open_lanes()

    def load(self, slot_ids: Ids, block_ids: Ids, after: Sequence[Event] = ()) -> Movement:
        """Start to copy host slots to device blocks.

        Args:
            slot_ids: int32 [n], the source. A lease of the caller must protect the slots until the
                movement has ended.
            block_ids: int32 [n], the target. No other user may touch the blocks until the movement
                has ended.
            after: events that must be done before the copy starts.

        Returns:
            The movement, which ends when the copy has succeeded or failed.
        """
        return self._move(BlockCopy(Direction.LOAD, slot_ids, block_ids, tuple(after)))

    def offload(self, slot_ids: Ids, block_ids: Ids, after: Sequence[Event] = ()) -> Movement:
        """Start to copy device blocks to host slots.

        Args:
            slot_ids: int32 [n], the target. No other user may touch the slots until the movement
                has ended.
            block_ids: int32 [n], the source. A lease of the caller must protect the blocks until
                the movement has ended.
            after: events that must be done before the copy starts: those of the kernels that write
                the blocks.

        Returns:
            The movement, which ends when the copy has succeeded or failed.
        """
        return self._move(BlockCopy(Direction.OFFLOAD, slot_ids, block_ids, tuple(after)))

    def copy_within(self, source_ids: Ids, target_ids: Ids) -> Movement:
        """Start to copy device blocks to other device blocks. A short copy has ended on return.

        Args:
            source_ids: int32 [n]. A lease of the caller must protect the blocks until the movement
                has ended.
            target_ids: int32 [n], distinct. No other user may touch the blocks until the movement
                has ended.

        Returns:
            The movement, which ends when the copy has succeeded or failed.
        """

        def submit() -> tuple[Event, ...]:
            event = self._device.copy_blocks(self._planes, source_ids, target_ids)
            return (event,) * self._planes.layout.num_layers

        num_bytes = len(source_ids) * self._block_bytes
        if num_bytes <= self._device.quick_copy_bytes:
            quick = _submitted(submit)
            movement = Movement(quick, num_bytes)
            movement.end((_outcome(_events_of(quick)[-1]) or _DONE)[0])
            return movement
        assert self._submitter is not None, "the mover is running"
        loop, submission = asyncio.get_running_loop(), self._submitter.submit(submit)
        movement = Movement(submission, num_bytes)
        self.num_in_flight += 1
        followed = [movement]  # emptied by the callback, else the two objects refer to each other
        submission.add_done_callback(
            lambda _: loop.call_soon_threadsafe(self._follow, followed.pop(), None)
        )
        return movement

    def gate(self, movements: Sequence[Movement]) -> LayerGate:
        """Return a gate at which an engine waits for the layers that `movements` copy.

        If there are no movements, the gate is open.
        """
        if not movements:
            return self._open_gate
        submissions = [movement.submission for movement in movements]
        return LayerGate(self._open_gate.num_layers, submissions, self.poller)

    def _move(self, copy: BlockCopy) -> Movement:
        counts = copy.direction
        submission = _submitted(partial(self._lanes[counts].submit, copy))
        movement = Movement(submission, len(copy) * self._block_bytes)
        self.num_in_flight += 1
        self._follow(movement, counts)
        return movement

    def _follow(self, movement: Movement, counts: Direction | None) -> None:
        """End the movement when its copy is done, and count its bytes as loaded or offloaded.

        `counts` is the direction of the copy; None for a copy within the device, which is not
        counted.
        """
        submission, is_long = movement.submission, movement.num_bytes > _SHORT_BYTES
        loop, events = asyncio.get_running_loop(), _events_of(submission)

        def end(error: TransferError | None) -> None:
            self.num_in_flight -= 1
            if error is None and counts is not None:
                self.bytes_moved[counts] += movement.num_bytes
            if not self.num_in_flight and self._all_ended is not None:
                self._all_ended.set_result(None)
                self._all_ended = None
            movement.end(error)

        try:
            if counts is Direction.LOAD and loop.time() >= self._times_from:
                self._time_layers(events, is_long=is_long)
            if counts is not None or not self.poller.call_if_done(events[-1], end):
                self.poller.call_when_done(events[-1], end, is_long=is_long)
        except ShuttingDownError as failure:  # the poller has failed, and so does the service
            loop.call_soon(end, TransferError(str(failure)))

    def _time_layers(self, events: Sequence[Event], *, is_long: bool) -> None:
        loop, ready_s = asyncio.get_running_loop(), []
        began = loop.time()
        self._times_from = math.inf

        def layer_ended(error: TransferError | None) -> None:
            if error is None:
                ready_s.append(loop.time() - began)
            if len(ready_s) == len(events):
                self.layer_times = self.layer_times.and_one(ready_s)
            if error is not None or len(ready_s) == len(events):
                self._times_from = loop.time() + _TIMED_EVERY_S

        for event in events:
            self.poller.call_when_done(event, layer_ended, is_long=is_long)


@contextmanager
def _closing(lanes: Iterable[Lane]) -> Iterator[None]:
    with ExitStack() as stack:
        for lane in lanes:
            stack.callback(lane.close)
        yield
