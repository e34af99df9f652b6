"""The engine transformers beside transformers alone, in one run.

    python -m benchmarks.hf_engine [--quick] [--json] [--model PATH]

On a GPU (with CuPy): a Llama of 8 billion parameters with random weights in bfloat16, prompts of
32,768 tokens (--quick: four layers, 8,192 tokens). On a processor: a small one in float32, 2,048
tokens. --model takes a model from a directory or a GGUF file instead.

Time to the first token: computed, and with the prompt on the host, beside one contiguous copy of as
many bytes (from pinned memory on a GPU); on a processor also with the prompt in a Redis on this
machine. Time of a generated token: of one request beside `generate`, of several beside
`generate_batch` and one, and beside loads of other requests.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.bench import Row, row, show
from tests.redis_server import redis_server
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.clock import SystemClock
from tierkv.engine import GenerateRequest, Generation
from tierkv.gpu import open_device
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.tokenizers import TokensOnly

A = TypeVar("A")

_ROUNDS = 5
_BLOCK = 16


def apart(work: Callable[[], A]) -> A:
    """Run `work` in a thread that ends, as a node loads its model: OpenMP's pool ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


class Bench:
    """A model, prompts for it, and a node that serves it."""

    def __init__(self, *, is_quick: bool, path: str) -> None:
        import torch  # noqa: PLC0415 - after --help
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

        from tierkv.hf.model import load_model  # noqa: PLC0415
        from tierkv.hf.settings import TransformersSettings  # noqa: PLC0415

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        is_gpu = self.device == "cuda"
        self.num_tokens = 2_000 if not is_gpu else 8_192 if is_quick else 32_768
        self.num_new = 64 if is_gpu else 16 if is_quick else 32
        self.batch = 32 if is_gpu else 8
        self.settings = TransformersSettings(chunk_tokens=2_048 if is_gpu else 512)
        layers, width, heads, inner = (4 if is_quick else 32), 4_096, 32, 14_336
        if not is_gpu:
            layers, width, heads, inner = 12, 512, 8, 1_536
        torch.manual_seed(1)
        if path:
            self.model = load_model(Path(path), "auto", torch.device(self.device))
        else:
            config = LlamaConfig(
                vocab_size=32_000,
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 4,
                max_position_embeddings=2 * self.num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            torch.set_default_dtype(torch.bfloat16 if is_gpu else torch.float32)
            with torch.device(self.device):
                self.model = LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        self.model.generation_config.eos_token_id = None
        self.vocab_size = self.model.config.vocab_size
        self._chance = np.random.default_rng(1)
        self.prompt_blocks = self.num_tokens // _BLOCK
        self.batch_blocks = self.batch * (256 + self.num_new) // _BLOCK
        self._count = 0

    def prompt(self, num_tokens: int) -> list[int]:
        tokens: list[int] = self._chance.integers(1, self.vocab_size, num_tokens).tolist()
        return tokens

    def seconds(self, work: Any) -> float:  # noqa: ANN401 - any call
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter() - began

    def alone(self, prompts: Sequence[list[int]], num_new: int) -> float:
        """Return the seconds that transformers alone takes for greedy answers."""
        named: dict[str, Any] = {"max_new_tokens": num_new, "do_sample": False}
        if len(prompts) > 1:
            from transformers import GenerationConfig  # noqa: PLC0415

            config = GenerationConfig(**named, eos_token_id=None, pad_token_id=0)
            return self.seconds(lambda: self.model.generate_batch(list(prompts), config))
        ids = self.torch.tensor(prompts, device=self.device)
        mask = self.torch.ones_like(ids)
        return self.seconds(
            lambda: self.model.generate(ids, attention_mask=mask, pad_token_id=0, **named)
        )

    def per_token(self, prompts: Sequence[list[int]]) -> float:
        """Return transformers' milliseconds of a step of all prompts, without their prefills."""
        few = self.num_new // 4
        long, short = (
            apart(partial(self.alone, prompts, number)) for number in (self.num_new, few)
        )
        return (long - short) / (self.num_new - few) * 1e3


class Serving:
    """A node without HTTP."""

    def __init__(self, bench: Bench, service: Service, engine: Any) -> None:  # noqa: ANN401
        self.bench = bench
        self.service = service
        self.engine = engine
        self._count = 0

    async def generate(
        self, prompt: list[int], num_new: int, times: list[float] | None = None
    ) -> Generation:
        """Answer a prompt; `times` gets the moment of each token."""
        self._count += 1
        told = None if times is None else lambda *_: times.append(time.perf_counter())
        job = GenerateRequest(f"r{self._count}", pack(prompt), num_new, on_tokens=told)
        generation: Generation = await self.engine.generate(job)
        return generation

    async def step_ms(self, prompts: Sequence[list[int]], num_new: int) -> float:
        """Return the milliseconds of a step in which every prompt gets a token."""
        times: list[list[float]] = [[] for _ in prompts]
        async with asyncio.TaskGroup() as group:
            for prompt, told in zip(prompts, times, strict=True):
                group.create_task(self.generate(prompt, num_new, told))
        began, ended = max(one[0] for one in times), min(one[-1] for one in times)
        steps = [sum(began < at <= ended for at in one) for one in times]
        return (ended - began) / (sum(steps) / len(steps)) * 1e3


@asynccontextmanager
async def serving(
    bench: Bench,
    model: Any,  # noqa: ANN401
    url: str | None,
    *,
    device_blocks: int,
) -> AsyncIterator[Serving]:
    """Run a node that serves the `PagedModel`.

    Args:
        bench: the prompts and settings.
        model: the `PagedModel`.
        url: URL of the storage tier; None for none.
        device_blocks: number of device blocks.
    """
    from tierkv.hf.engine import TransformersEngine  # noqa: PLC0415

    device = open_device(bench.device)
    cache = CacheSettings(
        block_size=_BLOCK,
        device_blocks=device_blocks,
        host_blocks=4 * bench.prompt_blocks + bench.batch_blocks,
        host_write=WritePolicy.WRITE_THROUGH,
        storage_write=WritePolicy.NONE if url is None else WritePolicy.WRITE_THROUGH,
        fetch_policy=FetchPolicy.WAIT_COMPLETE,
    )
    store = None if url is None else open_store(url, StoreSettings(), SystemClock())
    service = Service(device, model.fingerprint(""), cache, HandoffSettings(), store)
    tokenizer = TokensOnly(model.vocab_size, frozenset())
    engine = TransformersEngine(service, model, tokenizer, bench.settings)
    async with service.running(), engine.running():
        yield Serving(bench, service, engine)
    device.close()


async def first_token_rows(serving: Serving) -> list[Row]:
    """Let two prompts take turns, of which the device holds one: each is loaded from the host."""
    bench, torch = serving.bench, serving.bench.torch
    prompts = [bench.prompt(bench.num_tokens) for _ in range(2)]
    block_bytes = serving.service.fingerprint.layout.block_bytes
    num_bytes = block_bytes * (bench.num_tokens // _BLOCK)
    kind = {"dtype": torch.uint8}
    pinned = torch.ones(num_bytes, pin_memory=bench.device == "cuda", **kind)
    target = torch.empty(num_bytes, device=bench.device, **kind)
    computed, hit, copied = [], [], []
    for prompt in prompts:
        computed.append((await serving.generate(prompt, 1)).first_token_s * 1e3)
        work = serving.service.tiers.work
        while work.num_tasks:  # copies to the host
            await work.next_change()
    del target
    target = torch.empty(num_bytes, device=bench.device, **kind)
    for number in range(2 * _ROUNDS):
        found = await serving.generate(prompts[number % 2], 1)
        assert found.matched.host_tokens > bench.num_tokens // 2, found
        hit.append(found.first_token_s * 1e3)
        copied.append(bench.seconds(lambda: target.copy_(pinned, non_blocking=True)) * 1e3)
    limit = row("one contiguous copy", copied, "ms")
    whole = row("first token, computed", computed, "ms")
    name = "first token, prompt on the host"
    rows = [whole, row(name, hit, "ms", against=whole, most=0.1)]
    if bench.device == "cuda":
        rows += [limit, row(name, hit, "ms", against=limit, most=1.15)]
    if serving.service.store is not None:
        fetched = []
        for number in range(2 * _ROUNDS):
            serving.service.reset()
            found = await serving.generate(prompts[number % 2], 1)
            assert found.matched.storage_tokens > bench.num_tokens // 2, found
            fetched.append(found.first_token_s * 1e3)
        name = "first token, prompt in Redis"
        rows.append(row(name, fetched, "ms", against=whole, most=0.25))
    return rows


async def step_beside_hits(serving: Serving, prompts: Sequence[list[int]]) -> list[float]:
    """Return milliseconds of a step of the batch beside hits of two long prompts in turn."""
    bench = serving.bench
    long = [bench.prompt(bench.num_tokens) for _ in range(2)]
    for prompt in long:
        await serving.generate(prompt, 1)
    beside = []
    for _ in range(_ROUNDS):
        loading = asyncio.Event()

        async def load(stop: asyncio.Event = loading) -> None:
            while not stop.is_set():
                for prompt in long:
                    await serving.generate(prompt, 1)

        async with asyncio.TaskGroup() as group:
            group.create_task(load())
            beside.append(await serving.step_ms(prompts, bench.num_new))
            loading.set()
    return beside


async def rows_of(bench: Bench, url: str | None) -> list[Row]:
    """Measure everything; transformers alone first, since serving changes its attention."""
    from tierkv.hf.model import PagedModel  # noqa: PLC0415

    prompts = [bench.prompt(256) for _ in range(bench.batch)]
    apart(partial(bench.alone, prompts[:1], 4))
    own_one = row("a token, generate", [bench.per_token(prompts[:1]) for _ in range(_ROUNDS)], "ms")
    rows, own_batch = [own_one], None
    if bench.device == "cuda":
        apart(partial(bench.alone, prompts, 4))
        name = f"a step of {bench.batch}, generate_batch"
        own_batch = row(name, [bench.per_token(prompts) for _ in range(_ROUNDS)], "ms")
        rows.append(own_batch)
    model = apart(partial(PagedModel, bench.model, _BLOCK))
    room = 5 * bench.prompt_blocks // 2 + bench.batch_blocks
    async with serving(bench, model, None, device_blocks=room) as node:
        await node.step_ms(prompts[:1], 8)
        one = [await node.step_ms(prompts[:1], bench.num_new) for _ in range(_ROUNDS)]
        rows.append(row("a token of one request", one, "ms", against=own_one, most=1 / 0.9))
        every = [await node.step_ms(prompts, bench.num_new) for _ in range(_ROUNDS)]
        limit, most = (rows[-1], bench.batch / 3) if own_batch is None else (own_batch, 1 / 0.9)
        name = f"a step of {bench.batch} requests"
        batch = row(name, every, "ms", against=limit, most=most)
        rows.append(batch)
        if bench.device == "cuda":
            held = await step_beside_hits(node, prompts)
            rows.append(row("a step of the batch, beside device hits", held, "ms"))
    if bench.device == "cuda":
        room = 9 * bench.prompt_blocks // 8 + bench.batch_blocks
        async with serving(bench, model, None, device_blocks=room) as node:
            loaded = await step_beside_hits(node, prompts)
        name = "a step of the batch, beside host hits"
        rows.append(row(name, loaded, "ms", against=rows[-1], most=1.03))
    async with serving(bench, model, url, device_blocks=17 * bench.prompt_blocks // 16) as node:
        rows += await first_token_rows(node)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="", metavar="PATH")
    args = parser.parse_args()
    bench = apart(partial(Bench, is_quick=args.quick, path=args.model))
    with ExitStack() as stack:
        url = None if bench.device == "cuda" else stack.enter_context(redis_server()).url
        show(asyncio.run(rows_of(bench, url)), as_json=args.json)


if __name__ == "__main__":
    main()
