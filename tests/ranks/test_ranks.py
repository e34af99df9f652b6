"""A block counts when every rank has it; a rank that dies or lags is named."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.latch import ManualEvent
from tests.layouts import LAYOUTS
from tierkv.cache.shards import ShardScheme
from tierkv.errors import DeviceFailedError, TransferError
from tierkv.gpu.cpu import CpuDevice, CpuLane
from tierkv.gpu.protocol import BlockCopy, Direction, Event, HostSlots, Ids, Planes
from tierkv.ranks.ledger import Ledger
from tierkv.ranks.ranked import RankedDevice, RankedEvent


class Ranks:
    """A ledger whose hands a test turns, and how its movements ended, by number."""

    def __init__(self, count: int = 3) -> None:
        self.now = 0.0
        self.ledger = Ledger(count, late_s=1.0, dead_s=5.0, now=lambda: self.now)
        self.ended: dict[int, TransferError | None] = {}

    def begin(self) -> int:
        number = self.ledger.begin((3, 4), lambda error: self.ended.setdefault(number, error))
        return number


def test_a_movement_ends_when_every_rank_has_reported_it_in_any_order_and_twice() -> None:
    rng = random.Random(3)
    for _ in range(100):
        all_ranks = Ranks(4)
        numbers = [all_ranks.begin() for _ in range(3)]
        reports = [(rank, number) for rank in range(4) for number in numbers] * 2
        rng.shuffle(reports)
        seen: set[tuple[int, int]] = set()
        for rank, number in reports:
            seen.add((rank, number))
            all_ranks.ledger.report(rank, number)
            whole = {n for n in numbers if all((other, n) in seen for other in range(4))}
            assert all_ranks.ended == dict.fromkeys(whole)


def test_a_failure_anywhere_is_a_failure_but_only_once_all_have_let_go() -> None:
    three = Ranks()
    number = three.begin()
    three.ledger.report(0, number, "it broke")
    three.ledger.report(1, number, "it broke here, too")
    assert not three.ended
    three.ledger.report(2, number)
    assert str(three.ended[number]) == "it broke"
    assert three.ended[number].blocks == (3, 4)  # type: ignore[union-attr]


def test_a_rank_that_lags_and_one_that_is_dead_are_named_with_what_they_owe() -> None:
    three = Ranks()
    first, second = three.begin(), three.begin()
    for number in (first, second):
        three.ledger.report(0, number)
    three.now = 0.5
    assert three.ledger.findings() == []
    three.now = 7.9
    three.ledger.alive(1)
    three.now = 8.0
    lags, dead = three.ledger.findings()
    assert lags == f"rank 1 lags, silent for 0.1 s: owes 2 movements, the first is {first}"
    assert dead == f"rank 2 is dead, silent for 8.0 s: owes 2 movements, the first is {first}"
    assert three.ledger.silent() == [2]


def test_a_rank_that_had_nothing_to_do_for_long_is_not_dead_for_having_said_nothing() -> None:
    two = Ranks(2)
    two.now = 100.0
    two.ledger.report(0, two.begin())
    two.now = 102.0
    assert two.ledger.findings()[0].startswith("rank 1 lags, silent for 2.0 s: owes 1 movements")
    assert two.ledger.silent() == []
    two.now = 106.0
    assert two.ledger.findings()[0].startswith("rank 1 is dead, silent for 6.0 s")


def test_what_a_rank_that_left_owed_has_failed_and_nothing_more_begins() -> None:
    two = Ranks(2)
    number, other = two.begin(), two.begin()
    two.ledger.report(0, number)
    assert two.ledger.leave(1, "its process ended with status 9")
    assert not two.ledger.leave(1, "and again")
    assert list(two.ended) == [number], "rank 0 still touches the blocks of the other"
    two.ledger.report(0, other)
    assert all(isinstance(error, DeviceFailedError) for error in two.ended.values())
    assert two.ledger.findings() == ["rank 1 has left: its process ended with status 9"]
    with pytest.raises(DeviceFailedError, match="status 9"):
        two.begin()


def test_an_event_that_failed_on_a_rank_names_the_rank_and_its_blocks_once_all_let_go() -> None:
    parts = [ManualEvent(), ManualEvent()]
    event = RankedEvent(parts)
    parts[1].finish(TransferError("the copy broke", blocks=(3, 4)))
    assert not event.is_done
    parts[0].finish()
    with pytest.raises(TransferError, match="rank 1: the copy broke") as failed:
        _ = event.is_done
    assert failed.value.blocks == (3, 4)


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
    scheme = ShardScheme(LAYOUTS["gqa"], {"key": 2, "value": 2})
    device = RankedDevice(parts, scheme, late_s=1.0, now=lambda: now[0])
    planes, host = device.allocate_planes(scheme.whole, 8), device.allocate_host(scheme.whole, 8)
    ids = np.array([3, 4], np.int32)
    if what == "lane":
        lane = device.open_lane(Direction.OFFLOAD, planes, host)
        events = lane.submit(BlockCopy(Direction.OFFLOAD, ids, ids))
    else:
        events = (device.copy_blocks(planes, ids, ids + 1),)
    other = parts[1 - refusing]
    assert len(events) == len(other.events) == (3 if what == "lane" else 1)
    assert not any(event.is_done for event in events), "the other rank still touches the blocks"
    now[0] = 2.0
    [late] = device.findings()
    assert late.startswith(f"rank {1 - refusing} lags")
    for begun in other.events:
        begun.finish()
    for event in events:
        with pytest.raises(TransferError, match=f"rank {refusing}: it took no copy") as failed:
            _ = event.is_done
        assert failed.value.blocks == ((3, 4) if what == "lane" else (4, 5))
    assert device.findings() == [], "nothing is under way, and no rank owes anything"


class Unclosable(Rank):
    """Neither it nor a lane of it can be closed without an error; counts who tried."""

    def __init__(self) -> None:
        super().__init__()
        self.num_closed = 0

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> CpuLane:
        return _UnclosableLane(self)

    def close(self) -> None:
        self.num_closed += 1
        raise TransferError("it cannot be closed")


class _UnclosableLane(_Lane):
    def __init__(self, device: Unclosable) -> None:
        super().__init__(device)
        self._owner = device

    def close(self) -> None:
        self._owner.close()


@pytest.mark.parametrize("what", ["lane", "device"])
def test_what_cannot_be_closed_on_one_rank_leaves_nothing_open_on_another(what: str) -> None:
    parts = [Unclosable(), Unclosable()]
    scheme = ShardScheme(LAYOUTS["gqa"], {"key": 2, "value": 2})
    device = RankedDevice(parts, scheme)
    planes, host = device.allocate_planes(scheme.whole, 8), device.allocate_host(scheme.whole, 8)
    lane = device.open_lane(Direction.LOAD, planes, host)
    with pytest.raises(TransferError, match="cannot be closed"):
        (lane if what == "lane" else device).close()
    assert [part.num_closed for part in parts] == [1, 1]
