"""Slices of blocks: nodes of different tensor-parallel sizes read each other's."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.cache.layout import Bytes1D, Layout, Plane, attention_layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.errors import LayoutError

BLOCK_SIZE = 4


def mixed() -> Layout:
    """Attention with 4 heads, fp8 scales by head, and an indexer that every rank has."""
    planes = []
    for layer in range(2):
        planes += [
            Plane(layer, "key", "float8", BLOCK_SIZE * 20, 20),
            Plane(layer, "value", "float8", BLOCK_SIZE * 12, 12),
            Plane(layer, "scale", "float32", BLOCK_SIZE * 16, 16),
            Plane(layer, "indexer", "uint8", BLOCK_SIZE * 7, 7),
        ]
    return Layout(BLOCK_SIZE, tuple(planes))


SCHEMES = {
    "gqa": ShardScheme(
        attention_layout(
            num_layers=3, num_kv_heads=4, head_dim=3, dtype="bf16", item_bytes=2, block_size=4
        ),
        {"key": 4, "value": 4},
    ),
    "mixed": ShardScheme(mixed(), {"key": 4, "value": 4, "scale": 4}),
    "fewer heads than ranks": ShardScheme(
        attention_layout(
            num_layers=2, num_kv_heads=2, head_dim=4, dtype="bf16", item_bytes=2, block_size=4
        ),
        {"key": 2, "value": 2},
    ),
    "mla": ShardScheme(Layout(BLOCK_SIZE, (Plane(0, "latent", "bf16", 36 * BLOCK_SIZE, 36),)), {}),
    "heads in the block": ShardScheme(
        Layout(BLOCK_SIZE, tuple(Plane(layer, "kv", "bf16", 44) for layer in range(2))), {"kv": 4}
    ),
    "mla, opaque": ShardScheme(Layout(BLOCK_SIZE, (Plane(0, "latent", "bf16", 101),)), {}),
}
SIZES = (1, 2, 4)


def reference(scheme: ShardScheme, whole: Bytes1D, shard: Shard, tokens: int) -> Bytes1D:
    """The shard's payload, cut out head by head."""
    parts = []
    for plane, start in zip(scheme.whole.planes, scheme.whole.offsets, strict=True):
        content = whole[start : start + plane.block_bytes]
        if plane.role not in scheme.heads:
            cut = scheme.whole.has_token_bytes and tokens < BLOCK_SIZE
            parts.append(content[: (plane.token_bytes or 0) * tokens] if cut else content)
            continue
        heads = scheme.heads[plane.role]
        if plane.token_bytes is None:
            by_head = content.reshape(1, heads, -1)  # a tail is whole, too
        else:
            by_head = content.reshape(BLOCK_SIZE, heads, -1)[:tokens]
        per_rank = max(1, heads // shard.size)
        first = shard.rank * heads // shard.size
        parts.append(by_head[:, first : first + per_rank].reshape(-1))
    return np.concatenate(parts)


@pytest.mark.promise("Each rank assembles its slice from shards of any size.")
@pytest.mark.parametrize("tokens", [1, 3, BLOCK_SIZE])
@pytest.mark.parametrize("readers", SIZES)
@pytest.mark.parametrize("writers", SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_each_rank_assembles_its_slice_from_those_of_any_size(
    name: str, writers: int, readers: int, tokens: int
) -> None:
    scheme = SCHEMES[name]
    whole = np.random.default_rng(1).integers(0, 256, scheme.whole.block_bytes, np.uint8)
    stored = {
        shard: reference(scheme, whole, shard, tokens)
        for shard in (Shard(rank, writers) for rank in range(writers))
    }
    for rank in range(readers):
        reader = Shard(rank, readers)
        sources = scheme.sources(reader, writers)
        assert len(sources) == max(1, writers // readers) or not scheme.heads or name[0] == "f"
        expected = reference(scheme, whole, reader, tokens)
        target = np.zeros(scheme.layout(reader).stored_bytes(tokens), np.uint8)
        scheme.assemble(reader, {s: stored[s] for s in sources}, target, num_tokens=tokens)
        assert np.array_equal(target, expected)


def test_what_does_not_fit_is_refused() -> None:
    scheme = SCHEMES["gqa"]
    half = np.zeros(scheme.layout(Shard(0, 2)).block_bytes, np.uint8)
    whole = np.zeros(scheme.whole.block_bytes, np.uint8)
    with pytest.raises(LayoutError, match="1of2 is missing"):
        scheme.assemble(Shard(0, 1), {Shard(0, 2): half}, whole)
    with pytest.raises(LayoutError, match="bytes, not"):
        scheme.assemble(Shard(0, 1), {Shard(0, 2): half[1:], Shard(1, 2): half}, whole)
    with pytest.raises(LayoutError, match="2 sizes"):
        scheme.assemble(Shard(0, 1), {Shard(0, 2): half, Shard(0, 1): whole}, whole)
    with pytest.raises(LayoutError, match="cannot be split"):
        scheme.layout(Shard(0, 3))
    with pytest.raises(LayoutError, match="no rank"):
        Shard(2, 2)
    with pytest.raises(LayoutError, match="equal heads"):
        ShardScheme(scheme.whole, {"key": 5})
