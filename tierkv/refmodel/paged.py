"""One sequence's rows of one plane, as its block table scatters them over the device; and how
positions are cut into tiles, so that shapes never depend on how work was cut into calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
PlaneArray = npt.NDArray[np.uint8]
BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where a sequence's tokens lie: token p is row p % block_size of block ids[p // block_size].

    ids: int64 [n] of the array module xp (NumPy or CuPy), distinct, all within the planes.
    token_shape: (num_kv_heads, head_dim), one token's elements in a plane, of type kv_dtype.
    """

    xp: ModuleType
    ids: npt.NDArray[np.int64]
    block_size: int
    token_shape: tuple[int, int]
    kv_dtype: str

    def write(self, plane: PlaneArray, rows: Floats, *, start: int) -> None:
        """Put `rows` [n, num_kv_heads, head_dim] at tokens from `start` on, rounded to kv_dtype (to
        the nearest, ties to even).

        No other byte of the plane changes.
        """
        positions = self.xp.arange(start, start + len(rows))
        blocks = self.ids[positions // self.block_size]
        self._tokens(plane)[blocks, positions % self.block_size] = self._stored(rows)

    def read(self, plane: PlaneArray, *, num_tokens: int, num_rows: int) -> Floats:
        """float32 [num_kv_heads, num_rows, head_dim], C order: the first `num_tokens` tokens.

        The rows after them are zero, whatever the plane holds there.
        """
        num_kv_heads, head_dim = self.token_shape
        blocks = self._tokens(plane)[self.ids[: -(-num_tokens // self.block_size)]]
        tokens = blocks.reshape(-1, num_kv_heads, head_dim)[:num_tokens]
        rows: Floats = self.xp.zeros((num_kv_heads, num_rows, head_dim), dtype=np.float32)
        rows[:, :num_tokens] = self._computable(tokens).transpose(1, 0, 2)
        return rows

    def _tokens(self, plane: PlaneArray) -> npt.NDArray[np.generic]:
        """The plane's own memory as [num_blocks, block_size, num_kv_heads, head_dim]; bfloat16,
        which NumPy lacks, as uint16: the upper half of a float32."""
        dtype = "uint16" if self.kv_dtype == BFLOAT16 else self.kv_dtype
        view: npt.NDArray[np.generic] = plane.view(dtype)
        return view.reshape(len(plane), self.block_size, *self.token_shape)

    def _stored(self, rows: Floats) -> npt.NDArray[np.generic]:
        if self.kv_dtype != BFLOAT16:
            return rows.astype(self.kv_dtype)
        words = self.xp.ascontiguousarray(rows).view(np.uint32)
        nearest = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
        is_nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)  # which rounding may lose
        kept: npt.NDArray[np.uint16] = (
            self.xp.where(is_nan, words | np.uint32(0x00400000), nearest) >> np.uint32(16)
        ).astype(np.uint16)
        return kept

    def _computable(self, stored: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        if self.kv_dtype != BFLOAT16:
            return stored
        words: npt.NDArray[np.uint32] = stored.astype(np.uint32) << np.uint32(16)
        return words.view(np.float32)


# Floating-point sums depend on their order, and a BLAS chooses the order by the shapes it is given
# and by where in the output a row is. So every shape follows from absolute positions alone:
#
#     position   0 ............ 15 | 16 ........... 31 | 32 ....
#     tile       0                 | 1                 | 2           TILE tokens each
#     forward(start=20, n=4)       | . . . . x x x x . . . .         the other 12 rows are padding
#
# - The token at position p is always row p % TILE of tile p // TILE.
# - A projection is [TILE, a] @ [a, b] per tile: np.matmul runs one gemm per tile of a stack. Where
#   the array module may batch them otherwise (CuPy), a stack is one tile high.
# - Attention of tile i is over chunks of CHUNK keys, the last of which holds the tile, one gemm
#   per chunk and KV head; what the chunks bring is added up in order.
#
# A gemm of one shape gives a row the same bits whatever its other rows hold, so a cold prefill, a
# cached prefix plus the rest, and decode all give the same bits, at any block_size.
#
# Nothing leaks from what a query must not see. Scores of later positions are replaced (where), not
# added to; and rows of K and V after the last known token are zeros, not what the planes hold
# there, because 0 * NaN is NaN and a weight of exactly 0 would not save the sum.
#
# Promised for one machine; on another, another BLAS kernel may run.
TILE = 16

# At the default sizes every gemm is one that OpenBLAS runs on the calling thread (rows * columns *
# depth up to 262,144), so the bits do not depend on the number of threads either. One gemm for the
# whole context took 1.3 s for 10,000 tokens instead of 1.9, but 17.7 s when its threads had to wait
# for each other on a busy machine (2 cores of an EPYC, NumPy 2.4, 2026-11-21).
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Span:
    """The positions [start, end) that one call computes, start < end, and the tiles they touch."""

    start: int
    end: int

    @property
    def first_tile(self) -> int:
        return self.start // TILE

    @property
    def num_tiles(self) -> int:
        return -(-self.end // TILE) - self.first_tile

    @property
    def live(self) -> slice:
        """The rows of [num_tiles * TILE] that are tokens of the span; the others are padding."""
        lead = self.start % TILE
        return slice(lead, lead + self.end - self.start)

    @property
    def padded_end(self) -> int:
        """The position after the last tile's last row."""
        return (self.first_tile + self.num_tiles) * TILE

    @property
    def context_rows(self) -> int:
        """How many positions the chunks up to the last tile's have."""
        return -(-self.padded_end // CHUNK) * CHUNK

    def stacks(self, height: int) -> Iterator[slice]:
        """The tiles, counted from the span's first, in slices of up to `height`."""
        for at in range(0, self.num_tiles, height):
            yield slice(at, min(at + height, self.num_tiles))
