"""What TierKVConnector costs vLLM: time in its scheduler's thread, and decoding speed beside it.

    .venv-engines/bin/python benchmarks/vllm_connector.py [--quick] [--json]

(`./scripts/test --engines` makes that environment.)
One engine with a small model of random weights, in a process of its own, has 256 requests running.

Attached and idle: all decode, nobody comes or goes, and nothing is saved (prompts of 40 tokens). In
turns steps are without a connector, with one that does nothing, and with tierkv's: it is taken out
of vLLM and put back, so that all are of one engine and one moment. Compared are processor time of
the whole process, whatever thread it is of, and time. What a connector costs that does nothing is
vLLM's own affair.

Saving: as before with longer prompts, so that 1.5 of the 256 requests in each step have enough that
is not saved yet. Of answers that go on for ever it would be one.

With traffic: as many requests run all the time. Each has a prompt of 200 tokens and an answer of as
many, at any point of which it may be; when one ends the next comes, so that 1.3 come and go in each
step. Of the prompts every second one was there before and is on the host, and vLLM has lost it.
Counted are all calls into the connector of one step, by time and by processor time of the thread,
and beside them the processor time and the wake-ups of tierkv's own threads, which take the GIL. A
step waits 10 ms more, with the GIL given up, as for a GPU: the model itself takes hardly any time.
Without --quick vLLM's own OffloadingConnector has the same traffic and as much host memory, in a
process of its own, with tests/engines/vllm_cpu_spec.py as its worker: vLLM has none without a GPU.
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
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Row, row, show

ROOT = Path(__file__).resolve().parents[1]
RUNNING = 256
PROMPT, SHORT, ANSWER = 200, 40, 200
LOST = 80  # of the last requests that have ended vLLM may still have blocks
MODEL_S = 0.01  # of a step with traffic
HOST_BYTES = 256 << 20
TRANSFER: dict[str, Any] = {
    "kv_connector": "TierKVConnector",
    "kv_connector_module_path": "tierkv.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": HOST_BYTES},
}
OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tests.engines.vllm_cpu_spec",
        "cpu_bytes_to_use": HOST_BYTES,
        "secondary_tiers": [],
    },
}
CALLS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "request_finished_all_groups",
    "get_kv_connector_stats", "take_events",
)  # fmt: skip


KINDS = ("without", "idle", "tierkv")


class Step(NamedTuple):
    """Seconds: of a step, of the process's processors, and of the calls into the connector, by
    clock and by processor. ended: which requests have."""

    took: float
    of_process: float
    in_calls: float
    of_thread: float
    ended: list[str]
    of_others: float = 0.0
    wake_ups: int = 0


def others() -> tuple[float, int]:
    """Return the processor seconds of tierkv's threads here, and how often they slept."""
    seconds, wake_ups = 0.0, 0
    for thread in threading.enumerate():
        if not thread.name.startswith("tierkv-") or thread.ident is None:
            continue
        seconds += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        [line] = [one for one in status.splitlines() if one.startswith("voluntary")]
        wake_ups += int(line.split()[1])
    return seconds, wake_ups


