"""The division of a copy into units: which layers of which blocks are copied together.

    layout's block   | layer 0 | layer 1 | layer 2 | ...      span: consecutive layers
    blocks           0 1 2 ... n                              unit: a span of some of the blocks

The copy engine copies a unit in pieces, one or more for each block. One kernel then moves the unit
between staging memory and planes. This module does not use a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import LayoutError
from tierkv.gpu.protocol import Event

Bytes = npt.NDArray[np.uint64]  # addresses or byte counts

MAX_BLOCKS = 960  # as in csrc/planes.cu
FIRST_BLOCKS = 128  # in the first unit, which an event loop may submit, at 1.5 us a block
_KEEP_UP_TO = 64  # largest number of blocks for which plans are kept
ROW_ALIGNMENT = 16  # rows of staging memory are aligned for 16-byte vectors


class Order(Enum):
    """The order in which a copy's units are made.

    LAYERS begins with the first layers of all blocks, so that the model can start early. BLOCKS
    copies block after block, in fewer and larger pieces.
    """

    LAYERS = "layers"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Sizes, in bytes, of the parts of a copy. The figures were measured on an H200.

    A unit is a part of a copy that passes through staging memory at once. The copy engine copies a
    unit in pieces: a piece is a contiguous range of one host slot, with one or more layers.

    Most units have 1 / `share` of the copy's bytes, but at least 2 * `min_unit` and at most
    `max_unit`. A copy of up to 2 * `min_unit` is one unit. The first unit is smaller (`first`), so
    that the first layer arrives early. The last units become smaller down to `last`, so that little
    work is left when the last byte has arrived.

    Attributes:
        first: size of the first unit, which has at most FIRST_BLOCKS blocks. This unit must occupy
            the copy engine until the lane's thread submits the next one, 0.5 to 0.7 ms later; PCIe
            5 moves 32 MiB in 0.6 ms.
        min_unit: half of the smallest size of a unit that is neither the first nor near the end.
        max_unit: largest size of a unit. During a load, decoder layers lose 0.5 % of their speed
            with 64 MiB and 1.7 % with 128 MiB, since the model's next kernel waits for the unit's
            kernel.
        last: size down to which units halve at the end of a copy. With 8 MiB, a load reaches 97.7 %
            of the speed of a contiguous copy instead of 98.5 %.
        last_share: in a small copy the last unit has 1 / `last_share` of the bytes, if that is less
            than `last`, but at least `min_unit`.
        share: number of units of a copy, if neither `min_unit` nor `max_unit` limits their size.
        piece: smallest piece of a load; consecutive layers are joined until a piece has this size.
            Pieces of 256 KiB reach 98 % of the speed of a contiguous copy, 1 MiB 98.6 %.
        max_piece: largest piece of joined layers in the middle of a load. Larger pieces save the
            submitting thread 1 to 4 us each.
        offload_piece: smallest piece of an offload, if larger than `piece`. Pieces of 256 KiB reach
            92 to 94 % of the speed of a contiguous copy, 1 MiB 97 %, 2 MiB 98 %.
        straight_row: number of bytes from which a row counts as wide. If at least 15/16 of a
            block's bytes are in wide rows, the first unit is copied without staging memory, as
            rectangles of such rows. With rows of 128 KiB, an offload of 2 GiB then reaches 99.2 %
            of the speed of a contiguous copy instead of 98.8 %; with rows of 32 KiB there is no
            gain.
    """

    first: int = 32 << 20
    min_unit: int = 8 << 20
    max_unit: int = 64 << 20
    last: int = 32 << 20
    last_share: int = 32
    share: int = 8
    piece: int = 256 << 10
    max_piece: int = 2 << 20
    offload_piece: int = 2 << 20
    straight_row: int = 64 << 10


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a copy: bytes [first_byte, first_byte + num_bytes) of some of its blocks.

    Attributes:
        layers: the layers that have these bytes.
        first_byte: offset of the bytes in each block.
        num_bytes: number of bytes of each block.
        start, stop: positions [start, stop) of the blocks in the copy.
    """

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
        """Bytes of one block's row in staging memory, alignment included."""
        return row_of(self.num_bytes)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that the unit needs."""
        return self.num_blocks * self.row_bytes


def row_of(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of 16."""
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


