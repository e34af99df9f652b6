"""A vLLM engine in a process of its own: a question per line in, an answer per line out, as JSON.

python vllm_process.py MODEL KV_TRANSFER_CONFIG_JSON, both may be empty. A question is a list of
prompts (lists of token ids); the answer their greedy tokens and how many of each came from a cache.
"""

from __future__ import annotations

import json
import os
import sys

from tests.engines.connector_process import ON_GPU


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to stdout
    os.dup2(2, 1)
    model, config = sys.argv[1], json.loads(sys.argv[2] or "null")
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        block_size=32,
        num_gpu_blocks_override=int(os.environ.get("TEST_GPU_BLOCKS", "256")),
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(**config) if config else None,
        disable_log_stats=True,
        enforce_eager=True,
        **(ON_GPU if torch.cuda.is_available() else {}),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(line)]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answer = [
            {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
            for output in outputs
        ]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
