"""A seed stands for the same weights everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import Weights, make_weights


def matrices(weights: Weights) -> Iterator[npt.NDArray[np.float32]]:
    yield weights.embedding
    for layer in weights.layers:
        yield from (layer.qkv, layer.qkv_bias, layer.out, layer.gate_up, layer.down)
    yield weights.unembedding


def checksum(config: ModelConfig) -> str:
    joined = b"".join(matrix.tobytes() for matrix in matrices(make_weights(config)))
    return hashlib.sha256(joined).hexdigest()


def test_the_bytes_of_a_seed_are_pinned() -> None:
    """If this fails, stored KV of the same model name and revision no longer fits: raise it."""
    assert (
        checksum(ModelConfig())
        == "c558ef964faba7655032c3c8f0725de0b4f9dc6c6c29478dedc64561f254564c"
    )
    assert (
        checksum(ModelConfig(seed=2**64 - 1))
        == "035f5a3fe74bdc996ffec24811385961b517199305f7f27c37c168f2f6193ebe"
    )


def test_all_weights_are_float32_in_c_order() -> None:
    for matrix in matrices(make_weights(ModelConfig())):
        assert matrix.dtype == np.float32
        assert matrix.flags.c_contiguous


def test_another_seed_gives_other_weights_throughout() -> None:
    ours, theirs = (matrices(make_weights(ModelConfig(seed=seed))) for seed in (0, 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert np.count_nonzero(mine == other) <= mine.size // 2  # biases of values are zero
