"""Time to the first token in transformers on a GPU: computed, and with the prompt on the host.

    python -m benchmarks.transformers_ttft [--quick] [--json]   (a GPU, CuPy and transformers)

A Llama of 8 billion parameters with random weights in bfloat16, one prompt of 32,768 tokens
(--quick: a model of four layers, 8,192 tokens). Two prompts take turns, so that each finds the
other one's blocks on the device and its own on the host. The limit is one contiguous copy of as
many bytes from pinned memory. Tokens are compared with those of the model alone whose last prompt
token is computed by itself, as after a hit: kernels for one token round otherwise than for many.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.bench import row, show

_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    import torch  # noqa: PLC0415 - after --help
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    from tierkv.adapters.transformers import TierKVCache  # noqa: PLC0415

    layers, num_tokens = (4, 8_192) if asked.quick else (32, 32_768)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2 * num_tokens,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    prompts = [torch.randint(0, 32_000, (1, num_tokens), device="cuda") for _ in range(2)]

    def first_token(prompt: Any, cache: Any = None) -> tuple[float, Any]:  # noqa: ANN401 - torch's
        torch.cuda.synchronize()
        began = time.perf_counter()
        more = {} if cache is None else {"past_key_values": cache}
        out = model.generate(prompt, max_new_tokens=1, do_sample=False, **more)
        torch.cuda.synchronize()
        return time.perf_counter() - began, out

    with torch.no_grad():
        alone = DynamicCache(config=config)
        model(prompts[0][:, :-1], past_key_values=alone)
    truth = first_token(prompts[0], alone)[1]
    del alone
    num_bytes = 2 * layers * 8 * 128 * 2 * num_tokens
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    copied, computed, hit = [], [], []
    with TierKVCache.for_model(model, host_bytes=6 * num_bytes, revision="random") as cache:
        for prompt in (*prompts, *prompts):  # computed and saved; then once to warm up
            first_token(prompt, cache)
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()
            copied.append(time.perf_counter() - began)
            computed.append(first_token(prompts[0])[0])
            took, out = first_token(prompts[0], cache)
            assert cache.last_hit.host == num_tokens - 1, cache.last_hit
            assert torch.equal(out, truth), "a hit gives another token"
            hit.append(took)
            first_token(prompts[1], cache)
    limit = row("one contiguous pinned copy", [one * 1e3 for one in copied], "ms")
    alone_row = row("computed", [one * 1e3 for one in computed], "ms", against=limit)
    host = row("found on the host", [one * 1e3 for one in hit], "ms", against=limit, most=1 / 0.9)
    show([limit, alone_row, host], as_json=asked.json)


if __name__ == "__main__":
    main()
