"""A block counts when every rank has it; a rank that lags is named."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from tests.latch import ManualEvent
from tests.layouts import LAYOUTS
from tierkv.cache.shards import ShardScheme
from tierkv.errors import DeviceFailedError, GateTimeoutError, TransferError
from tierkv.gpu.cpu import CpuDevice, CpuLane
from tierkv.gpu.protocol import BlockCopy, Direction, Event, HostSlots, Ids, Planes
from tierkv.ranks.ranked import RankedDevice, RankedEvent, RankedStream, part_of

SCHEME = ShardScheme(LAYOUTS["gqa"], {"key": 2, "value": 2})
IDS = np.array([3, 4], np.int32)


@pytest.mark.parametrize("kind", [TransferError, DeviceFailedError])
def test_an_event_that_failed_on_a_rank_names_rank_and_blocks_once_all_let_go_and_tells_each_once(
    kind: type[TransferError],
) -> None:
    told: list[int] = []
    parts = [ManualEvent(), ManualEvent()]
    event = RankedEvent(parts, told.append)
    parts[1].finish(kind("the copy broke", blocks=(3, 4)))
    assert not event.is_done
    parts[0].finish()
    for _ in range(2):
        with pytest.raises(kind, match="rank 1: the copy broke") as failed:
            _ = event.is_done
        assert failed.value.blocks == (3, 4)
    assert sorted(told) == [0, 1]


class _Lane(CpuLane):
    """Its copies end when the test says so; or it takes none."""

    def __init__(self, device: Rank) -> None:
        self._device = device

    def submit(self, copy: BlockCopy) -> tuple[Event, ...]:
        return tuple(self._device.event(copy.block_ids) for _ in range(3))

    def close(self) -> None:
        pass


class Rank(CpuDevice):
    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.events: list[ManualEvent] = []

    def event(self, ids: Ids) -> Event:
        if self.refuses:
            raise TransferError("it took no copy", blocks=tuple(ids.tolist()))
        self.events.append(ManualEvent())
        return self.events[-1]

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> CpuLane:
        return _Lane(self)

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        return self.event(target_ids)


@pytest.mark.parametrize("what", ["lane", "device"])
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_copy_that_one_rank_does_not_even_take_fails_by_name_once_the_other_let_go(
    refusing: int, what: str
) -> None:
    now, parts = [0.0], [Rank(refuses=refusing == rank) for rank in range(2)]
    device = RankedDevice(parts, SCHEME, late_s=1.0, now=lambda: now[0])
    planes, host = device.allocate_planes(SCHEME.whole, 8), device.allocate_host(SCHEME.whole, 8)
    if what == "lane":
        lane = device.open_lane(Direction.OFFLOAD, planes, host)
        events = lane.submit(BlockCopy(Direction.OFFLOAD, IDS, IDS))
    else:
        events = (device.copy_blocks(planes, IDS, IDS + 1),)
    other = parts[1 - refusing]
    assert len(events) == len(other.events) == (3 if what == "lane" else 1)
    assert not any(event.is_done for event in events), "the other rank still touches the blocks"
    now[0] = 2.0
    [late] = device.findings()
    assert late.startswith(f"rank {1 - refusing} has reported nothing")
    for begun in other.events:
        begun.finish()
    for event in events:
        with pytest.raises(TransferError, match=f"rank {refusing}: it took no copy") as failed:
            _ = event.is_done
        assert failed.value.blocks == ((3, 4) if what == "lane" else (4, 5))
    assert device.findings() == [], "nothing is under way, and no rank owes anything"


def test_a_lagging_rank_is_silent_since_its_last_end_or_its_oldest_late_copy() -> None:
    now, parts = [0.0], [Rank(), Rank()]
    device = RankedDevice(parts, SCHEME, late_s=1.0, now=lambda: now[0])
    planes = device.allocate_planes(SCHEME.whole, 8)
    now[0] = 100.0  # an idle rank is not silent
    events = [device.copy_blocks(planes, IDS, IDS + 1) for _ in range(3)]
    for begun in parts[0].events:
        begun.finish()
    assert not any(event.is_done for event in events)
    now[0] = 100.9
    assert device.findings() == []
    now[0] = 102.0
    assert device.findings() == [
        "rank 1 has reported nothing for 2.0 s: 3 of its copies are pending"
    ]
    parts[1].events[0].finish()
    assert events[0].is_done
    now[0] = 102.5
    assert device.findings() == [
        "rank 1 has reported nothing for 0.5 s: 2 of its copies are pending"
    ]
    for begun in parts[1].events[1:]:
        begun.finish()
    assert all(event.is_done for event in events)
    assert device.findings() == []


class Unclosable(Rank):
    """Neither it nor a lane of it can be closed without an error; counts who tried."""

    num_closed = 0

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> CpuLane:
        lane = _Lane(self)
        lane.close = self.close  # type: ignore[method-assign]
        return lane

    def close(self) -> None:
        self.num_closed += 1
        raise TransferError("it cannot be closed")


@pytest.mark.parametrize("what", ["lane", "device"])
def test_what_cannot_be_closed_on_one_rank_leaves_nothing_open_on_another(what: str) -> None:
    parts = [Unclosable(), Unclosable()]
    device = RankedDevice(parts, SCHEME)
    planes, host = device.allocate_planes(SCHEME.whole, 8), device.allocate_host(SCHEME.whole, 8)
    lane = device.open_lane(Direction.LOAD, planes, host)
    with pytest.raises(TransferError, match="cannot be closed"):
        (lane if what == "lane" else device).close()
    assert [part.num_closed for part in parts] == [1, 1]


# One event of several ranks: it waits for all, fails by name and kind, and owes nothing after.


class Told(ManualEvent):
    """Notes how long it was to be waited for, and takes a moment of that."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float] = []

    def block_until_done(self, timeout_s: float) -> None:
        self.timeouts.append(timeout_s)
        time.sleep(0.02)
        super().block_until_done(timeout_s)


