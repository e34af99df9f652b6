"""Which planes are rectangles to a copy engine: of one size, equally far apart on both sides."""

from __future__ import annotations

from itertools import product

import numpy as np

from tierkv.cache.layout import Layout, Plane, layered
from tierkv.gpu.plane_memory import PlaneMemory, Rectangle, rectangles_of


def keys(*sizes: int) -> Layout:
    return Layout(1, tuple(Plane(n, "key", "uint8", size) for n, size in enumerate(sizes)))


POOL = range(1 << 40)  # one allocation


def of_keys(
    *places: tuple[int, int],
    sizes: tuple[int, ...] = (64, 64, 64),
    allocations: tuple[range, ...] = (POOL, POOL, POOL, POOL, POOL),
) -> list[Rectangle]:
    memory = [PlaneMemory(*place, one) for place, one in zip(places, allocations, strict=False)]
    return list(rectangles_of(keys(*sizes), memory, 9))


def side_by_side(layout: Layout, num_blocks: int, *, gap: int = 0) -> list[PlaneMemory]:
    """As tierkv's own planes lie, if there is no gap between a plane's blocks."""
    memory, at = [], 0x1000
    for plane in layout.planes:
        memory.append(PlaneMemory(at, plane.block_bytes + gap, POOL))
        at += num_blocks * (plane.block_bytes + gap)
    return memory


def test_planes_of_one_size_equally_far_apart_are_one_rectangle() -> None:
    memory = PlaneMemory(5000, 64, POOL)
    apart = of_keys((5000, 64), (6000, 64), (7000, 64))
    assert apart == [Rectangle(memory, 1000, 0, 64, row_bytes=64, rows=3)]
    (within,) = of_keys((5000, 192), (5064, 192), (5128, 192))
    assert within.pitch == 64, "planes may lie within each other"
    (alone,) = of_keys((5000, 64), sizes=(64,))
    assert (alone.pitch, alone.slot_pitch, alone.rows) == (64, 64, 1)


def test_a_rectangle_is_only_what_lies_in_one_allocation() -> None:
    """As PyTorch has them: a large tensor is an allocation, often equally far from the next."""
    places = ((4096, 64), (8192, 64), (12288, 64))
    own = (range(4096, 8192), range(8192, 12288), range(12288, 16384))
    assert [one.rows for one in of_keys(*places, allocations=own)] == [1, 1, 1]
    pair = range(4096, 12288)
    found = of_keys(*places, allocations=(pair, pair, own[2]))
    assert [(one.memory.address, one.rows) for one in found] == [(4096, 2), (12288, 1)]
    many = tuple((4096 * n, 64) for n in range(5))
    alone = tuple(range(4096 * n, 4096 * (n + 1)) for n in range(5))
    assert not of_keys(*many, sizes=(64,) * 5, allocations=alone), "five calls are too many"
    assert not of_keys(*places, allocations=(range(0),) * 3), "the driver knows no allocation"
    too_short = range(4096, 12288 + 8 * 64 + 63)
    assert not of_keys(*places, allocations=(too_short,) * 3), "of the last block a byte"


def test_rectangles_hold_every_byte_of_a_block_once() -> None:
    """A block moved by them row by row is the block moved plane by plane."""
    layouts = (
        layered(4, [("key", "float8", 8), ("value", "float8", 8), ("scale", "float32", 2)], 5),
        layered(4, [("latent", "bfloat16", 9)], 7),
        keys(97, 1, 15, 17),
        keys(32, 32, 32, 32),
    )
    for layout, gap in product(layouts, (0, 24)):
        memory, block = side_by_side(layout, 6, gap=gap), 4
        there = np.random.default_rng(3).integers(0, 256, 1 << 14, np.uint8)
        slot = np.zeros(layout.block_bytes, np.uint8)
        times = np.zeros(layout.block_bytes, np.uint8)
        for one in rectangles_of(layout, memory, 6):
            for row in range(one.rows):
                source = one.memory.of_block(block) + row * one.pitch
                target = one.block_byte + row * one.slot_pitch
                slot[target : target + one.row_bytes] = there[source : source + one.row_bytes]
                times[target : target + one.row_bytes] += 1
        assert (times == 1).all()
        planes = [
            there[one.address + block * one.stride :][: plane.block_bytes]
            for one, plane in zip(memory, layout.planes, strict=True)
        ]
        assert np.array_equal(slot, np.concatenate(planes))
