"""A node whose device is lost says so, and keeps what does not need it."""

from __future__ import annotations

import pytest

from tests.api.nodes import here
from tierkv.gpu.cpu import CpuDevice


@pytest.mark.promise("A lost device makes a node unready and leaves it alive.")
async def test_a_lost_device_makes_a_node_unready_and_leaves_it_alive() -> None:
    async with here() as on:
        device = on.node.device
        assert isinstance(device, CpuDevice)
        device.failure = device.status = "GPU 0 is lost to this process: restart the process"
        for path in ("/readyz", "/readyz?verbose"):
            answer = await on.client.get(path)
            assert (answer.status, answer.code) == (503, "not_ready")
            assert "device: GPU 0 is lost" in answer.body["detail"]
        assert (await on.client.get("/livez")).status == 200
        assert (await on.client.get("/v1/stats")).status == 200
        assert (await on.client.get("/v1/verify")).body == {"findings": []}
