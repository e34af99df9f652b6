"""Random tiny models of several families, what transformers generates with them alone, and nodes
without HTTP that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.engine import GenerateRequest, Generation, Sampling
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device, Ids
from tierkv.hf.engine import TransformersEngine, TransformersSpec
from tierkv.hf.settings import TransformersSettings
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.storage.protocol import Store

BLOCK = 16
KINDS = ("llama", "qwen3", "phi", "gemma3", "deepseek_v3")
VOCABULARY = 512
torch.set_num_threads(1)


def config_of(kind: str) -> PretrainedConfig:
    """Return the sizes of a tiny model with full attention alone."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,  # so that the logits depend on the context
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": VOCABULARY - 1,
    }
    if kind == "llama":
        return LlamaConfig(**common)
    if kind == "qwen3":
        return Qwen3Config(**common, head_dim=16)
    if kind == "phi":
        return PhiConfig(**common)
    if kind == "gemma3":
        layers = {"layer_types": ["full_attention"] * 3}
        return Gemma3TextConfig(**common, head_dim=16, query_pre_attn_scalar=16, **layers)
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3Config(
        **common | {"num_key_value_heads": 8},
        moe_intermediate_size=32,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        **experts,
        **groups,
    )


@cache
def directory_of(kind: str) -> str:
    """Return a directory with a model of this kind; its weights are the same in every process."""
    torch.manual_seed(7)
    path = mkdtemp(prefix=f"tierkv-{kind}-")
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(path)
    return path


@cache
def alone(kind: str, device: str = "cpu") -> PreTrainedModel:
    """Return the model of this kind for transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory_of(kind), dtype=torch.float32)
    return model.to(device).eval()


def truth(
    kind: str, prompt: Sequence[int], num_tokens: int, device: str = "cpu"
) -> tuple[int, ...]:
    """Return the tokens that `generate` of transformers gives, greedily."""
    return generated(alone(kind, device), prompt, num_tokens)


def generated(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return the tokens that the model's own `generate` gives, greedily."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)], device=model.device)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
    return tuple(found[0, len(prompt) :].tolist())


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Return random tokens; another seed, other tokens from the first one on."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return tokens


def varied_prompt(kind: str, length: int, num_tokens: int) -> list[int]:
    """Return a prompt that the model does not answer with the same few tokens again and again."""
    for seed in range(100):
        answer = truth(kind, prompt_of(length, seed), num_tokens)
        if len(answer) == num_tokens and len(set(answer)) > num_tokens // 2:
            return prompt_of(length, seed)
    raise AssertionError(f"{kind} answers nothing of interest")


class HfNode:
    """A service and its engine; `generate` is what a caller of the engine would do."""

    def __init__(self, service: Service, engine: TransformersEngine) -> None:
        self.service = service
        self.engine = engine
        self._count = 0

    def job(self, prompt: Sequence[int], num_tokens: int, **named: Any) -> GenerateRequest:
        self._count += 1
        sampling = Sampling(**named)
        return GenerateRequest(f"request-{self._count}", pack(prompt), num_tokens, sampling)

    async def generate(self, prompt: Sequence[int], num_tokens: int, **named: Any) -> Generation:
        return await self.engine.generate(self.job(prompt, num_tokens, **named))

    async def slots(self, prompt: Sequence[int]) -> Ids:
        """Return the device blocks of a cached prompt, its tail's included."""
        self._count += 1
        spec = RequestSpec(f"probe-{self._count}", Prompt.of(list(prompt), BLOCK), 0)
        session = Session(self.service, spec)
        request = await session.admit()
        try:
            await session.loaded(10)
            return request.block_table.copy()
        finally:
            session.end()

    async def where(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the blocks of `prompt` on the device, and on the host only."""
        match = self.service.index.match(Prompt.of(list(prompt), BLOCK))
        return match.device_blocks, match.host_blocks


@asynccontextmanager
async def hf_node(
    kind: str,
    store: Store | None = None,
    *,
    device_blocks: int = 256,
    host_blocks: int = 256,
    host_write: WritePolicy = WritePolicy.WRITE_BACK,
    storage_write: WritePolicy = WritePolicy.NONE,
    device: Device | None = None,
    pads: bool = False,
    **named: Any,
) -> AsyncIterator[HfNode]:
    """Run a node; its books must be in order at the end."""
    device = device or CpuDevice()
    cache_settings = CacheSettings(
        block_size=BLOCK,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        host_write=host_write,
        storage_write=storage_write,
        fetch_policy=FetchPolicy.WAIT_COMPLETE,  # a machine's speed decides nothing here
    )
    settings = TransformersSettings(**named)
    spec = TransformersSpec(
        directory_of(kind), settings, cache_settings, "cpu" if device.array_module is np else "cuda"
    )
    await asyncio.to_thread(lambda: (spec.model, spec.tokenizer))
    spec.model.pads |= pads
    service = Service(device, spec.fingerprint(""), cache_settings, HandoffSettings(), store)
    engine = spec.open(service)
    async with service.running(), engine.running():
        yield HfNode(service, engine)
        assert service.verify() == []
    device.close()
