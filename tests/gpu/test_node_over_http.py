"""A node on a GPU as a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.nodes import run_to_end
from tests.gpu.cuda import cupy_or_skip

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


async def test_a_gpu_that_is_not_there_ends_the_node_with_a_reason(tmp_path: Path) -> None:
    cupy_or_skip()
    config = tmp_path / "node.toml"
    config.write_text('[node]\ndevice = "cuda:99"\n')
    status, _, said = await run_to_end(tmp_path, "serve", "--port", "0", "--config", config)
    assert status != 0
    assert "there is no GPU 99" in said
    assert "Traceback" not in said