def test_who_blocks_hears_of_a_failure_only_when_every_rank_has_let_go() -> None:
    parts = [ManualEvent(), ManualEvent()]
    event = RankedEvent(parts)
    parts[0].finish(TransferError("broke"))
    late = threading.Timer(0.05, parts[1].finish)
    late.start()
    with pytest.raises(TransferError, match="rank 0: broke"):
        event.block_until_done(20.0)
    late.join()
    assert event.parts[1].is_done, "the other rank was waited for"


def test_all_ranks_together_have_the_time_that_is_given() -> None:
    parts = [Told(), Told(), Told()]
    for part in parts:
        part.finish()
    RankedEvent(parts).block_until_done(20.0)
    first, second, third = (part.timeouts[0] for part in parts)
    assert second <= first - 0.02
    assert third <= second - 0.02


def test_a_rank_that_is_not_done_in_time_is_named() -> None:
    parts = [ManualEvent(), ManualEvent()]
    parts[0].finish()
    with pytest.raises(GateTimeoutError, match="rank 1"):
        RankedEvent(parts).block_until_done(0.0)
    parts[1].finish()


def test_each_ranks_stream_waits_for_that_ranks_part() -> None:
    streams = [Mock(), Mock()]
    event = RankedStream(streams).record()
    RankedStream(streams).wait(event, 1.0)
    for rank, stream in enumerate(streams):
        assert part_of(event, rank) is stream.record.return_value
        [waited] = stream.wait.call_args_list
        assert waited.args[0] is part_of(event, rank)


def test_a_copy_waits_on_each_rank_for_that_ranks_kernels_alone() -> None:
    device = RankedDevice([CpuDevice(), CpuDevice()], SCHEME)
    planes, host = device.allocate_planes(SCHEME.whole, 2), device.allocate_host(SCHEME.whole, 2)
    lane = device.open_lane(Direction.OFFLOAD, planes, host)
    kernels = [ManualEvent(), ManualEvent()]
    try:
        ids = np.array([1], np.int32)
        [*_, last] = lane.submit(BlockCopy(Direction.OFFLOAD, ids, ids, (RankedEvent(kernels),)))
        assert isinstance(last, RankedEvent)
        kernels[0].finish()
        last.parts[0].block_until_done(20.0)
        assert not last.parts[1].is_done, "its kernel has not written yet"
        kernels[1].finish()
        last.block_until_done(20.0)
    finally:
        for kernel in kernels:
            kernel.finish()
        lane.close()
        host.close()
        planes.close()
        device.close()
