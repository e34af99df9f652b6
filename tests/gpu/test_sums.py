"""The checksum of a block: what it is, and what changes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts import ALL_LAYOUTS
from tierkv.cache.layout import Layout, layered
from tierkv.gpu.sums import block_sums, plane_sums

MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def sum_of(layout: Layout, block: bytes) -> int:
    """Word by word, by the definition."""
    total = 0
    for plane, start in zip(layout.planes, layout.offsets, strict=True):
        for at in range(start, start + plane.block_bytes, 4):
            word = int.from_bytes(block[at : min(at + 4, start + plane.block_bytes)], "little")
            total += word * ((mixed(at) << 32) + 2 * at + 1)
    return total & MASK


@pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
def test_the_sum_is_the_one_that_is_defined_whatever_the_layout(layout: Layout) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (3, layout.block_bytes), np.uint8)
    expected = [sum_of(layout, block.tobytes()) for block in blocks]
    assert block_sums(layout, blocks).tolist() == expected
    assert block_sums(layout, blocks[::-1]).tolist() == expected[::-1]
    assert block_sums(layout, blocks[:0]).tolist() == []


def test_every_bit_that_flips_and_every_two_of_them_change_the_sum() -> None:
    layout = ALL_LAYOUTS["odd-17"]
    block = np.random.default_rng(2).integers(0, 256, layout.block_bytes, np.uint8)
    bits = np.unpackbits(block)
    flips = np.eye(len(bits), dtype=np.uint8)
    changed = np.packbits(bits ^ flips, axis=1)
    [before] = block_sums(layout, block[None])
    sums = block_sums(layout, changed)
    assert before not in sums
    # Two flips change the sum by what each of them does, added: 0 only if they undo each other.
    changes = sums - before
    both = changes[:, None] + changes[None, :]
    np.fill_diagonal(both, 1)
    assert both.all()


@given(st.data())
def test_two_different_words_that_change_places_change_the_sum(data: st.DataObject) -> None:
    """Far ones too, with weights that differ by large powers of two."""
    size = data.draw(st.sampled_from((2, 3, 1 << 8, 1 << 16)))
    at, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    word = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from((0, 1 << 31, 2**32 - 1)))
    words = np.zeros((2, size), "<u4")
    words[:, [at, other]] = data.draw(st.lists(word, min_size=2, max_size=2, unique=True))
    words[1, [at, other]] = words[0, [other, at]]
    one, two = plane_sums(words.view(np.uint8), data.draw(st.integers(0, 1 << 29)))
    assert one != two


def test_blocks_whose_bytes_moved_on_have_another_sum() -> None:
    layout = layered(4, [("key", "uint8", 1024)], num_layers=2)
    block = np.random.default_rng(3).integers(0, 256, layout.block_bytes, np.uint8)
    rolled = np.stack([np.roll(block, by) for by in range(0, layout.block_bytes, 4)])
    assert len(set(block_sums(layout, rolled).tolist())) == len(rolled)
