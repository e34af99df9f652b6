"""Several tensor-parallel ranks as one device: each rank has its heads of every block.

    block b, device   rank 0 | planes of heads 0 1 |    rank 1 | planes of heads 2 3 |
    host slot s       rank 0 | its bytes |              rank 1 | its bytes |

A block has the same id on all ranks, and this device submits each copy to every rank. An event is
done when the copies of all ranks are done. If a rank fails, the event fails once no rank touches
the blocks any more, and the error names the rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import ModuleType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.errors import (
    ConfigError,
    DeviceFailedError,
    GateTimeoutError,
    LayoutError,
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
    Sharing,
    Stream,
)
from tierkv.transfer.storage_io import Slice

LATE_S = 5.0


_Part = TypeVar("_Part", Planes, HostSlots, Lane)


def _close(parts: Sequence[Device | Planes | HostSlots | Lane]) -> None:
    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.close)


def _all_or_none(opens: Iterable[Callable[[], _Part]]) -> list[_Part]:
    """Return what each of `opens` returns; if one raises, close what the others have returned."""
    parts: list[_Part] = []
    try:
        for open_one in opens:
            parts.append(open_one())  # noqa: PERF401 - those before a failure are closed
    except BaseException:
        _close(parts)
        raise
    return parts


class RankedDevice:
    """The devices of several ranks as one device. `close` closes all of them.

    Args:
        devices: one device for each rank, in the order of the ranks.
        scheme: the division of a block over the ranks.
        late_s: seconds after which `findings` reports a copy that a rank has not finished.
        now: returns the time of a monotonic clock, in seconds.

    Raises:
        ConfigError: `devices` is empty.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        scheme: ShardScheme,
        *,
        late_s: float = LATE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not devices:
            raise ConfigError("tensor parallelism needs at least one rank")
        self.devices = tuple(devices)
        self.scheme = scheme
        self.shards = tuple(Shard(rank, len(devices)) for rank in range(len(devices)))
        self.layouts = tuple(scheme.layout(shard) for shard in self.shards)
        self.name = f"{devices[0].name} x{len(devices)}"
        self.compute_stream: Stream = RankedStream([d.compute_stream for d in devices])
        # Other processes cannot map the planes of several ranks.
        self.sharing: Sharing | None = None
        self.quick_copy_bytes = min(device.quick_copy_bytes for device in devices)
        self._pending = _PendingCopies(len(devices), late_s=late_s, now=now)

    @property
    def array_module(self) -> ModuleType:
        return self.devices[0].array_module

    @property
    def failure(self) -> str | None:
        for rank, device in enumerate(self.devices):
            if device.failure is not None:
                return f"rank {rank}: {device.failure}"
        return None

    @property
    def status(self) -> str:
        """The status of each rank's device, as a line of text."""
        return ", ".join(device.status for device in self.devices)

    def computing(self) -> AbstractContextManager[None]:
        """Return the first device's context for computing; kernels of all ranks may run in it."""
        return self.devices[0].computing()

    def findings(self) -> list[str]:
        """Return one sentence for each rank that has not finished a copy in `late_s` seconds."""
        return self._pending.findings()

    def allocate_planes(self, layout: Layout, num_blocks: int) -> RankedPlanes:
        """Allocate planes on all ranks.

        Args:
            layout: the layout of a whole block.
            num_blocks: number of blocks, the same on each rank.

        Returns:
            The planes of all ranks. Their `arrays` are those of rank 0, in the order of its layout,
                then those of rank 1, and so on.

        Raises:
            LayoutError: `layout` is not the layout that `scheme` divides over the ranks.
        """
        self._check(layout)
        own = zip(self.devices, self.layouts, strict=True)
        parts = _all_or_none(partial(device.allocate_planes, of, num_blocks) for device, of in own)
        return RankedPlanes(layout, num_blocks, parts)

    def allocate_host(self, layout: Layout, num_slots: int) -> RankedHost:
        self._check(layout)
        own = zip(self.devices, self.layouts, strict=True)
        parts = _all_or_none(partial(device.allocate_host, of, num_slots) for device, of in own)
        return RankedHost(num_slots, parts)

    def slices(self, host: HostSlots) -> list[Slice]:
        """Return each rank's slice of the slots of `host`, which `allocate_host` has returned."""
        assert isinstance(host, RankedHost), "a ranked device's slots are ranked"
        parts = zip(self.shards, self.layouts, host.parts, strict=True)
        return [Slice(shard, layout, part) for shard, layout, part in parts]

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        assert isinstance(planes, RankedPlanes), "a ranked device's planes are ranked"
        assert isinstance(host, RankedHost), "a ranked device's slots are ranked"
        own = zip(self.devices, planes.parts, host.parts, strict=True)
        lanes = _all_or_none(partial(device.open_lane, direction, p, h) for device, p, h in own)
        return _RankedLane(lanes, planes.layout.num_layers, self._pending)

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        assert isinstance(planes, RankedPlanes), "a ranked device's planes are ranked"
        events: list[Event] = []
        for device, part in zip(self.devices, planes.parts, strict=True):
            try:
                events.append(device.copy_blocks(part, source_ids, target_ids))
            except TransferError as error:
                events.append(FailedEvent(error))
        return RankedEvent(events, self._pending.begin())

    def close(self) -> None:
        _close(self.devices)

    def _check(self, layout: Layout) -> None:
        if layout.digest != self.scheme.whole.digest:
            raise LayoutError("the layout differs from the layout that the ranks split")


