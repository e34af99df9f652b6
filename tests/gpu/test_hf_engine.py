"""A transformers model on a GPU gives the tokens that transformers gives alone there."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the transformers extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

import asyncio

import torch

from tests.adapters.hf_world import BLOCK, hf_node, prompt_of, truth
from tests.gpu.cuda import cupy_or_skip
from tests.latch import until

pytestmark = pytest.mark.gpu
LENGTH, NEW = 77, 12


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
async def test_a_node_on_a_gpu_gives_the_tokens_of_transformers(kind: str) -> None:
    cupy_or_skip()
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - imports CuPy

    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [prompt_of(LENGTH + seed, seed=seed) for seed in range(8)]
    expected = [truth(kind, prompt, NEW, device="cuda") for prompt in prompts]
    async with hf_node(kind, device=CudaDevice(), device_blocks=32, chunk_tokens=32) as node:
        found = await asyncio.gather(*(node.generate(prompt, NEW) for prompt in prompts))
        assert [one.tokens for one in found] == expected
        work = node.service.tiers.work
        await until(lambda: work.num_tasks == 0, "an idle node")
        again = [await node.generate(prompt, NEW) for prompt in prompts]
        assert [one.tokens for one in again] == expected
        assert sum(one.matched.host_tokens for one in again) >= BLOCK
