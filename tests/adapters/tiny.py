"""A tiny random Llama of transformers, what it generates alone, and an engine that runs it over an
embedded service."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tierkv.adapters.transformers import PagedCache
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.embed import Admitted, Embedded
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_store

BLOCK = 64
# Newer versions of transformers call it `cache`, and warn of the other name.
ARGUMENT = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)
WAIT_S = 60.0
Rows = list[np.ndarray]


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Weights from a fixed seed: the same in every process. 8 query heads over 2 KV heads."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,  # so that the logits depend on the context
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


def forward(model: LlamaForCausalLM, cache: DynamicCache, tokens: Sequence[int]) -> int:
    """Run `tokens` on top of the cache; the token that follows, greedily."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=True, **{ARGUMENT: cache}).logits
    return int(logits[0, -1].argmax())


def rows_of(cache: DynamicCache) -> Rows:
    """KV bytes by plane: uint8 [heads, tokens, bytes]."""
    states = [one for layer in cache.layers for one in (layer.keys, layer.values)]
    return [one[0].contiguous().view(torch.uint8).numpy().copy() for one in states]


def alone(
    model: LlamaForCausalLM, prompt: Sequence[int], new: int, *, cut: int = 0
) -> tuple[list[int], Rows]:
    """What transformers generates without tierkv, and the KV of all but the last token.

    cut: prefill in two calls, the first of so many tokens, as a node does that had these cached.
    """
    cache = DynamicCache(config=model.config)
    if cut:
        forward(model, cache, prompt[:cut])
    tokens = [forward(model, cache, prompt[cut:])]
    while len(tokens) < new:
        tokens.append(forward(model, cache, tokens[-1:]))
    return tokens, rows_of(cache)


@dataclass(frozen=True)
class Generated:
    tokens: list[int]
    rows: Rows
    found: Admitted


class TinyEngine:
    """transformers over an embedded service. Use it in a `with`."""

    def __init__(
        self,
        store: str,
        *,
        dtype: torch.dtype = torch.float32,
        before_copy: Callable[[BlockCopy], None] | None = None,
        storage_write: WritePolicy = WritePolicy.NONE,
    ) -> None:
        self.model = llama(dtype)
        self.paged = PagedCache(self.model.config, block_size=BLOCK, dtype=dtype)

        def build() -> Service:
            return Service(
                CpuDevice(before_copy),
                self.paged.fingerprint("tiny-llama", revision="seed 7"),
                CacheSettings(
                    block_size=BLOCK,
                    device_blocks=32,
                    host_blocks=64,
                    host_write=WritePolicy.WRITE_THROUGH,
                    storage_write=storage_write,
                    # A machine's speed decides what a fetch is worth; these tests do not.
                    fetch_policy=FetchPolicy.WAIT_COMPLETE,
                ),
                HandoffSettings(),
                open_store(store, StoreSettings(), SystemClock()),
            )

        self.cache = Embedded(build)
        self.num_computed = 0

    def __enter__(self) -> Self:
        self.cache.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def prefill(self, name: str, prompt: Sequence[int], ticket_id: str) -> int:
        """Compute what is not cached, publish the prompt; the first token."""
        found = self.cache.admit(name, prompt, max_new_tokens=0).wait(WAIT_S)
        first, _ = self._prompt(found, prompt)
        self.cache.commit(name, prompt)
        published = self.cache.publish(name, ticket_id, [first])
        self.cache.end(name).wait(WAIT_S)
        published.result()
        return first

    def decode(
        self,
        name: str,
        prompt: Sequence[int],
        ticket_id: str,
        new: int,
        *,
        meddle: Callable[[Sequence[np.ndarray], Admitted], None] | None = None,
    ) -> Generated:
        """Claim a published prompt and go on. meddle: damages the claimed blocks."""
        call = self.cache.claim(name, ticket_id, prompt, max_new_tokens=new - 1)
        found = call.wait(WAIT_S)
        if meddle is not None:
            meddle(self._planes, found)
        cache = self.paged.load(self._planes, found.block_table, found.cached_tokens)
        assert found.ticket is not None
        return self._go_on(name, prompt, list(found.ticket.first_tokens), new, (cache, found))

    def generate(self, name: str, prompt: Sequence[int], new: int) -> Generated:
        found = self.cache.admit(name, prompt, max_new_tokens=new - 1).wait(WAIT_S)
        first, cache = self._prompt(found, prompt)
        return self._go_on(name, prompt, [first], new, (cache, found))

    @property
    def _planes(self) -> Sequence[np.ndarray]:
        return self.cache.service.planes.arrays

    def _prompt(self, found: Admitted, prompt: Sequence[int]) -> tuple[int, DynamicCache]:
        start = found.cached_tokens
        cache = self.paged.load(self._planes, found.block_table, start)
        first = forward(self.model, cache, prompt[start:])
        self.num_computed += len(prompt) - start
        self.paged.store(cache, self._planes, found.block_table, start, len(prompt))
        return first, cache

    def _go_on(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: list[int],
        new: int,
        state: tuple[DynamicCache, Admitted],
    ) -> Generated:
        cache, found = state
        while len(tokens) < new:
            tokens.append(forward(self.model, cache, tokens[-1:]))
        fed = [*prompt, *tokens[:-1]]
        self.paged.store(cache, self._planes, found.block_table, len(prompt), len(fed))
        # What the blocks hold is what counts, not what this process had computed into its cache.
        rows = rows_of(self.paged.load(self._planes, found.block_table, len(fed)))
        self.cache.commit(name, fed)
        self.cache.end(name).wait(WAIT_S)
        return Generated(tokens, rows, found)
