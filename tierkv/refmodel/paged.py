"""One sequence's rows of one plane, as its block table scatters them over the device."""

from __future__ import annotations

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
