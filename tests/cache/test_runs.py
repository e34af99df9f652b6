"""Where a mask is true, as runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache.index import runs_of


@given(st.lists(st.booleans(), max_size=40))
def test_runs_are_those_that_a_loop_finds(bits: list[bool]) -> None:
    expected: list[tuple[int, int]] = []
    for at, bit in enumerate(bits):
        if not bit:
            continue
        if expected and expected[-1][1] == at:
            expected[-1] = (expected[-1][0], at + 1)
        else:
            expected.append((at, at + 1))
    assert runs_of(np.array(bits, np.bool_)) == expected
