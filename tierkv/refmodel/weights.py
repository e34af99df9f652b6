"""Weights from a seed: the same bytes on every machine, with every NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard
from tierkv.errors import LayoutError
from tierkv.refmodel.config import VOCAB_SIZE, ModelConfig
from tierkv.refmodel.paged import TILE, Floats

# A gain is the deviation of a product whose input has root mean square 1. These make an untrained
# model that depends on its context and does not soon repeat itself: attention is sharp, and adds
# more than the embedding brought. The bias, shared by a query and its key, becomes under RoPE a
# preference for near tokens: zeroing the K and V of the last 8 of 4,000 tokens changed the greedy
# 30 that follow in 9 cases of 9 (3 seeds, 3 pieces of source code), and without it in 3.
_EMBEDDING_GAIN = 1.0
_QUERY_KEY_GAIN = 2.0
_QUERY_KEY_BIAS = 3.0
_VALUE_GAIN = 2.0
_OUT_GAIN = 3.0
_GATE_UP_GAIN = 2.0
_DOWN_GAIN = 3.0
_UNEMBEDDING_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Rows of tokens are multiplied from the left; q is num_heads * head_dim wide,
    kv num_kv_heads * head_dim.

    qkv: [hidden, q + 2 kv], qkv_bias: [q + 2 kv]; queries, then keys, then values.
    out: [q, hidden]. gate_up: [hidden, 2 ffn], the gate first. down: [ffn, hidden].
    """

    qkv: Floats
    qkv_bias: Floats
    out: Floats
    gate_up: Floats
    down: Floats

    def to(self, xp: ModuleType) -> LayerWeights:
        return LayerWeights(
            qkv=xp.asarray(self.qkv),
            qkv_bias=xp.asarray(self.qkv_bias),
            out=xp.asarray(self.out),
            gate_up=xp.asarray(self.gate_up),
            down=xp.asarray(self.down),
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding: [256, hidden]. unembedding: [hidden, 256]. RMSNorm's gains are in the matrices."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    unembedding: Floats

    def to(self, xp: ModuleType) -> Weights:
        """The same numbers as arrays of `xp` (NumPy or CuPy)."""
        return Weights(
            embedding=xp.asarray(self.embedding),
            layers=tuple(layer.to(xp) for layer in self.layers),
            unembedding=xp.asarray(self.unembedding),
        )


def make_weights(config: ModelConfig) -> Weights:
    """The weights that `config.seed` stands for, as NumPy arrays.

    Made of PCG64's raw words with exact float32 arithmetic only: NumPy keeps the words of a
    seed for ever, but not what its distributions make of them.
    """
    draw = _Uniform(config.seed)
    embedding = draw.array(VOCAB_SIZE, config.hidden, deviation=_EMBEDDING_GAIN)
    layers = tuple(_make_layer(config, draw) for _ in range(config.num_layers))
    return Weights(embedding, layers, draw.matrix(config.hidden, VOCAB_SIZE, _UNEMBEDDING_GAIN))


def _make_layer(config: ModelConfig, draw: _Uniform) -> LayerWeights:
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    shared = draw.array(config.num_kv_heads, config.head_dim, deviation=_QUERY_KEY_BIAS)
    group = config.num_heads // config.num_kv_heads
    bias = [shared.repeat(group, axis=0).ravel(), shared.ravel(), np.zeros(kv, np.float32)]
    return LayerWeights(
        qkv=np.concatenate(
            [
                draw.matrix(config.hidden, q + kv, _QUERY_KEY_GAIN),
                draw.matrix(config.hidden, kv, _VALUE_GAIN),
            ],
            axis=1,
        ),
        qkv_bias=np.concatenate(bias),
        out=draw.matrix(q, config.hidden, _OUT_GAIN),
        gate_up=draw.matrix(config.hidden, 2 * config.ffn, _GATE_UP_GAIN),
        down=draw.matrix(config.ffn, config.hidden, _DOWN_GAIN),
    )


class _Uniform:
    """One stream of numbers, evenly spread around zero."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def array(self, rows: int, columns: int, *, deviation: float) -> Floats:
        words = self._bits.random_raw(rows * columns).reshape(rows, columns)
        top = (words >> np.uint64(40)).astype(np.float32)  # 24 bits: exact in a float32
        unit = top * np.float32(2.0**-23) - np.float32(1)
        scaled: Floats = unit * np.float32(deviation * math.sqrt(3))
        return scaled

    def matrix(self, rows: int, columns: int, gain: float) -> Floats:
        return self.array(rows, columns, deviation=gain / math.sqrt(rows))


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
