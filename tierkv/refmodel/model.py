"""The reference model: a small transformer over the device planes.

The bits of its logits do not depend on how a prompt is divided into calls, so tests can compare
other results with them. Weights made from a seed are the same bytes on every machine, with every
version of NumPy.

The model has RMSNorm (Zhang & Sennrich 2019), rotary positions (RoPE, Su et al. 2021),
grouped-query attention (GQA, Ainslie et al. 2023) and SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import ModuleType

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard
from tierkv.engine import Sampling
from tierkv.errors import BadRequestError, LayoutError
from tierkv.refmodel.config import VOCAB_SIZE, ModelConfig
from tierkv.tokenizers import ByteTokenizer

# Tokens are bytes. The model reads any byte but writes only printable ASCII and newline, so that a
# terminal, a log line or a JSON answer can show its text unchanged.


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """Choose the token at a position from the logits for that position.

    Greedy sampling chooses the lowest of the ids with the largest logit. Otherwise the only
    randomness is word `position` of the Philox stream (a counter-based generator, Salmon et al.
    2011) keyed by the seed, so that another node with the same seed continues with the same tokens.
    A logit of -inf is never chosen.

    Args:
        logits: float32 [vocab_size].
        sampling: temperature, top_k and seed; other fields are not read.
        position: position of the token, counted from the start of the prompt.

    Returns:
        The id of the token.

    Raises:
        BadRequestError: the position is negative, a logit is NaN or +inf, or all logits are -inf.
    """
    if position < 0:
        raise BadRequestError(f"a position must not be negative, not {position}")
    best = int(np.argmax(logits))  # the first of equals; a NaN would be chosen
    if not np.isfinite(logits[best]):
        raise BadRequestError("no token can be sampled: the largest logit is not finite")
    if sampling.is_greedy:
        return best
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature makes all other logits -inf
        weights = np.exp((wide - wide[best]) / sampling.temperature)
    if sampling.top_k:
        ranked = np.argsort(-wide, kind="stable")  # equal logits stay in the order of their ids
        weights[ranked[sampling.top_k :]] = 0.0
    cumulative = np.cumsum(weights)
    point = _uniform(sampling.seed, position) * cumulative[-1]
    chosen = int(np.searchsorted(cumulative, point, side="right"))
    # The random point may have been rounded up to the whole sum.
    last = int(np.flatnonzero(weights)[-1])
    return min(chosen, last)


def _uniform(seed: int, position: int) -> float:
    word = int(np.random.Philox(key=seed, counter=position).random_raw())
    return float(word >> 11) * 2.0**-53


PRINTABLE: npt.NDArray[np.bool_] = np.array(
    [chr(token) == "\n" or " " <= chr(token) <= "~" for token in range(VOCAB_SIZE)]
)
"""bool [256]: the tokens that the model may generate."""
PRINTABLE.setflags(write=False)


def encode(text: str) -> npt.NDArray[np.int32]:
    """Return the tokens of `text`, which are the bytes of its UTF-8 form, as int32 [n]."""
    return np.frombuffer(TOKENIZER.encode(text), "<i4").astype(np.int32)


def decode(tokens: Iterable[int]) -> str:
    """Return the text of `tokens`, with U+FFFD for bytes that are not UTF-8."""
    return TOKENIZER.decode(tokens)


TOKENIZER = ByteTokenizer()
Floats = npt.NDArray[np.float32]
PlaneArray = npt.NDArray[np.uint8]
BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one sequence, and the layout of a block in a plane.

    The token at position p is row p % block_size of block ids[p // block_size].

    Attributes:
        xp: the array module, NumPy or CuPy.
        ids: ids of the sequence's blocks in the order of its tokens, int64 [n] of `xp`, distinct,
            all within the planes.
        block_size: number of tokens of a block.
        token_shape: (num_kv_heads, head_dim) of one token in a plane.
        kv_dtype: element type of the planes.
    """

    xp: ModuleType
    ids: npt.NDArray[np.int64]
    block_size: int
    token_shape: tuple[int, int]
    kv_dtype: str

    def write(self, plane: PlaneArray, rows: Floats, *, start: int) -> None:
        """Write the keys or values of consecutive tokens into a plane.

        Values are rounded to kv_dtype, to the nearest, ties to even. No other byte of the plane
        changes.

        Args:
            plane: uint8 [num_blocks, block_bytes].
            rows: keys or values of the tokens, float32 [n, num_kv_heads, head_dim].
            start: position of the first token.
        """
        positions = self.xp.arange(start, start + len(rows))
        blocks = self.ids[positions // self.block_size]
        self._tokens(plane)[blocks, positions % self.block_size] = self._stored(rows)

    def read(self, plane: PlaneArray, *, num_tokens: int, num_rows: int) -> Floats:
        """Return the keys or values of the sequence's first tokens, padded with zeros.

        Args:
            plane: uint8 [num_blocks, block_bytes].
            num_tokens: number of tokens to read.
            num_rows: number of rows of the result, at least `num_tokens`.

        Returns:
            float32 [num_kv_heads, num_rows, head_dim], C order. The rows after `num_tokens` are
                zeros.
        """
        num_kv_heads, head_dim = self.token_shape
        blocks = self._tokens(plane)[self.ids[: -(-num_tokens // self.block_size)]]
        tokens = blocks.reshape(-1, num_kv_heads, head_dim)[:num_tokens]
        rows: Floats = self.xp.zeros((num_kv_heads, num_rows, head_dim), dtype=np.float32)
        rows[:, :num_tokens] = self._computable(tokens).transpose(1, 0, 2)
        return rows

    def _tokens(self, plane: PlaneArray) -> npt.NDArray[np.generic]:
        """Return a view of the plane as [num_blocks, block_size, num_kv_heads, head_dim].

        Elements of a bfloat16 plane are uint16, the upper half of a float32, since NumPy has no
        bfloat16.
        """
        dtype = "uint16" if self.kv_dtype == BFLOAT16 else self.kv_dtype
        view: npt.NDArray[np.generic] = plane.view(dtype)
        return view.reshape(len(plane), self.block_size, *self.token_shape)

    def _stored(self, rows: Floats) -> npt.NDArray[np.generic]:
        if self.kv_dtype != BFLOAT16:
            return rows.astype(self.kv_dtype)
        words = self.xp.ascontiguousarray(rows).view(np.uint32)
        nearest = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
        # Rounding could make it infinite.
        is_nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
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
#   per chunk and KV head; the results of the chunks are added in order.
#
# In a gemm of one shape the bits of a row do not depend on the other rows, so a cold prefill, a
# cached prefix plus the rest, and decode all give the same bits, at any block_size.
#
# Later positions have no effect on a query. Their scores are replaced (where), not added to; and
# rows of K and V after the last known token are zeros, not the planes' content, since 0 * NaN is
# NaN.
#
# The bits are the same on one machine; on another one, another BLAS kernel may run.
TILE = 16

# At the default sizes every gemm is one that OpenBLAS runs on the calling thread (rows * columns *
# depth up to 262,144), so the bits do not depend on the number of threads either. One gemm for the
# whole context is faster (1.3 s instead of 1.9 s for 10,000 tokens), but takes 17.7 s where its
# threads wait for each other on a busy machine.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Span:
    """The positions [start, end) that one call computes, start < end, and the tiles that hold them.

    A tile is TILE consecutive positions, the first of which is a multiple of TILE.
    """

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
        """The rows of [start, end) in an array with one row for each position of the tiles.

        The other rows of the array are padding.
        """
        lead = self.start % TILE
        return slice(lead, lead + self.end - self.start)

    @property
    def padded_end(self) -> int:
        """The first position after the span's last tile, a multiple of TILE."""
        return (self.first_tile + self.num_tiles) * TILE

    @property
    def context_rows(self) -> int:
        """The number of positions whose keys and values are read: up to the end of the last tile.

        The number is rounded up to a multiple of CHUNK.
        """
        return -(-self.padded_end // CHUNK) * CHUNK

    def stacks(self, height: int) -> Iterator[slice]:
        """Yield ranges of at most `height` consecutive tiles that together cover the span.

        A tile is TILE positions. Tile 0 is the first tile of the span.
        """
        for at in range(0, self.num_tiles, height):
            yield slice(at, min(at + height, self.num_tiles))


# A gain is the standard deviation of a product with an input of root mean square 1. With these
# gains the untrained model depends on its context and does not soon repeat itself. The bias, shared
# by a query and its key, becomes under RoPE a preference for near tokens: zeroing the K and V of
# the last 8 of 4,000 tokens changed the 30 greedy tokens that follow in 9 cases of 9, and in 3
# without the bias.
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
    """The weights of one layer, as matrices [input size, output size] for row vectors.

    In the shapes, q is num_heads * head_dim, and kv is num_kv_heads * head_dim. A matrix can also
    be stored as panels of PANEL columns, [output size / PANEL, input size, PANEL].

    Attributes:
        qkv: [hidden, q + 2 kv]; columns of the queries, then keys, then values.
        qkv_bias: [q + 2 kv], in the same order.
        out: [q, hidden].
        gate_up: [hidden, 2 ffn], the gate first.
        down: [ffn, hidden].
    """

    qkv: Floats
    qkv_bias: Floats
    out: Floats
    gate_up: Floats
    down: Floats

    def to(self, xp: ModuleType) -> LayerWeights:
        return LayerWeights(*[xp.asarray(getattr(self, field.name)) for field in fields(self)])


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of the model. RMSNorm's gains are multiplied into the matrices.

    Attributes:
        embedding: [vocab_size, hidden].
        layers: the weights of each layer.
        unembedding: [hidden, vocab_size], or in panels, [vocab_size / PANEL, hidden, PANEL].
    """

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    unembedding: Floats

    def to(self, xp: ModuleType) -> Weights:
        """Return the same weights as arrays of `xp` (NumPy or CuPy)."""
        return Weights(
            embedding=xp.asarray(self.embedding),
            layers=tuple(layer.to(xp) for layer in self.layers),
            unembedding=xp.asarray(self.unembedding),
        )


PANEL = 64


def in_panels(matrix: Floats) -> Floats:
    """Return a matrix [a, b] cut into panels of PANEL columns, [b / PANEL, a, PANEL].

    Multiplying TILE rows by panels takes a third of the time of multiplying them by the whole
    matrix, because OpenBLAS first copies a whole matrix into an order of its own.

    Returns:
        The panels; the matrix itself, if PANEL does not divide b.
    """
    rows, columns = matrix.shape
    if columns % PANEL:
        return np.ascontiguousarray(matrix)
    return np.ascontiguousarray(matrix.reshape(rows, -1, PANEL).transpose(1, 0, 2))


def multiply(tiles: Floats, weight: Floats, xp: ModuleType) -> Floats:
    """Multiply each tile by a matrix.

    Each tile (and panel) is multiplied separately, so that the bits of a product do not depend on
    the number of tiles.

    Args:
        tiles: [num_tiles, TILE, a].
        weight: [a, b], or its panels, [b / PANEL, a, PANEL].
        xp: the array module of both, NumPy or CuPy.

    Returns:
        [num_tiles, TILE, b].
    """
    if weight.ndim == 2:  # noqa: PLR2004 - a matrix
        whole: Floats = xp.matmul(tiles, weight)
        return whole
    # A panel stays in the CPU's cache for all tiles.
    panels = xp.matmul(tiles[None], weight[:, None])
    joined: Floats = panels.transpose(1, 2, 0, 3).reshape(*tiles.shape[:2], -1)
    return joined


def make_weights(config: ModelConfig) -> Weights:
    """Make random weights from `config.seed`, as NumPy arrays.

    The weights are made from raw words of the generator PCG64 with exact float32 arithmetic,
    because NumPy's distributions may change from version to version.
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
    """A stream of pseudo-random numbers, uniformly distributed around zero."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def array(self, rows: int, columns: int, *, deviation: float) -> Floats:
        """Return the next numbers, float32 [rows, columns], with a standard `deviation`."""
        words = self._bits.random_raw(rows * columns).reshape(rows, columns)
        top = (words >> np.uint64(40)).astype(np.float32)  # 24 bits are exact in a float32
        unit = top * np.float32(2.0**-23) - np.float32(1)
        scaled: Floats = unit * np.float32(deviation * math.sqrt(3))
        return scaled

    def matrix(self, rows: int, columns: int, gain: float) -> Floats:
        """Return a random matrix, float32 [rows, columns].

        A vector [rows] of root mean square 1, multiplied by the matrix, gives elements with the
        standard deviation `gain`.
        """
        return self.array(rows, columns, deviation=gain / math.sqrt(rows))


@dataclass(frozen=True, slots=True)
class RankHeads:
    """The attention heads of one tensor-parallel rank.

    If there are more ranks than KV heads, consecutive ranks have the same KV head and divide its
    query heads among them.

    Attributes:
        layout: layout of the rank's planes.
        kv_heads: range of the KV heads for which the rank has keys and values.
        rows: range of the rows that the rank computes of the query matrix of each of its KV heads.
            The model computes TILE consecutive tokens at a time; the matrix has TILE rows for each
            query head of the KV head.
    """

    layout: Layout
    kv_heads: slice
    rows: slice

    @property
    def num_kv_heads(self) -> int:
        count: int = self.kv_heads.stop - self.kv_heads.start
        return count


def split_heads(config: ModelConfig, block_size: int, num_ranks: int) -> tuple[RankHeads, ...]:
    """Divide the heads among tensor-parallel ranks.

    Args:
        config: sizes of the model.
        block_size: number of tokens of a block.
        num_ranks: number of ranks.

    Returns:
        The heads of each rank, in the order of the ranks.

    Raises:
        LayoutError: the heads cannot be divided into `num_ranks` equal shares.
    """
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


_HOST_STACK_TILES = 64  # limits temporary memory: 64 tiles need 1 MiB for gate and up at ffn = 128


class ReferenceModel:
    """A transformer that stores K and V only in the planes that are passed to each call.

    The model keeps nothing of a sequence between calls. Thread-safe.

    Args:
        config: sizes of the model.
        block_size: number of tokens of a block of the planes, any positive number.
        xp: the planes' array module, NumPy or CuPy; CuPy's current stream does all the work.
        tensor_parallel: number of ranks that share the heads; the result is the same in every bit.
            Each rank has its own planes, and its attention reads only them.
        weights: weights of a checkpoint in host memory; None for the weights of `config.seed`.

    Raises:
        LayoutError: block_size is not positive, or the heads cannot be split over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        xp: ModuleType = np,
        *,
        tensor_parallel: int = 1,
        weights: Weights | None = None,
    ) -> None:
        self.config = config
        self._ranks = split_heads(config, block_size, tensor_parallel)
        self.layout = config.layout(block_size)
        self._xp = xp
        self._is_on_host = xp is np
        self._stack_tiles = _HOST_STACK_TILES if self._is_on_host else 1
        self._group = config.num_heads // config.num_kv_heads
        self._weights = (weights or make_weights(config)).to(xp)
        self._epsilon = np.float32(config.norm_epsilon)
        self._rope = Rope(config, xp)
        row = np.tile(np.arange(TILE), self._group)[:, None]
        self._key_after_row: npt.NDArray[np.int64] = xp.asarray(np.arange(CHUNK) - row)

    def forward(
        self,
        *,
        tokens: npt.NDArray[np.integer],
        start: int,
        block_table: npt.NDArray[np.integer],
        planes: Sequence[PlaneArray],
        before_layer: Callable[[int], None],
    ) -> Floats:
        """Compute `tokens`: write their K and V, and return the logits of the next token.

        Args:
            tokens: int [n] in host memory, n >= 1, at positions start, start + 1, ...
            start: position of the first token. Earlier tokens must have their K and V in the
                planes.
            block_table: int [m] in host memory, distinct ids of the blocks of the sequence, in
                order. Blocks after the one of the last token are ignored.
            planes: uint8 [num_blocks, the plane's block_bytes] each, in the layout's order. With
                several ranks, first the planes of rank 0 in the order of its layout, then those of
                rank 1, and so on.
            before_layer: called with 0, 1, ... before that layer's planes are read or written, to
                wait for loads. If it raises, the error passes to the caller, and only the earlier
                layers are written.

        Returns:
            float32 [vocab_size] in host memory, ready to read; -inf for tokens that the built-in
                model may not generate (see PRINTABLE).

        Raises:
            BadRequestError: tokens, start or block_table is not valid; nothing was written.
            LayoutError: a plane does not fit the layout; nothing was written.
        """
        by_rank = np.array_split(np.arange(len(planes)), len(self._ranks))
        for rank, own in zip(self._ranks, by_rank, strict=True):
            check_planes([planes[i] for i in own], rank.layout)
        check_tokens(tokens, start, self.config)
        span = Span(start, start + len(tokens))
        used = used_blocks(
            block_table,
            num_tokens=span.end,
            block_size=self.layout.block_size,
            num_blocks=len(planes[0]),
        )
        ids = self._xp.asarray(used)
        tables = [
            BlockTable(
                xp=self._xp,
                ids=ids,
                block_size=self.layout.block_size,
                token_shape=(rank.num_kv_heads, self.config.head_dim),
                kv_dtype=self.config.kv_dtype,
            )
            for rank in self._ranks
        ]
        hidden = self._embed(tokens, span)
        for layer, weights in enumerate(self._weights.layers):
            before_layer(layer)
            queries, new_keys, new_values = self._project(hidden, weights, span)
            means = self._xp.empty_like(queries)
            for rank, own, table in zip(self._ranks, by_rank, tables, strict=True):
                key, value = (planes[own[i]] for i in self.layout.planes_of_layer[layer])
                table.write(key, new_keys[:, rank.kv_heads], start=span.start)
                table.write(value, new_values[:, rank.kv_heads], start=span.start)
                keys = table.read(key, num_tokens=span.end, num_rows=span.context_rows)
                values = table.read(value, num_tokens=span.end, num_rows=span.context_rows)
                seen = self._attend(queries[:, rank.kv_heads], keys, values, span)
                means[:, rank.kv_heads, rank.rows] = seen[:, :, rank.rows]
            self._mix(hidden, self._by_token(means, span), weights, span)
        return self._logits(hidden[-1], row=(span.end - 1) % TILE)

    def _embed(self, tokens: npt.NDArray[np.integer], span: Span) -> Floats:
        rows: Floats = self._xp.zeros((span.num_tiles * TILE, self.config.hidden), np.float32)
        rows[span.live] = self._weights.embedding[self._xp.asarray(tokens)]
        return rows.reshape(span.num_tiles, TILE, self.config.hidden)

    def _project(
        self, hidden: Floats, weights: LayerWeights, span: Span
    ) -> tuple[Floats, Floats, Floats]:
        """Return scaled queries, and the keys and values [n, num_kv_heads, head_dim].

        Queries are [num_tiles, num_kv_heads, group * TILE, head_dim], where each KV head has the
        TILE tokens of its first query head, then those of its second, and so on.
        """
        c, xp = self.config, self._xp
        grouped = (span.num_tiles, c.num_kv_heads, self._group * TILE, c.head_dim)
        queries: Floats = xp.empty(grouped, np.float32)
        keys: Floats = xp.empty((span.num_tiles, TILE, c.num_kv_heads, c.head_dim), np.float32)
        values = xp.empty_like(keys)
        for stack in span.stacks(self._stack_tiles):
            qkv = multiply(self._rms_norm(hidden[stack]), weights.qkv, xp) + weights.qkv_bias
            heads = qkv.reshape(-1, TILE, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            turned = self._rope.turn(
                heads[:, :, : -c.num_kv_heads], first_tile=span.first_tile + stack.start
            )
            keys[stack] = turned[:, :, c.num_heads :]
            values[stack] = heads[:, :, -c.num_kv_heads :]
            scaled = turned[:, :, : c.num_heads] * np.float32(c.head_dim**-0.5)
            by_group = scaled.reshape(-1, TILE, c.num_kv_heads, self._group, c.head_dim)
            queries[stack] = by_group.transpose(0, 2, 3, 1, 4).reshape(-1, *grouped[1:])
        flat = (-1, c.num_kv_heads, c.head_dim)
        return queries, keys.reshape(flat)[span.live], values.reshape(flat)[span.live]

    def _attend(self, queries: Floats, keys: Floats, values: Floats, span: Span) -> Floats:
        c, xp = self.config, self._xp
        chunked = (len(keys), -1, CHUNK, c.head_dim)
        key_chunks, value_chunks = keys.reshape(chunked), values.reshape(chunked)
        means: Floats = xp.empty_like(queries)
        for index in range(span.num_tiles):
            tile_start = (span.first_tile + index) * TILE
            num_chunks = tile_start // CHUNK + 1
            # [num_kv_heads, num_chunks, group * TILE, CHUNK]; only the last chunk has later keys
            scores = xp.matmul(queries[index, :, None], key_chunks[:, :num_chunks].swapaxes(2, 3))
            sees = self._key_after_row <= tile_start % CHUNK
            scores[:, -1] = xp.where(sees, scores[:, -1], np.float32(-np.inf))
            scores -= scores.max(axis=3, keepdims=True).max(axis=1, keepdims=True)
            xp.exp(scores, out=scores)
            total = scores.sum(axis=3, keepdims=True).sum(axis=1)
            means[index] = xp.matmul(scores, value_chunks[:, :num_chunks]).sum(axis=1) / total
        return means

    def _by_token(self, means: Floats, span: Span) -> Floats:
        c = self.config
        by_head = means.reshape(-1, c.num_kv_heads, self._group, TILE, c.head_dim)
        rows: Floats = by_head.transpose(0, 3, 1, 2, 4).reshape(span.num_tiles, TILE, -1)
        return rows

    def _mix(self, hidden: Floats, attended: Floats, weights: LayerWeights, span: Span) -> None:
        xp, ffn = self._xp, self.config.ffn
        for stack in span.stacks(self._stack_tiles):
            hidden[stack] += multiply(attended[stack], weights.out, xp)
            gate_up = multiply(self._rms_norm(hidden[stack]), weights.gate_up, xp)
            gate, up = gate_up[..., :ffn], gate_up[..., ffn:]
            hidden[stack] += multiply(gate / (1 + xp.exp(-gate)) * up, weights.down, xp)

    def _logits(self, tile: Floats, *, row: int) -> Floats:
        logits = multiply(self._rms_norm(tile)[None], self._weights.unembedding, self._xp)[0, row]
        on_host: Floats = logits if self._is_on_host else logits.get()
        if self.config.weights:
            return on_host
        return np.where(PRINTABLE, on_host, np.float32(-np.inf))

    def _rms_norm(self, rows: Floats) -> Floats:
        square = (rows * rows).sum(axis=-1, keepdims=True) / np.float32(rows.shape[-1])
        normed: Floats = rows / self._xp.sqrt(square + self._epsilon)
        return normed


def check_planes(planes: Sequence[PlaneArray], layout: Layout) -> None:
    """Check that each array has the shape and type that the layout requires for its plane.

    Args:
        planes: the arrays, in the order of the layout's planes; uint8 [number of blocks, bytes of
            the plane per block].
        layout: the layout of the model.

    Raises:
        LayoutError: there are too few or too many arrays, an array has another shape or type, or
            the bytes of a block are not contiguous.
    """
    if len(planes) != len(layout.planes):
        raise LayoutError(
            f"the model has {len(layout.planes)} planes, but {len(planes)} were given"
        )
    for plane, array in zip(layout.planes, planes, strict=True):
        where = f"layer {plane.layer} {plane.role}"
        shape = (len(planes[0]), plane.block_bytes)
        if array.shape != shape or array.dtype != np.uint8:
            raise LayoutError(f"{where} must be uint8 {shape}, not {array.dtype} {array.shape}")
        if array.strides[1] != 1:
            raise LayoutError(f"{where}: the bytes of a block must be contiguous")


def check_tokens(tokens: npt.NDArray[np.integer], start: int, config: ModelConfig) -> None:
    """Check the tokens of a call of the model.

    Args:
        tokens: the tokens, an integer array [n], n >= 1.
        start: position of the first token.
        config: sizes of the model.

    Raises:
        BadRequestError: `tokens` is no such array, a token is not in the vocabulary, or a position
            is negative or above the model's largest.
    """
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise BadRequestError("tokens must be a list of at least one integer")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise BadRequestError(f"a token must be in [0, {config.vocab_size})")
    end = start + len(tokens)
    if start < 0 or end > config.max_positions:
        raise BadRequestError(
            f"positions {start} to {end - 1} exceed the model's {config.max_positions} positions"
        )


def used_blocks(
    block_table: npt.NDArray[np.integer], *, num_tokens: int, block_size: int, num_blocks: int
) -> npt.NDArray[np.int64]:
    """Check a block table, and return the blocks of the first `num_tokens` tokens, int64 [n].

    Args:
        block_table: the block ids of the sequence, in order.
        num_tokens: number of tokens.
        block_size: number of tokens of a block.
        num_blocks: number of blocks of the planes.

    Raises:
        BadRequestError: the table is too short, or an id is out of range or repeated.
    """
    needed = -(-num_tokens // block_size)
    if block_table.ndim != 1 or not np.issubdtype(block_table.dtype, np.integer):
        raise BadRequestError("a block table must be a list of integers")
    if len(block_table) < needed:
        raise BadRequestError(
            f"{num_tokens} tokens need a block table of {needed} blocks, not {len(block_table)}"
        )
    used = block_table[:needed].astype(np.int64)
    if used.min() < 0 or used.max() >= num_blocks:
        raise BadRequestError(f"a block id of the block table is not in [0, {num_blocks})")
    if len(np.unique(used)) != needed:
        raise BadRequestError("a block is in the block table twice")
    return used


class Rope:
    """The cosines and sines of RoPE for every position, in memory of `xp` (NumPy or CuPy).

    All calls use the same bits, computed once in float64 on the host and rounded to float32.

    Args:
        config: sizes of the model.
        xp: the array module.
    """

    def __init__(self, config: ModelConfig, xp: ModuleType) -> None:
        rows = Span(0, config.max_positions).padded_end
        pairs = np.arange(0, config.head_dim, 2) / config.head_dim
        angles = np.arange(rows, dtype=np.float64)[:, None] * config.rope_theta**-pairs
        self._xp = xp
        self._cos: Floats = xp.asarray(np.cos(angles).astype(np.float32))
        self._sin: Floats = xp.asarray(np.sin(angles).astype(np.float32))

    def turn(self, heads: Floats, *, first_tile: int) -> Floats:
        """Rotate each pair of elements (i, i + head_dim / 2) by the angle of its token's position.

        Args:
            heads: queries or keys of consecutive tokens, [num_tiles, TILE, num_heads, head_dim].
            first_tile: position of the first token, divided by TILE.

        Returns:
            The rotated heads, in the shape of `heads`.
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
