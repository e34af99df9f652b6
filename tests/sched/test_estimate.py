"""The cache is never why a request is slower than without one: bounded regret, by simulation."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.sched.computing import Computing
from tierkv.sched.worth import HEDGE, Estimator, FetchPolicy, Line

BYTES_PER_TOKEN = 128 * 1024
PREFILL = 30_000.0  # tokens a second


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


def simulate(policy: FetchPolicy, bandwidths: list[float], seed: int) -> tuple[float, float, float]:
    """Time with the cache, time without, and the dearest request's compute time.

    bandwidths: bytes a second of the tier at each request; 0 for a tier that hangs.
    """
    rng = random.Random(seed)
    estimator = Estimator(bytes_per_token=BYTES_PER_TOKEN, policy=policy, deadline_s=10.0)
    with_cache = without = dearest = 0.0
    for bandwidth in bandwidths:
        tokens = rng.randrange(500, 20_000)
        compute = tokens / PREFILL * rng.uniform(0.9, 1.1)
        size = tokens * BYTES_PER_TOKEN
        decision = estimator.decide(tokens)
        took = compute
        if decision.fetches:
            fetch = 0.002 + size / bandwidth if bandwidth else float("inf")
            patience = decision.give_up_s if decision.give_up_s is not None else float("inf")
            if fetch <= patience:
                took = fetch
                estimator.note_fetch(size, fetch)
            else:
                took = patience + compute
                estimator.note_fetch(patience * bandwidth, patience)
                estimator.note_prefill(tokens, compute)
        else:
            estimator.note_prefill(tokens, compute)
        with_cache += took
        without += compute
        dearest = max(dearest, compute)
    return with_cache, without, dearest


@pytest.mark.parametrize("seed", range(5))
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
    with_cache, without, dearest = simulate(FetchPolicy.BEST_EFFORT, bandwidths, seed)
    changes = 1 + sum(a != b for a, b in pairwise(bandwidths))
    # Every change of the tier costs a few requests that learn of it; then only rare tries.
    assert with_cache <= without * 1.03 + changes * 6 * dearest


@pytest.mark.parametrize("seed", range(3))
def test_best_effort_has_most_of_what_a_fast_tier_offers(seed: int) -> None:
    with_cache, without, _ = simulate(FetchPolicy.BEST_EFFORT, [40e9] * 300, seed)
    assert with_cache < without * 0.2


@pytest.mark.parametrize("seed", range(3))
def test_a_tier_that_becomes_fast_is_noticed(seed: int) -> None:
    with_cache, without, _ = simulate(FetchPolicy.BEST_EFFORT, [1e9] * 50 + [40e9] * 400, seed)
    assert with_cache < without * 0.6


def test_the_other_policies_do_what_they_say() -> None:
    wait = Estimator(bytes_per_token=1.0, policy=FetchPolicy.WAIT_COMPLETE).decide(1000)
    assert (wait.fetches, wait.give_up_s) == (True, None)
    until = Estimator(bytes_per_token=1.0, policy=FetchPolicy.DEADLINE, deadline_s=3.0).decide(9)
    assert (until.fetches, until.give_up_s) == (True, 3.0)
    with pytest.raises(ValueError, match="deadline"):
        Estimator(bytes_per_token=1.0, policy=FetchPolicy.DEADLINE)


def test_what_is_queued_in_front_counts() -> None:
    estimator = Estimator(bytes_per_token=1000.0, policy=FetchPolicy.BEST_EFFORT)
    estimator.note_prefill(1000, 1.0)
    estimator.note_fetch(1e6, 0.1)
    assert estimator.decide(1000).fetches
    estimator.queued_bytes = 1e8
    decision = estimator.decide(1000)
    assert not decision.fetches
    assert decision.reason == "computing is estimated to be faster"


def test_a_hopeful_wait_costs_a_share_of_computing_at_the_most() -> None:
    estimator = Estimator(bytes_per_token=1000.0, policy=FetchPolicy.BEST_EFFORT)
    estimator.note_prefill(1000, 1.0)
    first = estimator.decide(1000)
    assert first.fetches
    assert first.give_up_s == pytest.approx(HEDGE)


def test_a_tier_that_never_answers_costs_less_than_one_in_a_hundred() -> None:
    estimator = Estimator(bytes_per_token=1.0, policy=FetchPolicy.BEST_EFFORT)
    estimator.note_prefill(1000, 1.0)
    waited = computed = 0.0
    for _ in range(3200):
        decision = estimator.decide_question(1000)
        if decision.fetches:
            assert decision.give_up_s is not None
            waited += decision.give_up_s
            estimator.note_answer(1000, decision.give_up_s, in_time=False)
        computed += 1.0
    assert 0 < waited <= computed * 0.01
    estimator.note_answer(1000, 0.001, in_time=True)
    assert estimator.decide_question(1000).fetches


@pytest.mark.parametrize("delivers", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("begun", [0.0, 1.0])
def test_waiting_for_owners_costs_little_when_they_fail_and_saves_when_they_deliver(
    delivers: float, begun: float
) -> None:
    """begun: which share of their time they are at it already, at the most."""
    prefill, rng = Line(), random.Random(3)
    prefill.add(1000.0, 1.0)
    index = Index(4)
    computing = Computing(prefill, lambda: None)
    with_waits = without = 0.0
    for number in range(2000):
        prompt = Prompt.of(list(range(number * 64, number * 64 + 64)), 4)
        claim = computing.begin(index.root, 0, prompt, 0.0)
        assert claim is not None
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
        computing.end(claim)
        with_waits, without = with_waits + took, without + compute_s
    assert with_waits <= without * 1.03
    if delivers == begun == 1.0:
        assert with_waits <= without * 0.6


def test_after_waits_that_were_lost_a_chance_is_taken_again_when_enough_were_passed_by() -> None:
    prefill, index, prompt = Line(), Index(4), Prompt.of(list(range(64)), 4)
    prefill.add(1000.0, 1.0)
    computing = Computing(prefill, lambda: None)
    computing.begin(index.root, 0, prompt, 0.0)
    wait = computing.possible_wait(index.match(prompt), prompt, 16, 0.01)
    assert wait is not None
    for passes in (1, 3, 7):
        computing.note_wait(wait, 0.0, was_worth_it=False)
        for _ in range(passes):
            assert not computing.is_worth_it(wait)
            computing.passed_by(wait)
        assert computing.is_worth_it(wait)
