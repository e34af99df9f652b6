"""A node that serves a transformers model gives the tokens that transformers gives alone."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the transformers extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    T5Config,
)

from tests.adapters.hf_world import (
    BLOCK,
    KINDS,
    VOCABULARY,
    HfNode,
    alone,
    directory_of,
    hf_node,
    prompt_of,
    truth,
    varied_prompt,
)
from tests.latch import PATIENCE_S, turns, until
from tests.redis_server import PATIENT, redis_server
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.engine import Sampling, TokenLogprobs
from tierkv.errors import ConfigError, TierKVError
from tierkv.hf import engine as hf_engine
from tierkv.hf.engine import TransformersSpec
from tierkv.hf.model import PagedModel
from tierkv.hf.sampling import TokenChoice, choose
from tierkv.hf.settings import TransformersSettings
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.sched.settings import CacheSettings
from tierkv.storage.factory import open_store
from tierkv.storage.memory import MemorySettings, MemoryStore

LENGTH, NEW = 77, 12  # four blocks and a tail of 13


async def settle(node: HfNode) -> None:
    """Wait until nothing runs, and check the books."""
    service = node.service
    await until(lambda: service.stats().running_requests == 0, "no running request")
    await until(lambda: service.tiers.work.num_tasks == 0, "an idle node")
    assert service.verify() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_gives_the_tokens_of_transformers_computed_and_from_every_tier(
    kind: str,
) -> None:
    prompt = varied_prompt(kind, LENGTH, NEW)
    expected = truth(kind, prompt, NEW)
    store = MemoryStore(MemorySettings(), SystemClock())
    options: dict[str, Any] = {"storage_write": WritePolicy.WRITE_THROUGH, "chunk_tokens": 32}
    async with hf_node(kind, store, device_blocks=12, **options) as node:
        first = await node.generate(prompt, NEW)
        assert (first.tokens, first.computed_tokens) == (expected, LENGTH)
        again = await node.generate(prompt, NEW)
        assert (again.tokens, again.matched.device_tokens) == (expected, LENGTH - 1)
        await node.generate(prompt_of(150, seed=2), 2)  # takes the device
        await settle(node)
        from_host = await node.generate(prompt, NEW)
        assert from_host.tokens == expected
        assert from_host.matched.host_tokens >= BLOCK
        await settle(node)
    async with hf_node(kind, store, device_blocks=12, **options) as node:
        stored = await node.generate(prompt, NEW)
        assert stored.tokens == expected
        assert stored.matched.storage_tokens >= LENGTH // BLOCK * BLOCK


@pytest.mark.promise("A prefill and a decode node generate the tokens of transformers alone.")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefill_and_a_decode_node_over_redis_give_the_tokens_of_one(kind: str) -> None:
    prompt = varied_prompt(kind, LENGTH, NEW)
    async with pair(kind) as (prefill, decode):
        prefilled = await prefill.engine.prefill(
            prefill.job(prompt, 1), "ticket", waits_for=PublishWait.PUBLISHED
        )
        expected = truth(kind, prompt, NEW)
        assert prefilled.generation.tokens == expected[:1]
        job = decode.job(prompt, NEW)
        found, ticket = await decode.engine.decode(
            job, "ticket", policy=ClaimPolicy.WHOLE, deadline_s=60.0
        )
        assert ticket is not None
        assert (found.tokens, found.computed_tokens) == (expected, 0)
        further = [*prompt, *expected, 1, 2, 3]  # the second turn of the conversation
        turn = await decode.generate(further, NEW)
        assert turn.tokens == truth(kind, further, NEW)
        assert turn.matched.device_tokens >= LENGTH


@asynccontextmanager
async def pair(kind: str) -> AsyncIterator[tuple[HfNode, HfNode]]:
    """Run two nodes over one Redis."""
    with redis_server() as server:
        clock = SystemClock()
        async with (
            hf_node(kind, open_store(server.url, PATIENT, clock), chunk_tokens=32) as prefill,
            hf_node(kind, open_store(server.url, PATIENT, clock)) as decode,
        ):
            yield prefill, decode


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("damage", ["a zeroed tail", "a block in the place of another"])
async def test_a_decode_node_with_other_kv_than_was_computed_gives_other_tokens(
    kind: str, damage: str
) -> None:
    prompt = varied_prompt(kind, LENGTH, NEW)
    async with hf_node(kind) as node:
        await node.generate(prompt, 1)
        full = (await node.slots(prompt))[: LENGTH // BLOCK]
        others = np.setdiff1d(np.arange(node.service.planes.num_blocks), full)
        for plane in node.service.planes.arrays:
            if damage == "a zeroed tail":
                plane[others] = 0
            else:
                plane[full[2]] = plane[full[0]]
        found = await node.generate(prompt, NEW)
        assert found.computed_tokens < BLOCK
        assert found.tokens != truth(kind, prompt, NEW)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
async def test_requests_that_attend_in_one_padded_call_give_the_tokens_of_each_alone(
    kind: str,
) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 15, 16, 40, 90)]
    async with hf_node(kind, pads=True, chunk_tokens=32) as node:
        found = await asyncio.gather(*(node.generate(prompt, 20) for prompt in prompts))
        assert [one.tokens for one in found] == [truth(kind, prompt, 20) for prompt in prompts]


async def test_requests_that_need_more_blocks_than_there_are_are_preempted_and_go_on() -> None:
    prompts = [prompt_of(40, seed=seed) for seed in range(3)]
    async with hf_node("llama", device_blocks=12, reserve_tokens=16) as node:
        jobs = [node.generate(prompt, 90) for prompt in prompts]
        found = await asyncio.gather(*jobs)
        assert [one.tokens for one in found] == [truth("llama", one, 90) for one in prompts]
        assert node.engine.stats.preemptions > 0
        await settle(node)


@pytest.mark.parametrize("size", [1, 7, 32])
async def test_requests_that_come_and_go_at_random_give_the_tokens_of_each_alone(
    size: int,
) -> None:
    chance = random.Random(size)
    shared = prompt_of(48)
    prompts = [
        [*shared[: chance.choice((0, 16, 40))], *prompt_of(chance.randint(1, 90), seed=number)]
        for number in range(size)
    ]
    lengths = [chance.randint(1, 24) for _ in prompts]
    async with hf_node("llama", device_blocks=40, chunk_tokens=32, reserve_tokens=8) as node:

        async def one(number: int) -> tuple[int, ...] | None:
            await turns(chance.randint(0, 60))
            prompt, length = prompts[number], lengths[number]
            task = asyncio.ensure_future(node.generate(prompt, length))
            if chance.random() < 0.3:
                await turns(chance.randint(0, 40))
                task.cancel()
            try:
                return (await task).tokens
            except asyncio.CancelledError:
                return None

        found = await asyncio.gather(*(one(number) for number in range(size)))
        for number, tokens in enumerate(found):
            if tokens is not None:
                assert tokens == truth("llama", prompts[number], lengths[number])
        await settle(node)


async def test_requests_whose_prompts_need_steps_of_their_own_share_steps_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    forward = PagedModel.forward

    def counted(model: PagedModel, pages: Any, runs: Sequence[Any], before: Any) -> torch.Tensor:
        sizes.append(len(runs))
        return forward(model, pages, runs, before)

    monkeypatch.setattr(PagedModel, "forward", counted)
    num_tokens = 70  # each request commits once on the way, at another step than the others
    prompts = [varied_prompt("llama", 20 + number, num_tokens) for number in range(4)]
    async with hf_node("llama", chunk_tokens=32) as node:
        sizes.clear()  # the node has tried its model
        found = await asyncio.gather(*(node.generate(one, num_tokens) for one in prompts))
    assert [one.tokens for one in found] == [truth("llama", one, num_tokens) for one in prompts]
    assert len(sizes) < num_tokens + 12, "one step has a token of every request"


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_k": 50, "top_p": 0.95, "min_p": 0.01}


async def test_a_sampled_answer_is_the_same_on_every_path() -> None:
    prompt = varied_prompt("llama", LENGTH, NEW)
    async with pair("llama") as (prefill, decode):
        alone = await prefill.generate(prompt, NEW, **SAMPLED)
        assert alone.tokens != truth("llama", prompt, NEW)
        assert (await prefill.generate(prompt, NEW, **SAMPLED)).tokens == alone.tokens
        other = await prefill.generate(prompt, NEW, **{**SAMPLED, "seed": 4})
        assert other.tokens != alone.tokens
        job = prefill.job(prompt, 1, **SAMPLED)
        await prefill.engine.prefill(job, "sampled", waits_for=PublishWait.PUBLISHED)
        claim = decode.job(prompt, NEW, **SAMPLED)
        found, _ = await decode.engine.decode(claim, "sampled", deadline_s=60.0)
        assert found.tokens == alone.tokens
        begun = decode.job([*prompt, *alone.tokens[:5]], NEW - 5, **SAMPLED)
        rest = await decode.engine.generate(replace(begun, answered_tokens=5))
        assert rest.tokens == alone.tokens[5:]


async def test_penalties_and_tokens_that_end_an_answer_are_those_of_transformers() -> None:
    prompt = prompt_of(LENGTH)
    model = alone("llama")
    async with hf_node("llama") as node:
        ids = torch.tensor([prompt])
        named = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        for penalty in (1.3, 0.8):
            found = await node.generate(prompt, NEW, repetition_penalty=penalty)
            expected = await asyncio.to_thread(
                model.generate, ids, repetition_penalty=penalty, **named
            )
            assert found.tokens == tuple(expected[0, LENGTH:].tolist())
        plain = await node.generate(prompt, NEW)
        never_again = await node.generate(prompt, NEW, presence_penalty=2.0, frequency_penalty=2.0)
        assert len(set(never_again.tokens)) >= len(set(plain.tokens))
        for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            chosen = await node.generate(prompt, NEW, temperature=1.0, **options)
            assert chosen.tokens == plain.tokens


async def test_log_probabilities_are_those_of_transformers_computed_cached_and_streamed() -> None:
    prompt = varied_prompt("llama", LENGTH, NEW)
    expected = truth("llama", prompt, NEW)
    with torch.inference_mode():
        whole = alone("llama")(input_ids=torch.tensor([[*prompt, *expected]])).logits[0]
    scores = whole[LENGTH - 1 : -1].double().log_softmax(-1)
    async with hf_node("llama") as node:
        told: list[TokenLogprobs | None] = []

        def listen(_: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = (), /) -> None:
            told[:] = logprobs

        for computed in (LENGTH, 1):
            job = replace(node.job(prompt, NEW), num_logprobs=3, on_tokens=listen)
            found = await node.engine.generate(job)
            assert (found.tokens, found.computed_tokens) == (expected, computed)
            assert told == list(found.logprobs)
            assert len(found.logprobs) == NEW
            for row, token, one in zip(scores, expected, found.logprobs, strict=True):
                assert one is not None
                assert one.chosen == pytest.approx(float(row[token]), abs=1e-4)
                best = row.topk(3)
                assert [likely for likely, _ in one.top] == best.indices.tolist()
                assert [score for _, score in one.top] == pytest.approx(
                    best.values.tolist(), abs=1e-4
                )
        assert (await node.generate(prompt, NEW)).logprobs == ()


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], PretrainedConfig], str]] = {
    "windows": (lambda sizes: MistralConfig(**sizes, sliding_window=32), "full attention"),
    "states": (
        lambda _: MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        "full attention|keys and values|attention code",
    ),
    "encoder": (
        lambda sizes: BertConfig(**{**sizes, "num_key_value_heads": 8}),
        "attend to later tokens",
    ),
    "encoder and decoder": (
        lambda _: T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
        ),
        "encoder-decoder models",
    ),
    "soft caps": (
        lambda sizes: Gemma2Config(**sizes, head_dim=16, layer_types=["full_attention"] * 3),
        "softcap|other logits",
    ),
    "a rope that changes": (
        lambda sizes: LlamaConfig(**sizes, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope of type dynamic",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    make, words = REFUSED[what]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }  # fmt: skip
    config = make(sizes)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    family.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(TierKVError, match=words) as raised:
        _ = spec_of(tmp_path).model
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert re.search(": (use|for models such as BERT, set) ", sentence)
    assert "this cache" not in sentence


def test_a_model_that_is_not_there_or_does_not_fit_is_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="there is no model at"):
        _ = spec_of(tmp_path / "none").model
    path = tmp_path / "large"
    shutil.copytree(directory_of("llama"), path)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 42)  # a sparse file takes no room on the disk
    with pytest.raises(ConfigError, match=r"needs 4096.00 GiB of memory, but .* lower its size"):
        _ = spec_of(path).model
    (path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        _ = spec_of(path).model


def spec_of(path: Path) -> TransformersSpec:
    return TransformersSpec(str(path), TransformersSettings(), CacheSettings(), "cpu")


def test_a_model_is_loaded_in_a_thread_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of OpenMP that the main thread kept would slow down every step."""
    loading: list[threading.Thread] = []

    def load(*_: object) -> None:
        loading.append(threading.current_thread())
        raise ConfigError("seen")

    monkeypatch.setattr(hf_engine, "load_model", load)
    with pytest.raises(ConfigError, match="seen"):
        _ = spec_of(tmp_path).model
    assert loading[0] is not threading.main_thread()
    loading[0].join(PATIENCE_S)
    assert not loading[0].is_alive()


def test_tokens_are_chosen_as_often_as_their_logits_say() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    prompt = np.zeros(1, np.int32)

    def shares(**named: Any) -> list[float]:
        every = [Sampling(temperature=1.0, seed=seed, **named) for seed in range(2000)]
        found = [choose(logits, [TokenChoice(one, prompt, [])])[0] for one in every]
        return [found.count(token) / len(every) for token in range(5)]

    assert shares() == pytest.approx(logits[0].softmax(0).tolist(), abs=0.04)
    of_two = torch.tensor([2.0, 1.0]).softmax(0).tolist()
    assert shares(top_k=2) == pytest.approx([*of_two, 0, 0, 0], abs=0.04)
    assert shares(top_p=0.7) == pytest.approx([*of_two, 0, 0, 0], abs=0.04)
    assert shares(min_p=0.3) == pytest.approx([*of_two, 0, 0, 0], abs=0.04)
    excluded = TokenChoice(Sampling(), prompt, [], frozenset({0}))
    assert choose(logits, [excluded]) == [1]
