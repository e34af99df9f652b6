"""Which way blocks take by themselves."""

from __future__ import annotations

import pytest

from tierkv.pd.direct.offers import AGAIN_S, LEAST_BYTES, Speeds
from tierkv.pd.settings import DirectPath

NETWORK, DEVICE = DirectPath.NETWORK, DirectPath.DEVICE
MUCH = 78 << 20


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def speeds(clock: Clock, *, is_named: bool = False) -> Speeds:
    return Speeds(is_named=is_named, now=clock)


@pytest.mark.promise("A direct path slower than storage is used only if the settings name it.")
def test_a_way_slower_than_storage_is_not_taken_by_itself() -> None:
    """As over TCP, where a claim of 78 MiB took 2.4 times the way through Redis."""
    known = speeds(Clock())
    assert not known.prefers_storage(NETWORK, MUCH), "nobody knows it yet"
    known.note(NETWORK, MUCH, 0.240)
    assert known.prefers_storage(NETWORK, MUCH), "storage is looked at"
    known.note(None, MUCH, 0.100)
    assert known.prefers_storage(NETWORK, MUCH)
    assert not known.prefers_storage(DEVICE, MUCH), "that way nobody knows yet"


def test_a_way_faster_than_storage_stays_taken_and_storage_is_looked_at_once_a_while() -> None:
    clock = Clock()
    known = speeds(clock)
    known.note(NETWORK, MUCH, 0.050)
    assert known.prefers_storage(NETWORK, MUCH)
    known.note(None, MUCH, 0.100)
    assert not any(known.prefers_storage(NETWORK, MUCH) for _ in range(9))
    clock.now_s += AGAIN_S
    assert [known.prefers_storage(NETWORK, MUCH) for _ in range(3)] == [True, False, False]


def test_a_way_that_was_slow_is_tried_again_after_a_while() -> None:
    clock = Clock()
    known = speeds(clock)
    known.note(NETWORK, MUCH, 0.240)
    known.note(None, MUCH, 0.100)
    assert known.prefers_storage(NETWORK, MUCH)
    clock.now_s += AGAIN_S
    known.note(None, MUCH, 0.100)
    assert not known.prefers_storage(NETWORK, MUCH)
    known.note(NETWORK, MUCH, 0.030)
    assert not known.prefers_storage(NETWORK, MUCH)


@pytest.mark.promise("A direct path slower than storage is used only if the settings name it.")
def test_a_way_that_is_named_is_taken_whatever_it_costs() -> None:
    known = speeds(Clock(), is_named=True)
    known.note(NETWORK, MUCH, 10.0)
    known.note(None, MUCH, 0.1)
    assert not known.prefers_storage(NETWORK, MUCH)


def test_a_way_that_is_fast_beyond_doubt_needs_no_look_at_storage() -> None:
    known = speeds(Clock())
    known.note(DEVICE, MUCH, MUCH / 50e9)
    assert not known.prefers_storage(DEVICE, MUCH)


def test_few_bytes_say_nothing_of_a_way_but_many_times_few_do() -> None:
    """As where blocks are small: a group of them has 512 KiB."""
    known, few = speeds(Clock()), LEAST_BYTES // 2
    known.note(NETWORK, few, 0.010)
    assert not known.prefers_storage(NETWORK, few)
    known.note(NETWORK, few, 0.010)
    looks = [known.prefers_storage(NETWORK, few) for _ in range(3)]
    assert looks == [True, True, False], "until enough has come to know storage by"
    known.note(None, few, 0.004)
    known.note(None, few, 0.004)
    assert known.prefers_storage(NETWORK, few)


def test_a_look_at_a_store_that_has_nothing_ends() -> None:
    known = speeds(Clock())
    known.note(NETWORK, MUCH, 0.240)
    assert known.prefers_storage(NETWORK, MUCH)
    known.note(None, 0, 0.1)
    assert not known.prefers_storage(NETWORK, MUCH)
