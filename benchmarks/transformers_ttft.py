"""Time to the first token in transformers: computed, with the prompt on the host, and in a store.

    python -m benchmarks.transformers_ttft [--quick] [--json] [--store redis://127.0.0.1:6379/0]

On a GPU (with CuPy): a Llama of 8 billion parameters with random weights in bfloat16, prompts of
32,768 tokens (--quick: a model of four layers, 8,192 tokens). On a processor: a small one, 2,048
tokens. Two prompts take turns, so that each finds the other one's blocks on the device and its own
on the host. The limit is one contiguous copy of as many bytes, from pinned memory on a GPU. Tokens
are compared with those of the model alone whose last prompt token is computed by itself, as after a
hit: kernels for one token round otherwise than for many. Beside that: what a generated token takes
with the cache and with transformers' own, in turns, prompt and what is kept included.

--store: three prompts take turns, and the host has room for one: each is in the store, and whether
it is fetched or computed is decided. How long that took is compared with computing.
--late: seconds by which each answer of the store, then a Redis server, is late.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from benchmarks.bench import Row, row, show

_ROUNDS = 11
_STORE_ROUNDS = 15
_NEW_TOKENS = 64


class Bench:
    """A model with random weights, and prompts for it."""

    def __init__(self, *, is_quick: bool) -> None:
        import torch  # noqa: PLC0415 - after --help
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        layers, self.num_tokens = (4, 8_192) if is_quick else (32, 32_768)
        width, heads, inner = 4096, 32, 14_336
        if self.device == "cpu":
            layers, self.num_tokens, width, heads, inner = 4, 2_048, 512, 8, 1_536
        kv_heads = heads // 4
        torch.manual_seed(1)
        self.config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=2 * self.num_tokens,
        )
        torch.set_default_dtype(torch.bfloat16 if self.device == "cuda" else torch.float32)
        with torch.device(self.device):
            self.model = LlamaForCausalLM(self.config).eval()
            size = (1, self.num_tokens)
            self.prompts = [torch.randint(0, 32_000, size) for _ in range(3)]
        item = torch.get_default_dtype().itemsize
        self.num_bytes = 2 * layers * kv_heads * (width // heads) * item * self.num_tokens

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def first_token(self, prompt: Any, cache: Any = None) -> tuple[float, Any]:  # noqa: ANN401 - torch's
        """Seconds, and the tokens."""
        self.synchronize()
        began = time.perf_counter()
        more = {} if cache is None else {"past_key_values": cache}
        out = self.model.generate(prompt, max_new_tokens=1, do_sample=False, **more)
        self.synchronize()
        return time.perf_counter() - began, out

    def truth(self) -> Any:  # noqa: ANN401 - torch's
        """Of the first prompt, with its last token computed by itself."""
        from transformers import DynamicCache  # noqa: PLC0415

        with self.torch.no_grad():
            alone = DynamicCache(config=self.config)
            self.model(self.prompts[0][:, :-1], past_key_values=alone)
        return self.first_token(self.prompts[0], alone)[1]


def host_rows(bench: Bench) -> list[Row]:
    from tierkv.adapters.transformers import TierKVCache  # noqa: PLC0415

    torch, prompts, truth = bench.torch, bench.prompts, bench.truth()
    kind = {"dtype": torch.uint8}
    pinned = torch.empty(bench.num_bytes, pin_memory=bench.device == "cuda", **kind)
    target = torch.empty(bench.num_bytes, device=bench.device, **kind)
    copied, computed, hit = [], [], []
    with TierKVCache.for_model(
        bench.model, host_bytes=6 * bench.num_bytes, revision="random"
    ) as cache:
        for prompt in (*prompts[:2], *prompts[:2]):  # computed and saved; then once to warm up
            bench.first_token(prompt, cache)
        for _ in range(_ROUNDS):
            bench.synchronize()
            began = time.perf_counter()
            target.copy_(pinned, non_blocking=True)
            bench.synchronize()
            copied.append(time.perf_counter() - began)
            computed.append(bench.first_token(prompts[0])[0])
            took, out = bench.first_token(prompts[0], cache)
            assert cache.last_hit.host == bench.num_tokens - 1, cache.last_hit
            assert torch.equal(out, truth), "a hit gives another token"
            hit.append(took)
            bench.first_token(prompts[1], cache)
    limit = row("one contiguous copy", [one * 1e3 for one in copied], "ms")
    alone = row("computed", [one * 1e3 for one in computed], "ms", against=limit)
    host = row("found on the host", [one * 1e3 for one in hit], "ms", against=limit, most=1 / 0.9)
    return [limit, alone, host]


def decode_rows(bench: Bench) -> list[Row]:
    """Of a token, after prompts that fill a sixteenth of the context."""
    from transformers import DynamicCache  # noqa: PLC0415

    from tierkv.adapters.transformers import TierKVCache  # noqa: PLC0415

    prompts = [one[:, : bench.num_tokens // 16] for one in bench.prompts[:2]]

    def generate(prompt: Any, cache: Any) -> float:  # noqa: ANN401 - torch's
        bench.synchronize()
        began = time.perf_counter()
        out = bench.model.generate(
            prompt,
            max_new_tokens=_NEW_TOKENS,
            min_new_tokens=_NEW_TOKENS,
            do_sample=False,
            past_key_values=cache,
        )
        bench.synchronize()
        assert out.shape[1] == prompt.shape[1] + _NEW_TOKENS
        return (time.perf_counter() - began) / _NEW_TOKENS * 1e3

    own, with_cache = [], []
    with TierKVCache.for_model(bench.model, host_bytes=bench.num_bytes, revision="random") as cache:
        for prompt in prompts:  # to warm up
            generate(prompt, DynamicCache(config=bench.config))
            generate(prompt, cache)
        for number in range(_ROUNDS):
            prompt = prompts[number % 2]
            own.append(generate(prompt, DynamicCache(config=bench.config)))
            with_cache.append(generate(prompt, cache))
    alone = row("a generated token, transformers' own cache", own, "ms")
    ours = "a generated token, with this cache"
    return [alone, row(ours, with_cache, "ms", against=alone, most=1 / 0.99)]


def store_rows(bench: Bench, store: str) -> list[Row]:
    """What generate takes with the prompt in the store, to computing, in turns."""
    from tierkv.adapters.transformers import TierKVCache  # noqa: PLC0415

    computed, through, decided = [], [], []
    host_bytes = bench.num_bytes * 7 // 5
    with TierKVCache.for_model(
        bench.model, store, host_bytes=host_bytes, revision="random"
    ) as cache:
        for prompt in bench.prompts:
            bench.first_token(prompt, cache)
    with TierKVCache.for_model(
        bench.model, store, host_bytes=host_bytes, revision="random"
    ) as cache:
        for number in range(_STORE_ROUNDS):
            prompt = bench.prompts[number % 3]
            computed.append(bench.first_token(prompt)[0])
            through.append(bench.first_token(prompt, cache)[0])
            hit = cache.last_hit
            decided.append("fetched" if hit.storage else f"computed: {hit.problem}")
    alone = row("computed", [one * 1e3 for one in computed], "ms")
    found = row("in the store", [one * 1e3 for one in through], "ms", against=alone, most=1.05)
    for number, (one, what) in enumerate(zip(through, decided, strict=True)):
        print(f"  request {number}: {one * 1e3:.0f} ms, {what}")
    return [alone, found]


@contextmanager
def late(store: str, delay_s: float) -> Iterator[str]:
    """The URL of the same server, whose answers come so much later."""
    from tests.redis_proxy import proxy_on_a_thread  # noqa: PLC0415

    parts = urlsplit(store)
    account = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    with proxy_on_a_thread(parts.port or 6379) as proxy:
        proxy.delay_s = delay_s
        yield urlunsplit(parts._replace(netloc=f"{account}127.0.0.1:{proxy.port}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store")
    parser.add_argument("--late", type=float, default=0.0)
    asked = parser.parse_args()
    bench = Bench(is_quick=asked.quick)
    if asked.store is None:
        rows = host_rows(bench) + decode_rows(bench)
    else:
        with late(asked.store, asked.late) as url:
            rows = store_rows(bench, url if asked.late else asked.store)
    show(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
