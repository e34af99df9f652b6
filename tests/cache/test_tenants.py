"""Nothing is ever shared across fingerprints, and a quota's evictions stay within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stored import stored_keys
from tierkv.cache.index import Index
from tierkv.cache.keys import Names, Prompt, chain
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


@given(tokens)
def test_digests_and_names_of_two_tenants_never_meet(ids: list[int]) -> None:
    names = Names("tierkv", "0" * 16)
    found = set()
    for space, root in ROOTS.items():
        keys = stored_keys(root, Prompt.of(ids, 2, space=space))
        found |= {names.name(key) for key in keys}
    assert len(found) == 3 * -(-len(ids) // 2)


def test_digests_come_from_the_tenants_own_root_and_are_computed_once() -> None:
    index, pool = index_with(Space("a", ROOTS["a"])), BlockPool("d", 40)
    prompt = Prompt.of([1, 2, 3, 4, 5, 6], 2, space="a")
    put(index, pool, prompt)
    match = index.match(prompt)
    digests = index.digests(match.node, 3)
    assert digests == chain(ROOTS["a"], prompt)
    assert match.node.digests == b"".join(digests)
    assert index.digests(match.node, 2) == digests[:2]


def test_remembered_digests_survive_a_split_and_an_eviction() -> None:
    index, pool = index_with(), BlockPool("d", 40)
    prompt = Prompt.of([1, 2, 3, 4, 5, 6, 7, 8], 2)
    put(index, pool, prompt)
    expected = index.digests(index.match(prompt).node, 4)
    put(index, pool, Prompt.of([1, 2, 3, 4, 9, 9], 2))
    assert index.digests(index.match(prompt).node, 4) == expected
    for victim in index.spaces.order[Tier.DEVICE].victims(1):
        pool.release(index.drop(Tier.DEVICE, *victim))
    match = index.match(prompt)
    assert index.digests(match.node, match.num_blocks) == expected[: match.num_blocks]


def test_a_quotas_own_order_lists_only_its_own_blocks() -> None:
    space = Space("a", ROOTS["a"], quota=(4, None))
    index, pool = index_with(space), BlockPool("d", 40)
    put(index, pool, Prompt.of([7] * 8, 2))
    put(index, pool, Prompt.of([1, 2, 3, 4], 2, space="a"))
    put(index, pool, Prompt.of([5, 6], 2, space="a"))
    order = index.spaces.own_order(space, Tier.DEVICE)
    assert order is not None
    assert (order.num_unheld, space.used) == (3, [3, 0])
    assert {victim.node.space.name for victim in order.victims(10)} == {"a"}
    for victim in order.victims(2):
        pool.release(index.drop(Tier.DEVICE, *victim))
    assert space.used == [1, 0]
    assert index.match(Prompt.of([7] * 8, 2)).num_blocks == 4


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
