"""The settings of the engine `transformers`."""

from __future__ import annotations

from typing import Literal

import msgspec

from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.errors import ConfigError


class TransformersSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the engine `transformers`.

    Attributes:
        dtype: type of weights and KV; auto is the type in the model's files, float32 for GGUF.
        max_context: largest number of tokens of prompt and answer together; 0 for the model's own
            limit.
        chunk_tokens: largest number of prompt tokens in one forward pass, which also computes one
            token for each request that generates.
        reserve_tokens: number of answer tokens for which a request reserves blocks at once. A
            request that later finds no free block is preempted, and resumed when blocks are free.
        load_timeout_s: seconds that a request may wait for cached tokens that are being loaded.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: int = 0
    chunk_tokens: int = 512
    reserve_tokens: int = 256
    load_timeout_s: Fixed[float] = 30.0

    def __post_init__(self) -> None:
        all_at_least_one("transformers", self, "chunk_tokens", "reserve_tokens")
        all_above_zero("transformers", self, "load_timeout_s")
        if self.max_context < 0:
            raise ConfigError(
                f"transformers.max_context must be at least 0, not {self.max_context}"
            )
