"""The device that a node's settings name: opened, or refused with what to do."""

from __future__ import annotations

import pytest

from tierkv.errors import ConfigError
from tierkv.gpu import open_device


def test_cpu_is_the_cpu() -> None:
    device = open_device("cpu")
    assert (device.name, device.status, device.failure) == ("cpu", "cpu", None)
    device.close()


@pytest.mark.parametrize("name", ["gpu", "", "cpu:1", "cuda:x", "cuda:-1", "CUDA", "cuda:1:2"])
def test_a_name_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match="use cpu, cuda"):
        open_device(name)


def test_cuda_without_cupy_is_refused_with_the_remedy(without_cupy: None) -> None:
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[cuda12\]'.*tierkv doctor"):
        open_device("cuda")
