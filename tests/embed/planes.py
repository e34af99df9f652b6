"""Planes of a worker that a test can look into: files that both processes have mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.world import GQA


def shard_planes(folder: Path, rank: int, num_blocks: int) -> list[np.ndarray]:
    """uint8 [num_blocks, block_bytes] for each plane of GQA."""
    arrays = []
    for index, plane in enumerate(GQA.planes):
        path = folder / f"rank-{rank}-plane-{index}"
        shape = (num_blocks, plane.block_bytes)
        arrays.append(np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=shape))
    return list(arrays)
