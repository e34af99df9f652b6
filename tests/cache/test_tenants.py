"""Nothing is ever shared across fingerprints, and a quota's evictions stay within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.node import BlockPool, Space, Tier
from tierkv.errors import BadRequestError, ConfigError

ROOTS = {"": b"o" * 32, "a": b"a" * 32, "b": b"b" * 32}
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def index_with(*spaces: Space) -> Index:
    index = Index(2, ROOTS[""])
    for space in spaces:
        index.spaces.open(space)
    return index


def put(index: Index, pool: BlockPool, prompt: Prompt) -> None:
    match = index.match(prompt)
    lease = index.hold(match.node, match.num_blocks)
    slots = pool.allocate(prompt.num_blocks - match.num_blocks)
    index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
    index.release(lease)


@given(tokens, tokens)
def test_a_prompt_matches_nothing_of_another_tenant(ours: list[int], theirs: list[int]) -> None:
    index, pool = index_with(Space("a", ROOTS["a"]), Space("b", ROOTS["b"])), BlockPool("d", 40)
    put(index, pool, Prompt.of(theirs, 2, space="a"))
    for space in ("", "b"):
        match = index.match(Prompt.of(ours, 2, space=space))
        assert match.num_blocks == 0
        assert match.partial is None


def test_a_tenant_nobody_opened_is_refused_and_none_is_opened_twice() -> None:
    index = index_with(Space("a", ROOTS["a"]))
    with pytest.raises(BadRequestError, match="'who'"):
        index.match(Prompt.of([1], 2, space="who"))
    with pytest.raises(BadRequestError, match="already open"):
        index.spaces.open(Space("a", ROOTS["a"]))
    with pytest.raises(ConfigError, match="quota"):
        Space("c", b"", quota=(-1, None))


def test_a_space_that_still_has_blocks_is_not_closed_and_an_empty_one_is() -> None:
    index, pool = index_with(Space("a", ROOTS["a"])), BlockPool("d", 40)
    prompt = Prompt.of([1, 2, 3, 4], 2, space="a")
    put(index, pool, prompt)
    with pytest.raises(AssertionError, match="when it is empty"):
        index.spaces.close("a")
    assert index.match(prompt).num_blocks == 2, "nothing has changed"
    index.forget_below(index.match(prompt).node, 0)
    index.spaces.close("a")
    with pytest.raises(BadRequestError, match="'a' is not open"):
        index.match(prompt)
    assert index.spaces.order[Tier.DEVICE].num_unheld == 0
