"""What TierKVConnector costs vLLM: time in its scheduler's thread, and decoding speed beside it.

    .venv-engines/bin/python benchmarks/vllm_connector.py [--quick] [--json]

(`./scripts/test --engines` makes that environment.)
Two engines with a small model of random weights, one with tierkv and one without, each in a process
of its own, decode the same requests in turns. The speed is of steps in which all requests decode
and nothing comes or goes. The time in the scheduler's thread is of all calls into the connector in
one step; "with traffic" is of steps in which requests come and go, as many as the model's speed
lets them.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Row, row, show

ROOT = Path(__file__).resolve().parents[1]
RUNNING = 256
PROMPT, ANSWER = 40, 120
TRANSFER = {
    "kv_connector": "TierKVConnector",
    "kv_connector_module_path": "tierkv.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": 256 << 20},
}
CALLS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "request_finished",
    "get_kv_connector_stats", "take_events",
)  # fmt: skip


class Child:
    """An engine; a line in is a round, a line out what it took."""

    def __init__(self, model: str, *, attached: bool) -> None:
        from vllm import EngineArgs  # noqa: PLC0415
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                max_model_len=PROMPT + ANSWER + 8,
                max_num_seqs=RUNNING,
                block_size=16,
                num_gpu_blocks_override=4096,
                enforce_eager=True,
                kv_transfer_config=KVTransferConfig(**TRANSFER) if attached else None,
            )
        )
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.spent = 0.0  # in the connector, in this step
        self.draws = random.Random(os.getpid())
        if attached:
            for name in CALLS:
                self._time(name)

    def _time(self, name: str) -> None:
        connector = self.scheduler.connector
        call: Callable[..., Any] = getattr(connector, name)

        def timed(*given: Any, **more: Any) -> Any:  # noqa: ANN401
            started = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                self.spent += time.perf_counter() - started

        setattr(connector, name, timed)

    def _add(self, name: str, num_tokens: int) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        prompt = [self.draws.randrange(500) for _ in range(PROMPT)]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _step(self) -> tuple[float, float, int]:
        """Seconds of a step, those in the connector, and how many requests have ended."""
        self.spent = 0.0
        started = time.perf_counter()
        outputs = self.engine.step()
        took = time.perf_counter() - started
        return took, self.spent, sum(output.finished for output in outputs)

    def steady(self) -> dict[str, Any]:
        """All decode; nobody comes or goes."""
        for at in range(RUNNING):
            self._add(f"s{at}", ANSWER)
        while len(self.scheduler.running) < RUNNING or self.scheduler.waiting:
            self._step()
        for _ in range(10):
            self._step()
        steps: list[tuple[float, float, int]] = []
        while len(self.scheduler.running) == RUNNING and len(steps) < ANSWER // 2:
            steps.append(self._step())
        self._drain()
        took = [one[0] for one in steps]
        return {
            "tokens_per_s": RUNNING / statistics.median(took),
            "spent": [s for _, s, _ in steps],
        }

    def traffic(self, num_steps: int) -> dict[str, Any]:
        """As many requests run all the time, and one comes when one goes, at any step."""
        for at in range(RUNNING):
            self._add(f"t{at}", 2 + at * ANSWER // RUNNING)
        spent, number = [], RUNNING
        for at in range(num_steps + ANSWER):
            _, in_connector, ended = self._step()
            if at >= ANSWER:
                spent.append(in_connector)
            for _ in range(ended):
                self._add(f"t{number}", ANSWER)
                number += 1
        self.engine.abort_request(list(self.scheduler.requests))
        self._drain()
        return {"spent": spent}

    def _drain(self) -> None:
        while self.scheduler.has_requests():
            self._step()


def child(model: str, *, attached: bool) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    here = Child(model, attached=attached)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        name, *given = line.split()
        answers.write(json.dumps(getattr(here, name)(*map(int, given))) + "\n")
        answers.flush()
    here.engine.engine_core.engine_core.shutdown()


def tiny_model(path: str) -> None:
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def measured(model: str, *, rounds: int, traffic_steps: int) -> list[Row]:
    threads = Path(sys.prefix).glob("lib/python*/site-packages/**/libiomp5.so")
    environment = os.environ | {
        "LD_PRELOAD": next((str(found) for found in threads), ""),
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    engines = {}
    for name in ("without", "with"):
        command = [sys.executable, __file__, "--child", name, model]
        engines[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(name: str, line: str) -> dict[str, Any]:
        process = engines[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    try:
        for process in engines.values():
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("an engine did not start; what it said is above")
        speeds: dict[str, list[float]] = {"without": [], "with": []}
        spent: list[float] = []
        for turn in range(rounds):
            for name in ("without", "with") if turn % 2 else ("with", "without"):
                answer = ask(name, "steady")
                speeds[name].append(answer["tokens_per_s"])
                if name == "with":
                    spent += answer["spent"]
        busy = ask("with", f"traffic {traffic_steps}")["spent"]
    finally:
        for process in engines.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
    without = row("seconds of 10k tokens, without", [1e4 / one for one in speeds["without"]], "s")
    beside = [1e4 / one for one in speeds["with"]]
    rows = [
        without,
        row("seconds of 10k tokens, tierkv attached", beside, "s", against=without, most=1 / 0.99),
    ]
    for where, times in (("nothing to do", spent), ("with traffic", busy)):
        at = sorted(one * 1e3 for one in times)
        rows += [
            row(f"scheduler's thread, a step, {where}: p50", [at[len(at) // 2]], "ms", most=0.2),
            row(
                f"scheduler's thread, a step, {where}: p99", [at[len(at) * 99 // 100]], "ms", most=1
            ),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=["with", "without"], help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.model, attached=given.child == "with")
        return
    with tempfile.TemporaryDirectory() as path:
        tiny_model(path)
        sizes = (
            {"rounds": 2, "traffic_steps": 100}
            if given.quick
            else {"rounds": 7, "traffic_steps": 600}
        )
        show(measured(path, **sizes), as_json=given.json)


if __name__ == "__main__":
    main()
