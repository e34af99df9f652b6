"""One table says how a copy may change; every pair is looked at."""

from __future__ import annotations

from itertools import product

import pytest

from tierkv.cache.node import Change, CopyState, advance
from tierkv.errors import OwnershipError

ALLOWED = {
    (CopyState.ABSENT, Change.RESERVE): CopyState.INCOMING,
    (CopyState.ABSENT, Change.PLACE): CopyState.READY,
    (CopyState.INCOMING, Change.ARRIVE): CopyState.READY,
    (CopyState.INCOMING, Change.FAIL): CopyState.ABSENT,
    (CopyState.READY, Change.EVICT): CopyState.ABSENT,
}


@pytest.mark.promise("Every change of a block's state is allowed or refused by one table.")
@pytest.mark.parametrize(("state", "change"), list(product(CopyState, Change)))
def test_every_pair_of_state_and_change_is_allowed_or_refused_with_both_names(
    state: CopyState, change: Change
) -> None:
    if (state, change) in ALLOWED:
        assert advance(state, change) is ALLOWED[state, change]
    else:
        with pytest.raises(OwnershipError, match=f"{state.name}.*{change.name}"):
            advance(state, change)
