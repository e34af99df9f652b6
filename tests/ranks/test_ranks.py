"""A block counts when every rank has it; a rank that dies or lags is named."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.latch import ManualEvent
from tests.layouts import LAYOUTS
from tierkv.cache.shards import ShardScheme
from tierkv.errors import BadRequestError, TransferError
from tierkv.gpu.cpu import CpuDevice, CpuLane
from tierkv.gpu.protocol import BlockCopy, Direction, Event, HostSlots, Ids, Planes
from tierkv.ranks.ledger import Outcome, Ranks
from tierkv.ranks.ranked import RankedDevice, RankedEvent


def ranks(count: int = 3) -> Ranks:
    return Ranks(count, late_s=1.0, dead_s=5.0)


def test_a_movement_is_done_when_every_rank_has_said_so() -> None:
    ledger = ranks()
    ledger.begin(1, 0.0)
    assert ledger.report(0, 1, 0.1) is Outcome.PENDING
    assert ledger.report(2, 1, 0.2) is Outcome.PENDING
    assert ledger.missing(1) == (1,)
    assert ledger.report(1, 1, 0.3) is Outcome.DONE
    assert ledger.end(1) is Outcome.DONE


def test_a_failure_anywhere_is_a_failure_but_only_once_all_have_let_go() -> None:
    ledger = ranks()
    ledger.begin(1, 0.0)
    assert ledger.report(0, 1, 0.1, failed=True) is Outcome.PENDING
    with pytest.raises(BadRequestError, match="not over"):
        ledger.end(1)
    ledger.report(1, 1, 0.1)
    assert ledger.report(2, 1, 0.1) is Outcome.FAILED


def test_reports_may_come_twice_and_in_any_order() -> None:
    rng = random.Random(3)
    for _ in range(100):
        ledger = ranks(4)
        reports = [(rank, number) for rank in range(4) for number in range(3)] * 2
        rng.shuffle(reports)
        for number in range(3):
            ledger.begin(number, 0.0)
        seen: set[tuple[int, int]] = set()
        for rank, number in reports:
            seen.add((rank, number))
            is_all = all((other, number) in seen for other in range(4))
            outcome = ledger.report(rank, number, 0.5)
            assert (outcome is Outcome.DONE) == is_all


def test_a_rank_that_lags_and_one_that_is_dead_are_named_with_what_they_owe() -> None:
    ledger = ranks()
    ledger.begin(7, 0.0)
    ledger.begin(8, 0.0)
    for number in (7, 8):
        ledger.report(0, number, 0.1)
    assert ledger.findings(0.5) == []
    ledger.alive(1, 7.9)
    lags, dead = ledger.findings(8.0)
    assert lags.startswith("rank 1 lags, silent for 0.1 s: owes 2 movements, the first is 7")
    assert dead.startswith("rank 2 is dead, silent for 8.0 s: owes 2")


def test_a_rank_that_had_nothing_to_do_for_long_is_not_dead_for_having_said_nothing() -> None:
    ledger = ranks(2)
    ledger.begin(1, 0.0)
    for rank in range(2):
        ledger.report(rank, 1, 0.1)
    ledger.end(1)
    ledger.begin(2, 100.0)
    ledger.report(0, 2, 100.1)
    [lags] = ledger.findings(102.0)
    assert lags.startswith("rank 1 lags, silent for 2.0 s: owes 1 movements, the first is 2")
    [dead] = ledger.findings(106.0)
    assert dead.startswith("rank 1 is dead, silent for 6.0 s")


def test_what_a_rank_that_left_owed_has_failed_and_later_movements_too() -> None:
    ledger = ranks(2)
    ledger.begin(1, 0.0)
    ledger.report(0, 1, 0.1)
    ledger.leave(1, "its process ended with status 9")
    assert ledger.end(1) is Outcome.FAILED
    assert ledger.findings(0.2) == ["rank 1 has left: its process ended with status 9"]
    ledger.begin(2, 1.0)
    assert ledger.report(0, 2, 1.1) is Outcome.FAILED


def test_what_cannot_be_is_refused() -> None:
    ledger = ranks()
    ledger.begin(1, 0.0)
    with pytest.raises(BadRequestError, match="begun already"):
        ledger.begin(1, 0.0)
    with pytest.raises(BadRequestError, match="no rank 3"):
        ledger.report(3, 1, 0.0)
    with pytest.raises(BadRequestError, match="not under way"):
        ledger.report(0, 9, 0.0)
    with pytest.raises(ValueError, match="ranks"):
        Ranks(0, late_s=1, dead_s=1)


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
