"""Small prompts, for which storage is too slow, do not keep big ones from it, nor the other way."""

from __future__ import annotations

import random

import pytest

from tests.simulated import simulate, simulated_world
from tierkv.cache.eviction import WritePolicy
from tierkv.sched.worth import Estimator, FetchPolicy, Line

BYTES_PER_TOKEN = 128 * 1024
PREFILL = 30_000.0  # tokens a second
GROUP_TOKENS = 512  # what arrives at a time
ANSWER_S, LATENCY_S = 0.0005, 0.001


class Node:
    """A request after the other, step by step as a fetcher goes: question, answer, groups.

    per_token_s: what an answer takes longer for each token. ticks: of a clock that counts whole
        milliseconds, as uvloop's; None for one that counts all.
    """

    def __init__(
        self, bandwidth: float, *, per_token_s: float = 0.0, ticks: random.Random | None = None
    ) -> None:
        self.estimator = Estimator(bytes_per_token=BYTES_PER_TOKEN, policy=FetchPolicy.BEST_EFFORT)
        self.estimator.note_prefill(2000, 2000 / PREFILL)
        self.bandwidth, self.per_token_s, self.ticks = bandwidth, per_token_s, ticks
        self.with_cache = self.without = self.best = 0.0
        self.fetched: dict[int, int] = {}

    def measured(self, seconds: float) -> float:
        if self.ticks is None:
            return seconds
        return int((seconds + self.ticks.random() * 0.001) * 1000) / 1000

    def request(self, tokens: int) -> None:
        compute_s = tokens / PREFILL
        fetch_s = LATENCY_S + tokens * BYTES_PER_TOKEN / self.bandwidth
        answer_s = ANSWER_S + self.per_token_s * tokens
        self.with_cache += self._seconds(tokens, answer_s, compute_s, fetch_s)
        self.without += compute_s
        self.best += min(compute_s, answer_s + fetch_s)

    def _seconds(self, tokens: int, answer_s: float, compute_s: float, fetch_s: float) -> float:
        estimator = self.estimator
        question = estimator.decide_question(tokens)
        if not question.fetches:
            return compute_s
        assert question.give_up_s is not None
        if answer_s > question.give_up_s:
            estimator.note_answer(tokens, self.measured(question.give_up_s), in_time=False)
            return question.give_up_s + compute_s
        estimator.note_answer(tokens, self.measured(answer_s), in_time=True)
        decision = estimator.decide(tokens)
        if not decision.fetches:
            return answer_s + compute_s
        assert decision.give_up_s is not None
        if fetch_s <= decision.give_up_s:
            estimator.note_fetch(tokens * BYTES_PER_TOKEN, self.measured(fetch_s))
            self.fetched[tokens] = self.fetched.get(tokens, 0) + 1
            return answer_s + fetch_s
        moving_s = max(decision.give_up_s - LATENCY_S, 0.0)
        came = int(moving_s * self.bandwidth / BYTES_PER_TOKEN) // GROUP_TOKENS * GROUP_TOKENS
        waited_s = self.measured(decision.give_up_s)
        estimator.note_fetch(came * BYTES_PER_TOKEN, waited_s, is_whole=False)
        return answer_s + decision.give_up_s + (tokens - came) / PREFILL


@pytest.mark.parametrize("small", [8, 32, 64, 200])
def test_small_and_big_ones_in_turn_cost_what_is_best_for_each(small: int) -> None:
    node = Node(bandwidth=20e9)
    for _ in range(300):
        node.request(small)
        node.request(10_000)
    assert node.fetched[10_000] >= 295
    assert node.with_cache <= node.best * 1.02


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bandwidth", [20e9, 5e9, 1e9])
def test_of_prompts_of_all_sizes_none_makes_the_cache_slower_than_none(
    bandwidth: float, seed: int
) -> None:
    rng, node = random.Random(seed), Node(bandwidth)
    sizes = [16, 32, 48, 64, 128, 480, 2000, 10_000, 20_000]
    for _ in range(1500):
        node.request(rng.choice(sizes))
    assert node.with_cache <= node.without * 1.03
    assert node.with_cache <= node.best * 1.1


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_that_counts_whole_milliseconds_is_enough(seed: int) -> None:
    rng, node = random.Random(seed), Node(bandwidth=20e9, ticks=random.Random(seed))
    for _ in range(1500):
        node.request(rng.choice([16, 32, 48, 64, 128, 480, 2000, 10_000, 20_000]))
    assert node.with_cache <= node.best * 1.1


