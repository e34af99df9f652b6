"""The promise all others stand on: no bit depends on how the work was cut into calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refmodel.paged_run import KVDtype, PagedRun, Tokens, model

DTYPES: tuple[KVDtype, ...] = ("float32", "float16", "bfloat16")


def random_tokens(num_tokens: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, num_tokens, dtype=np.int32)


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=600),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    block_size=st.integers(1, 70),
    table_seed=st.integers(0, 2**32),
    garbage=st.integers(0, 255),
    kv_dtype=st.sampled_from(DTYPES),
)
def test_cuts_block_size_block_table_and_old_contents_of_the_planes_change_no_bit(
    prompt: list[int],
    cuts: list[float],
    block_size: int,
    table_seed: int,
    garbage: int,
    kv_dtype: KVDtype,
) -> None:
    cold = PagedRun(model(kv_dtype), len(prompt))
    expected = cold.feed(prompt)

    run = PagedRun(model(kv_dtype, block_size), len(prompt), table_seed=table_seed, garbage=garbage)
    ends = [*sorted({int(cut * len(prompt)) for cut in cuts} - {0}), len(prompt)]
    logits = expected
    for end in dict.fromkeys(ends):
        logits = run.feed(prompt[run.length : end])

    assert logits.tobytes() == expected.tobytes()
    assert run.kv() == cold.kv()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_decoding_token_by_token_gives_the_bits_of_a_cold_prefill(kv_dtype: KVDtype) -> None:
    tokens = random_tokens(290)
    decode = PagedRun(model(kv_dtype), len(tokens))
    for position, token in enumerate(tokens):
        logits = decode.feed([token])
        if 34 <= position < 254 and position % 32 > 1:
            continue  # between the borders of tiles and chunks
        cold = PagedRun(model(kv_dtype, 7), len(tokens), table_seed=1)
        assert cold.feed(tokens[: position + 1]).tobytes() == logits.tobytes(), position
        assert cold.kv() == decode.kv(), position


def test_what_later_positions_hold_in_the_planes_changes_no_bit() -> None:
    tokens = random_tokens(100)
    run = PagedRun(model(), len(tokens))
    run.feed(tokens)
    kv = run.kv()
    run.length = 60
    again = run.feed(tokens[60:61])  # positions 61 to 99 hold finite K and V now, not NaN
    assert again.tobytes() == PagedRun(model(), 100).feed(tokens[:61]).tobytes()
    run.length = 100
    assert run.kv() == kv


def test_calls_in_several_threads_at_once_give_the_bits_of_one_after_the_other() -> None:
    prompts = [random_tokens(700 + 37 * seed, seed) for seed in range(6)]

    def logits(prompt: Tokens) -> bytes:
        return PagedRun(model(), len(prompt)).feed(prompt).tobytes()

    expected = [logits(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(logits, prompts)) == expected
