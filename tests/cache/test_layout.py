"""A layout says where each byte of a block is; tails are cut out and pasted back exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts import ALL_LAYOUTS, LAYOUTS
from tierkv.cache.layout import Layout, Plane
from tierkv.errors import LayoutError

every_layout = pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS.keys())


def random_slot(layout: Layout, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, layout.block_bytes).astype(np.uint8)


@every_layout
def test_planes_fill_a_slot_without_gap_or_overlap(layout: Layout) -> None:
    ends = [
        start + plane.block_bytes
        for start, plane in zip(layout.offsets, layout.planes, strict=True)
    ]
    assert list(layout.offsets) == [0, *ends[:-1]]
    assert layout.block_bytes == ends[-1]
    listed = [index for planes in layout.planes_of_layer for index in planes]
    assert listed == list(range(len(layout.planes)))
    for layer, planes in enumerate(layout.planes_of_layer):
        assert {layout.planes[index].layer for index in planes} == {layer}


@every_layout
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_a_tail_comes_back_and_the_rest_is_zero(layout: Layout, num_tokens: int) -> None:
    slot = random_slot(layout)
    before = slot.copy()
    payload = layout.cut_tail(slot, num_tokens).copy()
    assert len(payload) == layout.stored_bytes(num_tokens)
    target = random_slot(layout, seed=2)
    layout.paste_tail(payload, target, num_tokens)
    assert np.array_equal(slot, before)
    for plane, start in zip(layout.planes, layout.offsets, strict=True):
        ours = target[start : start + plane.block_bytes]
        theirs = slot[start : start + plane.block_bytes]
        if layout.has_token_bytes and num_tokens < layout.block_size:
            kept = num_tokens * (plane.token_bytes or 0)
            assert np.array_equal(ours[:kept], theirs[:kept])
            assert not ours[kept:].any()
        else:
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("num_tokens", [0, -1, 5])
def test_a_tail_of_no_or_too_many_tokens_is_refused(num_tokens: int) -> None:
    with pytest.raises(LayoutError, match="1 to 4 tokens"):
        LAYOUTS["gqa"].stored_bytes(num_tokens)


def test_a_tail_of_the_wrong_size_is_refused_and_the_slot_stays() -> None:
    layout = LAYOUTS["gqa"]
    slot = random_slot(layout)
    before = slot.copy()
    with pytest.raises(LayoutError, match="a tail of 2 tokens"):
        layout.paste_tail(np.zeros(layout.stored_bytes(1), np.uint8), slot, 2)
    assert np.array_equal(slot, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout(0, (Plane(0, "key", "u", 1),)),
        lambda: Layout(4, ()),
        lambda: Layout(4, (Plane(1, "key", "u", 1),)),
        lambda: Layout(4, (Plane(0, "key", "u", 1), Plane(2, "key", "u", 1))),
        lambda: Layout(4, (Plane(1, "key", "u", 1), Plane(0, "key", "u", 1))),
        lambda: Layout(4, (Plane(0, "key", "u", 1), Plane(0, "key", "u", 2))),
        lambda: Layout(4, (Plane(0, "key", "u", 9, 2),)),
        lambda: Plane(0, "key", "u", 0),
        lambda: Plane(-1, "key", "u", 1),
        lambda: Plane(0, "", "u", 1),
        lambda: Plane(0, "key", "", 1),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(LayoutError):
        make()


PLANE = Plane(0, "key", "bfloat16", 32, 8)


@pytest.mark.parametrize(
    "other",
    [
        Layout(4, (dataclasses.replace(PLANE, role="value"),)),
        Layout(4, (dataclasses.replace(PLANE, dtype="float16"),)),
        Layout(4, (dataclasses.replace(PLANE, block_bytes=64, token_bytes=16),)),
        Layout(4, (dataclasses.replace(PLANE, token_bytes=None),)),
        Layout(2, (dataclasses.replace(PLANE, token_bytes=16),)),
        Layout(4, (PLANE, Plane(0, "value", "bfloat16", 32, 8))),
        Layout(4, (PLANE, Plane(1, "key", "bfloat16", 32, 8))),
    ],
)
def test_any_difference_of_layouts_is_in_the_digest(other: Layout) -> None:
    assert other.digest != Layout(4, (PLANE,)).digest


def test_the_order_of_planes_is_in_the_digest() -> None:
    key, value = Plane(0, "key", "u", 8), Plane(0, "value", "u", 8)
    assert Layout(4, (key, value)).digest != Layout(4, (value, key)).digest


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@given(st.tuples(texts, texts), st.tuples(texts, texts))
def test_role_and_dtype_cannot_run_into_each_other(
    left: tuple[str, str], right: tuple[str, str]
) -> None:
    one, other = (Layout(4, (Plane(0, role, dtype, 8),)) for role, dtype in (left, right))
    assert (one.digest == other.digest) == (left == right)
