"""Clocks of stores, and this machine's clock for stores that do not report their time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.clocks import ShiftedClock
from tests.redis_server import PATIENT, redis_server
from tests.storage.values import put_one
from tierkv.clock import StoreClock
from tierkv.storage.factory import StoreSettings, open_guarded_store, open_store
from tierkv.storage.protocol import PutStatus

AHEAD_S = 660.0


class Hands:
    """A clock whose monotonic and wall time a test sets separately."""

    def __init__(self) -> None:
        self.passed_s, self.unix_s = 0.0, 5000.0

    def monotonic(self) -> float:
        return self.passed_s

    def wall(self) -> float:
        return self.unix_s


def test_the_time_told_is_that_of_the_middle_of_the_question() -> None:
    ours = Hands()
    clock = StoreClock(ours)
    assert (clock.wall(), clock.skew_s) == (5000.0, None)
    ours.passed_s = 0.5
    clock.note(4000.0, asked_at=0.0)
    assert clock.wall() == 4000.25
    assert clock.skew_s == 999.75


def test_a_step_of_our_clock_moves_the_skew_and_not_the_stores_time() -> None:
    ours = Hands()
    clock = StoreClock(ours)
    clock.note(5000.0, asked_at=0.0)
    ours.unix_s += AHEAD_S
    assert (clock.wall(), clock.skew_s) == (5000.0, AHEAD_S)


def test_an_answer_that_took_long_does_not_replace_a_better_one() -> None:
    ours = Hands()
    clock = StoreClock(ours)
    ours.passed_s = 8.0
    clock.note(5000.0, asked_at=0.0)  # the first measurement counts, however slow
    assert clock.wall() == 5004.0
    clock.note(5000.0, asked_at=7.9)
    ours.passed_s = 20.0
    known = clock.wall()
    clock.note(9000.0, asked_at=10.0)
    assert clock.wall() == known


async def test_a_redis_that_may_not_tell_its_time_is_used_by_our_clock() -> None:
    with redis_server() as server:
        server.execute("ACL", "SETUSER", "default", "-time")
        store = open_guarded_store(server.url, PATIENT, ShiftedClock(AHEAD_S))
        async with store.running():
            assert store.health.clock_skew_s is None
            assert store.now() == pytest.approx(time.time() + AHEAD_S, abs=5)
            assert await put_one(store, "t:f:0:0", b"x") is PutStatus.STORED


@pytest.mark.parametrize("is_layered", [False, True])
async def test_guard_and_layers_pass_the_far_stores_clock_on(
    tmp_path: Path, *, is_layered: bool
) -> None:
    with redis_server() as server:
        url = f"layered:file://{tmp_path}/near|{server.url}" if is_layered else server.url
        store = open_guarded_store(url, StoreSettings(), ShiftedClock(-AHEAD_S))
        async with store.running():
            assert store.health.clock_skew_s == pytest.approx(-AHEAD_S, abs=1)
            assert store.now() == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize("ahead_s", [AHEAD_S, -AHEAD_S])
async def test_files_expire_by_the_clock_of_their_file_system(
    tmp_path: Path, ahead_s: float
) -> None:
    """Two users of one directory see the same values; a listing uses each user's own clock."""
    url, shifted = f"file://{tmp_path}", ShiftedClock(ahead_s)
    first = open_store(url, StoreSettings(), ShiftedClock(0))
    second = open_store(url, StoreSettings(), shifted)
    async with first.running(), second.running():
        for name, writer in (("t:f:0:0", first), ("t:f:1:0", second)):
            assert await put_one(writer, name, b"x", ttl_s=100.0) is PutStatus.STORED
        names = ["t:f:0:0", "t:f:1:0"]
        assert await first.exists(names) == await second.exists(names) == 2
        for value in (await second.list("t:", limit=9)).values:
            assert value.expires_at == pytest.approx(shifted.wall() + 100, abs=5)
        assert second.health.clock_skew_s == pytest.approx(ahead_s, abs=1)
