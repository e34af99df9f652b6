"""Nodes on a GPU as processes of their own: the same answers over HTTP, cached or handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.nodes import Client, Process, process, run_to_end
from tests.gpu.cuda import cupy_or_skip

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

CONFIG = """
[node]
device = "cuda"

[cache]
block_size = 16
device_blocks = 64
host_blocks = 512
host_write = "write_through"

[model]
kv_dtype = "bfloat16"
"""
PROMPT = "Tell me of the tiers in which blocks are kept, one by one, and of what moves them. " * 3


@pytest.fixture
def config(tmp_path: Path) -> Path:
    cupy_or_skip()
    path = tmp_path / "node.toml"
    path.write_text(CONFIG)
    return path


async def generated(client: Client, path: str = "generate", **body: Any) -> Any:
    answer = await client.post(f"/v1/{path}", {"prompt": PROMPT, **body})
    assert answer.status == 200, answer.body
    return answer.body


async def ended_well(node: Process) -> None:
    assert (await node.client.get("/v1/verify")).body == {"findings": []}
    node.terminate()
    assert await node.ended() == 0, node.log_text()


async def test_a_prompt_is_handed_over_between_two_nodes(config: Path, tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    options = ("--config", config, "--storage", store)
    async with (
        process(tmp_path, *options, "--role", "prefill") as prefill,
        process(tmp_path, *options, "--role", "decode") as decode,
    ):
        alone = await generated(decode.client)
        await generated(prefill.client, "prefill", ticket_id="t1")
        handed = await generated(decode.client, "decode", ticket_id="t1")
        assert handed["text"] == alone["text"]
        await ended_well(prefill)
        await ended_well(decode)


async def test_a_gpu_that_is_not_there_ends_the_node_with_a_reason(tmp_path: Path) -> None:
    cupy_or_skip()
    config = tmp_path / "node.toml"
    config.write_text('[node]\ndevice = "cuda:99"\n')
    status, _, said = await run_to_end(tmp_path, "serve", "--port", "0", "--config", config)
    assert status != 0
    assert "there is no GPU 99" in said
    assert "Traceback" not in said
