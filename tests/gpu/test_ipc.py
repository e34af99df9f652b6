"""Blocks of another process's planes, by CUDA IPC: exact, and no harm when that process ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest

from tests.gpu.cuda import blocks_of, cupy_or_skip, write_blocks
from tests.gpu.ipc_holder import Holder, content, holder
from tests.layouts import ALL_LAYOUTS
from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError, TransferError
from tierkv.gpu.protocol import SharedPlane, SharedPlanes

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu import cuda_device
from tierkv.gpu.cuda_device import CudaDevice, CudaPeer, CudaSharing
from tierkv.gpu.cuda_memory import CudaPlanes

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy() -> ModuleType:
    return cupy_or_skip()


@pytest.fixture(scope="module")
def other() -> Iterator[Holder]:
    cupy_or_skip()
    with holder() as running:
        yield running


@pytest.fixture
def device(cupy: ModuleType) -> Iterator[CudaDevice]:
    opened = CudaDevice()
    yield opened
    assert opened.failure is None
    opened.close()


def named(sharing: CudaSharing, planes: tuple[SharedPlane, ...], num_blocks: int) -> SharedPlanes:
    return SharedPlanes(
        owner="other", name="planes", place=sharing.place, num_blocks=num_blocks, planes=planes
    )


@contextmanager
def opened(
    device: CudaDevice, layout: Layout, num_blocks: int, theirs: tuple[SharedPlane, ...], count: int
) -> Iterator[tuple[CudaPlanes, CudaPeer]]:
    """Planes of `num_blocks` blocks, and the other process's of `count`."""
    sharing, own = device.sharing, device.allocate_planes(layout, num_blocks)
    peer = sharing.open(own, named(sharing, theirs, count))
    yield own, peer
    peer.close()
    own.close()


@pytest.mark.parametrize("name", ALL_LAYOUTS)
def test_blocks_come_byte_for_byte_and_touch_no_others(
    cupy: ModuleType, device: CudaDevice, other: Holder, name: str
) -> None:
    layout, rng = ALL_LAYOUTS[name], np.random.default_rng(1)
    expected = np.full((40, layout.block_bytes), 0xA5, np.uint8)
    sources = rng.permutation(50)[:30].astype(np.int32)
    targets = rng.permutation(40)[:30].astype(np.int32)
    with opened(device, layout, 40, other.make(name, 50), 50) as (own, peer):
        write_blocks(cupy, own, expected)
        peer.copy(sources, targets)
        expected[targets] = content(layout, 50)[sources]
        assert np.array_equal(blocks_of(cupy, own), expected)
        peer.copy(sources[:0], targets[:0])


def test_a_copy_larger_than_its_staging_goes_in_parts(
    cupy: ModuleType, device: CudaDevice, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ALL_LAYOUTS["fp8"]
    monkeypatch.setattr(cuda_device, "_STAGING_BYTES", 7 * layout.block_bytes)
    sources = np.random.default_rng(2).permutation(2000).astype(np.int32)
    with opened(device, layout, 2000, other.make("fp8", 2000), 2000) as (own, peer):
        peer.copy(sources, np.arange(2000, dtype=np.int32))
        assert np.array_equal(blocks_of(cupy, own), content(layout, 2000)[sources])


def test_memory_of_a_pool_is_found_within_its_allocation(
    cupy: ModuleType, device: CudaDevice, other: Holder
) -> None:
    layout, every = ALL_LAYOUTS["gqa"], np.arange(9, dtype=np.int32)
    with opened(device, layout, 9, other.make("gqa", 9, "pool"), 9) as (own, peer):
        peer.copy(every, every)
        assert np.array_equal(blocks_of(cupy, own), content(layout, 9))


def test_memory_that_cannot_be_shared_is_refused_with_the_remedy(
    cupy: ModuleType, other: Holder
) -> None:
    with pytest.raises(RuntimeError, match="cudaMallocAsync"):
        other.make("gqa", 9, "async")


def test_what_another_process_says_of_its_planes_is_not_believed(
    cupy: ModuleType, device: CudaDevice, other: Holder
) -> None:
    """A kernel that read beyond them would lose this process's GPU."""
    layout, sharing = ALL_LAYOUTS["gqa"], device.sharing
    own = device.allocate_planes(layout, 4)
    planes = other.make("gqa", 9)
    free, _ = device.gpu.memory_info()
    wrong = (
        named(sharing, planes, 10**7),
        named(sharing, planes, 0),
        named(sharing, planes[:-1], 9),
        named(sharing, tuple(SharedPlane(p.handle, 1 << 40, p.stride) for p in planes), 9),
        named(sharing, tuple(SharedPlane(p.handle, p.offset, 1) for p in planes), 9),
        named(sharing, tuple(SharedPlane(b"\1" * 64, p.offset, p.stride) for p in planes), 9),
    )
    for shared in wrong:
        with pytest.raises(TransferError):
            sharing.open(own, shared)
    peer = sharing.open(own, named(sharing, planes, 9))
    for source in (9, -1):
        with pytest.raises(TransferError, match="has no block"):
            peer.copy(np.array([source], np.int32), np.array([0], np.int32))
    peer.close()
    assert device.gpu.memory_info()[0] >= free - (80 << 20)
    own.close()


def test_a_gpu_that_this_process_does_not_see_is_told_as_that(
    cupy: ModuleType, device: CudaDevice
) -> None:
    sharing = device.sharing
    own = device.allocate_planes(ALL_LAYOUTS["gqa"], 4)
    elsewhere = SharedPlanes(owner="o", name="n", place="00" * 16, num_blocks=4, planes=())
    with pytest.raises(ConfigError, match="cannot read the memory"):
        sharing.open(own, elsewhere)
    own.close()
