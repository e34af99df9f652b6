"""The cutting of a copy into units of work: which layers of which blocks travel together.

    layout's block   | layer 0 | layer 1 | layer 2 | ...      span: consecutive layers
    blocks           0 1 2 ... n                              unit: a span of some of the blocks

A unit is one batch of pieces for the copy engine (a piece per block) and one kernel. This module
has no access to a GPU.
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

Bytes = npt.NDArray[np.uint64]  # addresses, or how many

MAX_BLOCKS = 960  # as in csrc/planes.cu
FIRST_BLOCKS = 128  # of the first unit: at 1.5 us a piece it may be an event loop that submits them
_KEEP_UP_TO = 64  # plans for so few blocks are kept: making one takes longer than using it
ROW_ALIGNMENT = 16  # rows of staging start where 16-byte vectors may


class Order(Enum):
    """The order of a copy's units.

    LAYERS copies the first layers of all blocks first, so that the model may start. BLOCKS copies
    block by block, in fewer and larger pieces.
    """

    LAYERS = "layers"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Sizes of a copy's units, in bytes. Figures were measured on an H200.

    A unit has 1 / `share` of the copy's bytes, but at least 2 * `min_unit` and at most `max_unit`.
    Copies of up to 2 * `min_unit` are one unit, since another kernel would cost more than it hides.
    The first unit is smaller (`first`), so that the first layer arrives early; the units at the end
    halve down to `last`, so that little is left to scatter and compute after the last byte.

    Attributes:
        first: size of the first unit, which has at most FIRST_BLOCKS blocks. The caller's thread
            submits this unit; its bytes keep the copy engine busy until the lane's thread
            continues, after 0.5 to 0.7 ms. PCIe 5 moves 32 MiB in 0.6 ms.
        min_unit: half of the smallest size of a unit that is neither the first nor near the end.
        max_unit: largest size of a unit. The model's next kernel waits for the unit's kernel, 90 us
            for 128 MiB. During a load, decoder layers lose 1.7 % with 128 MiB and 0.5 % with
            64 MiB; the load keeps 98.5 % of the limit with either.
        last: size down to which units halve at the end. With 8 MiB, a load during decoder layers
            keeps 97.7 % of the limit instead of 98.5 %: smaller units wait for kernels of the model
            just as long.
        last_share: in a small copy the last unit has 1 / `last_share` of the bytes, if that is
            less than `last`, but at least `min_unit`. An 8B model computes a layer as fast as 256
            MiB bring one: four layers in the last unit cost 0.3 ms of 5 ms.
        share: number of units of a copy, if neither limit applies.
        piece: smallest piece for the copy engine; layers are joined to reach it. 256 KiB pieces
            reach 98 % of a contiguous copy, 1 MiB 98.6 %.
        max_piece: largest piece of joined layers in the middle of a load, where the model computes
            earlier layers anyway; a piece costs the submitting thread 1 to 4 us. Pieces of a small
            load are no larger than a block's part of a unit.
        offload_piece: smallest piece of an offload, where a piece costs more: 256 KiB pieces reach
            92 to 94 %, 512 KiB 95 to 96 %, 1 MiB 97 %, 2 MiB 98 %.
        straight_row: smallest row of a rectangle of planes with which a copy of whole blocks begins
            without staging. With rows of 128 KiB, 2 GiB to the host reach 99.2 % instead of 98.8 %;
            with rows of 32 KiB no more.
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
        layers: layers that these bytes belong to.
        first_byte: offset in each block.
        num_bytes: bytes of each block.
        start, stop: the blocks, as positions [start, stop) in the copy.
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
        return row_of(self.num_bytes)

    @property
    def staging_bytes(self) -> int:
        return self.num_blocks * self.row_bytes


def row_of(num_bytes: int) -> int:
    """Return the bytes of a row of staging memory for `num_bytes`, alignment included."""
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


class UnitPlanner:
    """The plans of copies of one layout, in one order."""

    def __init__(self, layout: Layout, order: Order, sizes: UnitSizes) -> None:
        self._order = order
        self._sizes = sizes
        self._num_layers = layout.num_layers
        firsts = [planes.start for planes in layout.planes_of_layer]
        self._starts = [*(layout.offsets[first] for first in firsts), layout.block_bytes]
        self._kept: dict[int, tuple[Unit, ...]] = {}

    def plan(self, num_blocks: int) -> Iterator[Unit]:
        """Yield units that together hold every byte of `num_blocks` blocks once, layers ascending.

        A unit has at most `sizes.max_unit` bytes of staging, unless one layer of one block (with
        Order.BLOCKS: one block) needs more.
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
        """Yield the ranges of layers that are copied together, in order.

        With Order.LAYERS a range is as small as pieces and units of a good size allow, and smallest
        at both ends.

        Args:
            num_blocks: blocks of the copy.
            target: bytes of a unit in the middle of the copy.
            first: bytes of the first unit.
            last: bytes of the last unit.
        """
        if self._order is Order.BLOCKS:
            yield range(self._num_layers)
            return
        start, aim, piece = 0, first, self._sizes.piece
        max_piece = self._sizes.max_piece
        if target < self._sizes.max_unit:
            max_piece = target // num_blocks
        while start < self._num_layers:
            left = self._starts[-1] - self._starts[start]  # of each block
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
    """Join neighbouring blocks to larger pieces.

    No piece spans two chunks of the memory at `start`, since the driver registers each chunk by
    itself.

    Args:
        slots: ascending addresses of the blocks.
        block_bytes: bytes of a block.
        start: address of the memory.
        chunk_bytes: bytes of a chunk.
        max_bytes: largest bytes of a piece.

    Returns:
        The index of each piece's first block, and each piece's bytes.
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
    """The management of `capacity` bytes of staging memory, which are reserved in turn.

    Positions increase without end; the remainder by `capacity` is the offset.

    |<------------- capacity ------------->|
    | in use | in use |   next   |  in use (oldest) |
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._reserved: int | None = None
        self._in_use: deque[tuple[int, E]] = deque()  # (first position, used until)

    def reserve(self, num_bytes: int) -> tuple[int, E | None]:
        """Reserve the next `num_bytes` bytes; a call of `use_until` must follow.

        Returns:
            The offset, and the event before which the bytes must not be written. The event is None
                if the writer, which waits for the events of earlier calls in order, has waited long
                enough already.

        Raises:
            LayoutError: the ring is smaller than `num_bytes`.
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
            _, freed_by = self._in_use.popleft()  # events come in order: the last one covers all
        self._reserved = start
        return start % self.capacity, freed_by

    def use_until(self, event: E) -> None:
        """Keep the bytes of the last `reserve` in use until `event` is done."""
        assert self._reserved is not None, "reserve comes first"
        self._in_use.append((self._reserved, event))
        self._reserved = None
        while self._in_use[0][1].is_done and len(self._in_use) > 1:
            self._in_use.popleft()

    def reset(self) -> None:
        """Mark the whole ring as free."""
        self._reserved = None
        self._in_use.clear()
