"""Planes that a test can look into (files that both processes have mapped), and plans of copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.world import GQA
from tierkv.ranks.link import Kind, Plan


def plan_of(number: int, kind: Kind, source: Sequence[int], target: Sequence[int]) -> Plan:
    packed = [np.array(ids, np.int32).tobytes() for ids in (source, target)]
    return Plan(number, kind, packed[0], packed[1])


def shard_planes(folder: Path, rank: int, num_blocks: int) -> list[np.ndarray]:
    """uint8 [num_blocks, block_bytes] for each plane of GQA."""
    arrays = []
    for index, plane in enumerate(GQA.planes):
        path = folder / f"rank-{rank}-plane-{index}"
        shape = (num_blocks, plane.block_bytes)
        arrays.append(np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=shape))
    return list(arrays)
