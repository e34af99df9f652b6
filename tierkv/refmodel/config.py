"""The settings of the reference model (its sizes and its seed), and its KV layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tierkv.cache.layout import Layout, attention_layout
from tierkv.cache.shards import ShardScheme
from tierkv.config import Fixed, all_at_least_one
from tierkv.errors import ConfigError
from tierkv.tokenizers import ByteTokenizer

VOCAB_SIZE = ByteTokenizer.vocab_size
"""A token is a byte; there is no BOS and no other special token."""

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a decoder-only transformer. By default its tokens are bytes.

    Attributes:
        name: name of the model in the keys of cached blocks.
        revision: revision of the model in the keys of cached blocks.
        num_layers: number of layers of the decoder.
        num_heads: number of query heads, a multiple of num_kv_heads.
        num_kv_heads: number of heads of keys and values.
        head_dim: number of elements of a head, even.
        hidden: number of elements of a token's hidden state.
        ffn: number of elements of the feed-forward layer.
        rope_theta: base of RoPE's wavelengths.
        max_positions: largest number of tokens of prompt and output together.
        seed: seed of the weights.
        kv_dtype: type of keys and values in the planes; all computing is in float32.
        vocab_size: number of tokens in the vocabulary, 256 for the built-in model.
        norm_epsilon: term added to the mean square in RMSNorm.
        weights: digest of a checkpoint's files; "" if the weights are made from `seed`.

    Raises:
        ConfigError: a number is out of range, or num_heads is no multiple of num_kv_heads.
    """

    name: str = "tierkv-ref-tiny"
    revision: str = "1"
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    ffn: Fixed[int] = 128
    rope_theta: Fixed[float] = 10_000.0
    max_positions: Fixed[int] = 131_072
    seed: int = 0
    kv_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    vocab_size: Fixed[int] = VOCAB_SIZE
    norm_epsilon: Fixed[float] = 1e-6
    weights: Fixed[str] = ""

    def __post_init__(self) -> None:
        if not self.name or not self.revision:
            raise ConfigError("the reference model needs a name and a revision")
        all_at_least_one("", self, "num_layers", "num_heads", "num_kv_heads", "head_dim")
        all_at_least_one("", self, "hidden", "ffn", "max_positions", "vocab_size")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, not {self.head_dim}")
        if not (math.isfinite(self.rope_theta) and self.rope_theta >= 1):
            raise ConfigError(f"rope_theta must be finite and at least 1, not {self.rope_theta}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be in [0, 2**64), not {self.seed}")
        if self.kv_dtype not in _ITEM_BYTES:
            raise ConfigError(
                f"kv_dtype must be one of {', '.join(_ITEM_BYTES)}, not {self.kv_dtype!r}"
            )

    @property
    def weights_id(self) -> str:
        """A text of all settings that change the model's results, without the model's name.

        It is a part of the fingerprint, so that nodes with different models never share KV.
        """
        return (
            f"{self.revision}: {self.num_layers} layers of {self.hidden}, ffn {self.ffn}, "
            f"{self.num_heads} heads of {self.head_dim}, theta {self.rope_theta:g}, "
            + (f"weights {self.weights}" if self.weights else f"seed {self.seed}")
        )

    def layout(self, block_size: int) -> Layout:
        """Return the layout of blocks: for each layer a plane of keys and one of values.

        A block of a plane is [block_size, num_kv_heads, head_dim] of kv_dtype.

        Raises:
            LayoutError: block_size is not positive.
        """
        return attention_layout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.kv_dtype,
            item_bytes=_ITEM_BYTES[self.kv_dtype],
            block_size=block_size,
        )

    def shards(self, block_size: int) -> ShardScheme:
        """Return the split of KV heads among ranks, for blocks of `block_size` tokens."""
        heads = {"key": self.num_kv_heads, "value": self.num_kv_heads}
        return ShardScheme(self.layout(block_size), heads)
