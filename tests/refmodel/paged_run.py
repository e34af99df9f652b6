"""A sequence in planes of its own: a scattered block table over memory that starts as garbage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from tierkv.engine import Sampling
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel, Weights, encode, sample

KVDtype = Literal["float32", "float16", "bfloat16"]
Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

NAN_BYTE = 0xFF  # of any kv_dtype it makes NaN

PROSE = encode(
    "The quick brown fox jumps over the lazy dog, and the dog, being lazy, says nothing at all. "
    "Next morning it is the dog's turn: he walks round the fox twice, sits down and waits for an "
    "apology. None comes. Foxes remember everything, but they are slow to say so in words. "
)


@functools.cache
def model(kv_dtype: KVDtype = "float32", block_size: int = 16) -> ReferenceModel:
    return ReferenceModel(ModelConfig(kv_dtype=kv_dtype, max_positions=4096), block_size)


def arrays(weights: Weights) -> Iterator[npt.NDArray[np.float32]]:
    """All weights of a model, in the order in which a seed makes them."""
    yield weights.embedding
    for layer in weights.layers:
        yield from (layer.qkv, layer.qkv_bias, layer.out, layer.gate_up, layer.down)
    yield weights.unembedding


def no_gate(layer: int) -> None:
    """A hook for planes that are there already."""


class PagedRun:
    """Calls a model for one sequence of up to `capacity` tokens."""

    def __init__(
        self,
        of: ReferenceModel,
        capacity: int,
        *,
        table_seed: int = 0,
        spare_blocks: int = 3,
        garbage: int = NAN_BYTE,
    ) -> None:
        num_blocks = -(-capacity // of.layout.block_size) + spare_blocks
        self.model = of
        self.block_table = np.random.default_rng(table_seed).permutation(num_blocks)
        self.planes = [
            np.full((num_blocks, plane.block_bytes), garbage, np.uint8)
            for plane in of.layout.planes
        ]
        self.length = 0

    def feed(
        self, tokens: Iterable[int] | Tokens, before_layer: Callable[[int], None] = no_gate
    ) -> Logits:
        """Compute `tokens` after what was fed before."""
        array = np.array(list(tokens), np.int32)
        logits = self.model.forward(
            tokens=array,
            start=self.length,
            block_table=self.block_table,
            planes=self.planes,
            before_layer=before_layer,
        )
        self.length += len(array)
        return logits

    def generate(self, prompt: Tokens, num_tokens: int) -> list[int]:
        """Feed `prompt`, then go on greedily for `num_tokens`."""
        out = [sample(self.feed(prompt), Sampling(), self.length)]
        while len(out) < num_tokens:
            out.append(sample(self.feed(out[-1:]), Sampling(), self.length))
        return out

    def kv(self) -> bytes:
        """The bytes of all tokens fed so far, plane after plane, in the order of positions."""
        each = map(self.rows, range(len(self.planes)))
        return b"".join(rows[: self.length].tobytes() for rows in each)

    def rows(self, plane_index: int) -> npt.NDArray[np.uint8]:
        """A copy of one plane, uint8 [tokens, token_bytes], in the order of positions."""
        token_bytes = self.model.layout.planes[plane_index].token_bytes
        assert token_bytes is not None
        return self.planes[plane_index][self.block_table].reshape(-1, token_bytes)

    def overwrite(self, positions: range, byte: int) -> None:
        """Fill these tokens' K and V in all layers."""
        size = self.model.layout.block_size
        for position in positions:
            block = self.block_table[position // size]
            for plane in self.planes:
                plane[block].reshape(size, -1)[position % size] = byte
