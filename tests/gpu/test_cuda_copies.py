"""CUDA lanes: every byte of every layout arrives, in any cut into units, at any alignment."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.gpu.cuda import WAIT_S, blocks_of, cupy_or_skip, opened, write_blocks
from tests.layouts import ALL_LAYOUTS, LAYOUTS
from tierkv.cache.layout import Layout, Plane, attention_layout, layered
from tierkv.errors import ConfigError, LayoutError
from tierkv.gpu.protocol import Direction
from tierkv.gpu.units import Order, UnitSizes

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_lane import LaneSettings

pytestmark = pytest.mark.gpu

BIG_LAYOUTS = {
    "gqa-128k": attention_layout(
        num_layers=4, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=64
    ),
    "mla-72k": layered(64, [("latent", "bfloat16", 1152)], num_layers=5),
    "fp8-scales": layered(
        64,
        [("key", "float8", 1024), ("value", "float8", 1024), ("scale", "float32", 64)],
        num_layers=3,
    ),
    "odd-4097": Layout(1, tuple(Plane(n, "key", "uint8", 4097 * (n + 1)) for n in range(4))),
}
SIZES = {
    "usual": UnitSizes(),
    "a row each": UnitSizes(min_unit=1, max_unit=1, piece=1),
    "small": UnitSizes(min_unit=1 << 16, max_unit=1 << 17, piece=1 << 12, straight_row=1 << 30),
}


@pytest.fixture(scope="module")
def cupy() -> ModuleType:
    return cupy_or_skip()


def patterns(num_blocks: int) -> dict[str, np.ndarray]:
    every = np.arange(num_blocks, dtype=np.int32)
    shuffled = np.random.default_rng(7).permutation(num_blocks).astype(np.int32)
    return {
        "none": every[:0],
        "one": every[-1:],
        "consecutive": every[1:-1],
        "reversed": every[::-1],
        "random": shuffled[: num_blocks * 2 // 3],
    }


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("name", [*ALL_LAYOUTS, *BIG_LAYOUTS])
def test_exactly_the_named_blocks_arrive(
    cupy: ModuleType, name: str, direction: Direction, order: Order, sizes: str
) -> None:
    layout, count = (ALL_LAYOUTS | BIG_LAYOUTS)[name], 23
    device = CudaDevice(lanes=LaneSettings(staging_bytes=1 << 20, units=SIZES[sizes]))
    planes, rng = device.allocate_planes(layout, count), np.random.default_rng(len(name))
    with opened(device, planes, count + 2, direction, order=order) as on:
        for pattern, block_ids in patterns(count).items():
            blocks = rng.integers(0, 256, (count, layout.block_bytes), np.uint8)
            slots = rng.integers(0, 256, (count + 2, layout.block_bytes), np.uint8)
            write_blocks(cupy, planes, blocks)
            on.host.array[:] = slots
            slot_ids = rng.permutation(count + 2).astype(np.int32)[: len(block_ids)]
            events = on.submit(direction, slot_ids, block_ids)
            assert len(events) == layout.num_layers
            for event in events:
                event.block_until_done(WAIT_S)
            if direction is Direction.LOAD:
                blocks[block_ids] = slots[slot_ids]
            else:
                slots[slot_ids] = blocks[block_ids]
            assert np.array_equal(blocks_of(cupy, planes), blocks), pattern
            assert np.array_equal(on.host.array, slots), pattern


def test_copies_of_more_blocks_than_one_kernel_takes_arrive(cupy: ModuleType) -> None:
    layout, device, rng = LAYOUTS["fp8"], CudaDevice(), np.random.default_rng(4)
    blocks = rng.integers(0, 256, (5000, layout.block_bytes), np.uint8)
    with opened(device, device.allocate_planes(layout, 5000), 5000) as on:
        write_blocks(cupy, on.planes, blocks)
        for count in (960, 961, 1920, 5000):
            slots, source, target = (
                rng.permutation(5000).astype(np.int32)[:count] for _ in range(3)
            )
            on.copy(Direction.OFFLOAD, slots, source)
            assert np.array_equal(on.host.array[slots], blocks[source])
            on.copy(Direction.LOAD, slots, target)
            blocks[target] = blocks[source]
            assert np.array_equal(blocks_of(cupy, on.planes), blocks)


def engine_tensors(cupy: ModuleType, layout: Layout, num_blocks: int, kind: str) -> list[object]:
    """KV tensors as engines lay them out, of random bytes."""
    rng = np.random.default_rng(3)
    tensors: list[object] = []
    for plane in layout.planes:
        width = plane.block_bytes
        data = cupy.asarray(rng.integers(0, 256, (num_blocks, 2, width), np.uint8))
        if kind == "interleaved":  # [num_blocks, 2, ...]: another plane lies between two blocks
            tensors.append(data[:, 1])
        elif kind == "unaligned":
            raw = cupy.asarray(rng.integers(0, 256, num_blocks * (width + 3) + 1, np.uint8))
            tensors.append(raw[1:].reshape(num_blocks, width + 3)[:, :width])
        else:  # dimensions inside the block in another order
            shaped = cupy.asarray(rng.integers(0, 256, (num_blocks, 4, width // 4), np.uint8))
            tensors.append(shaped.transpose(0, 2, 1))
    return tensors


@pytest.mark.promise("An engine's tensors are used without a copy.")
@pytest.mark.parametrize("kind", ["interleaved", "unaligned", "transposed"])
@pytest.mark.parametrize("name", ["gqa", "mla", "dsa", "fp8", "gqa-128k"])
def test_an_engines_tensors_are_adopted_in_place(cupy: ModuleType, name: str, kind: str) -> None:
    layout = (LAYOUTS | BIG_LAYOUTS)[name]
    device, tensors = CudaDevice(), engine_tensors(cupy, layout, 9, kind)
    every = np.arange(9, dtype=np.int32)
    with opened(device, device.adopt_planes(layout, tensors), 9) as on:
        slots, before = on.host.array, blocks_of(cupy, on.planes)
        on.copy(Direction.OFFLOAD, every[::-1].copy(), every)
        assert np.array_equal(slots[::-1], before)
        slots[:] = np.random.default_rng(1).integers(0, 256, slots.shape, np.uint8)
        on.copy(Direction.LOAD, every, every)
        assert np.array_equal(blocks_of(cupy, on.planes), slots)
        if kind == "interleaved":
            first = cupy.asnumpy(tensors[0])
            assert np.array_equal(first, slots[:, : layout.planes[0].block_bytes])


MIB = 1 << 20


@pytest.mark.parametrize("kind", ["alone", "one pool"])
@pytest.mark.parametrize("tensor_mib", [1, 64, 512])
def test_adopted_tensors_are_moved_be_they_allocations_of_their_own_or_not(
    cupy: ModuleType, tensor_mib: int, kind: str
) -> None:
    """Equally far apart either way, as PyTorch's allocator lays out an engine's large tensors."""
    block_bytes = min(tensor_mib * MIB // 16, MIB)
    num_blocks, num_planes = tensor_mib * MIB // block_bytes, 3
    layout = layered(1, [("key", "uint8", block_bytes)], num_layers=num_planes)
    shape = (num_planes, num_blocks, block_bytes)
    with cupy.cuda.using_allocator(None):  # straight from cudaMalloc
        pool = cupy.empty(shape if kind == "one pool" else (1,), cupy.uint8)
        if kind == "one pool":
            tensors = list(pool)
        else:
            tensors = [cupy.empty(shape[1:], cupy.uint8) for _ in range(num_planes)]
    device, rng = CudaDevice(), np.random.default_rng(tensor_mib)
    planes = device.adopt_planes(layout, tensors)
    assert [one.rows for one in planes.rectangles] == ([3] if kind == "one pool" else [1, 1, 1])
    for tensor in tensors:
        tensor[...] = cupy.asarray(rng.integers(0, 256, (num_blocks, 1), np.uint8))
        tensor[:, ::4099] = cupy.asarray(rng.integers(0, 256, (1, -(-block_bytes // 4099)), "u1"))
    with opened(device, planes, 16) as on:
        for count in (1, 4, 16):
            source, target = (
                rng.permutation(num_blocks).astype(np.int32)[:count] for _ in range(2)
            )
            slots = rng.permutation(16).astype(np.int32)[:count]
            wanted = [cupy.asnumpy(tensor[cupy.asarray(source)]) for tensor in tensors]
            on.copy(Direction.OFFLOAD, slots, source)
            assert np.array_equal(on.host.array[slots], np.concatenate(wanted, axis=1))
            on.copy(Direction.LOAD, slots, target)
            for tensor, rows in zip(tensors, wanted, strict=True):
                assert np.array_equal(cupy.asnumpy(tensor[cupy.asarray(target)]), rows)


def test_tensors_that_do_not_fit_are_refused(cupy: ModuleType) -> None:
    device = CudaDevice()
    layout = Layout(1, (Plane(0, "key", "uint8", 64), Plane(0, "value", "uint8", 64)))
    good = cupy.zeros((5, 64), cupy.uint8)
    for tensors, what in (
        ([good], "2 planes"),
        ([good, good[:4]], "4 blocks"),
        ([good, cupy.zeros((5, 32), cupy.uint8)], "32 bytes"),
        ([good, cupy.zeros((5, 128), cupy.uint8)[:, ::2]], "must be contiguous"),
        ([good, cupy.broadcast_to(good[0], (5, 64))], "overlap"),
    ):
        with pytest.raises(LayoutError, match=what):
            device.adopt_planes(layout, tensors)
    with pytest.raises(ConfigError, match="uint8"):
        device.adopt_planes(layout, [good, object()])
    device.close()


def test_a_ring_that_is_wrapped_many_times_loses_nothing(cupy: ModuleType) -> None:
    """Many transfers in flight through 1 MiB of staging, both directions, no wait between them."""
    device = CudaDevice(lanes=LaneSettings(staging_bytes=1 << 20))
    planes, rng = device.allocate_planes(BIG_LAYOUTS["fp8-scales"], 64), np.random.default_rng(9)
    with opened(device, planes, 128) as on:
        slots = on.host.array
        slots[:] = rng.integers(0, 256, slots.shape, np.uint8)
        expected = slots.copy()
        for _ in range(200):
            blocks = rng.permutation(32).astype(np.int32)[:20]
            into = rng.permutation(64).astype(np.int32)[:20]
            loaded = on.submit(Direction.LOAD, into, blocks)
            # ordered on the GPU alone: the offload waits for the load, and the next load for it
            last = on.submit(Direction.OFFLOAD, into + 64, blocks, loaded[-1])
            last[-1].block_until_done(WAIT_S)
            expected[into + 64] = expected[into]
        assert np.array_equal(slots, expected)


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_small_copy_does_not_overtake_a_big_one_nor_the_other_way(
    cupy: ModuleType, direction: Direction
) -> None:
    """Small ones go straight where nothing is under way, and then nothing may pass them."""
    layout, device, rng = BIG_LAYOUTS["gqa-128k"], CudaDevice(), np.random.default_rng(11)
    every = np.arange(96, dtype=np.int32)
    is_load = direction is Direction.LOAD
    with opened(device, device.allocate_planes(layout, 96), 96, direction) as on:
        for number in range(60):
            source = rng.integers(0, 256, (96, 1), np.uint8)
            blocks = np.broadcast_to(source, (96, layout.block_bytes))
            one = rng.integers(0, 96, 1).astype(np.int32)
            other = (one + np.int32(1)) % np.int32(96)
            order = [(every, every), (other, one) if is_load else (one, other)]
            if number % 2:
                order.reverse()
            if is_load:
                on.host.array[:] = blocks
            else:
                write_blocks(cupy, on.planes, blocks)
            for end in [on.submit(direction, *pair)[-1] for pair in order]:
                end.block_until_done(WAIT_S)
            expected = source.copy()
            if not number % 2:
                expected[one] = source[other]
            found = blocks_of(cupy, on.planes) if is_load else on.host.array
            assert (found == expected).all(), number
