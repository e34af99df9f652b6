"""Nobody starves: not a tenant behind another's backlog, not a low priority behind all above it."""

from __future__ import annotations

from itertools import count as count_up
from itertools import pairwise

import pytest

from tests.sched.test_waiting_line import anybody, one
from tierkv.sched.fair_queue import MAX_PASSED_OVER, Waiting, WaitingLine

BLOCKS = 4
numbers = count_up()


def serve(line: WaitingLine) -> Waiting:
    first = line.next(anybody)
    assert first is not None
    line.admitted(first)
    line.given(first.tenant, BLOCKS)
    return first


def join(line: WaitingLine, count: int, *, tenant: str = "", priority: int = 0) -> None:
    for _ in range(count):
        line.join(one(f"number {next(numbers)}", tenant=tenant, priority=priority))


async def test_two_tenants_with_long_backlogs_take_turns_to_the_end() -> None:
    line = WaitingLine()
    join(line, 100, tenant="many")
    join(line, 100, tenant="late")
    served = [serve(line).tenant for _ in range(200)]
    assert all(first != second for first, second in pairwise(served))


async def test_what_a_tenant_had_while_it_was_alone_is_no_debt() -> None:
    line = WaitingLine()
    for _ in range(1000):
        line.given("was alone", BLOCKS)
    join(line, 50, tenant="new")
    join(line, 50, tenant="was alone")
    served = [serve(line).tenant for _ in range(100)]
    assert served[:50].count("was alone") in (24, 25)


async def test_a_tenant_that_comes_back_has_no_old_credit() -> None:
    line = WaitingLine()
    join(line, 1, tenant="rare")
    serve(line)
    for _ in range(1000):
        line.given("busy", BLOCKS)
    join(line, 50, tenant="busy")
    join(line, 50, tenant="rare")
    served = [serve(line).tenant for _ in range(100)]
    assert served[:50].count("rare") in (24, 25, 26)


@pytest.mark.parametrize("num_levels", [2, 3, 5])
async def test_every_priority_goes_on_however_many_come_above_it(num_levels: int) -> None:
    line = WaitingLine()
    join(line, 10, priority=0)
    low = list(line)
    served: list[Waiting] = []
    for _ in range(20 * MAX_PASSED_OVER):
        for priority in range(1, num_levels):
            join(line, 1, priority=priority)
        served.append(serve(line))
    places = [served.index(each) for each in low]
    gaps = [second - first for first, second in pairwise([-1, *places])]
    assert places == sorted(places)
    assert max(gaps) <= (MAX_PASSED_OVER + 1) + num_levels


async def test_a_backlog_of_low_priority_does_not_stop_those_above_it() -> None:
    line = WaitingLine()
    join(line, 200, priority=0)
    join(line, 200, priority=5)
    served = [serve(line).priority for _ in range(100)]
    assert served.count(0) == 100 // (MAX_PASSED_OVER + 1)


async def test_those_that_were_there_before_are_not_passed_over_by_being_served() -> None:
    line = WaitingLine()
    join(line, 100, priority=5)
    join(line, 1, priority=0)
    served = [serve(line).priority for _ in range(101)]
    assert served.index(0) == 100, "all above it came before it"


async def test_one_that_is_overdue_and_may_not_go_holds_nobody_else_up() -> None:
    line = WaitingLine()
    join(line, 1, tenant="full", priority=0)
    join(line, 2 * MAX_PASSED_OVER, tenant="other", priority=5)
    for _ in range(MAX_PASSED_OVER + 5):
        first = line.next(lambda each: each.tenant != "full")
        assert first is not None
        assert first.tenant == "other"
        line.admitted(first)
        line.given(first.tenant, BLOCKS)
    assert serve(line).tenant == "full", "and it goes as soon as it may"
