"""The model's settings validate themselves and come from TOML as they are."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest

from tests.refmodel.paged_run import PagedRun, arrays
from tierkv.cache.keys import Fingerprint
from tierkv.errors import ConfigError
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel, make_weights


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"revision": ""},
        {"num_layers": 0},
        {"num_heads": 3},
        {"num_kv_heads": 0},
        {"head_dim": 15},
        {"hidden": 0},
        {"ffn": -1},
        {"max_positions": 0},
        {"rope_theta": 0.5},
        {"rope_theta": float("nan")},
        {"rope_theta": float("inf")},
        {"seed": -1},
        {"seed": 2**64},
        {"kv_dtype": "float8"},
    ],
    ids=str,
)
def test_a_model_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ModelConfig(**{**asdict(ModelConfig()), **changes})


@pytest.mark.parametrize(
    ("kv_dtype", "item_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2)]
)
def test_the_layout_is_a_key_and_a_value_plane_per_layer(kv_dtype: str, item_bytes: int) -> None:
    config = msgspec.convert({"kv_dtype": kv_dtype}, ModelConfig)
    layout = config.layout(24)
    assert [(plane.layer, plane.role) for plane in layout.planes] == [
        (layer, role) for layer in range(4) for role in ("key", "value")
    ]
    assert {plane.token_bytes for plane in layout.planes} == {2 * 16 * item_bytes}
    assert {plane.dtype for plane in layout.planes} == {kv_dtype}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"num_layers": 1},
        {"num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "hidden": 30, "ffn": 50},
    ],
    ids=str,
)
def test_other_sizes_keep_the_promise_of_equal_bits(changes: dict[str, int]) -> None:
    config = replace(ModelConfig(max_positions=512), **changes)  # type: ignore[arg-type]
    of = ReferenceModel(config, 16)
    tokens = np.random.default_rng(0).integers(0, 256, 300)
    cold = PagedRun(of, 300)
    expected = cold.feed(tokens)
    run = PagedRun(of, 300, table_seed=1)
    run.feed(tokens[:123])
    assert run.feed(tokens[123:]).tobytes() == expected.tobytes()
    assert run.kv() == cold.kv()


# Two configurations that compute differently never share a key.


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


# A seed stands for the same weights everywhere.


def checksum(config: ModelConfig) -> str:
    joined = b"".join(array.tobytes() for array in arrays(make_weights(config)))
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
