"""vLLM's engine in a process of its own, driven step by step as its own loop does it.

python connector_process.py MODEL KV_TRANSFER_CONFIG_JSON ENGINE_ARGUMENTS_JSON. A command per line
in, an answer per line out, as JSON; see `Driver`. Scheduler and worker are in this process, so that
blocks can be counted and read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

PATIENCE_S = 60.0


class Driver:
    """Its public methods are the commands; their arguments are the command's other fields."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, more: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.config import KVTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        settings: dict[str, Any] = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "enable_prefix_caching": True,
            "enforce_eager": True,
        }
        arguments = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **(settings | more),
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector

    def generate(
        self, requests: list[dict[str, Any]], aborts: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Greedy tokens, tokens from a cache, and kv_transfer_params of each request. aborts: after
        so many steps this request is aborted."""
        from vllm import SamplingParams

        for request in requests:
            params = request.get("params")
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=request.get("max_tokens", 12),
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
            if request.get("salt"):
                prompt["cache_salt"] = request["salt"]
            self.engine.add_request(request["id"], prompt, sampling)
        answers: dict[str, Any] = {}
        left = dict(aborts or {})
        steps = 0
        deadline = time.monotonic() + PATIENCE_S
        while self.scheduler.has_requests():
            for name in [name for name, at in left.items() if at <= steps]:
                self.engine.abort_request([name])
                del left[name]
            outputs = self.engine.step()
            steps += 1
            for output in outputs:
                if output.finished:
                    answers[output.request_id] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "params": output.kv_transfer_params,
                        "reason": output.outputs[0].finish_reason,
                    }
            if not outputs:
                time.sleep(0.001)
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {steps} steps: {self.scheduler.requests}")
        return {"answers": answers, "steps": steps}

    def blocks(self, tokens: list[int]) -> list[str | None]:
        """For each full block of a prompt that vLLM has in its own cache, a digest of its bytes."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request("look", tokens, SamplingParams(), None,
                          block_hasher=self.core.request_block_hasher)  # fmt: skip
        pool = self.scheduler.kv_cache_manager.block_pool
        layers = self.core.vllm_config.compilation_config.static_forward_context
        found: list[str | None] = []
        for key in request.block_hashes:
            block = pool.get_cached_block(key, [0])
            if not block:
                found.append(None)
                continue
            digest = hashlib.sha256()
            for name in sorted(layers):
                digest.update(layers[name].kv_cache[block[0].block_id].contiguous()
                              .view(-1).view(dtype=_bytes()).numpy().tobytes())  # fmt: skip
            found.append(digest.hexdigest())
        return found

    def forget(self) -> bool:
        """vLLM forgets its own cache, and tierkv keeps its."""
        return bool(self.scheduler.reset_prefix_cache())

    def reset(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_connector=True))

    def at_rest(self) -> dict[str, Any]:
        """What is wrong when nothing runs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        found: list[str] = []
        if self.connector is not None:
            cache = self.connector.scheduler.cache
            deadline = time.monotonic() + PATIENCE_S
            while True:
                cache.poll()
                found = cache.verify().wait(PATIENCE_S)
                if not found or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        return {"taken": taken, "requests": len(self.scheduler.requests), "findings": found}


def _bytes() -> Any:
    import torch

    return torch.uint8


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to stdout
    os.dup2(2, 1)
    model, transfer, more = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    driver = Driver(model, transfer, more)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(driver, command.pop("do"))(**command)
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    driver.core.shutdown()


if __name__ == "__main__":
    main()
