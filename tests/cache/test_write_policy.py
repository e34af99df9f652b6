"""When a copy goes down a tier, by policy and hits."""

from __future__ import annotations

import pytest

from tierkv.cache.eviction import WritePolicy, WriteRule
from tierkv.errors import ConfigError


@pytest.mark.parametrize("hits", range(5))
@pytest.mark.parametrize("after_hits", range(1, 4))
def test_each_policy_writes_when_it_says(hits: int, after_hits: int) -> None:
    writes = {policy: WriteRule(policy, after_hits).writes_now(hits) for policy in WritePolicy}
    assert writes == {
        WritePolicy.NONE: False,
        WritePolicy.WRITE_THROUGH: True,
        WritePolicy.SELECTIVE: hits >= after_hits,
        WritePolicy.WRITE_BACK: False,
    }


def test_only_write_back_writes_on_eviction() -> None:
    assert [p for p in WritePolicy if WriteRule(p).writes_on_eviction] == [WritePolicy.WRITE_BACK]


def test_a_rule_needs_at_least_one_hit() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        WriteRule(WritePolicy.SELECTIVE, 0)