class UnitPlanner:
    """Divides copies of blocks into units: the parts that pass through staging memory at once.

    Args:
        layout: the layout of the blocks.
        order: LAYERS to begin with the first layers of all blocks, BLOCKS to copy block after
            block.
        sizes: target sizes of units and pieces, in bytes.
    """

    def __init__(self, layout: Layout, order: Order, sizes: UnitSizes) -> None:
        self._order = order
        self._sizes = sizes
        self._num_layers = layout.num_layers
        firsts = [planes.start for planes in layout.planes_of_layer]
        self._starts = [*(layout.offsets[first] for first in firsts), layout.block_bytes]
        self._kept: dict[int, tuple[Unit, ...]] = {}

    def plan(self, num_blocks: int) -> Iterator[Unit]:
        """Yield the units of a copy of `num_blocks` blocks, lower layers first.

        Each byte is in exactly one unit. A unit has at most `sizes.max_unit` bytes of staging
        memory; only if a single layer of a block has more (with Order.BLOCKS, a single block), the
        unit is that large.
        """
        if num_blocks not in self._kept:
            if num_blocks > _KEEP_UP_TO:
                return self._cut(num_blocks)
            self._kept[num_blocks] = tuple(self._cut(num_blocks))
        return iter(self._kept[num_blocks])

    def _cut(self, num_blocks: int) -> Iterator[Unit]:
        total = left = num_blocks * self._starts[-1]
        sizes, min_unit = self._sizes, self._sizes.min_unit
        target = min(max(total // sizes.share, 2 * min_unit), sizes.max_unit)
        aim = min(target, sizes.first)
        last = min(sizes.last, max(total // sizes.last_share, min_unit))
        if total <= min(2 * min_unit, sizes.max_unit):
            target = aim = last = total
        max_blocks = FIRST_BLOCKS
        for layers in self._spans(num_blocks, target, aim, last):
            first_byte = self._starts[layers.start]
            num_bytes = self._starts[layers.stop] - first_byte
            row = row_of(num_bytes)
            start = 0
            while start < num_blocks:
                room = max(min(aim, max(left // 2, last)) // row, 1)
                stop = min(start + min(room, max_blocks), num_blocks)
                yield Unit(layers, first_byte, num_bytes, start, stop)
                left -= (stop - start) * num_bytes
                start = stop
                aim, max_blocks = min(2 * aim, target), MAX_BLOCKS

    def _spans(self, num_blocks: int, target: int, first: int, last: int) -> Iterator[range]:
        """Yield the ranges of layers that are copied together, each as one unit, in order.

        `first`, `target` and `last` are the bytes of the first unit, of units in the middle, and
        of the last unit.
        """
        if self._order is Order.BLOCKS:
            yield range(self._num_layers)
            return
        start, aim, piece = 0, first, self._sizes.piece
        max_piece = self._sizes.max_piece
        if target < self._sizes.max_unit:
            max_piece = target // num_blocks
        while start < self._num_layers:
            left = self._starts[-1] - self._starts[start]  # bytes of each block that are left
            of_unit = min(aim, max(num_blocks * left // 2, last)) // num_blocks
            of_piece = max(min(piece, left // 2), self._sizes.piece)
            stop = start + 1
            while stop < self._num_layers and (
                self._starts[stop] - self._starts[start] < self._sizes.piece
                or self._starts[stop + 1] - self._starts[start] <= max(of_unit, of_piece)
            ):
                stop += 1
            yield range(start, stop)
            start, aim = stop, min(2 * aim, target)
            piece = min(2 * piece, max(max_piece, self._sizes.piece))


def joined(
    slots: Bytes, block_bytes: int, *, start: int, chunk_bytes: int, max_bytes: int
) -> tuple[npt.NDArray[np.intp], Bytes]:
    """Join neighbouring blocks to larger pieces for the copy engine.

    No piece spans two chunks of the memory, since each chunk is registered with the driver
    separately.

    Args:
        slots: ascending addresses of the blocks.
        block_bytes: bytes of a block.
        start: address of the memory with the blocks.
        chunk_bytes: bytes of a chunk of that memory.
        max_bytes: largest number of bytes of a piece.

    Returns:
        For each piece: the index of its first block in `slots`, and its number of bytes.
    """
    follows = np.diff(slots) == np.uint64(block_bytes)
    follows &= (slots[1:] - np.uint64(start)) % np.uint64(chunk_bytes) != 0
    follows &= np.arange(1, len(slots)) % max(max_bytes // block_bytes, 1) != 0
    firsts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    counts = np.diff(np.append(firsts, len(slots)))
    return firsts, counts.astype(np.uint64) * np.uint64(block_bytes)


E = TypeVar("E", bound=Event)

_ALIGNMENT = 256


class Ring(Generic[E]):
    """Reservations in a ring buffer: staging memory of `capacity` bytes.

    Each reservation follows the previous one. If too few bytes follow, it begins at offset 0. E is
    the type of the events after which reserved bytes are free again.

    |<------------- capacity ------------->|
    | in use | in use |   next   |  in use (oldest) |
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._reserved: int | None = None
        self._in_use: deque[tuple[int, E]] = deque()  # (first position, used until)

    def reserve(self, num_bytes: int) -> tuple[int, E | None]:
        """Reserve the next `num_bytes` bytes of the ring.

        The caller must then call `use_until` with the event after which the bytes are free again.

        Returns:
            The offset of the bytes, and the event of their previous use. The event must be done
                before the bytes are written; None if no wait is needed.

        Raises:
            LayoutError: the ring has fewer than `num_bytes` bytes.
        """
        assert self._reserved is None, "use_until follows each reserve"
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > self.capacity:
            raise LayoutError(
                f"one block needs {num_bytes} bytes of staging memory, but there are "
                f"{self.capacity}: raise staging_bytes"
            )
        start = self._head
        if start % self.capacity + num_bytes > self.capacity:
            start += self.capacity - start % self.capacity
        self._head = start + num_bytes
        freed_by: E | None = None
        while self._in_use and self._in_use[0][0] < self._head - self.capacity:
            # Events are done in order, so the last one is enough.
            _, freed_by = self._in_use.popleft()
        self._reserved = start
        return start % self.capacity, freed_by

    def use_until(self, event: E) -> None:
        """Mark the bytes of the last call of `reserve` as in use until `event` is done."""
        assert self._reserved is not None, "reserve comes first"
        self._in_use.append((self._reserved, event))
        self._reserved = None
        while self._in_use[0][1].is_done and len(self._in_use) > 1:
            self._in_use.popleft()

    def reset(self) -> None:
        """Discard all reservations without waiting for their events, so that all bytes are free."""
        self._reserved = None
        self._in_use.clear()
