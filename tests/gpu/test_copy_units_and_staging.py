"""How a copy is cut, and how staging is handed out: pure, so these run without a GPU."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.latch import ManualEvent
from tests.layouts import ALL_LAYOUTS
from tierkv.errors import LayoutError
from tierkv.gpu.units import MAX_BLOCKS, Order, Ring, UnitPlanner, UnitSizes, joined

SIZES = st.builds(
    UnitSizes,
    first=st.integers(1, 10_000),
    min_unit=st.integers(1, 10_000),
    max_unit=st.integers(1, 100_000),
    last=st.integers(1, 100_000),
    last_share=st.integers(1, 40),
    share=st.integers(1, 40),
    piece=st.integers(1, 2000),
)


@given(st.sampled_from(sorted(ALL_LAYOUTS)), st.sampled_from(Order), st.integers(1, 3000), SIZES)
def test_units_hold_every_byte_once_layers_ascending(
    name: str, order: Order, num_blocks: int, sizes: UnitSizes
) -> None:
    layout = ALL_LAYOUTS[name]
    held = np.zeros((num_blocks, layout.block_bytes), np.uint8)
    layer = 0
    for unit in UnitPlanner(layout, order, sizes).plan(num_blocks):
        held[unit.start : unit.stop, unit.first_byte : unit.first_byte + unit.num_bytes] += 1
        assert unit.layers.start >= layer
        layer = unit.layers.start
        assert 0 < unit.num_blocks <= MAX_BLOCKS
        assert unit.row_bytes >= unit.num_bytes
        assert unit.row_bytes % 16 == 0
        assert unit.staging_bytes <= max(sizes.max_unit, unit.row_bytes)
    assert (held == 1).all()


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=60),
    capacity=st.integers(20, 60),
)
def test_staging_in_use_is_handed_out_only_behind_its_event(
    sizes: list[tuple[int, bool]], capacity: int
) -> None:
    """Events end in order, and writers wait in order: what is handed out overlaps nothing that is
    in use, unless an event came with it, or before, that is not before the end of that use."""
    ring: Ring[ManualEvent] = Ring(capacity * 256)
    in_use: deque[tuple[int, int, ManualEvent]] = deque()
    order: list[ManualEvent] = []
    waited_for = -1
    for num_bytes, ends_one in sizes:
        start, free = ring.reserve(num_bytes)
        if free is not None:
            waited_for = max(waited_for, order.index(free))
        assert 0 <= start <= ring.capacity - num_bytes
        for first, stop, event in in_use:
            if start < stop and first < start + num_bytes and not event.is_done:
                assert waited_for >= order.index(event)
        event = ManualEvent()
        ring.use_until(event)
        in_use.append((start, start + num_bytes, event))
        order.append(event)
        if ends_one:
            next((one for one in order if not one.is_done), event).finish()


def test_more_than_the_ring_has_is_refused() -> None:
    with pytest.raises(LayoutError, match="staging_bytes"):
        Ring[ManualEvent](1024).reserve(1025)


@given(
    slots=st.sets(st.integers(0, 40), min_size=1),
    per_chunk=st.integers(1, 50),
    per_piece=st.integers(1, 20),
    block_bytes=st.integers(1, 9000),
)
def test_neighbours_are_joined_within_a_chunk_and_every_block_is_in_one_piece(
    slots: set[int], per_chunk: int, per_piece: int, block_bytes: int
) -> None:
    start = 1 << 40
    ids = sorted(slots)
    addresses = np.array(ids, np.uint64) * np.uint64(block_bytes) + np.uint64(start)
    firsts, sizes = joined(
        addresses,
        block_bytes,
        start=start,
        chunk_bytes=per_chunk * block_bytes,
        max_bytes=per_piece * block_bytes,
    )
    pieces = [
        list(range(ids[first], ids[first] + int(size) // block_bytes))
        for first, size in zip(firsts.tolist(), sizes.tolist(), strict=True)
    ]
    assert [slot for piece in pieces for slot in piece] == ids
    for piece in pieces:
        assert piece[0] // per_chunk == piece[-1] // per_chunk
        assert len(piece) <= per_piece
    for before, after in itertools.pairwise(pieces):
        is_cut = after[0] % per_chunk == 0 or ids.index(after[0]) % per_piece == 0
        assert after[0] != before[-1] + 1 or is_cut
