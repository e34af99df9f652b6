"""The blocks of several ranks as one block: each rank's shard whole, one behind the other.

    host slot   | rank 0: its layers, in order | rank 1: its layers, in order | ...

So one decision maker counts one block, one value in storage holds all of it, and every rank copies
one contiguous piece of each slot. To the service the layers of rank 1 follow those of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierkv.cache.layout import Layout
from tierkv.errors import LayoutError


def side_by_side(shards: Sequence[Layout]) -> Layout:
    """The layout of blocks whose shard r has layout `shards[r]`; of one shard, that one.

    Raises LayoutError if there are none, or their block sizes differ.
    """
    if not shards or len({shard.block_size for shard in shards}) != 1:
        raise LayoutError("shards of one block have one block size, and there is at least one")
    planes, first = [], 0
    for shard in shards:
        planes += [replace(plane, layer=first + plane.layer) for plane in shard.planes]
        first += shard.num_layers
    return Layout(shards[0].block_size, tuple(planes))


def pieces(shards: Sequence[Layout]) -> list[slice]:
    """For each rank, its bytes of a host slot."""
    found, at = [], 0
    for shard in shards:
        found.append(slice(at, at + shard.block_bytes))
        at += shard.block_bytes
    return found
