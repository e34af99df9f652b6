"""CUDA lanes: every byte of every layout arrives, in any cut into units, at any alignment."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.gpu.cuda import blocks_of, cupy_or_skip, write_blocks
from tests.layouts import ALL_LAYOUTS, LAYOUTS
from tierkv.cache.layout import Layout, Plane, attention_layout, layered
from tierkv.errors import ConfigError, LayoutError
from tierkv.gpu.protocol import BlockCopy, Direction
from tierkv.gpu.units import Order, UnitSizes

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_lane import LaneSettings

pytestmark = pytest.mark.gpu

WAIT_S = 20.0
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


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


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
    layout = (ALL_LAYOUTS | BIG_LAYOUTS)[name]
    device = CudaDevice(lanes=LaneSettings(staging_bytes=1 << 20, units=SIZES[sizes]))
    num_blocks = 23
    planes = device.allocate_planes(layout, num_blocks)
    host = device.allocate_host(layout, num_blocks + 2)
    lane = device.open_ordered_lane(direction, planes, host, order)
    rng = np.random.default_rng(len(name))
    for pattern, block_ids in patterns(num_blocks).items():
        blocks = rng.integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)
        slots = rng.integers(0, 256, (num_blocks + 2, layout.block_bytes), np.uint8)
        write_blocks(cupy, planes, blocks)
        host.array[:] = slots
        slot_ids = rng.permutation(num_blocks + 2).astype(np.int32)[: len(block_ids)]
        events = lane.submit(BlockCopy(direction, slot_ids, block_ids))
        assert len(events) == layout.num_layers
        for event in events:
            event.block_until_done(WAIT_S)
        if direction is Direction.LOAD:
            blocks[block_ids] = slots[slot_ids]
        else:
            slots[slot_ids] = blocks[block_ids]
        assert np.array_equal(blocks_of(cupy, planes), blocks), pattern
        assert np.array_equal(host.array, slots), pattern
    lane.close()
    host.close()
    planes.close()
    device.close()


def test_copies_of_more_blocks_than_one_kernel_takes_arrive(cupy: ModuleType) -> None:
    layout = LAYOUTS["fp8"]
    device = CudaDevice()
    planes, host = device.allocate_planes(layout, 5000), device.allocate_host(layout, 5000)
    there = device.open_lane(Direction.OFFLOAD, planes, host)
    back = device.open_lane(Direction.LOAD, planes, host)
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (5000, layout.block_bytes), np.uint8)
    write_blocks(cupy, planes, blocks)
    for count in (960, 961, 1920, 5000):
        slots, source, target = (rng.permutation(5000).astype(np.int32)[:count] for _ in range(3))
        there.submit(BlockCopy(Direction.OFFLOAD, slots, source))[-1].block_until_done(WAIT_S)
        assert np.array_equal(host.array[slots], blocks[source])
        back.submit(BlockCopy(Direction.LOAD, slots, target))[-1].block_until_done(WAIT_S)
        blocks[target] = blocks[source]
        assert np.array_equal(blocks_of(cupy, planes), blocks)
    for lane in (there, back):
        lane.close()
    host.close()
    planes.close()
    device.close()


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
    device = CudaDevice()
    tensors = engine_tensors(cupy, layout, 9, kind)
    planes = device.adopt_planes(layout, tensors)
    host = device.allocate_host(layout, 9)
    there, back = (
        device.open_lane(way, planes, host) for way in (Direction.OFFLOAD, Direction.LOAD)
    )
    before = blocks_of(cupy, planes)
    every = np.arange(9, dtype=np.int32)
    there.submit(BlockCopy(Direction.OFFLOAD, every[::-1].copy(), every))[-1].block_until_done(
        WAIT_S
    )
    assert np.array_equal(host.array[::-1], before)
    host.array[:] = np.random.default_rng(1).integers(0, 256, host.array.shape, np.uint8)
    back.submit(BlockCopy(Direction.LOAD, every, every))[-1].block_until_done(WAIT_S)
    assert np.array_equal(blocks_of(cupy, planes), host.array)
    if kind == "interleaved":
        first = cupy.asnumpy(tensors[0])
        assert np.array_equal(first, host.array[:, : layout.planes[0].block_bytes])
    for lane in (there, back):
        lane.close()
    host.close()
    planes.close()
    device.close()


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
    device = CudaDevice()
    planes, host = device.adopt_planes(layout, tensors), device.allocate_host(layout, 16)
    assert [one.rows for one in planes.rectangles] == ([3] if kind == "one pool" else [1, 1, 1])
    there = device.open_lane(Direction.OFFLOAD, planes, host)
    back = device.open_lane(Direction.LOAD, planes, host)
    rng = np.random.default_rng(tensor_mib)
    for tensor in tensors:
        tensor[...] = cupy.asarray(rng.integers(0, 256, (num_blocks, 1), np.uint8))
        tensor[:, ::4099] = cupy.asarray(rng.integers(0, 256, (1, -(-block_bytes // 4099)), "u1"))
    for count in (1, 4, 16):
        source, target = (rng.permutation(num_blocks).astype(np.int32)[:count] for _ in range(2))
        slots = rng.permutation(16).astype(np.int32)[:count]
        wanted = [cupy.asnumpy(tensor[cupy.asarray(source)]) for tensor in tensors]
        there.submit(BlockCopy(Direction.OFFLOAD, slots, source))[-1].block_until_done(WAIT_S)
        assert np.array_equal(host.array[slots], np.concatenate(wanted, axis=1))
        back.submit(BlockCopy(Direction.LOAD, slots, target))[-1].block_until_done(WAIT_S)
        for tensor, rows in zip(tensors, wanted, strict=True):
            assert np.array_equal(cupy.asnumpy(tensor[cupy.asarray(target)]), rows)
    for lane in (there, back):
        lane.close()
    host.close()
    planes.close()
    device.close()


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

    layout = BIG_LAYOUTS["fp8-scales"]
    device = CudaDevice(lanes=LaneSettings(staging_bytes=1 << 20))
    planes = device.allocate_planes(layout, 64)
    host = device.allocate_host(layout, 128)
    load = device.open_lane(Direction.LOAD, planes, host)
    offload = device.open_lane(Direction.OFFLOAD, planes, host)
    rng = np.random.default_rng(9)
    host.array[:] = rng.integers(0, 256, host.array.shape, np.uint8)
    expected = host.array.copy()
    last = None
    for _ in range(200):
        blocks = rng.permutation(32).astype(np.int32)[:20]
        into = rng.permutation(64).astype(np.int32)[:20]
        loaded = load.submit(BlockCopy(Direction.LOAD, into, blocks))
        # ordered on the GPU alone: the offload waits for the load, and the next load for it
        after = (loaded[-1],)
        last = offload.submit(BlockCopy(Direction.OFFLOAD, into + 64, blocks, after))
        last[-1].block_until_done(WAIT_S)
        expected[into + 64] = expected[into]
    assert np.array_equal(host.array, expected)
    for lane in (load, offload):
        lane.close()
    host.close()
    planes.close()
    device.close()


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_small_copy_does_not_overtake_a_big_one_nor_the_other_way(
    cupy: ModuleType, direction: Direction
) -> None:
    """Small ones go straight where nothing is under way, and then nothing may pass them."""

    layout = BIG_LAYOUTS["gqa-128k"]
    device = CudaDevice()
    planes, host = device.allocate_planes(layout, 96), device.allocate_host(layout, 96)
    lane = device.open_lane(direction, planes, host)
    every = np.arange(96, dtype=np.int32)
    rng = np.random.default_rng(11)
    for number in range(60):
        source = rng.integers(0, 256, (96, 1), np.uint8)
        blocks = np.broadcast_to(source, (96, layout.block_bytes))
        one = int(rng.integers(0, 96))
        into_one, from_one = ids(one), ids((one + 1) % 96)
        small = (from_one, into_one) if direction is Direction.LOAD else (into_one, from_one)
        order = [BlockCopy(direction, every, every), BlockCopy(direction, *small)]
        if number % 2:
            order.reverse()
        if direction is Direction.LOAD:
            host.array[:] = blocks
        else:
            write_blocks(cupy, planes, blocks)
        ends = [lane.submit(copy)[-1] for copy in order]
        for end in ends:
            end.block_until_done(WAIT_S)
        expected = source.copy()
        if not number % 2:
            expected[one] = source[(one + 1) % 96]
        found = blocks_of(cupy, planes) if direction is Direction.LOAD else host.array
        assert (found == expected).all(), number
    lane.close()
    host.close()
    planes.close()
    device.close()
