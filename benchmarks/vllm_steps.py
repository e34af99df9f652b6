"""What a KV connector costs vLLM on a GPU where it hits and where it does not, step by step.

    python benchmarks/vllm_steps.py [MODE ...] [--quick] [--json] [--host-gib 52] [--model tiny]

Modes: none, idle (a connector that does nothing: vLLM's own part of the cost), offloading (vLLM's
OffloadingConnector), tierkv. Each mode is a process of its own with one engine in vLLM's default
mode: CUDA graphs, torch.compile, asynchronous scheduling, an engine core of its own. The model has
the shape of an 8B Llama and random weights. With --json one line for each mode.

Measured, in this order:
  start               seconds until the engine takes requests
  first               the first request after the start, 8,192 tokens; the next, of other tokens
  compute, gpu, host  TTFT of 8k and 32k tokens: computed; in vLLM's own cache; in host memory,
                      after vLLM's cache was emptied
  decode              tokens/s of 128 and 256 requests with prompts of 40 tokens and no hit,
                      from their start to their end
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES = ("none", "idle", "offloading", "tierkv")
LENGTHS = (8192, 32768)
SHORT = 40  # tokens of a prompt that hits nothing
_RESET_S = 5.0  # for saved blocks to be found


def transfer(mode: str, host_bytes: int) -> dict[str, Any] | None:
    """Return vLLM's configuration of the mode's connector."""
    if mode == "none":
        return None
    connectors: dict[str, dict[str, Any]] = {
        "idle": {
            "kv_connector": "IdleConnector",
            "kv_connector_module_path": "benchmarks.idle_connector",
        },
        "offloading": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
        },
        "tierkv": {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.adapters.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_bytes": host_bytes},
        },
    }
    return {"kv_role": "kv_both"} | connectors[mode]


def write_config(path: str, model: str) -> None:
    """Write the configuration of a Llama of 8B weights, or of a few million."""
    is_big = model == "8b"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096 if is_big else 512,
        "intermediate_size": 14336 if is_big else 1024,
        "num_hidden_layers": 32 if is_big else 4,
        "num_attention_heads": 32 if is_big else 4,
        "num_key_value_heads": 8 if is_big else 4,
        "head_dim": 128,
        "vocab_size": 128256 if is_big else 1024,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    Path(path, "config.json").write_text(json.dumps(config))


class Bench:
    """One engine, and its measurements."""

    def __init__(self, mode: str, given: argparse.Namespace, path: str) -> None:
        from vllm import LLM  # noqa: PLC0415

        began = time.perf_counter()
        host_bytes = int(given.host_gib * (1 << 30))
        self.llm = LLM(
            model=path,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=LENGTHS[-1] + 256,
            max_num_seqs=256,
            gpu_memory_utilization=given.gpu_share,
            kv_transfer_config=transfer(mode, host_bytes),
        )
        self.start_s = time.perf_counter() - began
        self._given = given
        self._hits = mode not in {"none", "idle"}
        self._draws = random.Random(1)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._draws.randrange(3, 1000) for _ in range(num_tokens)]

    def ttft(self, tokens: list[int]) -> tuple[float, int]:
        """Return the milliseconds until the first token, and how many tokens came from a cache."""
        began = time.perf_counter()
        [answer] = self._answers([tokens], 1)
        return (time.perf_counter() - began) * 1e3, answer.num_cached_tokens or 0

    def _answers(self, prompts: list[list[int]], num_tokens: int) -> list[Any]:
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        answers: list[Any] = self.llm.generate(
            [{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False
        )
        return answers

    def empty(self) -> None:
        """Empty vLLM's own cache, which waits until no block is held."""
        deadline = time.perf_counter() + _RESET_S
        while not self.llm.reset_prefix_cache() and time.perf_counter() < deadline:
            time.sleep(0.01)

    def latencies(self) -> dict[str, Any]:
        times = 3 if self._given.quick else 7
        found: dict[str, Any] = {}
        for length in LENGTHS:
            name, tokens = f"{length // 1024}k", self.prompt(length)
            computed = [self.ttft(self.prompt(length))[0] for _ in range(2 if times < 7 else 3)]
            self.ttft(tokens)
            on_gpu = [self.ttft(tokens) for _ in range(2 * times)][2:]
            found[f"compute {name}"] = statistics.median(computed)
            found[f"gpu {name}"] = statistics.median(one for one, _ in on_gpu)
            found[f"gpu {name}, all"] = [round(one, 2) for one, _ in on_gpu]
            if not self._hits:
                continue
            time.sleep(1.0)  # what was saved can be found by now
            on_host = []
            for _ in range(times):
                self.empty()
                on_host.append(self.ttft(tokens))
            found[f"host {name}"] = statistics.median(one for one, _ in on_host)
            found[f"host {name}, all"] = [round(one, 2) for one, _ in on_host]
            found[f"host {name}, tokens"] = min(tokens for _, tokens in on_host)
        return found

    def decode(self, batch: int, num_tokens: int) -> dict[str, Any]:
        """Return the tokens/s of a batch of requests that hit nothing."""
        speeds = []
        for _ in range(2 if self._given.quick else 5):
            prompts = [self.prompt(SHORT) for _ in range(batch)]
            began = time.perf_counter()
            self._answers(prompts, num_tokens)
            speeds.append(batch * num_tokens / (time.perf_counter() - began))
        return {
            f"decode {batch}": statistics.median(speeds),
            f"decode {batch}, all": [round(one) for one in speeds],
        }

    def measured(self) -> dict[str, Any]:
        found: dict[str, Any] = {"start s": self.start_s}
        found["first"] = self.ttft(self.prompt(LENGTHS[0]))[0]
        found["second"] = self.ttft(self.prompt(LENGTHS[0]))[0]
        for batch in (128, 256):
            self.decode(batch, 8)  # graphs of this size have run
            found |= self.decode(batch, 128 if self._given.quick else 512)
        return found | self.latencies()


