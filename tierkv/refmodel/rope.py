"""Rotary positions (RoPE, Su et al. 2021): a head's pairs, turned by position times frequency."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.paged import Floats
from tierkv.refmodel.tiles import TILE, Span


class Rope:
    """Cosines and sines of every position the model has, in memory of `xp` (NumPy or CuPy).

    Computed once, in float64 on the host, so that a position's row never depends on a call.
    """

    def __init__(self, config: ModelConfig, xp: ModuleType) -> None:
        rows = Span(0, config.max_positions).padded_end
        pairs = np.arange(0, config.head_dim, 2) / config.head_dim
        angles = np.arange(rows, dtype=np.float64)[:, None] * config.rope_theta**-pairs
        self._xp = xp
        self._cos: Floats = xp.asarray(np.cos(angles).astype(np.float32))
        self._sin: Floats = xp.asarray(np.sin(angles).astype(np.float32))

    def turn(self, heads: Floats, *, first_tile: int) -> Floats:
        """`heads` [num_tiles, TILE, num_heads, head_dim], with pairs (i, i + head_dim / 2) turned.

        first_tile: the absolute tile of heads[0].
        """
        num_tiles, half = len(heads), heads.shape[-1] // 2
        rows = slice(first_tile * TILE, (first_tile + num_tiles) * TILE)
        cos = self._cos[rows].reshape(num_tiles, TILE, 1, half)
        sin = self._sin[rows].reshape(num_tiles, TILE, 1, half)
        left, right = heads[..., :half], heads[..., half:]
        turned: Floats = self._xp.concatenate(
            [left * cos - right * sin, right * cos + left * sin], axis=-1
        )
        return turned
