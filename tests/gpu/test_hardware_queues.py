"""What makes lanes as fast beside an engine that has computed before as beside one that has not."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.gpu.cuda import cupy_or_skip
from tests.layouts import LAYOUTS
from tierkv.gpu.protocol import Direction

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu import cuda_device
from tierkv.gpu.cuda import CudaStream, Gpu
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.kernels import launch_nothing


@pytest.fixture
def cupy() -> ModuleType:
    return cupy_or_skip()


@pytest.mark.parametrize(
    ("told", "expected"),
    [(None, 8), ("", 8), ("1", 1), ("32", 32), ("99", 32), ("0", 1), ("many", 8), ("-4", 8)],
)
def test_there_are_as_many_queues_as_the_driver_is_told(
    monkeypatch: pytest.MonkeyPatch, told: str | None, expected: int
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if told is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", told)
    assert cuda_device.num_queues() == expected


@pytest.mark.gpu
def test_each_queue_has_had_a_kernel_before_the_first_lane_is_open_and_none_after(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def noted(gpu: Gpu, stream: CudaStream) -> None:
        launched.append(stream.address)
        launch_nothing(gpu, stream)

    monkeypatch.setattr(cuda_device, "launch_nothing", noted)
    device = CudaDevice()
    layout = LAYOUTS["fp8"]
    planes, host = device.allocate_planes(layout, 4), device.allocate_host(layout, 4)
    assert not launched, "a device that only computes makes no streams of ours"
    lanes = [device.open_lane(direction, planes, host) for direction in Direction]
    assert len(set(launched)) == len(launched) == cuda_device.num_queues()
    for lane in lanes:
        lane.close()
    host.close()
    device.close()
