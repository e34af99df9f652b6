"""Blocks of another process's planes, by CUDA IPC: exact, and no harm when that process ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from tests.gpu.cuda import blocks_of, cupy_or_skip, write_blocks
from tests.gpu.ipc_holder import Holder, content, holder
from tests.layouts import ALL_LAYOUTS
from tierkv.errors import ConfigError, TransferError
from tierkv.gpu.protocol import SharedPlane, SharedPlanes

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu import cuda_device
from tierkv.gpu.cuda_device import CudaDevice, CudaSharing

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


@pytest.mark.parametrize("name", ALL_LAYOUTS)
def test_blocks_come_byte_for_byte_and_touch_no_others(
    cupy: ModuleType, device: CudaDevice, other: Holder, name: str
) -> None:
    layout, sharing = ALL_LAYOUTS[name], device.sharing
    shared = named(sharing, other.make(name, 50), 50)
    own = device.allocate_planes(layout, 40)
    poison = np.full((40, layout.block_bytes), 0xA5, np.uint8)
    write_blocks(cupy, own, poison)
    rng = np.random.default_rng(1)
    sources = rng.permutation(50)[:30].astype(np.int32)
    targets = rng.permutation(40)[:30].astype(np.int32)
    peer = sharing.open(own, shared)
    peer.copy(sources, targets)
    expected = poison.copy()
    expected[targets] = content(layout, 50)[sources]
    assert np.array_equal(blocks_of(cupy, own), expected)
    peer.copy(sources[:0], targets[:0])
    peer.close()
    own.close()


def test_a_copy_larger_than_its_staging_goes_in_parts(
    cupy: ModuleType, device: CudaDevice, other: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, sharing = ALL_LAYOUTS["fp8"], device.sharing
    monkeypatch.setattr(cuda_device, "_STAGING_BYTES", 7 * layout.block_bytes)
    own = device.allocate_planes(layout, 2000)
    peer = sharing.open(own, named(sharing, other.make("fp8", 2000), 2000))
    sources = np.random.default_rng(2).permutation(2000).astype(np.int32)
    peer.copy(sources, np.arange(2000, dtype=np.int32))
    assert np.array_equal(blocks_of(cupy, own), content(layout, 2000)[sources])
    peer.close()
    own.close()


def test_memory_of_a_pool_is_found_within_its_allocation(
    cupy: ModuleType, device: CudaDevice, other: Holder
) -> None:
    layout, sharing = ALL_LAYOUTS["gqa"], device.sharing
    planes = other.make("gqa", 9, "pool")
    own = device.allocate_planes(layout, 9)
    peer = sharing.open(own, named(sharing, planes, 9))
    every = np.arange(9, dtype=np.int32)
    peer.copy(every, every)
    assert np.array_equal(blocks_of(cupy, own), content(layout, 9))
    peer.close()
    own.close()


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
