"""The line: who goes next is what the rule says, however long it is, and others have their turn."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from tests.latch import until
from tests.simulated import simulated
from tests.world import world
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.sched.fair_queue import MAX_PASSED_OVER, Waiting, WaitingLine
from tierkv.sched.request import Promise, PromiseWait, RequestSpec

MANY = 10_000


def anybody(_: Waiting) -> bool:
    return True


def one(name: str, *, space: str = "", priority: int = 0) -> Waiting:
    prompt = Prompt.of([1, 2, 3, 4], 4, space=space)
    spec = RequestSpec(name, prompt, 0, priority=priority)
    return Waiting(spec, None, asyncio.get_running_loop().create_future())


class Rule:
    """The order of turns in its simplest words: everything is looked at each time."""

    def __init__(self) -> None:
        self.in_turn: list[Waiting] = []
        self.given: dict[str, int] = {}
        self.served = 0
        self.passed: dict[int, int] = {}

    def join(self, one: Waiting, spaces: set[str]) -> None:
        """spaces: of all that wait, those aside included."""
        if one.space not in spaces:
            level = min((self.given.get(each, 0) for each in spaces), default=self.served)
            self.given[one.space] = max(self.given.get(one.space, 0), level)
        self.in_turn.append(one)

    def place(self, one: Waiting) -> tuple[int, int]:
        return self.given.get(one.space, 0), one.number

    def first(self) -> Waiting | None:
        levels = {one.priority for one in self.in_turn}
        self.passed = {level: self.passed.get(level, 0) for level in levels}
        if not levels:
            return None
        overdue = {level: n for level, n in self.passed.items() if n >= MAX_PASSED_OVER}
        level = max(overdue, key=lambda each: (overdue[each], each)) if overdue else max(levels)
        return self.of(level)

    def of(self, level: int) -> Waiting:
        return min((one for one in self.in_turn if one.priority == level), key=self.place)

    def admitted(self, one: Waiting, num_blocks: int) -> None:
        for level in {other.priority for other in self.in_turn}:
            if level < one.priority and self.of(level).number < one.number:
                self.passed[level] = self.passed.get(level, 0) + 1
        self.passed[one.priority] = 0
        self.in_turn.remove(one)
        self.served = max(self.served, self.given[one.space])
        self.given[one.space] += num_blocks


@pytest.mark.parametrize("seed", range(8))
async def test_the_next_is_the_first_of_all_in_the_order_of_the_rule(seed: int) -> None:
    rng, line, rule = random.Random(seed), WaitingLine(), Rule()
    aside: dict[Waiting, Promise] = {}
    ways = ["join", "join", "join", "leave", "admit", "admit", "aside", "back"]
    for number in range(1500):
        what = rng.choice(ways)
        if what == "join" or not len(line):
            space, priority = rng.choice("abc"), rng.choice([0, 0, 5, 5, 5, 9, 9, 9])
            comes = one(str(number), space=space, priority=priority)
            rule.join(comes, {each.space for each in line})
            line.join(comes)
        elif what == "leave":
            gone = rng.choice(list(line))
            if aside.pop(gone, None) is None:
                rule.in_turn.remove(gone)
            line.leave(gone)
        elif what == "admit" and rule.in_turn:
            first = line.next(anybody)
            assert first is rule.first()
            assert first is not None
            num_blocks = rng.randrange(1, 9)
            line.admitted(first)
            line.given(first.space, num_blocks)
            rule.admitted(first, num_blocks)
        elif what == "aside" and rule.in_turn:
            chosen = rng.choice(rule.in_turn)
            promise = Promise(chosen.spec.prompt, 0, 9, 0.0, (Index(4).spaces.root, b""), 0)
            line.park(chosen, PromiseWait(promise, 5, 100.0), 0.0, lambda: None)
            aside[chosen] = promise
            rule.in_turn.remove(chosen)
        elif what == "back" and aside:
            back, promise = rng.choice(list(aside.items()))
            promise.first = 5
            assert line.ready_again() == [back]
            line.unpark(back)
            del aside[back]
            rule.in_turn.append(back)
        assert line.findings() == []
        assert line.next(anybody) is rule.first()
    for each in list(line):
        line.leave(each)
    assert line.next(anybody) is None


async def test_ten_thousand_wait_and_the_loop_goes_round_between_them() -> None:
    async with world(device_blocks=8) as here:
        service = here.service
        service.pause()
        most = 0

        async def run_one(number: int) -> None:
            service.scheduler.end(await here.admit([number % 7] * 4))

        async def watch() -> None:
            nonlocal most
            admitted = 0
            while admitted < MANY:
                await asyncio.sleep(0)
                now = service.stats().requests.admitted_requests
                most, admitted = max(most, now - admitted), now

        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            for number in range(MANY):
                group.create_task(run_one(number))
            await until(lambda: service.scheduler.num_waiting == MANY)
            group.create_task(watch())
            service.unpause()
        assert 0 < most <= 64
        await here.settle()


async def test_the_cost_of_an_admission_does_not_grow_with_those_that_wait() -> None:
    """As many admissions from a long line as from a short one take about as long; with a sort, or
    a scan, they would take a hundred times as long."""

    def seconds(length: int) -> float:
        line = WaitingLine()
        for number in range(length):
            line.join(one(str(number), space=str(number % 5), priority=number % 3))
        started = time.thread_time()
        for _ in range(100):
            first = line.next(anybody)
            assert first is not None
            line.admitted(first)
            line.given(first.space, 1)
        return time.thread_time() - started

    short = min(seconds(100) for _ in range(5))
    assert min(seconds(MANY) for _ in range(5)) < 10 * short


async def test_a_tenant_at_its_limit_with_thousands_waiting_costs_others_nothing() -> None:
    line, looks = WaitingLine(), 0
    for number in range(2_000):
        line.join(one(str(number), space="busy"))
    other = one("other", space="calm", priority=-1)
    line.join(other)

    def may_go(waiting: Waiting) -> bool:
        nonlocal looks
        looks += 1
        return waiting.space != "busy"

    assert line.next(may_go) is other
    assert looks == 2


@simulated
async def test_however_often_it_waits_for_others_a_request_waits_as_long_as_at_first() -> None:
    loop, line, waits = asyncio.get_running_loop(), WaitingLine(), one("waits")
    began, ups = loop.time(), list[float]()
    promises: list[Promise] = []
    line.join(waits)
    for starts, patience_s, ends in ((0.0, 1.0, 1.0), (0.5, 0.2, 0.7), (0.6, 1.0, 1.0)):
        await asyncio.sleep(began + starts - loop.time())
        line.unpark(waits)
        promise = Promise(waits.spec.prompt, 0, 9, 0.0, (Index(4).spaces.root, b""), 0)
        promises.append(promise)
        wait = PromiseWait(promise, 5, patience_s)
        line.park(waits, wait, loop.time(), lambda: ups.append(loop.time() - began))
        assert waits.timer is not None
        assert waits.timer.when() == pytest.approx(began + ends)
    await asyncio.sleep(3.0)
    assert ups == [pytest.approx(1.0)], "waits that were left have ended with that"
    line.unpark(waits)
    assert [promise.num_waiting for promise in promises] == [0, 0, 0], "nobody waits for them"