class RankedPlanes:
    """Planes of several ranks as one object.

    Args:
        layout: the layout of a whole block.
        num_blocks: number of blocks, the same on each rank.
        parts: the planes of each rank, in the order of the ranks.
    """

    def __init__(self, layout: Layout, num_blocks: int, parts: Sequence[Planes]) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.parts = tuple(parts)

    @property
    def arrays(self) -> Sequence[npt.NDArray[np.uint8]]:
        return [array for part in self.parts for array in part.arrays]

    def close(self) -> None:
        _close(self.parts)


class RankedHost:
    """Host slots of several ranks: each rank has an array of its own for its bytes of each slot.

    Args:
        num_slots: number of slots, the same for each rank.
        parts: the host slots of each rank, in the order of the ranks.
    """

    def __init__(self, num_slots: int, parts: Sequence[HostSlots]) -> None:
        self.num_slots = num_slots
        self.parts = tuple(parts)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Always an error: each rank has an array of its own, in its element of `parts`.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(
            "the slots of several ranks are separate arrays: use the array of each part"
        )

    def close(self) -> None:
        _close(self.parts)


class _RankedLane:
    def __init__(self, lanes: Sequence[Lane], num_layers: int, pending: _PendingCopies) -> None:
        self._lanes = tuple(lanes)
        self._num_layers = num_layers
        self._pending = pending

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        by_rank: list[Sequence[Event]] = []
        for rank, lane in enumerate(self._lanes):
            after = tuple(part_of(event, rank) for event in copy.after)
            own = BlockCopy(copy.direction, copy.slot_ids, copy.block_ids, after)
            try:
                by_rank.append(lane.submit(own))
            except TransferError as error:  # copies that other ranks have begun continue
                by_rank.append([FailedEvent(error)] * self._num_layers)
        *layers, last = zip(*by_rank, strict=True)
        settled = self._pending.begin()
        return (*(RankedEvent(events) for events in layers), RankedEvent(last, settled))

    def close(self) -> None:
        _close(self._lanes)


@dataclass(slots=True, eq=False)
class _PendingCopy:
    begun: float
    ranks: set[int]


