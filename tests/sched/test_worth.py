"""What is known of tier and engine, and waits for what another request computes."""

from __future__ import annotations

import math
import random

import pytest

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.sched.request import Computing, PromiseWait
from tierkv.sched.worth import HEDGE, Estimator, Line, PrefillSpeed, TierSpeed

# The tier


def test_a_tier_is_a_round_trip_and_a_rate_behind_what_is_queued() -> None:
    tier = TierSpeed()
    assert tier.transfer_s(1e6) == 0.0
    for _ in range(20):
        tier.note_answer(0.1)
        tier.note_transfer(1e6, 0.3)
        tier.note_transfer(1e5, 0.12)
    assert tier.transfer_s(1e6) == pytest.approx(0.3, rel=0.01)
    queued = tier.begin(1e6, 0.0)
    assert tier.transfer_s(1e6) == pytest.approx(0.5, rel=0.01)
    tier.end(queued, 1.0, is_late=False)
    assert tier.queued_bytes == 0.0


def test_a_transfer_that_waited_for_others_counts_their_bytes_too() -> None:
    tier = TierSpeed()
    first, second = tier.begin(1e6, 0.0), tier.begin(1e6, 0.0)
    tier.arrived(first, 1e6)
    tier.end(first, 1.0, is_late=False)
    tier.arrived(second, 1e6)
    tier.end(second, 2.0, is_late=False)
    assert tier.transfer_s(1e6) == pytest.approx(1.0, rel=0.01)


def test_no_measurement_however_odd_raises_or_is_believed_for_long() -> None:
    rng = random.Random(5)
    odd = [0.0, 1e-300, 1e-9, 1.0, 1e9, 1e100, math.inf]
    for _ in range(300):
        estimator = Estimator(1000.0)
        for _ in range(12):
            estimator.prefill.note(rng.choice([1, 7, 10**9]), rng.choice(odd))
            estimator.tier.note_transfer(rng.choice([0.0, 1.0, 1e15]), rng.choice(odd[:-2]))
            estimator.tier.note_answer(rng.choice(odd[:-2]), has_found=True)
            estimator.judge(rng.choice([1, 1000]), 0.0)
        for _ in range(2):
            estimator.prefill.note(1000, 1.0)
            estimator.tier.note_answer(0.01, has_found=True)
        for _ in range(3):
            estimator.tier.note_transfer(1e6, 0.1)
        assert estimator.judge(1000, 0.0).wait_s > 0


# The engine


def test_what_the_engine_tells_counts_and_what_was_observed_only_until_then() -> None:
    prefill = PrefillSpeed()
    prefill.observe(1000, 3.0)
    assert not prefill.is_reported
    assert prefill.seconds(1000) == pytest.approx(3.0)
    prefill.note(1000, 1.0)
    prefill.observe(1000, 3.0)
    assert prefill.is_reported
    assert prefill.seconds(1000) == pytest.approx(1.0)


# The lines


def test_a_line_finds_latency_and_bandwidth_again() -> None:
    line = Line()
    rng = random.Random(1)
    for _ in range(60):
        size = rng.uniform(1e6, 1e9)
        line.add(size, 0.01 + size / 2e9)
    assert line.seconds(1e9) == pytest.approx(0.51, rel=0.01)
    assert line.seconds(1e6) == pytest.approx(0.0105, rel=0.1)


# Waiting for what another request computes


def computing_and_a_wait() -> tuple[Computing, PromiseWait]:
    prefill, index, prompt = PrefillSpeed(), Index(4), Prompt.of(list(range(64)), 4)
    prefill.note(64, 1.0)
    computing = Computing(prefill, lambda: None)
    computing.begin(index.spaces.root, 0, prompt, 0.0)
    wait = computing.possible_wait(index.match(prompt), prompt, 16, 0.01)
    assert wait is not None
    return computing, wait


@pytest.mark.parametrize("delivers", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("begun", [0.0, 1.0])
def test_waiting_for_owners_costs_little_when_they_fail_and_saves_when_they_deliver(
    delivers: float, begun: float
) -> None:
    """begun: which share of their time they are at it already, at the most."""
    prefill, rng = PrefillSpeed(), random.Random(3)
    prefill.note(1000, 1.0)
    index = Index(4)
    computing = Computing(prefill, lambda: None)
    with_waits = without = 0.0
    for number in range(2000):
        prompt = Prompt.of(list(range(number * 64, number * 64 + 64)), 4)
        promise = computing.begin(index.spaces.root, 0, prompt, 0.0)
        assert promise is not None
        compute_s, elapsed = prefill.seconds(64), begun * rng.random() * prefill.seconds(64)
        wait = computing.possible_wait(index.match(prompt), prompt, 16, elapsed)
        took = compute_s
        if wait is not None and not computing.is_worth_it(wait):
            computing.passed_by(wait)
        elif wait is not None:
            assert wait.patience_s <= compute_s * (1 + HEDGE)
            is_fine = rng.random() < delivers
            took = compute_s - elapsed if is_fine else wait.patience_s + compute_s
            computing.note_wait(wait, took - (0 if is_fine else compute_s), was_worth_it=is_fine)
        computing.end(promise)
        with_waits, without = with_waits + took, without + compute_s
    assert with_waits <= without * 1.03
    if delivers == begun == 1.0:
        assert with_waits <= without * 0.6


def test_waits_for_owners_that_deliver_pay_for_those_that_came_to_nothing() -> None:
    computing, wait = computing_and_a_wait()
    computing.note_wait(wait, 2.5, was_worth_it=False)
    for _ in range(5):
        assert not computing.is_worth_it(wait), "it has cost more than was to be had"
        computing.passed_by(wait)
    computing.note_wait(wait, 0.0, was_worth_it=True)
    assert computing.is_worth_it(wait)
    computing.note_wait(wait, 1.2, was_worth_it=False)
    computing.note_wait(wait, 9.0, was_worth_it=True)
    assert not computing.is_worth_it(wait), "one that took longer than computing has saved nothing"


def test_after_a_short_wait_in_vain_one_chance_is_passed_by_and_the_next_is_taken() -> None:
    computing, wait = computing_and_a_wait()
    computing.note_wait(wait, 0.01, was_worth_it=False)
    assert not computing.is_worth_it(wait)
    computing.passed_by(wait)
    assert computing.is_worth_it(wait)
