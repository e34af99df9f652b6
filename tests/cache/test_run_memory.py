"""A run refers to the bytes of the prompt it came with where that wastes little, else copies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cache.cached import Cached
from tierkv.cache.keys import Prompt, common_blocks, common_tokens, pack

SIZE = 4


def numbered(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_prompt_that_shares_little_is_not_copied() -> None:
    cache = Cached(SIZE)
    shared = numbered(2 * SIZE)
    cache.put(shared)
    cache.put(shared + numbered(SIZE, 5000))  # so that what follows branches off
    tokens = pack(shared + numbered(40 * SIZE, 1000))
    node = cache.put(Prompt(tokens, SIZE))
    assert node.packed is tokens
    assert node.tokens == tokens[2 * SIZE * 4 :]
    assert cache.findings() == []
    node.packed = b"\7" * 2 * SIZE * 4 + tokens[2 * SIZE * 4 :]
    (wrong,) = cache.findings()
    assert "other tokens before its own" in wrong


def test_a_prompt_that_shares_most_leaves_nothing_of_itself_in_memory() -> None:
    cache = Cached(SIZE)
    shared = numbered(40 * SIZE)
    cache.put(shared)
    cache.put(shared + numbered(SIZE, 5000))  # so that what follows branches off
    node = cache.put(shared + numbered(2 * SIZE, 1000))
    assert len(node.packed) == 2 * SIZE * 4
    assert cache.findings() == []


def test_the_halves_of_a_run_share_its_bytes_until_most_of_them_are_needed_no_more() -> None:
    cache, base = Cached(SIZE), numbered(40 * SIZE)
    lower = cache.put(base)
    packed = lower.packed
    for at in (30, 20, 8):  # cut in four, from the end on
        cache.put(base[: at * SIZE] + numbered(SIZE, 1000 * at))
    runs = [lower, *list(lower.path())[1:]]
    assert [node.num_blocks for node in runs] == [10, 10, 12, 8]
    assert all(node.packed is packed for node in runs), "a split copies no tokens"
    assert b"".join(node.tokens for node in reversed(runs)) == pack(base)
    assert cache.findings() == []
    cache.drop(lower, 0, 10)  # 30 of 40 blocks are needed
    assert [node.packed is packed for node in runs[1:]] == [True] * 3
    for node in runs[1:3]:  # and now the last 8
        for child in list(node.children.values()):
            cache.drop(child, 0, child.num_blocks)
        cache.drop(node, 0, node.num_blocks)
    assert runs[3].packed == pack(base[: 8 * SIZE])
    runs[3].packed += b"\0" * 4 * 25 * SIZE
    (wrong,) = cache.findings()
    assert "keeps too many tokens of removed blocks in memory" in wrong


def test_a_run_whose_end_went_lets_go_of_what_it_shares_with_runs_above() -> None:
    cache, base = Cached(SIZE), numbered(40 * SIZE)
    lower = cache.put(base)
    packed = lower.packed
    cache.put(base[: 2 * SIZE] + numbered(SIZE, 1000))
    upper = lower.parent
    assert upper is not None
    assert upper.packed is packed
    cache.drop(lower, 8, 38)  # 10 of 40 blocks are needed: a quarter
    assert upper.packed is lower.packed is packed
    cache.drop(lower, 7, 8)
    assert upper.packed == pack(base[: 2 * SIZE])
    assert lower.packed == pack(base[2 * SIZE : 9 * SIZE])
    assert cache.findings() == []


@pytest.mark.parametrize("shared", [0, 1, 2047, 2048, 2049, 26_623, 26_624, 40_000])
@pytest.mark.parametrize("size", [1, 3, 16, 50_000])
def test_common_blocks_are_counted_beyond_every_look(shared: int, size: int) -> None:
    left = np.arange(40_000, dtype=np.int32)
    right = left.copy()
    right[shared:] += 1
    packed, other = left.tobytes(), b"\7" * 8 + right.tobytes()
    most, width = 40_000 // size, 4 * size
    assert common_blocks(packed, 0, other, 8, most, width) == shared // size
    if shared > 3 * size:
        at = 3 * width
        found = common_blocks(packed, at, other, 8 + at, most - 3, width)
        assert found == shared // size - 3
        assert common_blocks(packed, 0, other, 8, 3, width) == 3
    assert common_tokens(packed, other[8:]) == shared
