"""An SGLang engine in a process of its own: a line of JSON in, a line of JSON out.

python -m tests.engines.sglang_process MODEL ENGINE_ARGUMENTS_JSON. A question has `prompts` (lists
of token ids, all asked at once) and maybe `salt`, `aborts` (these are given up as soon as they have
begun) and `flushes` (device and host memory are emptied before); the answer has of each prompt its
greedy tokens, and how many of its own came from the device, the host and storage.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from tests.engines import sglang_on_cpu  # also in the engine's own processes, which import this
from tests.engines.processes import serve, take_stdout
from tierkv.adapters.sglang import TierKVHiCache

__all__ = ["Zeroing", "sglang_on_cpu"]


class Zeroing(TierKVHiCache):
    """A control: what it brings is not what was stored, and nobody is told."""

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        answers = super().batch_get_v1(keys, host_indices, extra_info)
        pool = self.mem_pool_host
        for index in host_indices[:: pool.page_size]:
            page = pool.get_data_page(int(index))
            pool.set_from_flat_data_page(int(index), page.new_zeros(page.shape))
        return answers


def _from(meta: dict[str, Any]) -> list[int]:
    details = meta["cached_tokens_details"] or {"device": meta["cached_tokens"]}
    return [details.get(tier, 0) for tier in ("device", "host", "storage")]


def main() -> None:
    answers = take_stdout()
    import sglang

    engine = sglang.Engine(
        model_path=sys.argv[1],
        skip_tokenizer_init=True,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        page_size=16,
        random_seed=1,
        log_level="warning",
        **json.loads(sys.argv[2]),
    )
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}

    def ask(question: dict[str, Any]) -> list[dict[str, Any]]:
        while question.get("flushes") and not engine.flush_cache().success:
            time.sleep(0.05)  # what was stored last is still on its way
        prompts, rids = question["prompts"], None
        aborter = threading.Timer(question.get("aborts", 0), engine.tokenizer_manager.abort_request,
                                  kwargs={"abort_all": True})  # fmt: skip
        if question.get("aborts"):
            rids = [f"r{n}" for n in range(len(prompts))]
            aborter.start()
        salts = [question["salt"]] * len(prompts) if question.get("salt") else None
        outputs = engine.generate(
            input_ids=prompts, sampling_params=sampling, cache_salt=salts, rid=rids
        )
        aborter.cancel()
        return [
            {"tokens": output["output_ids"], "from": _from(output["meta_info"])}
            for output in outputs
        ]

    serve(answers, ask)
    engine.shutdown()


if __name__ == "__main__":
    main()
