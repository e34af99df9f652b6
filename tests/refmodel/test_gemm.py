"""What tiles.py takes for granted of NumPy and its BLAS, on the machine at hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tierkv.refmodel.model import CHUNK, TILE

Floats = npt.NDArray[np.float32]

SHAPES = [  # rows, depth, columns of every gemm at the default sizes
    (TILE, 64, 128),
    (TILE, 64, 64),
    (TILE, 64, 256),
    (TILE, 128, 64),
    (2 * TILE, 16, CHUNK),
    (2 * TILE, CHUNK, 16),
]


def normal(*shape: int) -> Floats:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("others", [0.0, 1e30, np.nan])
def test_a_row_of_a_product_has_the_same_bits_whatever_the_other_rows_hold(
    rows: int, depth: int, columns: int, others: float
) -> None:
    left, right = normal(rows, depth), normal(depth, columns)
    whole = left @ right
    for row in range(rows):
        alone = np.full_like(left, others)
        alone[row] = left[row]
        assert (alone @ right)[row].tobytes() == whole[row].tobytes()


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("height", [1, 2, 3, 64])
def test_a_stack_of_products_has_the_bits_of_one_product_at_a_time(
    rows: int, depth: int, columns: int, height: int
) -> None:
    lefts, right = normal(height, rows, depth), normal(depth, columns)
    stacked = np.matmul(lefts, right)
    for left, product in zip(lefts, stacked, strict=True):
        assert (left.copy() @ right).tobytes() == product.tobytes()


@pytest.mark.parametrize("height", [1, 2, 3, 40])
def test_transposed_chunks_of_keys_have_the_bits_of_one_chunk_at_a_time(height: int) -> None:
    queries, keys = normal(2, 2 * TILE, 16), normal(2, 40, CHUNK, 16)
    stacked = np.matmul(queries[:, None], keys[:, :height].swapaxes(2, 3))
    for head in range(2):
        for chunk in range(height):
            alone = queries[head].copy() @ keys[head, chunk].copy().T
            assert alone.tobytes() == stacked[head, chunk].tobytes()
