"""The same model on a CUDA device: its own bits do not depend on cuts either."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.refmodel.paged_run import KVDtype, PagedRun
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> ModuleType:
    module: ModuleType = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        num_devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    assert num_devices
    return module


def on_cuda(run: PagedRun, cupy: ModuleType) -> PagedRun:
    run.planes = [cupy.asarray(plane) for plane in run.planes]
    return run


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_cuts_block_size_and_block_table_change_no_bit(cupy: ModuleType, kv_dtype: KVDtype) -> None:
    config = ModelConfig(kv_dtype=kv_dtype, max_positions=4096)
    tokens = np.random.default_rng(0).integers(0, 256, 700)
    cold = on_cuda(PagedRun(ReferenceModel(config, 16, cupy), 700), cupy)
    expected = cold.feed(tokens)
    for block_size, cuts in ((16, [1, 256, 699]), (7, [16, 17, 300]), (64, range(580, 700))):
        run = on_cuda(PagedRun(ReferenceModel(config, block_size, cupy), 700, table_seed=1), cupy)
        for end in cuts:
            run.feed(tokens[run.length : end])
        assert run.feed(tokens[run.length :]).tobytes() == expected.tobytes()


def test_the_logits_are_close_to_the_hosts(cupy: ModuleType) -> None:
    config = ModelConfig(max_positions=4096)
    tokens = np.random.default_rng(0).integers(0, 256, 700)
    host = PagedRun(ReferenceModel(config, 16), 700).feed(tokens)
    device = on_cuda(PagedRun(ReferenceModel(config, 16, cupy), 700), cupy).feed(tokens)
    finite = np.isfinite(host)
    assert np.array_equal(finite, np.isfinite(device))
    assert np.abs(host[finite] - device[finite]).max() < 1e-2
