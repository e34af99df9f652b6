"""One event of several ranks: it waits for all, fails by name and kind, and owes nothing after."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.latch import ManualEvent
from tests.layouts import LAYOUTS
from tierkv.cache.shards import ShardScheme
from tierkv.errors import DeviceFailedError, GateTimeoutError, TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy, Direction
from tierkv.ranks.ranked import RankedDevice, RankedEvent, RankedStream, part_of


class Told(ManualEvent):
    """Notes how long it was to be waited for, and takes a moment of that."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float] = []

    def block_until_done(self, timeout_s: float) -> None:
        self.timeouts.append(timeout_s)
        time.sleep(0.02)
        super().block_until_done(timeout_s)


def test_a_device_that_failed_on_one_rank_is_a_failed_device() -> None:
    parts = [ManualEvent(), ManualEvent()]
    event = RankedEvent(parts)
    parts[0].finish()
    parts[1].finish(DeviceFailedError("it fell off the bus", blocks=(7,)))
    with pytest.raises(DeviceFailedError, match="rank 1: it fell off the bus") as failed:
        _ = event.is_done
    assert failed.value.blocks == (7,)


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
    class Noting:
        def __init__(self) -> None:
            self.waited: list[object] = []

        def record(self) -> ManualEvent:
            return ManualEvent()

        def wait(self, event: object, timeout_s: float) -> None:
            self.waited.append(event)

    streams = [Noting(), Noting()]
    event = RankedStream(streams).record()
    RankedStream(streams).wait(event, 1.0)
    assert [stream.waited for stream in streams] == [[part_of(event, 0)], [part_of(event, 1)]]
    assert part_of(event, 0) is not part_of(event, 1)


def test_a_copy_waits_on_each_rank_for_that_ranks_kernels_alone() -> None:
    scheme = ShardScheme(LAYOUTS["gqa"], {"key": 2, "value": 2})
    device = RankedDevice([CpuDevice(), CpuDevice()], scheme)
    planes, host = device.allocate_planes(scheme.whole, 2), device.allocate_host(scheme.whole, 2)
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


def test_each_rank_is_told_of_once() -> None:
    told: list[int] = []
    parts = [ManualEvent(), ManualEvent()]
    event = RankedEvent(parts, told.append)
    parts[1].finish(TransferError("broke"))
    assert not event.is_done
    parts[0].finish()
    for _ in range(2):
        with pytest.raises(TransferError):
            _ = event.is_done
    assert sorted(told) == [0, 1]
