"""A model from a path, served by processes, gives the tokens that its weights give alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.models import llama_tensors, write_llama, write_llama_gguf
from tests.processes import NodeProcess, gateway, node
from tests.refmodel.paged_run import PagedRun
from tierkv.api.types import DecodeBody, GenerateBody, PrefillBody
from tierkv.cache.keys import unpack
from tierkv.engine import Sampling, TokenLogprobs
from tierkv.engine_runs import logprobs_of
from tierkv.model_tokenizer import read_tokenizer
from tierkv.refmodel.checkpoint import open_checkpoint
from tierkv.refmodel.model import ReferenceModel, sample
from tierkv.tokenizers import AnswerDecoder

NUM_TOKENS = 24
CHAT = [{"role": "user", "content": "hello 12 worlds, " * 6 + "€?"}]


def alone(path: Path, packed: bytes) -> tuple[list[int], list[TokenLogprobs]]:
    """Return the model's greedy answer and log probabilities, token by token without a cache."""
    checkpoint, stops = open_checkpoint(path), read_tokenizer(path).stop_tokens
    model = ReferenceModel(checkpoint.config, 16, weights=checkpoint.weights())
    run, tokens = PagedRun(model, 400), unpack(packed).tolist()
    logits = [run.feed([token]) for token in tokens][-1]
    out: list[int] = []
    scores: list[TokenLogprobs] = []
    while len(out) < NUM_TOKENS and not stops & set(out):
        if out:
            logits = run.feed(out[-1:])
        out.append(sample(logits, Sampling(), run.length))
        scores.append(logprobs_of(logits, out[-1], 2))
    return out, scores


Start = Callable[[str], AbstractAsyncContextManager[NodeProcess]]


def prepared(kind: str, folder: Path) -> tuple[Path, Start]:
    """A model, and what starts a node of it in a role, over one directory for all."""
    tensors = llama_tensors(tied=True)
    if kind == "directory":
        model = write_llama(folder / "small", tensors, "BF16")
    else:
        model = write_llama_gguf(folder / "small.gguf", tensors, "Q8_0")
    config, storage = folder / "node.toml", f"file://{folder / 'store'}"
    config.write_text(
        f'[node]\nmodel = "{model}"\n[engine]\nweights_dir = "{folder / "weights"}"\n'
        '[cache]\ndevice_blocks = 64\nhost_blocks = 128\nstorage_write = "write_through"\n'
        'fetch_policy = "wait_complete"\n'
    )

    def start(role: str) -> AbstractAsyncContextManager[NodeProcess]:
        return node(role, role=role, config=config, storage=storage, folder=folder, direct="off")

    return model, start


@pytest.mark.promise(
    "A model from a path gives its own tokens from a pair, all tiers and a gateway."
)
@pytest.mark.parametrize("kind", ["directory", "gguf"])
async def test_a_pair_each_tier_and_a_gateway_give_the_tokens_of_the_model_alone(
    kind: str, tmp_path: Path
) -> None:
    model, start = await asyncio.to_thread(prepared, kind, tmp_path)
    tokenizer = await asyncio.to_thread(read_tokenizer, model)
    packed = tokenizer.encode_chat(CHAT)
    expected, scores = await asyncio.to_thread(alone, model, packed)
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(start("prefill"))
        async with start("decode") as decode:
            await prefill.client.prefill(PrefillBody(tokens=packed, ticket_id="t"))
            body = DecodeBody(tokens=packed, ticket_id="t", max_tokens=NUM_TOKENS)
            claimed = await decode.client.decode(body)
            assert list(claimed.tokens) == expected
            assert claimed.computed_tokens == 0
            again = await decode.client.generate(GenerateBody(tokens=packed, max_tokens=NUM_TOKENS))
            assert (list(again.tokens), again.matched.device > 0) == (expected, True)
            async with gateway(tmp_path, prefill=[prefill.url], decode=[decode.url]) as front:
                answer = await chat(front)
        assert answer["model"] == "small"
        choice = answer["choices"][0]
        assert choice["message"]["content"] == AnswerDecoder(tokenizer, packed).text(expected)
        found = choice["logprobs"]["content"]
        assert [one["logprob"] for one in found] == [one.chosen for one in scores]
        assert [[top["logprob"] for top in one["top_logprobs"]] for one in found] == [
            [score for _, score in one.top] for one in scores
        ]
        assert [one["token"] for one in found] == [tokenizer.token_text(one) for one in expected]
        is_ended = bool(tokenizer.stop_tokens & set(expected))
        assert choice["finish_reason"] == ("stop" if is_ended else "length")
        async with start("decode") as fresh:
            stored = await fresh.client.generate(GenerateBody(tokens=packed, max_tokens=NUM_TOKENS))
            assert (list(stored.tokens), stored.matched.storage > 0) == (expected, True)


async def chat(front: NodeProcess) -> dict[str, Any]:
    body = {
        "messages": CHAT, "temperature": 0, "max_tokens": NUM_TOKENS,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    async with (
        aiohttp.ClientSession() as http,
        http.post(front.url + "/v1/chat/completions", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
    assert response.status == 200, answer
    return answer


def test_another_models_tail_would_be_noticed(tmp_path: Path) -> None:
    """The control: the same prompt with other weights, or with its last tokens zeroed, differs."""
    model = write_llama(tmp_path / "a", llama_tensors(tied=True))
    packed = read_tokenizer(model).encode_chat(CHAT)
    other = write_llama(tmp_path / "b", llama_tensors(tied=True, seed=1))
    zeroed = packed[:-32] + np.zeros(8, "<i4").tobytes()
    tokens, _ = alone(model, packed)
    assert tokens not in (alone(other, packed)[0], alone(model, zeroed)[0])
