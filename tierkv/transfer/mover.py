"""Moves blocks between Host and Device. It is told what to move, and asks no questions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from operator import add

import msgspec

from tierkv.errors import TierKVError, TransferError
from tierkv.gpu.protocol import (
    BlockCopy,
    Device,
    Direction,
    Event,
    HostSlots,
    Ids,
    Lane,
    Planes,
)
from tierkv.tasks import outlast, task_group
from tierkv.transfer.completion import EventPoller
from tierkv.transfer.gate import LayerGate, Submission

_SHORT_BYTES = 16 << 20  # PCIe 5 moves them in 0.3 ms
# Looking at each layer of a load costs a turn of the loop, some 3 ms for 32 layers: 1 % at most.
_TIMED_EVERY_S = 0.25


class LayerTimes(msgspec.Struct, frozen=True):
    """When the layers of loads from host to device were there, in seconds after the load was asked
    for, as the event loop saw it: what a load waits for in its lane is in it.

    num_loads: that were looked at, one at a time and at most four in a second. total_s, longest_s:
    by layer; a layer itself took what its mean is above that of the one before.
    """

    num_loads: int
    total_s: tuple[float, ...]
    longest_s: tuple[float, ...]

    def and_one(self, ready_s: Sequence[float]) -> LayerTimes:
        """With those of one more load."""
        return LayerTimes(
            self.num_loads + 1,
            tuple(map(add, self.total_s, ready_s)),
            tuple(map(max, self.longest_s, ready_s)),
        )


@dataclass(frozen=True, slots=True)
class Movement:
    """A copy that is being submitted, is on its way, or has ended."""

    submission: Submission
    num_bytes: int
    _ended: asyncio.Future[None]
    _on_end: list[Callable[[], None]] = field(default_factory=list)

    async def done(self) -> None:
        """Return when every byte has arrived; raise TransferError if it failed. Cancelling the
        wait does not touch the copy."""
        await asyncio.shield(self._ended)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop as soon as the copy has ended, well or not."""
        if self._ended.done():
            call()
        else:
            self._on_end.append(call)

    def end(self, error: TransferError | None) -> None:
        """Called once, by the mover."""
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
        for call in self._on_end:
            call()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without all of its bytes."""
        return self._ended.done() and self._ended.exception() is not None


class Mover:
    """Two lanes, and a thread that submits what is copied within the device."""

    def __init__(self, device: Device, planes: Planes, host: HostSlots) -> None:
        self._device = device
        self._planes = planes
        self._host = host
        self._block_bytes = planes.layout.block_bytes
        self.poller = EventPoller()
        self._lanes: dict[Direction, Lane] = {}
        self._submitter: ThreadPoolExecutor | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._following: set[asyncio.Task[None]] = set()  # one per movement
        self.num_in_flight = 0
        self.bytes_moved = {Direction.LOAD: 0, Direction.OFFLOAD: 0}
        none = (0.0,) * planes.layout.num_layers
        self.layer_times = LayerTimes(0, none, none)
        self._times_from = 0.0  # of the loop's clock

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens the lanes; at the end, whatever it is, waits for every copy, then closes them."""
        self._submitter = ThreadPoolExecutor(1, thread_name_prefix="tierkv-submit")
        try:
            await self._open_lanes()
            async with self.poller.running(), task_group() as self._tasks:
                try:
                    yield
                finally:  # an error of the body would cancel what follows the copies
                    await outlast(self._following, on_cancel=lambda: None)
        finally:
            # Blocks the loop on purpose: memory must not be freed under a copy in flight.
            with _closing(self._lanes.values()):
                self._submitter.shutdown(wait=True)

    async def _open_lanes(self) -> None:
        """In the submitting thread: a lane takes memory, and its kernels may have to be compiled.
        A cancel waits for its end."""
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
        """Those of now; others after `reopen`."""
        return self._planes

    async def suspend(self) -> None:
        """Let go of the lanes, and so of the planes, until `reopen`. Nothing may be in flight."""
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
        """Open lanes over `planes`, which may have another number of blocks than those before."""
        assert not self._lanes, "reopened only when suspended"
        self._planes = planes
        await self._open_lanes()

    def load(self, slot_ids: Ids, block_ids: Ids, after: Sequence[Event] = ()) -> Movement:
        """Host slots to device blocks. Ids must stay leased until the movement has ended."""
        return self._move(BlockCopy(Direction.LOAD, slot_ids, block_ids, tuple(after)))

    def offload(self, slot_ids: Ids, block_ids: Ids, after: Sequence[Event] = ()) -> Movement:
        """Device blocks to host slots, after the events of the kernels that wrote the blocks."""
        return self._move(BlockCopy(Direction.OFFLOAD, slot_ids, block_ids, tuple(after)))

    def copy_within(self, source_ids: Ids, target_ids: Ids) -> Movement:
        """Device blocks to other device blocks."""

        def submit() -> tuple[Event, ...]:
            event = self._device.copy_blocks(self._planes, source_ids, target_ids)
            return (event,) * self._planes.layout.num_layers

        assert self._submitter is not None, "the mover is running"
        return self._follow(
            self._submitter.submit(submit), len(source_ids) * self._block_bytes, None
        )

    def gate(self, movements: Sequence[Submission]) -> LayerGate:
        return LayerGate(self._planes.layout.num_layers, movements, self.poller)

    def _move(self, copy: BlockCopy) -> Movement:
        submission: Submission = Future()
        try:
            submission.set_result(self._lanes[copy.direction].submit(copy))
        except TierKVError as error:
            submission.set_exception(error)
        return self._follow(submission, len(copy) * self._block_bytes, copy.direction)

    def _follow(self, submission: Submission, num_bytes: int, counts: Direction | None) -> Movement:
        assert self._tasks is not None, "the mover is running"
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        ended.add_done_callback(_retrieve)
        movement = Movement(submission, num_bytes, ended)
        self.num_in_flight += 1
        following = self._tasks.create_task(
            self._await_end(movement, counts, loop.time()), name="tierkv-movement"
        )
        self._following.add(following)
        following.add_done_callback(self._following.discard)
        return movement

    async def _await_end(self, movement: Movement, counts: Direction | None, began: float) -> None:
        error: TransferError | None = None
        try:
            submission = movement.submission
            is_known = submission.done()
            events = submission.result() if is_known else await asyncio.wrap_future(submission)
            is_long = movement.num_bytes > _SHORT_BYTES
            if counts is Direction.LOAD and began >= self._times_from:
                await self._time_layers(events, began, is_long=is_long)
            else:
                await self.poller.done(events[-1], is_long=is_long)
        except TransferError as failure:
            error = failure
        except TierKVError as failure:
            error = TransferError(str(failure))
        self.num_in_flight -= 1
        if error is None and counts is not None:
            self.bytes_moved[counts] += movement.num_bytes
        movement.end(error)

    async def _time_layers(self, events: Sequence[Event], began: float, *, is_long: bool) -> None:
        """Return when the last of a load's events is done."""
        loop, ready_s = asyncio.get_running_loop(), []
        self._times_from = math.inf
        try:
            for event in events:
                await self.poller.done(event, is_long=is_long)
                ready_s.append(loop.time() - began)
        finally:
            self._times_from = loop.time() + _TIMED_EVERY_S
        self.layer_times = self.layer_times.and_one(ready_s)


@contextmanager
def _closing(lanes: Iterable[Lane]) -> Iterator[None]:
    """Closes each at the end, also if another one's close has raised."""
    with ExitStack() as stack:
        for lane in lanes:
            stack.callback(lane.close)
        yield


def _retrieve(future: asyncio.Future[None]) -> None:
    """A failed movement nobody waits for any more is no news: its bookkeeping has been done."""
    if not future.cancelled():
        future.exception()
