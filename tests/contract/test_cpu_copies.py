"""The CPU's lanes: neighbouring slots and blocks are copied in one go, whatever the ids' order."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.cache.layout import layered
from tierkv.errors import TransferError
from tierkv.gpu.cpu import CpuDevice, runs_of
from tierkv.gpu.protocol import BlockCopy, Direction, Ids

LAYOUT = layered(4, [("k", "uint8", 16 << 10)], 2)  # 64 KiB a plane
NUM_BLOCKS = 12


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("slots", "blocks", "runs"),
    [
        (ids(3), ids(5), [(3, 5, 1)]),
        (ids(3, 4, 5), ids(7, 8, 9), [(3, 7, 3)]),
        (ids(5, 4, 3), ids(9, 8, 7), [(3, 7, 3)]),
        (ids(5, 4, 3), ids(7, 8, 9), [(3, 9, 1), (4, 8, 1), (5, 7, 1)]),
        (ids(8, 1, 0, 9), ids(2, 5, 4, 3), [(0, 4, 2), (8, 2, 2)]),
        (ids(0, 1, 2, 3), ids(0, 1, 3, 4), [(0, 0, 2), (2, 3, 2)]),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_every_block_goes_where_it_belongs_and_nothing_else_is_touched(
    direction: Direction, slots: Ids, blocks: Ids, runs: list[tuple[int, int, int]]
) -> None:
    copy = BlockCopy(direction, slots, blocks)
    assert runs_of(copy) == runs
    device = CpuDevice()
    planes, host = (
        device.allocate_planes(LAYOUT, NUM_BLOCKS),
        device.allocate_host(LAYOUT, NUM_BLOCKS),
    )
    rng = np.random.default_rng(0)
    for array in (*planes.arrays, host.array):
        array[:] = rng.integers(0, 256, array.shape, np.uint8)
    expected_host = host.array.copy()
    expected_planes = [array.copy() for array in planes.arrays]
    for slot, block in zip(slots, blocks, strict=True):
        for plane, expected, at in zip(planes.arrays, expected_planes, LAYOUT.offsets, strict=True):
            part = slice(at, at + plane.shape[1])
            if direction is Direction.LOAD:
                expected[block] = host.array[slot, part]
            else:
                expected_host[slot, part] = plane[block]
    lane = device.open_lane(direction, planes, host)
    try:
        lane.submit(copy)[-1].block_until_done(10)
    finally:
        lane.close()
        device.close()
    assert (host.array == expected_host).all()
    for plane, expected in zip(planes.arrays, expected_planes, strict=True):
        assert (plane == expected).all()


def test_a_copy_within_memory_that_is_gone_fails_by_its_blocks() -> None:
    device = CpuDevice()
    planes = device.allocate_planes(LAYOUT, NUM_BLOCKS)
    planes.close()
    event = device.copy_blocks(planes, ids(1, 2), ids(5, 6))
    with pytest.raises(TransferError, match="closed") as failed:
        event.block_until_done(10)
    assert failed.value.blocks == (5, 6)
    device.close()


def test_scattered_small_blocks_are_copied_by_their_ids() -> None:
    """A step of Python for each would cost more than the copy."""
    small = layered(4, [("k", "uint8", 16)], 1)
    device = CpuDevice()
    planes, host = device.allocate_planes(small, 64), device.allocate_host(small, 64)
    planes.arrays[0][:] = np.arange(64, dtype=np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(64).astype(np.int32)
    lane = device.open_lane(Direction.OFFLOAD, planes, host)
    try:
        lane.submit(BlockCopy(Direction.OFFLOAD, order, np.arange(64, dtype=np.int32)))[
            -1
        ].block_until_done(10)
    finally:
        lane.close()
        device.close()
    assert (host.array[order] == np.arange(64, dtype=np.uint8)[:, None]).all()