class Engine:
    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
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
                num_gpu_blocks_override=3600,  # of which 2,700 are taken
                enforce_eager=True,
                async_scheduling=False,  # connectors change places between steps
                kv_transfer_config=KVTransferConfig(**transfer),
            )
        )
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.runner = self.engine.engine_core.engine_core.model_executor.driver_worker.model_runner
        # vLLM's runner for GPUs keeps the worker's side; that for processors asks each time.
        self.active = getattr(self.runner, "kv_connector", None)
        self.ways: dict[str, tuple[Any, Any]] = {}  # by kind, scheduler's side and worker's
        self.num_loaded = 0  # tokens
        self.num_saves = 0
        self.in_calls = self.of_thread = 0.0  # in this step
        self.counts_others = False
        self.draws = random.Random(1)
        self.number = 0
        self.prompts: dict[str, list[int]] = {}

    def time_calls(self) -> None:
        """From now on; what measures would slow what is compared."""
        self.counts_others = True
        for name in CALLS:
            self._time(name)

    def _time(self, name: str) -> None:
        call: Callable[..., Any] = getattr(self.connector, name)

        def timed(*given: Any, **more: Any) -> Any:  # noqa: ANN401
            started, cpu_started = time.perf_counter(), time.thread_time()
            try:
                return call(*given, **more)
            finally:
                self.of_thread += time.thread_time() - cpu_started
                self.in_calls += time.perf_counter() - started

        def counted(request: Any, blocks: Any, num_tokens: int) -> Any:  # noqa: ANN401
            self.num_loaded += num_tokens
            return timed(request, blocks, num_tokens)

        def planned(step: Any) -> Any:  # noqa: ANN401
            plans = timed(step)
            self.num_saves += len(getattr(plans, "saving", ()))
            return plans

        ways = {"update_state_after_alloc": counted, "build_connector_meta": planned}
        setattr(self.connector, name, ways.get(name, timed))

    def _add(self, num_tokens: int, prompt: list[int]) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self.number += 1
        name = f"r{self.number}"
        self.prompts[name] = prompt
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self.draws.randrange(500) for _ in range(num_tokens)]

    def step(self) -> Step:
        self.in_calls = self.of_thread = 0.0
        beside = others() if self.counts_others else (0.0, 0)
        started, cpu_started = time.perf_counter(), time.process_time()
        outputs = self.engine.step()
        took, of_process = time.perf_counter() - started, time.process_time() - cpu_started
        ended = [output.request_id for output in outputs if output.finished]
        after = others() if self.counts_others else (0.0, 0)
        beside = (after[0] - beside[0], after[1] - beside[1])
        return Step(took, of_process, self.in_calls, self.of_thread, ended, *beside)

    def _attach(self, kind: str) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: PLC0415

        of_worker = kv_transfer_state.__dict__
        if not self.ways:
            from benchmarks.idle_connector import IdleConnector  # noqa: PLC0415 - imports vLLM

            nothing = object.__new__(IdleConnector)  # with no configuration of its own
            self.ways = {
                "without": (None, None),
                "idle": (nothing, nothing),
                "tierkv": (self.connector, of_worker["_KV_CONNECTOR_AGENT"]),
            }
        self.scheduler.connector, of_worker["_KV_CONNECTOR_AGENT"] = self.ways[kind]
        if self.active is None:
            return
        from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR  # noqa: PLC0415

        self.active.kv_connector = self.ways[kind][1]
        is_without = self.ways[kind][1] is None
        self.runner.kv_connector = NO_OP_KV_CONNECTOR if is_without else self.active

    def idle(self) -> dict[str, list[Step]]:
        """All requests decode."""
        self._fill()
        steps: dict[str, list[Step]] = {kind: [] for kind in KINDS}
        for at in range(ANSWER // 2 // 6):
            for kind in (*KINDS, *reversed(KINDS)) if at % 2 else (*reversed(KINDS), *KINDS):
                self._attach(kind)
                steps[kind].append(self.step())
                assert len(self.scheduler.running) == RUNNING
        self._attach("tierkv")
        self._drain()
        return steps

    def _fill(self, longest: int = SHORT) -> None:
        """With prompts of SHORT to `longest` tokens, evenly."""
        for at in range(RUNNING):
            self._add(ANSWER, self._prompt(SHORT + (longest - SHORT) * at // RUNNING))
        while len(self.scheduler.running) < RUNNING or self.scheduler.waiting:
            self.step()
        for _ in range(40):  # what their prompts brought to do is done
            self.step()

    def attached(self) -> list[Step]:
        self._fill()
        steps = [self.step() for _ in range(ANSWER // 2)]
        self._drain()
        return steps

    def saving(self) -> list[Step]:
        self._fill(PROMPT)
        before = self.num_saves
        steps = [self.step() for _ in range(ANSWER * 7 // 10)]
        assert len(self.scheduler.running) == RUNNING
        assert self.num_saves - before > RUNNING // 2, self.num_saves
        self._drain()
        return steps

    def with_hits(self, num_steps: int) -> list[Step]:
        steps = self.traffic(num_steps)
        assert self.num_loaded > num_steps * PROMPT // 4, self.num_loaded
        return steps

    def traffic(self, num_steps: int) -> list[Step]:
        executor = self.engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def executed(*given: Any, **more: Any) -> Any:  # noqa: ANN401
            time.sleep(MODEL_S)
            return execute(*given, **more)

        executor.execute_model = executed
        for at in range(RUNNING):
            self._add(2 + at * ANSWER // RUNNING, self._prompt(PROMPT))
        over: deque[list[int]] = deque()
        steps = []
        for at in range(num_steps + ANSWER):
            step = self.step()
            if at >= ANSWER:
                steps.append(step)
            for name in step.ended:
                over.append(self.prompts.pop(name))
                is_again = self.number % 2 and len(over) > LOST
                self._add(ANSWER, over.popleft() if is_again else self._prompt(PROMPT))
        self.engine.abort_request(list(self.scheduler.requests))
        self._drain()
        executor.execute_model = execute
        return steps

    def _drain(self) -> None:
        while self.scheduler.has_requests():
            self.step()


def measured(model: str, *, rounds: int, traffic_steps: int, has_theirs: bool) -> list[Row]:
    engine = Engine(model, TRANSFER)
    engine.idle()  # not counted
    idle: dict[str, list[Step]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, steps in engine.idle().items():
            idle[kind] += steps
    engine.time_calls()
    attached_steps, saving_steps = engine.attached(), engine.saving()
    busy = engine.with_hits(traffic_steps)
    theirs = offloading(model, traffic_steps) if has_theirs else []
    rows = []
    for what, of in (("processor time", "of_process"), ("time", "took")):
        of_kind = {kind: [getattr(one, of) * 1e3 for one in idle[kind]] for kind in KINDS}
        without = row(f"{what} of a step, without", of_kind["without"], "ms")
        nothing = row(
            f"{what} of a step, an idle connector", of_kind["idle"], "ms", against=without
        )
        name, times = f"{what} of a step, tierkv's", of_kind["tierkv"]
        rows += [
            without,
            nothing,
            row(name, times, "ms", against=without, most=1 / 0.99),
            row(name, times, "ms", against=nothing, most=1 / 0.99),
        ]
    of_thread = {"nothing to do": attached_steps, "saving": saving_steps, "with traffic": busy}
    for where, steps in of_thread.items():
        for what, of in (("time", "in_calls"), ("processor time", "of_thread")):
            times = sorted(getattr(step, of) * 1e3 for step in steps)
            for share, most in ((50, 0.2), (99, 1.0)):
                name = f"scheduler's thread, {where}, {what}, p{share}"
                rows.append(row(name, [at_share(times, share)], "ms", most=most))
        beside = statistics.mean(step.of_others * 1e3 for step in steps)
        rows.append(row(f"tierkv's threads, {where}, processor time, mean", [beside], "ms"))
        wake_ups = statistics.mean(step.wake_ups for step in steps)
        rows.append(row(f"tierkv's threads, {where}, wake-ups, mean", [wake_ups], "a step"))
    for share in (50, 99) if theirs else ():
        of_vllm = row(
            f"the same, with traffic, OffloadingConnector, time, p{share}",
            [at_share(sorted(theirs), share)],
            "ms",
        )
        ours = [at_share(sorted(step.in_calls * 1e3 for step in busy), share)]
        rows += [of_vllm, row(f"tierkv's to it, p{share}", ours, "ms", against=of_vllm)]
    return rows


def at_share(ordered: list[float], share: int) -> float:
    return ordered[len(ordered) * share // 100]


def offloading(model: str, num_steps: int) -> list[float]:
    """Milliseconds in each step's calls into vLLM's own connector."""
    command = [sys.executable, __file__, "--here", "--offloading", model, str(num_steps)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600)
    times: list[float] = json.loads(found.stdout.splitlines()[-1])
    return times


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--offloading", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.here:
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
        os.execve(sys.executable, [sys.executable, *sys.argv, "--here"], environment)
    if given.offloading is not None:
        engine = Engine(given.offloading[0], OFFLOADING)
        engine.time_calls()
        steps = engine.with_hits(int(given.offloading[1]))
        print(json.dumps([step.in_calls * 1e3 for step in steps]))
        return
    with tempfile.TemporaryDirectory() as path:
        tiny_model(path)
        rounds, num_steps = (4, 100) if given.quick else (20, 600)
        rows = measured(path, rounds=rounds, traffic_steps=num_steps, has_theirs=not given.quick)
        show(rows, as_json=given.json)


if __name__ == "__main__":
    main()
