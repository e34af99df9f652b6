"""Sampling is a function of logits, settings and position; nothing else is remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.engine import Sampling
from tierkv.engine_runs import logprobs_of
from tierkv.errors import BadRequestError
from tierkv.refmodel.model import sample

LOGITS = np.linspace(-3, 3, 256, dtype=np.float32)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros(256, np.float32)
    logits[[7, 9, 200]] = 4.0
    assert sample(logits, Sampling(), 0) == 7


def test_the_choices_of_a_seed_are_pinned() -> None:
    warm = Sampling(temperature=1.0, seed=5)
    found = [sample(LOGITS, warm, position) for position in range(8)]
    assert found == [242, 197, 249, 133, 248, 169, 223, 246]


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([1, 2, 5, 2], np.float32))
    warm = Sampling(temperature=1.0)
    counts = np.bincount([sample(logits, warm, at) for at in range(4000)], minlength=4)
    assert np.abs(counts / 4000 - [0.1, 0.2, 0.5, 0.2]).max() < 0.03


@given(top_k=st.integers(1, 300), position=st.integers(0, 2**40), seed=st.integers(0, 2**64 - 1))
def test_top_k_chooses_among_the_best(top_k: int, position: int, seed: int) -> None:
    token = sample(LOGITS, Sampling(temperature=9.0, seed=seed, top_k=top_k), position)
    assert token >= 256 - top_k


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    warm = Sampling(temperature=1.0, top_k=2)
    chosen = {sample(np.zeros(8, np.float32), warm, position) for position in range(100)}
    assert chosen == {0, 1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 1e300])
def test_what_is_masked_is_never_chosen(temperature: float) -> None:
    logits = np.full(256, -np.inf, np.float32)
    logits[[3, 77]] = 0.5, 1.5
    chosen = {sample(logits, Sampling(temperature=temperature), at) for at in range(100)}
    assert chosen <= {3, 77}


@pytest.mark.parametrize("logits", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]], ids=str)
def test_logits_that_name_no_token_are_refused(logits: list[float]) -> None:
    with pytest.raises(BadRequestError):
        sample(np.array(logits, np.float32), Sampling(), 0)


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": temperature} for temperature in (-1.0, float("nan"), float("inf"))),
        *({"seed": seed} for seed in (-1, 2**64)),
        {"top_k": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        Sampling(**fields)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0.7, "top_k": 1, "seed": 9}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 1.0, "min_p": 1}, {"temperature": 1.0, "min_p": 1.0}),
        ({"frequency_penalty": 1}, {"frequency_penalty": 1.0}),
    ],
    ids=str,
)
def test_samplings_that_choose_the_same_tokens_are_the_same_in_a_ticket(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert Sampling(**one).readable() == Sampling(**other).readable()


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(BadRequestError):
        sample(LOGITS, Sampling(), -1)


def test_log_probabilities_are_those_of_a_softmax_and_the_lower_of_equal_tokens_comes_first() -> (
    None
):
    logits = np.array([np.log(0.1), np.log(0.4), -np.inf, np.log(0.4), np.log(0.1)], np.float32)
    logits += 7
    found = logprobs_of(logits, 4, 5)
    assert np.exp(found.chosen) == pytest.approx(0.1)
    assert [token for token, _ in found.top] == [1, 3, 0, 4]
    assert [np.exp(score) for _, score in found.top] == pytest.approx([0.4, 0.4, 0.1, 0.1])
    assert [token for token, _ in logprobs_of(logits, 0, 1).top] == [1]
    assert logprobs_of(logits, 0, 0).top == ()
