"""A run's copies are what a plain list of (state, slot) would be, however they are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache.node import NO_SLOT, Change, CopyState, Ids, TierCopies, advance, is_allowed
from tierkv.errors import OwnershipError

steps = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from(Change)), max_size=12
)


def check(copies: TierCopies, expected: list[tuple[CopyState, int]]) -> None:
    assert copies.states.tolist() == [state for state, _ in expected]
    assert copies.slots.tolist() == [slot for _, slot in expected]
    present = sum(state is not CopyState.ABSENT for state, _ in expected)
    assert (copies.num_blocks, copies.num_present) == (len(expected), present)
    assert (copies.uniform is not None) == (len({state for state, _ in expected}) <= 1)


@given(st.integers(1, 7), steps)
def test_changes_do_what_the_table_says_to_every_block_or_to_none(
    num_blocks: int, changes: list[tuple[int, int, Change]]
) -> None:
    copies = TierCopies(num_blocks)
    expected = [(CopyState.ABSENT, NO_SLOT)] * num_blocks
    done: list[tuple[int, int, Change, Ids | None]] = []
    for number, (left, right, change) in enumerate(changes):
        start, stop = sorted((left % num_blocks, right % num_blocks + 1))
        if start == stop:
            continue
        given_slots = None
        if change in (Change.RESERVE, Change.PLACE):
            given_slots = np.arange(start, stop, dtype=np.int32) + 100 * number
        if not all(is_allowed(state, change) for state, _ in expected[start:stop]):
            with pytest.raises(OwnershipError):
                copies.change(start, stop, change, given_slots)
            check(copies, expected)
            continue
        had = copies.change(start, stop, change, given_slots)
        done.append((start, stop, change, given_slots))
        assert had.tolist() == [slot for _, slot in expected[start:stop]]
        for at in range(start, stop):
            state, slot = expected[at]
            if given_slots is not None:
                slot = int(given_slots[at - start])
            elif change in (Change.FAIL, Change.EVICT):
                slot = NO_SLOT
            expected[at] = (advance(state, change), slot)
        check(copies, expected)
        for at in range(1, num_blocks):
            lower = TierCopies(num_blocks)
            for step in done:
                lower.change(*step)
            upper = lower.behead(at)
            check(upper, expected[:at])
            check(lower, expected[at:])
    kept = max(num_blocks // 2, 1)
    copies.truncate(kept)
    check(copies, expected[:kept])
    copies.extend(2, np.array([7, 8], np.int32))
    check(copies, [*expected[:kept], (CopyState.READY, 7), (CopyState.READY, 8)])
    copies.extend(1, None)
    ready = [(CopyState.READY, 7), (CopyState.READY, 8)]
    check(copies, [*expected[:kept], *ready, (CopyState.ABSENT, NO_SLOT)])


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_of_a_ready_run_that_is_dropped_what_is_kept_is_ready_and_the_rest_nowhere(
    kept: int,
) -> None:
    """All of it: for who still holds on to the run after it has left the tree."""
    copies = TierCopies(5)
    copies.change(0, 5, Change.PLACE, np.arange(5, dtype=np.int32))
    assert copies.drop_ready(kept).tolist() == list(range(kept, 5))
    if kept:
        check(copies, [(CopyState.READY, slot) for slot in range(kept)])
    else:
        check(copies, [(CopyState.ABSENT, NO_SLOT)] * 5)
        assert not copies.is_in(CopyState.READY, 0, 5).any()
