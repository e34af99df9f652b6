"""Which heads of the reference model each tensor-parallel rank has."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard
from tierkv.errors import LayoutError
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.tiles import TILE


@dataclass(frozen=True, slots=True)
class RankHeads:
    """layout: of the rank's planes. kv_heads: the KV heads whose K and V it holds.

    rows: of each such head's group * TILE query rows, those of the rank's own query heads. With
    more ranks than KV heads, neighbours hold the same KV head and share its query heads.
    """

    layout: Layout
    kv_heads: slice
    rows: slice

    @property
    def num_kv_heads(self) -> int:
        count: int = self.kv_heads.stop - self.kv_heads.start
        return count


def split_heads(config: ModelConfig, block_size: int, num_ranks: int) -> tuple[RankHeads, ...]:
    """Raises LayoutError if the heads are not so many equal shares."""
    kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if num_ranks < 1 or config.num_heads % num_ranks:
        raise LayoutError(f"{config.num_heads} query heads cannot be split over {num_ranks} ranks")
    scheme = config.shards(block_size)
    heads = []
    for rank in range(num_ranks):
        layout = scheme.layout(Shard(rank, num_ranks))
        if num_ranks <= kv:
            each = kv // num_ranks
            own, rows = slice(rank * each, (rank + 1) * each), slice(0, group * TILE)
        else:
            sharers = num_ranks // kv
            each = group // sharers * TILE
            own = slice(rank // sharers, rank // sharers + 1)
            rows = slice(rank % sharers * each, (rank % sharers + 1) * each)
        heads.append(RankHeads(layout, own, rows))
    return tuple(heads)