class _PendingCopies:
    """The copies that at least one rank has not finished. Thread-safe."""

    def __init__(self, num_ranks: int, *, late_s: float, now: Callable[[], float]) -> None:
        self._late_s = late_s
        self._now = now
        self._copies: dict[int, _PendingCopy] = {}
        self._finished_at = dict.fromkeys(range(num_ranks), now())
        self._numbers = count()
        self._lock = threading.Lock()

    def begin(self) -> Callable[[int], None]:
        with self._lock:
            number = next(self._numbers)
            self._copies[number] = _PendingCopy(self._now(), set(self._finished_at))
        return partial(self._finish, number)

    def _finish(self, number: int, rank: int) -> None:
        with self._lock:
            self._finished_at[rank] = self._now()
            copy = self._copies[number]
            copy.ranks.discard(rank)
            if not copy.ranks:
                del self._copies[number]

    def findings(self) -> list[str]:
        with self._lock:
            now = self._now()
            late: dict[int, list[_PendingCopy]] = {}
            for copy in self._copies.values():
                if now - copy.begun > self._late_s:
                    for rank in copy.ranks:
                        late.setdefault(rank, []).append(copy)
            return [
                (
                    f"rank {rank} has reported nothing for "
                    f"{now - max(self._finished_at[rank], copies[0].begun):.1f} s: "
                    f"{len(copies)} of its copies are pending"
                )
                for rank, copies in sorted(late.items())
            ]


class RankedEvent:
    """One event for all ranks, done when the events of all ranks are done.

    Args:
        parts: one event for each rank, in the order of the ranks.
        settled: called with the number of each rank, once, when its event is found done or failed;
            None for no call.
    """

    def __init__(
        self, parts: Sequence[Event], settled: Callable[[int], None] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self._settled = settled
        # A polling thread and a compute thread may call at the same time.
        self._lock = threading.Lock()
        self._pending = set(range(len(parts)))
        self._errors: dict[int, TransferError] = {}

    @property
    def line(self) -> object:
        return self

    @property
    def position(self) -> int:
        return 0

    @property
    def is_done(self) -> bool:
        """True if the work of all ranks has finished.

        Raises:
            TransferError: the work of at least one rank has failed, and no rank works any more. The
                text names the first rank that failed.
        """
        with self._lock:
            for rank in sorted(self._pending):
                try:
                    if not self.parts[rank].is_done:
                        continue
                except TransferError as error:
                    self._errors[rank] = error
                self._pending.discard(rank)
                if self._settled is not None:
                    self._settled(rank)
            if self._pending:
                return False
            if self._errors:
                rank = min(self._errors)
                why = self._errors[rank]
                kind = DeviceFailedError if isinstance(why, DeviceFailedError) else TransferError
                raise kind(f"rank {rank}: {why}", blocks=why.blocks) from why
            return True

    def block_until_done(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in sorted(self._pending):
            try:
                self.parts[rank].block_until_done(max(deadline - time.monotonic(), 0.0))
            except GateTimeoutError as error:
                raise GateTimeoutError(f"rank {rank}: {error}") from error
            except TransferError:
                continue  # `is_done` below raises the error
        if not self.is_done:
            raise GateTimeoutError(f"the ranks did not finish within {timeout_s:g} s")


class RankedStream:
    """The compute streams of several ranks as one.

    Args:
        parts: the stream of each rank, in the order of the ranks.
    """

    def __init__(self, parts: Sequence[Stream]) -> None:
        self._parts = tuple(parts)

    def record(self) -> Event:
        return RankedEvent([stream.record() for stream in self._parts])

    def wait(self, event: Event, timeout_s: float) -> None:
        """Make each rank's stream wait for that rank's own event in `event`.

        The call blocks for at most `timeout_s` seconds for all ranks together.
        """
        deadline = time.monotonic() + timeout_s
        for rank, stream in enumerate(self._parts):
            stream.wait(part_of(event, rank), max(deadline - time.monotonic(), 0.0))


def part_of(event: Event, rank: int) -> Event:
    """Return one rank's own event.

    Args:
        event: an event of all ranks, or any other event.
        rank: number of the rank.

    Returns:
        The rank's event if `event` is one of all ranks, otherwise `event` itself.
    """
    return event.parts[rank] if isinstance(event, RankedEvent) else event
