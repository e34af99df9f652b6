"""Spaces are opened once and by name, and closed when they are empty."""

from __future__ import annotations

import pytest

from tests.cache.cached import Cached
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Space, Tier
from tierkv.errors import BadRequestError, ConfigError


@pytest.fixture
def cache() -> Cached:
    cache = Cached(2)
    cache.index.spaces.open(Space("a", b"a" * 32))
    return cache


def test_a_tenant_nobody_opened_is_refused_and_none_is_opened_twice(cache: Cached) -> None:
    with pytest.raises(BadRequestError, match="'who'"):
        cache.index.match(Prompt.of([1], 2, space="who"))
    with pytest.raises(BadRequestError, match="already open"):
        cache.index.spaces.open(Space("a", b"a" * 32))
    with pytest.raises(ConfigError, match="quota"):
        Space("c", b"", quota=(-1, None))


def test_a_space_that_still_has_blocks_is_not_closed_and_an_empty_one_is(cache: Cached) -> None:
    index, prompt = cache.index, Prompt.of([1, 2, 3, 4], 2, space="a")
    run = cache.put(prompt)
    with pytest.raises(AssertionError, match="when it is empty"):
        index.spaces.close("a")
    assert cache.num_matched(prompt) == 2, "nothing has changed"
    index.forget_below(run, 0)
    index.spaces.close("a")
    with pytest.raises(BadRequestError, match="'a' is not open"):
        index.match(prompt)
    assert index.spaces.order[Tier.DEVICE].num_unheld == 0
