"""What a call to the reference model must bring, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import BadRequestError, LayoutError
from tierkv.refmodel.config import VOCAB_SIZE
from tierkv.refmodel.paged import PlaneArray


def check_planes(planes: Sequence[PlaneArray], layout: Layout) -> None:
    """Raises LayoutError unless `planes` are the layout's, all of as many blocks."""
    if len(planes) != len(layout.planes):
        raise LayoutError(f"the model has {len(layout.planes)} planes, not {len(planes)}")
    for plane, array in zip(layout.planes, planes, strict=True):
        where = f"layer {plane.layer} {plane.role}"
        shape = (len(planes[0]), plane.block_bytes)
        if array.shape != shape or array.dtype != np.uint8:
            raise LayoutError(f"{where}: needs uint8 {shape}, not {array.dtype} {array.shape}")
        if array.strides[1] != 1:
            raise LayoutError(f"{where}: the bytes of a block must lie side by side")


def check_tokens(tokens: npt.NDArray[np.integer], start: int, *, max_positions: int) -> None:
    """Raises BadRequestError unless `tokens` are bytes at positions that the model has."""
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise BadRequestError("tokens must be a list of one integer or more")
    if tokens.min() < 0 or tokens.max() >= VOCAB_SIZE:
        raise BadRequestError(f"a token must be in [0, {VOCAB_SIZE})")
    end = start + len(tokens)
    if start < 0 or end > max_positions:
        raise BadRequestError(
            f"positions [{start}, {end}) are not within the model's {max_positions}"
        )


def used_blocks(
    block_table: npt.NDArray[np.integer], *, num_tokens: int, block_size: int, num_blocks: int
) -> npt.NDArray[np.int64]:
    """The ids that hold the first `num_tokens` tokens.

    Raises BadRequestError if the table is too short, or one of them is out of range or repeated.
    """
    needed = -(-num_tokens // block_size)
    if block_table.ndim != 1 or not np.issubdtype(block_table.dtype, np.integer):
        raise BadRequestError("a block table must be a list of integers")
    if len(block_table) < needed:
        raise BadRequestError(
            f"{num_tokens} tokens need a table of {needed} blocks, not {len(block_table)}"
        )
    used = block_table[:needed].astype(np.int64)
    if used.min() < 0 or used.max() >= num_blocks:
        raise BadRequestError(f"a block id in the table is not in [0, {num_blocks})")
    if len(np.unique(used)) != needed:
        raise BadRequestError("a block is in the table twice")
    return used
