"""The cache groups that tierkv makes of vLLM's specs, with tensors as vLLM allocates them.

For models that no test runs: what a block of a group is made of, and which blocks a length needs.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.processes import needs

needs("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from tierkv.adapters.vllm_connector import _planes_of, _with_shares
from tierkv.cache.groups import CacheGroup, GroupKind, slots_of
from tierkv.cache.layout import Layout, Plane
from tierkv.errors import ConfigError

_BLOCKS = 16


def group_of(spec: KVCacheSpec, *names: str) -> CacheGroup:
    """The group of layers with these names, each with a tensor of its own."""
    tensors = {}
    for name in names:
        of_layer = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        tensors[name] = torch.zeros((_BLOCKS, of_layer.page_size_bytes), dtype=torch.int8)
    group, rows = _planes_of(KVCacheGroupSpec(list(names), spec), _BLOCKS, tensors)
    assert [one.shape for one in rows] == [
        (_BLOCKS, plane.block_bytes) for plane in group.layout.planes
    ]
    return group


def mamba(mode: str = "align", **more: Any) -> MambaSpec:
    settings: dict[str, Any] = {
        "block_size": 32,
        "shapes": ((3, 192), (1, 64, 64)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": 32768,
    }
    return MambaSpec(**(settings | more), mamba_cache_mode=mode)


def test_a_state_is_a_whole_page_whose_parts_are_in_its_name() -> None:
    group = group_of(mamba(), "one", "two")
    assert (group.kind, group.block_size) == (GroupKind.STATE, 32)
    assert [plane.block_bytes for plane in group.layout.planes] == [32768, 32768]
    assert not group.has_prefixes
    assert list(group.needed(160)) == [4]
    others = [
        mamba(dtypes=(torch.float32, torch.float32)),
        mamba(shapes=((192, 3), (1, 64, 64))),
        mamba(block_size=64),
        mamba(page_size_padded=32896),
    ]
    digests = {group_of(one, "one", "two").layout.digest for one in others}
    assert len(digests | {group.layout.digest}) == 5


def test_host_memory_has_room_for_a_state_beside_four_blocks() -> None:
    attention = CacheGroup(Layout(32, (Plane(0, "kv", "bfloat16", 32768),)))
    states = [group_of(mamba(), "one") for _ in range(3)]
    groups = _with_shares([*states, attention])
    slots = slots_of(groups, 7 * 100 * 32768)
    assert slots == [100, 100, 100, 400]


def test_chunked_local_attention_is_a_window_of_one_chunk() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=128
    )
    group = group_of(spec, "one", "two")
    assert (group.kind, group.window) == (GroupKind.WINDOW, 128)
    for length in range(1, 600):
        chunk = range(length // 128 * 128 // 32, -(-length // 32))
        assert set(chunk) <= set(group.needed(length)), "all blocks of the chunk of the next token"


def latent(head_size: int, dtype: torch.dtype, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=head_size, dtype=dtype, **more)


def test_an_indexer_lies_beside_its_latents() -> None:
    """As in DeepSeek-V3.2: both have the same blocks, and entries of other sizes."""
    specs: dict[str, KVCacheSpec] = {
        "attention": latent(576, torch.bfloat16),
        "indexer": latent(132, torch.uint8),
    }
    spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    group = group_of(spec, *specs)
    assert group.kind is GroupKind.FULL
    assert [plane.block_bytes for plane in group.layout.planes] == [576 * 2 * 64, 132 * 64]


REFUSED: dict[str, KVCacheSpec] = {
    "'none': use --enable-prefix-caching": mamba("none"),
    # As in DeepSeek-V4: no test has run such a model, whose tails are no tails of tokens.
    "mla_attention with 4 tokens in one entry: use Offload": latent(
        576, torch.bfloat16, tokens_per_state=4
    ),
    "sliding_window_mla that is computed again after a hit": SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16,
        sliding_window=128, bounded_replay=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_cached_is_refused(sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        group_of(REFUSED[sentence], "one")
