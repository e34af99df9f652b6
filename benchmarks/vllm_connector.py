"""What TierKVConnector costs vLLM: time in its scheduler's thread, and decoding speed beside it.

    .venv-engines/bin/python benchmarks/vllm_connector.py [--quick] [--json]

(`./scripts/test --engines` makes that environment.)
Engines with a small model of random weights, each in a process of its own, decode the same requests
in turns: vLLM alone, vLLM with a connector that does nothing, and with tierkv's. The speed is of
steps in which all requests decode and nothing comes or goes; engines are started several times,
since each start has a speed of its own, and a ratio is of one start. The time in the scheduler's
thread is of all calls into the connector in one step; "with traffic" is of steps in which more than
one request comes and one goes. There a step waits 10 ms more, with the GIL given up, as for a GPU:
this model itself takes hardly any time.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Row, row, show

ROOT = Path(__file__).resolve().parents[1]
RUNNING = 256
PROMPT, ANSWER = 40, 200
MODEL_S = 0.01  # of a step with traffic
TRANSFERS: dict[str, dict[str, Any]] = {
    "idle": {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "benchmarks.vllm_connector",
        "kv_role": "kv_both",
    },
    "tierkv": {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": 256 << 20},
    },
}
KINDS = ("alone", "idle", "tierkv")
CALLS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "request_finished",
    "get_kv_connector_stats", "take_events",
)  # fmt: skip


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """What vLLM imports by name, where there is vLLM: a connector that does nothing."""
    if name != "IdleConnector":
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415

    nothing = {
        "start_load_kv": lambda *_, **__: None,
        "wait_for_layer_load": lambda *_: None,
        "save_kv_layer": lambda *_, **__: None,
        "wait_for_save": lambda _: None,
        "get_num_new_matched_tokens": lambda *_: (0, False),
        "update_state_after_alloc": lambda *_: None,
        "build_connector_meta": lambda *_: base.KVConnectorMetadata(),
        "request_finished_all_groups": lambda *_: (False, None),
    }
    return type(name, (base.KVConnectorBase_V1, base.SupportsHMA), nothing)


class Child:
    """An engine; a line in is a round, a line out what it took."""

    def __init__(self, model: str, kind: str) -> None:
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
                block_size=32,
                num_gpu_blocks_override=4096,
                enforce_eager=True,
                kv_transfer_config=None if kind == "alone" else KVTransferConfig(**TRANSFERS[kind]),
            )
        )
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.spent = 0.0  # in the connector, in this step
        self.draws = random.Random(os.getpid())

    def time_calls(self) -> dict[str, Any]:
        """From now on; what measures would slow what is compared."""
        for name in CALLS:
            self._time(name)
        return {}

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
        for _ in range(40):  # what their prompts brought to do is done
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
        executor = self.engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def executed(*given: Any, **more: Any) -> Any:  # noqa: ANN401
            time.sleep(MODEL_S)
            return execute(*given, **more)

        executor.execute_model = executed
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


def child(model: str, kind: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    here = Child(model, kind)
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


Ask = Callable[[str, str], dict[str, Any]]


@contextmanager
def engines(model: str) -> Iterator[Ask]:
    """Ask one of them, all being ready."""
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
    with ExitStack() as stack:
        pipes: dict[str, tuple[IO[str], IO[str]]] = {}
        for name in KINDS:
            command = [sys.executable, __file__, "--child", name, model]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.wait, 60)
            stack.callback(process.stdin.close)
            pipes[name] = (process.stdin, process.stdout)
        for _, answers in pipes.values():
            if answers.readline() != "ready\n":
                raise RuntimeError("an engine did not start; what it said is above")

        def ask(name: str, line: str) -> dict[str, Any]:
            questions, answers = pipes[name]
            questions.write(line + "\n")
            questions.flush()
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        yield ask


def measured(model: str, *, starts: int, rounds: int, traffic_steps: int) -> list[Row]:
    took: dict[str, list[float]] = {name: [] for name in KINDS}
    spent: list[float] = []
    busy: list[float] = []
    for start in range(starts):
        with engines(model) as ask:
            for name in KINDS:
                ask(name, "steady")  # not counted
            for turn in range(start, start + rounds):
                for name in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
                    took[name].append(1e4 / ask(name, "steady")["tokens_per_s"])
            ask("tierkv", "time_calls")
            spent += ask("tierkv", "steady")["spent"]
            busy += ask("tierkv", f"traffic {traffic_steps}")["spent"]

    def ratios(name: str, other: str) -> list[float]:
        """Of rounds beside each other, in one start."""
        return [mine / theirs for mine, theirs in zip(took[name], took[other], strict=True)]

    rows = [
        row("10k tokens, vLLM alone", took["alone"], "s"),
        row("10k tokens, a connector that does nothing", took["idle"], "s"),
        row("10k tokens, tierkv", took["tierkv"], "s"),
        row("a connector that does nothing / alone", ratios("idle", "alone"), "x"),
        row("tierkv / alone", ratios("tierkv", "alone"), "x", most=1 / 0.99),
        row("tierkv / a connector that does nothing", ratios("tierkv", "idle"), "x", most=1 / 0.99),
    ]
    for where, times in (("nothing to do", spent), ("with traffic", busy)):
        for share, most in ((50, 0.2), (99, 1.0)):
            ms = sorted(times)[len(times) * share // 100] * 1e3
            rows.append(row(f"scheduler's thread, {where}, p{share}", [ms], "ms", most=most))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.model, given.child)
        return
    with tempfile.TemporaryDirectory() as path:
        tiny_model(path)
        starts, rounds, steps = (1, 4, 100) if given.quick else (3, 6, 300)
        rows = measured(path, starts=starts, rounds=rounds, traffic_steps=steps)
        show(rows, as_json=given.json)


if __name__ == "__main__":
    main()
