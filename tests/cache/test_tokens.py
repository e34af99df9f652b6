"""Tokens are the same bytes however they come."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache.keys import common_tokens, count, pack, unpack
from tierkv.errors import BadRequestError

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(ids)
def test_a_list_arrays_json_and_packed_bytes_are_the_same_tokens(tokens: list[int]) -> None:
    packed = pack(tokens)
    assert unpack(packed).tolist() == tokens
    assert count(packed) == len(tokens)
    assert pack(packed) == packed
    assert pack(tuple(tokens)) == packed
    assert pack(json.loads(json.dumps(tokens))) == packed
    for dtype in ("<i4", ">i4", "<i8", ">i8", "u4", "u8"):
        assert pack(np.array(tokens, dtype=dtype)) == packed
    assert pack(list(np.array(tokens, np.int64))) == packed  # a list of NumPy integers
    assert pack(np.repeat(np.array(tokens, np.int32), 2)[::2]) == packed
    # What a socket has read into is packed too, not a token a byte.
    assert pack(bytearray(packed)) == packed
    assert pack(memoryview(packed)) == packed
    assert pack(np.array(tokens, ">i8").data) == packed
    assert pack(memoryview(packed).cast("c")) == packed  # type: ignore[arg-type]


def test_a_view_of_small_numbers_has_a_token_each_as_the_array_has() -> None:
    small = np.array([1, 2, 3, 127], np.int8)
    assert pack(small.data) == pack(small) == pack([1, 2, 3, 127])
    with pytest.raises(BadRequestError):
        pack(np.array([True, False, True, True]).data)


def test_the_bytes_are_little_endian_int32() -> None:
    assert pack([1, 258, 2**31 - 1]) == bytes([1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 127])


# fmt: off
NO_TOKENS = (
    [-1], [2**31], [2**63], [2**200], [1.0], [None], ["1"], [[1]], "text", {2, 1}, {1: 2},
    b"abc", bytearray(b"abc"), pack([7])[:3], b"\xff\xff\xff\xff",
    np.array([-1]), np.array([2**31]), np.array([2**63], np.uint64), np.array([1.5]), np.array(5),
    np.array([[1, 2]]), np.array([[1, 2]]).data, np.array([True]),
    np.ma.array([1, 2**40], mask=[False, True]),
)
# fmt: on


@pytest.mark.parametrize("bad", NO_TOKENS, ids=lambda bad: type(bad).__name__)
def test_what_is_no_token_is_refused(bad: object) -> None:
    with pytest.raises(BadRequestError):
        pack(bad)  # type: ignore[arg-type]


@given(ids, ids, ids)
def test_common_tokens_counts_the_shared_start(
    shared: list[int], left: list[int], right: list[int]
) -> None:
    expected = len(shared)
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        expected += 1
    assert common_tokens(pack(shared + left), pack(shared + right)) == expected
