"""Cuts a copy into units of work for a lane: which layers of which blocks travel together.

    layout's block   | layer 0 | layer 1 | layer 2 | ...      span: consecutive layers
    blocks           0 1 2 ... n                              unit: a span of some of the blocks

A unit is one batch of copy-engine pieces (a piece per block) and one kernel. Pure: no GPU here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tierkv.cache.layout import Layout

MAX_BLOCKS = 960  # as in csrc/planes.cu
ROW_ALIGNMENT = 16  # rows of staging start where 16-byte vectors may


class Order(Enum):
    """LAYERS: all blocks' first layers first, so that the model may start. BLOCKS: block by block,
    in fewer and larger pieces."""

    LAYERS = "layers"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes. A unit aims at a quarter of the copy, within [least, most]; the first one at half of
    that, so that the pipeline fills (and the first layer arrives) early.

    most: beside saturating matmuls a kernel starts only between two of the model's, 1.6 ms apart
        at bf16 8192^3, one per boundary, so a unit must bring what PCIe moves in that time: with
        16 MiB the pipeline fell to 60 % of the limit, with 64 MiB to 75 %, with 128 MiB it kept
        99 % (H200, 2026-11-21).
    piece: what a copy-engine piece should have at least, if need be by taking layers together:
        256 KiB pieces reach 99 % of a contiguous copy (H200, 2026-11-21).
    """

    least: int = 8 << 20
    most: int = 128 << 20
    piece: int = 256 << 10

    def target(self, total_bytes: int) -> int:
        return min(max(total_bytes // 4, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes [first_byte, first_byte + num_bytes) of the blocks at [start, stop) of the copy."""

    layers: range
    first_byte: int
    num_bytes: int
    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @property
    def row_bytes(self) -> int:
        return -(-self.num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def staging_bytes(self) -> int:
        return self.num_blocks * self.row_bytes


def plan_units(layout: Layout, num_blocks: int, order: Order, sizes: UnitSizes) -> Iterator[Unit]:
    """Units that together hold every byte of `num_blocks` blocks once, layers ascending.

    No unit is larger than sizes.most in staging, unless a single block's span is.
    """
    target = sizes.target(num_blocks * layout.block_bytes)
    is_first = True
    for layers in _spans(layout, num_blocks, order, target, sizes.piece):
        first_byte, stop_byte = _bytes_of(layout, layers)
        start = 0
        while start < num_blocks:
            row = Unit(layers, first_byte, stop_byte - first_byte, 0, 1).row_bytes
            room = max((target // 2 if is_first else target) // row, 1)
            stop = min(start + min(room, MAX_BLOCKS), num_blocks)
            yield Unit(layers, first_byte, stop_byte - first_byte, start, stop)
            start, is_first = stop, False


def _spans(
    layout: Layout, num_blocks: int, order: Order, target: int, piece: int
) -> Iterator[range]:
    """The layers taken together, in order; with Order.LAYERS as few as a good piece and unit allow,
    and fewest at the start."""
    if order is Order.BLOCKS:
        yield range(layout.num_layers)
        return
    start = 0
    while start < layout.num_layers:
        wanted = max(piece, (target if start else target // 2) // num_blocks)
        stop = start + 1
        while stop < layout.num_layers:
            first_byte, stop_byte = _bytes_of(layout, range(start, stop))
            if stop_byte - first_byte >= piece:
                _, larger = _bytes_of(layout, range(start, stop + 1))
                if larger - first_byte > wanted:
                    break
            stop += 1
        yield range(start, stop)
        start = stop


def _bytes_of(layout: Layout, layers: range) -> tuple[int, int]:
    """Where `layers` start and end in the layout's block."""
    first = layout.planes_of_layer[layers.start].start
    last = layout.planes_of_layer[layers.stop - 1].stop - 1
    return layout.offsets[first], layout.offsets[last] + layout.planes[last].block_bytes
