"""What makes lanes as fast beside an engine that has computed before as beside one that has not."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu import cuda_device


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
