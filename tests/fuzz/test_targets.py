"""Readers of foreign bytes give what they promise for bytes of any kind."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

SEEDS = seeds()
_SPLICES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 8), st.binary(max_size=8)))


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_read_is_understood_or_refused_as_promised(
    name: str, data: st.DataObject
) -> None:
    raw = bytearray(data.draw(st.sampled_from(SEEDS[name]) | st.binary(max_size=300)))
    for at, drop, put in data.draw(_SPLICES):
        raw[at : at + drop] = put
    TARGETS[name](bytes(raw))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("piece", [b"[", b"\x91", b'{"a":', b"\x81\xa1a"])
def test_a_hundred_thousand_of_the_same_are_refused_as_promised(name: str, piece: bytes) -> None:
    for seed in SEEDS[name]:
        TARGETS[name](seed[:4] + piece * 100_000)
        TARGETS[name](piece * 100_000)
