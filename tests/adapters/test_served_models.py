"""Processes that serve a transformers model: a killed node costs no token, a refusal one line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("torch", reason="needs the transformers extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

from transformers import AutoModelForCausalLM, MistralConfig

from tests.adapters.hf_world import directory_of, truth, varied_prompt
from tests.redis_server import redis_server
from tierkv.demo.processes import NodeProcess, gateway, node, together

LENGTH, NEW = 77, 160


async def test_an_answer_goes_on_with_the_same_tokens_when_the_decode_node_is_killed(
    tmp_path: Path,
) -> None:
    """The names of tokens in the log probabilities are the tokens: the model has no tokenizer."""
    prompt = await asyncio.to_thread(varied_prompt, "llama", LENGTH, 12)
    expected = await asyncio.to_thread(truth, "llama", prompt, NEW)
    config = tmp_path / "node.toml"
    config.write_text(
        f'[node]\nengine = "transformers"\nmodel = "{directory_of("llama")}"\n'
        "[cache]\ndevice_blocks = 64\nhost_blocks = 64\n"
    )
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server())

        async def started(role: str) -> NodeProcess:
            one = node(role, role=role, config=config, storage=redis.url, folder=tmp_path)
            return await stack.enter_async_context(one)

        prefill, decode = await together(started("prefill"), started("decode"))
        front = await stack.enter_async_context(
            gateway(tmp_path, prefill=[prefill.url], decode=[decode.url])
        )
        body = {
            "prompt": prompt, "max_tokens": NEW, "temperature": 0, "logprobs": 0, "stream": True,
        }  # fmt: skip
        http = await stack.enter_async_context(aiohttp.ClientSession())
        tokens: list[int] = []
        async with http.post(front.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    piece = json.loads(line[6:])["choices"][0]
                    tokens += map(int, (piece["logprobs"] or {}).get("tokens", ()))
                if len(tokens) > 3 and decode.process.returncode is None:
                    decode.process.kill()
                    await decode.process.wait()
        assert tuple(tokens) == expected
        async with http.get(front.url + "/metrics") as response:
            figures = await response.text()
        assert 'tierkv_gateway_routed_total{how="resumed"} 1.0' in figures


def test_a_model_that_cannot_be_served_ends_the_command_with_one_line(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=64, **sizes, **heads, sliding_window=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "tierkv", "serve", "--engine", "transformers", "--port", "0"]
    done = subprocess.run(
        [*command, "--storage", "none", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("error: only layers of full attention can be cached")
    assert len(lines) == 1, done.stderr