def test_who_asks_about_little_is_not_kept_from_it_by_those_who_ask_about_much() -> None:
    """Of whom each has its answer long after the little one would have to compute."""
    node = Node(bandwidth=40e9, per_token_s=1e-6)
    for _ in range(100):
        node.request(480)
        node.request(20_000)
    assert node.fetched[480] >= 95
    assert node.fetched[20_000] >= 95


def test_a_tier_that_is_only_somewhat_faster_than_computing_is_used_in_the_end() -> None:
    """All of it arrives at once, after more than the share of computing that most tries have."""
    node = Node(bandwidth=8e9)
    for _ in range(1000):
        node.request(480)
    assert node.fetched[480] >= 800
    assert node.with_cache <= node.without * 0.7


def test_an_answer_that_one_could_not_wait_for_does_not_silence_the_tier_for_a_bigger_one() -> None:
    estimator = Estimator(bytes_per_token=1.0, policy=FetchPolicy.BEST_EFFORT)
    estimator.note_prefill(1000, 1.0)
    small = estimator.decide_question(10)
    assert small.give_up_s is not None
    estimator.note_answer(10, small.give_up_s, in_time=False)
    assert not estimator.decide_question(10).fetches
    assert not estimator.decide_question(20).fetches  # it hangs, for all that is known
    assert estimator.decide_question(21).fetches
    estimator.note_answer(21, 0.005, in_time=True)
    estimator.note_answer(1000, 0.1, in_time=True)
    assert estimator.decide_question(900).fetches
    assert estimator.decide_question(100).fetches, "of less it can say sooner what it has"
    assert not estimator.decide_question(10).fetches  # nor is asked what cannot be waited for


def test_growing_prompts_ask_a_tier_that_hangs_only_each_time_they_have_doubled() -> None:
    estimator = Estimator(bytes_per_token=1.0, policy=FetchPolicy.BEST_EFFORT)
    estimator.note_prefill(1000, 1.0)
    waited = 0.0
    for tokens in range(1000, 1030):
        decision = estimator.decide_question(tokens)
        if decision.fetches:
            assert decision.give_up_s is not None
            waited += decision.give_up_s
            estimator.note_answer(tokens, decision.give_up_s, in_time=False)
    assert waited == pytest.approx(0.25)


def test_one_size_after_another_is_one_line_and_nothing_begins_anew() -> None:
    line = Line()
    for _ in range(10):
        line.add(1e6, 0.001 + 1e6 / 20e9)
        line.add(1e9, 0.001 + 1e9 / 20e9)
    assert line.seconds(1e6) == pytest.approx(0.00105, rel=0.01)
    assert line.seconds(1e9) == pytest.approx(0.051, rel=0.01)


def test_no_measurement_however_odd_raises_or_is_believed_for_long() -> None:
    rng = random.Random(5)
    odd = [0.0, 1e-300, 1e-9, 1.0, 1e9, 1e100, float("inf")]
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


def test_a_node_fetches_long_prompts_though_short_ones_could_not_wait_for_the_store() -> None:
    async def scene() -> None:
        through = WritePolicy.WRITE_THROUGH
        async with simulated_world(
            random.Random(1),
            device_blocks=256,
            host_blocks=256,
            host_write=through,
            storage_write=through,
        ) as here:
            short = [list(range(at, at + 8)) for at in range(10_000, 10_080, 8)]
            long = [list(range(at, at + 400)) for at in range(0, 4000, 400)]
            for prompt in (*short, *long):
                await here.run(prompt)
            here.service.reset()
            here.service.note_prefill(1000, 1.0)
            here.the_store.delay_s = 0.02  # a short one is computed in 8 ms, a long one in 400
            found = []
            for less, more in zip(short, long, strict=True):
                await here.run(less)
                found.append((await here.run(more)).storage_tokens)
            assert found == [399] * 10

    simulate(scene())
