"""Two configurations that compute differently never share a key."""

from __future__ import annotations

import dataclasses

import pytest

from tierkv.cache.keys import Fingerprint
from tierkv.refmodel.config import ModelConfig


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another"},
        {"revision": "2"},
        {"num_layers": 5},
        {"num_heads": 8},
        {"hidden": 128},
        {"ffn": 256},
        {"rope_theta": 500_000.0},
        {"seed": 1},
        {"kv_dtype": "float16"},
        {"head_dim": 32},
        {"num_kv_heads": 1},
    ],
)
def test_any_change_of_the_model_changes_the_fingerprint(change: dict[str, object]) -> None:
    def root(config: ModelConfig) -> bytes:
        return Fingerprint(config.name, config.layout(16), config.weights_id).root()

    config = ModelConfig()
    assert root(dataclasses.replace(config, **change)) != root(config)  # type: ignore[arg-type]