def run_here(mode: str, given: argparse.Namespace) -> None:
    """Measure one mode in this process, and print its figures as one line."""
    with tempfile.TemporaryDirectory() as path:
        write_config(path, given.model)
        bench = Bench(mode, given, path)
        found = bench.measured()
        began = time.perf_counter()
        del bench
        found["end s"] = time.perf_counter() - began
    print(json.dumps({"mode": mode} | found), flush=True)


def run_apart(mode: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one mode in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, mode, "--here", "--model", given.model]
    command += ["--host-gib", str(given.host_gib), "--gpu-share", str(given.gpu_share)]
    command += ["--quick"] if given.quick else []
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"mode"')]
    if not lines:
        return {"mode": mode, "problem": f"it ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(results: list[dict[str, Any]]) -> str:
    names = [
        name
        for name in max(results, key=len)
        if name not in {"mode", "problem"} and not name.endswith(", all")
    ]
    lines = [" " * 18 + "".join(f"{one['mode']:>13}" for one in results)]
    for name in names:
        cells = [one.get(name) for one in results]
        lines.append(
            f"{name:18}" + "".join(f"{'-' if c is None else format(c, '.1f'):>13}" for c in cells)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=["8b", "tiny"], default="8b")
    parser.add_argument("--host-gib", type=float, default=52.0)
    parser.add_argument("--gpu-share", type=float, default=0.6)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.modes).difference(MODES):
        parser.error(f"there is no mode {unknown.pop()!r}: choose among {', '.join(MODES)}")
    if given.here:
        run_here(given.modes[0], given)
        return
    results = []
    for mode in given.modes or MODES:
        results.append(run_apart(mode, given))
        if given.json:
            print(json.dumps(results[-1]), flush=True)
    if not given.json:
        print(table(results))


if __name__ == "__main__":
    main()
