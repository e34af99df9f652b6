"""Layouts of every kind that must work, with small and odd planes."""

from __future__ import annotations

from tierkv.cache.layout import Layout, Plane, attention_layout, layered

BLOCK_SIZE = 4


def _speculative() -> Layout:
    """Two attention layers, then two MTP layers of another shape, one with a scale."""
    main = attention_layout(
        num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", item_bytes=2, block_size=4
    )
    return Layout(
        BLOCK_SIZE,
        (
            *main.planes,
            Plane(2, "latent", "bfloat16", 4 * 18, 18),
            Plane(3, "key", "float8", 4 * 5, 5),
            Plane(3, "scale", "float32", 4 * 4, 4),
        ),
    )


LAYOUTS: dict[str, Layout] = {
    "gqa": attention_layout(
        num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", item_bytes=4, block_size=4
    ),
    "mla": layered(BLOCK_SIZE, [("latent", "bfloat16", 36)], num_layers=2),
    "dsa": layered(BLOCK_SIZE, [("key", "uint8", 21), ("indexer", "uint8", 7)], num_layers=2),
    "fp8": layered(
        BLOCK_SIZE,
        [("key", "float8", 16), ("value", "float8", 16), ("scale", "float32", 4)],
        num_layers=2,
    ),
    "mtp": _speculative(),
    "private": Layout(
        BLOCK_SIZE,
        (Plane(0, "key", "bfloat16", 67), Plane(0, "value", "bfloat16", 32, 8)),
    ),
}


def odd_layout(plane_bytes: int) -> Layout:
    """Planes of an odd size next to others, none of which declares where a token's bytes are."""
    return Layout(
        BLOCK_SIZE,
        (
            Plane(0, "key", "uint8", plane_bytes),
            Plane(0, "value", "uint8", 1),
            Plane(1, "key", "uint8", plane_bytes + 2),
        ),
    )


ODD_SIZES = (1, 15, 17, 4097)
ALL_LAYOUTS: dict[str, Layout] = LAYOUTS | {f"odd-{n}": odd_layout(n) for n in ODD_SIZES}
