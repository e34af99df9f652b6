"""The cache is never why a request is slower than without one: bounded regret, by a model.

A model of one node, a request after the other, step by step as a fetcher goes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.sched.request import Computing, PromiseWait
from tierkv.sched.worth import (
    HEDGE,
    MOST_IN_VAIN,
    PROBE_EVERY,
    SHARE,
    Estimator,
    FetchPolicy,
    Line,
    PrefillSpeed,
    Regret,
)

BYTES_PER_TOKEN = 128 * 1024
PREFILL = 30_000.0  # tokens a second
GROUP_TOKENS = 512  # what arrives at a time
ANSWER_S, LATENCY_S = 0.0005, 0.001
SIZES = (16, 32, 48, 64, 128, 480, 2000, 10_000, 20_000)


def telling(tokens: int = 1000, seconds: float = 1.0, **fields: float) -> Estimator:
    """An estimator that knows how fast the engine is."""
    bytes_per_token = fields.get("bytes_per_token", 1000.0)
    estimator = Estimator(bytes_per_token=bytes_per_token, policy=FetchPolicy.BEST_EFFORT)
    estimator.note_prefill(tokens, seconds)
    return estimator


class Node:
    """per_token_s: what an answer takes longer for each token. ticks: of a clock that counts whole
    milliseconds, as uvloop's; None for one that counts all. bandwidth: bytes a second, 0 for a tier
    that hangs."""

    def __init__(
        self, bandwidth: float, *, per_token_s: float = 0.0, ticks: random.Random | None = None
    ) -> None:
        self.estimator = telling(2000, 2000 / PREFILL, bytes_per_token=BYTES_PER_TOKEN)
        self.bandwidth, self.per_token_s, self.ticks = bandwidth, per_token_s, ticks
        self.with_cache = self.without = self.best = self.largest = 0.0
        self.fetched = Counter[int]()

    def measured(self, seconds: float) -> float:
        if self.ticks is None:
            return seconds
        return int((seconds + self.ticks.random() * 0.001) * 1000) / 1000

    def request(self, tokens: int) -> None:
        compute_s = tokens / PREFILL
        moves_s = tokens * BYTES_PER_TOKEN / self.bandwidth if self.bandwidth else math.inf
        answer_s = ANSWER_S + self.per_token_s * tokens
        waited_s, came = self._waits(tokens, answer_s, LATENCY_S + moves_s)
        self.with_cache += waited_s + (tokens - came) / PREFILL
        self.without += compute_s
        self.best += min(compute_s, answer_s + LATENCY_S + moves_s)
        self.largest = max(self.largest, compute_s)

    def _waits(self, tokens: int, answer_s: float, fetch_s: float) -> tuple[float, int]:
        estimator = self.estimator
        question = estimator.decide_question(tokens)
        if not question.fetches:
            return 0.0, 0
        assert question.give_up_s is not None
        if not self.bandwidth or answer_s > question.give_up_s:
            estimator.note_answer(tokens, self.measured(question.give_up_s), in_time=False)
            estimator.note_wait(0, self.measured(question.give_up_s))
            return question.give_up_s, 0
        estimator.note_answer(tokens, self.measured(answer_s), in_time=True)
        decision = estimator.decide(tokens, is_try=question.is_try)
        if not decision.fetches:
            estimator.note_wait(0, self.measured(answer_s))
            return answer_s, 0
        give_up_s = question.give_up_s - answer_s
        if decision.give_up_s is not None:
            give_up_s = min(decision.give_up_s, question.compute_s - answer_s)
        if fetch_s <= give_up_s:
            estimator.note_fetch(tokens * BYTES_PER_TOKEN, self.measured(fetch_s))
            estimator.note_wait(tokens, self.measured(answer_s + fetch_s))
            self.fetched[tokens] += 1
            return answer_s + fetch_s, tokens
        moving_s = max(give_up_s - LATENCY_S, 0.0)
        came = int(moving_s * self.bandwidth / BYTES_PER_TOKEN) // GROUP_TOKENS * GROUP_TOKENS
        estimator.note_fetch(came * BYTES_PER_TOKEN, self.measured(give_up_s), is_whole=False)
        estimator.note_wait(came, self.measured(answer_s + give_up_s))
        return answer_s + give_up_s, came


# Of one kind of tier


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "bandwidths",
    [
        [20e9] * 400,
        [1e9] * 400,  # always slower than computing
        [0.0] * 400,  # hangs
        [20e9] * 200 + [0.0] * 200,
        [20e9] * 200 + [0.5e9] * 200,
        ([20e9] * 40 + [0.3e9] * 40) * 5,
    ],
    ids=["fast", "slow", "hangs", "breaks", "degrades", "flaps"],
)
def test_best_effort_is_hardly_ever_slower_than_no_cache(
    bandwidths: list[float], seed: int
) -> None:
    rng, node = random.Random(seed), Node(bandwidths[0])
    for node.bandwidth in bandwidths:
        node.request(rng.randrange(500, 20_000))
    changes = 1 + sum(a != b for a, b in pairwise(bandwidths))
    # Every change of the tier costs a few requests that learn of it; then only rare tries.
    assert node.with_cache <= node.without * 1.03 + changes * (MOST_IN_VAIN + 1) * node.largest


@pytest.mark.parametrize(("before", "most"), [(0, 0.2), (50, 0.6)])
def test_a_tier_that_is_fast_or_becomes_fast_is_used(before: int, most: float) -> None:
    rng, node = random.Random(1), Node(1e9)
    for number in range(450):
        node.bandwidth = 1e9 if number < before else 40e9
        node.request(rng.randrange(500, 20_000))
    assert node.with_cache < node.without * most


def test_a_tier_that_is_only_somewhat_faster_than_computing_is_used_in_the_end() -> None:
    node = Node(bandwidth=5e9)
    for _ in range(1000):
        node.request(480)
    assert node.fetched[480] >= 900
    assert node.with_cache <= node.best * 1.1


# Of prompts of all sizes


@pytest.mark.parametrize("small", [8, 32, 64, 200])
def test_small_and_big_ones_in_turn_cost_what_is_best_for_each(small: int) -> None:
    node = Node(bandwidth=20e9)
    for _ in range(300):
        node.request(small)
        node.request(10_000)
    assert node.fetched[10_000] >= 295
    assert node.with_cache <= node.best * 1.02


@pytest.mark.parametrize("ticks", [None, random.Random(9)], ids=["any", "whole ms"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bandwidth", [20e9, 5e9, 1e9])
def test_of_prompts_of_all_sizes_none_makes_the_cache_slower_than_none(
    bandwidth: float, seed: int, ticks: random.Random | None
) -> None:
    rng, node = random.Random(seed), Node(bandwidth, ticks=ticks)
    for _ in range(1500):
        node.request(rng.choice(SIZES))
    assert node.with_cache <= node.without * 1.03
    assert node.with_cache <= node.best * 1.1


def test_who_asks_about_little_is_not_kept_from_it_by_those_who_ask_about_much() -> None:
    """Of whom each has its answer long after the little one would have to compute."""
    node = Node(bandwidth=40e9, per_token_s=1e-6)
    for _ in range(100):
        node.request(480)
        node.request(20_000)
    assert node.fetched[480] >= 95
    assert node.fetched[20_000] >= 95


def test_an_answer_that_one_could_not_wait_for_does_not_silence_the_tier_for_a_bigger_one() -> None:
    estimator = telling(1000, 1.0, bytes_per_token=1.0)
    small = estimator.decide_question(10)
    assert small.give_up_s == pytest.approx(0.01)
    estimator.note_answer(10, 0.01, in_time=False)
    assert not estimator.decide_question(10).fetches
    assert estimator.decide_question(20).is_try  # it hangs, for all that is known
    assert estimator.decide_question(21).fetches
    estimator.note_answer(21, 0.005, in_time=True)
    estimator.note_answer(1000, 0.1, in_time=True)
    assert estimator.decide_question(900).fetches
    assert estimator.decide_question(100).fetches, "of less it can say sooner what it has"
    assert not estimator.decide_question(3).fetches  # nor is asked what cannot be waited for


# The bound


def test_a_wait_costs_as_much_as_computing_at_the_most_and_a_share_beyond_the_estimate() -> None:
    estimator = telling(1000, 1.0)
    assert estimator.decide_question(1000).give_up_s == pytest.approx(1.0)
    estimator.note_answer(1000, 0.01, in_time=True)
    estimator.note_fetch(1e6, 0.1)
    assert estimator.decide_question(1000).give_up_s == pytest.approx(0.11 + HEDGE)
    assert estimator.decide(1000).give_up_s == pytest.approx(0.1 + HEDGE)
    estimator.note_fetch(1e6, 0.95)
    assert estimator.decide_question(1000).give_up_s == pytest.approx(1.0)


def test_what_is_queued_in_front_counts() -> None:
    estimator = telling(1000, 1.0)
    estimator.note_fetch(1e6, 0.1)
    assert estimator.decide(1000).fetches
    queued = estimator.begin_transfer(100_000, 0.0)
    decision = estimator.decide(1000)
    assert (decision.fetches, decision.reason) == (False, "computing is estimated to be faster")
    assert estimator.findings() != []
    estimator.end_transfer(queued, 1.0, is_late=False)
    assert estimator.decide(1000).fetches
    assert estimator.findings() == []


def test_a_tier_that_is_too_slow_is_tried_now_and_then_and_is_used_when_it_is_fast() -> None:
    estimator, tries = telling(1000, 1.0), 0
    estimator.note_answer(1000, 2.0, in_time=True)
    for _ in range(10 * PROBE_EVERY):
        decision = estimator.decide_question(1000)
        tries += decision.is_try
        assert decision.fetches == decision.is_try
    assert tries == 10
    estimator.note_answer(1000, 0.01, in_time=True)
    assert estimator.decide_question(1000).fetches


def test_a_tier_that_was_waited_for_in_vain_is_tried_soon_and_then_ever_more_rarely() -> None:
    estimator = telling(1000, 1.0)
    estimator.note_answer(1000, 0.01, in_time=True)
    estimator.note_fetch(1e6, 0.01)
    for _ in range(5):  # all of whom one stall has held up
        estimator.note_answer(1000, 1.0, in_time=False)
    refused = 0
    gaps: list[int] = []
    while len(gaps) < 9:
        if estimator.decide_question(1000).is_try:
            gaps.append(refused)
            refused = 0
            estimator.note_answer(1000, 1.0, in_time=False)
        else:
            refused += 1
    assert gaps == [1, 2, 4, 8, 16, 32, *3 * [PROBE_EVERY - 1]]


def test_a_try_that_came_too_late_does_not_end_the_doubt_and_one_in_time_does() -> None:
    estimator = telling(1000, 1.0)

    def num_refused() -> int:
        refused = 0
        while not estimator.decide_question(1000).fetches:
            refused += 1
        return refused

    estimator.note_answer(1000, 1.0, in_time=False)
    assert num_refused() == 1
    estimator.note_answer(1000, 5.0, in_time=True)  # what had stalled has come at last
    assert num_refused() == 2
    estimator.note_answer(1000, 0.01, in_time=True)
    estimator.note_fetch(1e6, 0.01)
    assert num_refused() == 0
    estimator.note_answer(1000, 3.0, in_time=True)  # it has become slow, which is sure
    assert num_refused() == PROBE_EVERY - 1


def test_as_much_may_be_lost_at_first_as_computing_two_of_the_largest_takes() -> None:
    estimator = telling(1000, 1.0)

    def num_asked() -> int:
        asked = 0
        while estimator.decide_question(1000).fetches:
            estimator.note_wait(0, 0.25)
            asked += 1
        return asked

    expected = round(MOST_IN_VAIN / (0.25 - SHARE))
    assert abs(num_asked() - expected) <= 1
    assert num_asked() == 0
    estimator.begin_anew()
    assert abs(num_asked() - expected) <= 1, "of another tier nothing is known"


def test_what_a_regret_has_is_bounded_both_ways() -> None:
    regret = Regret()
    assert not regret.allow(0.0), "who computes in no time waits for nobody"
    assert regret.allow(1.0)
    regret.add(1e9)  # an estimate that was far off, say
    regret.add(-2 * MOST_IN_VAIN)
    assert not regret.allow(1.0)
    regret.add(-1e9)  # a wait of hours
    num_refused = sum(not regret.allow(1.0) for _ in range(1000))
    assert num_refused <= 2 * MOST_IN_VAIN / SHARE
    assert regret.allow(math.inf) or regret.allow(1.0), "nothing odd sticks"
    regret.fill()
    assert regret.seconds == MOST_IN_VAIN


def test_what_one_large_request_has_lost_is_not_held_against_small_ones_for_ever() -> None:
    regret = Regret()
    assert regret.allow(100.0)
    regret.add(-1e9)
    num_refused = next(number for number in range(10_000) if regret.allow(1.0))
    assert 50 < num_refused < 500


def test_what_the_engine_tells_counts_and_what_was_observed_only_until_then() -> None:
    prefill = PrefillSpeed()
    prefill.observe(1000, 3.0)
    assert not prefill.is_told
    assert prefill.seconds(1000) == pytest.approx(3.0)
    prefill.tell(1000, 1.0)
    prefill.observe(1000, 3.0)
    assert prefill.is_told
    assert prefill.seconds(1000) == pytest.approx(1.0)


def test_the_other_policies_do_what_they_say() -> None:
    wait = Estimator(bytes_per_token=1.0, policy=FetchPolicy.WAIT_COMPLETE).decide(1000)
    assert (wait.fetches, wait.give_up_s) == (True, None)
    until = Estimator(bytes_per_token=1.0, policy=FetchPolicy.DEADLINE, deadline_s=3.0).decide(9)
    assert (until.fetches, until.give_up_s) == (True, 3.0)
    with pytest.raises(ValueError, match="deadline"):
        Estimator(bytes_per_token=1.0, policy=FetchPolicy.DEADLINE)


# The lines


def test_a_line_finds_latency_and_bandwidth_again() -> None:
    line = Line()
    rng = random.Random(1)
    for _ in range(60):
        size = rng.uniform(1e6, 1e9)
        line.add(size, 0.01 + size / 2e9)
    assert line.seconds(1e9) == pytest.approx(0.51, rel=0.01)
    assert line.seconds(1e6) == pytest.approx(0.0105, rel=0.1)


def test_a_line_of_equal_samples_is_a_plain_rate_and_forgets_the_old() -> None:
    line = Line()
    for _ in range(5):
        line.add(100.0, 1.0)
    assert line.seconds(50.0) == pytest.approx(0.5)
    for _ in range(60):
        line.add(100.0, 4.0)
    assert line.seconds(100.0) == pytest.approx(4.0, rel=0.05)


def test_one_size_after_another_is_one_line_and_nothing_begins_anew() -> None:
    line = Line()
    for _ in range(10):
        line.add(1e6, 0.001 + 1e6 / 20e9)
        line.add(1e9, 0.001 + 1e9 / 20e9)
    assert line.seconds(1e6) == pytest.approx(0.00105, rel=0.01)
    assert line.seconds(1e9) == pytest.approx(0.051, rel=0.01)


def test_no_measurement_however_odd_raises_or_is_believed_for_long() -> None:
    rng = random.Random(5)
    odd = [0.0, 1e-300, 1e-9, 1.0, 1e9, 1e100, math.inf]
    for _ in range(300):
        estimator = Estimator(bytes_per_token=1000.0, policy=FetchPolicy.BEST_EFFORT)
        for _ in range(12):
            estimator.note_prefill(rng.choice([1, 7, 10**9]), rng.choice(odd))
            estimator.note_fetch(
                rng.choice([0.0, 1.0, 1e15]), rng.choice(odd), is_whole=rng.random() < 0.5
            )
            estimator.note_answer(7, rng.choice(odd), in_time=rng.random() < 0.5)
            estimator.decide(rng.choice([1, 1000]))
            estimator.decide_question(rng.choice([1, 1000]))
        for _ in range(2):
            estimator.note_prefill(1000, 1.0)
            estimator.note_fetch(1e6, 0.1)
            estimator.note_answer(1000, 0.01, in_time=True)
        assert estimator.decide_question(1000).fetches
        assert estimator.decide(1000).fetches


# Waiting for what another request computes


def computing_and_a_wait() -> tuple[Computing, PromiseWait]:
    prefill, index, prompt = PrefillSpeed(), Index(4), Prompt.of(list(range(64)), 4)
    prefill.tell(64, 1.0)
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
    prefill.tell(1000, 1.0)
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


def test_after_waits_that_were_lost_a_chance_is_taken_again_when_enough_were_passed_by() -> None:
    computing, wait = computing_and_a_wait()
    for passes in (1, 3, 7):
        computing.note_wait(wait, 0.0, was_worth_it=False)
        for _ in range(passes):
            assert not computing.is_worth_it(wait)
            computing.passed_by(wait)
        assert computing.is_worth_it(wait)


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
