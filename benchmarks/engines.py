"""What KV connectors cost and save in vLLM: one workload after another, each engine alone.

    python benchmarks/engines.py [MODE ...] [--quick] [--json] [--rounds 3] [--host-gib 52]
        [--only WORKLOAD ...] [--traces FILE.tar.xz] [--settle-s SECONDS] [--model tiny]

Modes: none; idle (a connector that does nothing: vLLM's own part of the cost); offloading (vLLM's
OffloadingConnector); tier (the same with TierKVTier and a store of files below); tierkv. Each mode
is a process of its own with one engine in vLLM's default mode: CUDA graphs, torch.compile,
asynchronous scheduling, an engine core of its own. The model has the shape of an 8B Llama and
random weights. Rounds go through all modes in turn. On a machine without a GPU the model is tiny,
all lengths are small, and nothing is compiled: that shows that everything runs, not what it costs.

Workloads:
  first          the first request after the start, of tokens that no cache has
  latencies      TTFT of a short and a long prompt: computed; in vLLM's own cache; in host memory,
                 after vLLM's cache was emptied
  decode         tokens/s of requests with prompts of 40 tokens and no hit, in two batches
  documents      documents that are read once (what a miss costs), and then asked about
  conversations  users whose turns continue their last answers
  traces         the coding agents of `--traces`, at 1, 8 and 32 users, lengths scaled to the engine
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Row, row, show

ROOT = Path(__file__).resolve().parents[1]
MODES = ("none", "idle", "offloading", "tier", "tierkv")
WORKLOADS = ("first", "latencies", "decode", "documents", "conversations", "traces")
SHORT = 40  # tokens of a prompt that hits nothing
_RESET_S = 5.0  # for saved blocks to be found
_SAVED_S = 1.0  # after which a save is over
_VOCABULARY = 1000


class Sizes(NamedTuple):
    """Lengths in tokens, and numbers of requests."""

    lengths: tuple[int, int]
    batches: tuple[int, ...]
    answer: int  # of a request that decodes
    documents: tuple[int, int]  # how many, of how many tokens
    users: tuple[int, int, int, int]  # of conversations: how many, turns, first prompt, later ones
    trace_users: tuple[int, ...]
    most_tokens: int  # of a prompt and its answer
    gpu_blocks: int | None  # None: as many as there is memory for


BIG = Sizes((8192, 32768), (128, 256), 512, (50, 10_000), (48, 4, 6000, 1500), (1, 8, 32),
            33_024, None)  # fmt: skip
TINY = Sizes((512, 1024), (8, 16), 32, (6, 320), (4, 3, 200, 60), (1, 4), 1280, 128)
_TRACE_TOKENS = 120_000  # a prompt of a trace as long as this has the engine's longest prompt


class Turn(NamedTuple):
    """The next request of a user."""

    prompt: list[int]
    num_answer: int


User = Generator[Turn, list[int], None]  # its answers are sent to it


def transfer(mode: str, host_bytes: int, store: str, *, is_tiny: bool) -> dict[str, Any] | None:
    """Return vLLM's configuration of the mode's connector."""
    if mode == "none":
        return None
    offloading: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    if is_tiny:  # vLLM has no worker of its own without a GPU
        offloading |= {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm_cpu_spec",
            "secondary_tiers": [],
        }
    tier = {"type": "TierKVTier", "module_path": "tierkv.adapters.vllm", "store": store}
    below = {"spec_name": "TieringOffloadingSpec"} | offloading | {"secondary_tiers": [tier]}
    connectors: dict[str, dict[str, Any]] = {
        "idle": {
            "kv_connector": "IdleConnector",
            "kv_connector_module_path": "benchmarks.idle_connector",
        },
        "offloading": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": offloading,
        },
        "tier": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": below},
        "tierkv": {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.adapters.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_bytes": host_bytes},
        },
    }
    return {"kv_role": "kv_both"} | connectors[mode]


def write_config(path: str, *, is_tiny: bool) -> None:
    """Write the configuration of a Llama of 8B weights, or of a few million."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512 if is_tiny else 4096,
        "intermediate_size": 1024 if is_tiny else 14336,
        "num_hidden_layers": 4 if is_tiny else 32,
        "num_attention_heads": 4 if is_tiny else 32,
        "num_key_value_heads": 4 if is_tiny else 8,
        "head_dim": 128,
        "vocab_size": 1024 if is_tiny else 128256,
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
    """One engine, and its measurements: figures by name, which ends with the unit."""

    def __init__(self, mode: str, given: argparse.Namespace, path: str) -> None:
        import torch  # noqa: PLC0415
        from vllm import LLM  # noqa: PLC0415

        began = time.perf_counter()
        self._given = given
        self._sizes = TINY if given.model == "tiny" else BIG
        settings: dict[str, Any] = {"gpu_memory_utilization": given.gpu_share}
        is_on_cpu = not torch.cuda.is_available()
        if is_on_cpu:
            settings = {"enforce_eager": True, "block_size": 32}
        host_bytes = int(given.host_gib * (1 << 30))
        self.llm = LLM(
            model=path,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=self._sizes.most_tokens,
            max_num_seqs=self._sizes.batches[-1],
            num_gpu_blocks_override=given.gpu_blocks or self._sizes.gpu_blocks,
            enable_prefix_caching=True,
            kv_transfer_config=transfer(
                mode, host_bytes, f"file://{path}/store", is_tiny=is_on_cpu
            ),
            **settings,
        )
        self.start_s = time.perf_counter() - began
        self._has_host = mode not in {"none", "idle"}
        self._draws = random.Random(1)
        self._number = 0

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._draws.randrange(3, _VOCABULARY) for _ in range(num_tokens)]

    def play(self, users: Sequence[User], num_at_once: int) -> tuple[float, list[float]]:
        """Answer all turns of the users, so many users at a time.

        Returns:
            Seconds until the last answer, and milliseconds to the first token of each turn.
        """
        engine, waiting = self.llm.llm_engine, list(users)
        playing: dict[str, tuple[User, float]] = {}
        ttfts: list[float] = []
        began = time.perf_counter()

        def ask(user: User, answer: list[int] | None) -> None:
            with suppress(StopIteration):
                turn = next(user) if answer is None else user.send(answer)
                self._number += 1
                name = f"turn{self._number}"
                playing[name] = (user, time.perf_counter())
                engine.add_request(
                    name, {"prompt_token_ids": turn.prompt}, _sampling(turn.num_answer)
                )

        first: set[str] = set()
        while waiting or playing:
            while waiting and len(playing) < num_at_once:
                ask(waiting.pop(0), None)
            for output in engine.step():
                name = output.request_id
                user, asked_at = playing[name]
                if name not in first and output.outputs[0].token_ids:
                    first.add(name)
                    ttfts.append((time.perf_counter() - asked_at) * 1e3)
                if output.finished:
                    del playing[name]
                    ask(user, list(output.outputs[0].token_ids))
        return time.perf_counter() - began, ttfts

    def ttft(self, tokens: list[int]) -> float:
        """Return the milliseconds until the first token."""
        _, [found] = self.play([_one(tokens)], 1)
        return found

    def empty(self) -> None:
        """Empty vLLM's own cache, which waits until no block is held."""
        deadline = time.perf_counter() + _RESET_S
        while not self.llm.reset_prefix_cache() and time.perf_counter() < deadline:
            time.sleep(0.01)

    # The workloads

    def first(self) -> Iterator[tuple[str, float]]:
        yield "first request, ms", self.ttft(self.prompt(self._sizes.lengths[0]))

    def latencies(self) -> Iterator[tuple[str, float]]:
        times = 3 if self._given.quick else 7
        for length in self._sizes.lengths:
            tokens = self.prompt(length)
            computed = [self.ttft(self.prompt(length)) for _ in range(times)]
            yield f"computing {length} tokens, ms", statistics.median(computed)
            self.ttft(tokens)
            on_gpu = [self.ttft(tokens) for _ in range(2 * times)][2:]
            yield f"hit in vLLM's own cache, {length} tokens, ms", statistics.median(on_gpu)
            if not self._has_host:
                continue
            time.sleep(_SAVED_S)
            on_host = []
            for _ in range(times):
                self.empty()
                on_host.append(self.ttft(tokens))
            yield f"hit in host memory, {length} tokens, ms", statistics.median(on_host)

    def decode(self) -> Iterator[tuple[str, float]]:
        for batch in self._sizes.batches:
            speeds = []
            num_answer = self._sizes.answer // (4 if self._given.quick else 1)
            for at in range(3 if self._given.quick else 6):
                users = [_one(self.prompt(SHORT), num_answer) for _ in range(batch)]
                seconds, _ = self.play(users, batch)
                speeds += [batch * num_answer / seconds] if at else []  # graphs have run
            yield f"decode {batch}, tokens/s", statistics.median(speeds)

    def documents(self) -> Iterator[tuple[str, float]]:
        """Read all documents, and ask about each in another order."""
        count, length = self._sizes.documents
        documents = [self.prompt(length) for _ in range(count)]
        for name in ("read for the first time", "asked about again"):
            users = [_one([*one, *self.prompt(SHORT)], 16) for one in documents]
            seconds, ttfts = self.play(users, 4)
            yield f"documents, {name}, s", seconds
            yield f"documents, {name}, mean TTFT, ms", statistics.mean(ttfts)
            time.sleep(_SAVED_S)
            self._draws.shuffle(documents)

    def conversations(self) -> Iterator[tuple[str, float]]:
        count, turns, length, more = self._sizes.users

        def user() -> User:
            history = self.prompt(length)
            for _ in range(turns):
                history += yield Turn(list(history), 32)
                history += self.prompt(more)

        seconds, ttfts = self.play([user() for _ in range(count)], max(count // 2, 1))
        yield "conversations, s", seconds
        yield "conversations, TTFT p50, ms", statistics.median(ttfts)
        yield "conversations, TTFT p99, ms", sorted(ttfts)[len(ttfts) * 99 // 100]

    def traces(self) -> Iterator[tuple[str, float]]:
        if not self._given.traces:
            return
        most = self._sizes.most_tokens - 1
        most_turns = 4 if self._given.quick else 12
        for num_users in self._sizes.trace_users:
            traces = read_traces(Path(self._given.traces), num_users)
            users = [trace_user(trace, most, most_turns) for trace in traces]
            seconds, ttfts = self.play(users, num_users)
            yield f"agents, {num_users} users, s", seconds
            yield f"agents, {num_users} users, mean TTFT, ms", statistics.mean(ttfts)
            self.empty()

    def measured(self) -> dict[str, float]:
        found = {"start, s": self.start_s}
        for name in WORKLOADS:
            if name in self._given.only:
                found |= dict(getattr(self, name)())
            if name == "first":
                time.sleep(self._given.settle_s)
        return found


def _sampling(num_tokens: int) -> Any:  # noqa: ANN401 - vLLM's
    from vllm import SamplingParams  # noqa: PLC0415

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def _one(tokens: list[int], num_answer: int = 1) -> User:
    yield Turn(tokens, num_answer)


def read_traces(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first traces of an archive of kv-cache-tester's format, one JSON file each."""
    found: list[dict[str, Any]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                found.append(json.load(content))
            if len(found) == count:
                return found
    raise SystemExit(f"{path} has {len(found)} traces, and {count} users need one each")


def trace_user(trace: dict[str, Any], most_tokens: int, most_turns: int) -> User:
    """Ask the requests of a trace in turn, scaled so that equal blocks stay equal."""
    size = max(trace["block_size"] * most_tokens // _TRACE_TOKENS, 1)
    requests = [one for one in trace["requests"] if one.get("hash_ids")]
    for request in requests[:most_turns]:
        num_answer = min(max(request["out"] * most_tokens // _TRACE_TOKENS, 1), most_tokens // 8)
        tokens: list[int] = []
        for block in request["hash_ids"]:
            draws = random.Random(f"{trace['id']} {block}")
            tokens += [draws.randrange(3, _VOCABULARY) for _ in range(size)]
        yield Turn(tokens[: most_tokens - num_answer], num_answer)


def run_here(mode: str, given: argparse.Namespace) -> None:
    """Measure one mode in this process, and print its figures as one line."""
    with tempfile.TemporaryDirectory() as path:
        write_config(path, is_tiny=given.model == "tiny")
        bench = Bench(mode, given, path)
        found = bench.measured()
        began = time.perf_counter()
        bench.llm.llm_engine.engine_core.shutdown(timeout=60.0)
        found["end, s"] = time.perf_counter() - began
    print(json.dumps({"mode": mode} | found), flush=True)


def run_apart(mode: str, given: argparse.Namespace) -> dict[str, float]:
    """Measure one mode in a process of its own; return its figures by name."""
    threads = Path(sys.prefix).glob("lib/**/libiomp5.so")  # vLLM wants it on a processor
    environment = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "LD_PRELOAD": next((str(found) for found in threads), ""),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, mode, "--here", "--model", given.model]
    command += ["--host-gib", str(given.host_gib), "--gpu-share", str(given.gpu_share)]
    command += ["--gpu-blocks", str(given.gpu_blocks), "--traces", given.traces]
    command += ["--settle-s", str(given.settle_s)]
    command += ["--only", *given.only, *(["--quick"] if given.quick else [])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"mode"')]
    if not lines:
        raise SystemExit(f"the engine of {mode} ended with {done.returncode}: its log is above")
    found: dict[str, Any] = json.loads(lines[-1])
    return {name: value for name, value in found.items() if name != "mode"}


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Return a row for each figure and mode, beside that of `none`, or of the first mode."""
    rows: list[Row] = []
    names = dict.fromkeys(name for rounds in found.values() for name in rounds[0])
    for name in names:
        what, unit = name.rsplit(", ", 1)
        first: Row | None = None
        for mode, rounds in found.items():
            if name in rounds[0]:
                samples = [one[name] for one in rounds]
                rows.append(row(f"{what}: {mode}", samples, unit, against=first))
                first = first or rows[-1]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--quick", action="store_true", help="one round, fewer repetitions")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--traces", default="", help="archive of agentic traces; none: left out")
    parser.add_argument("--model", choices=["8b", "tiny"], default="8b")
    parser.add_argument("--host-gib", type=float, default=52.0)
    parser.add_argument("--gpu-share", type=float, default=0.6)
    parser.add_argument(
        "--settle-s",
        type=float,
        default=0.0,
        help="pause after the first request, in which host memory can be pinned",
    )
    parser.add_argument("--gpu-blocks", type=int, default=0, help="blocks of vLLM's own cache")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.modes).difference(MODES):
        parser.error(f"there is no mode {unknown.pop()!r}: choose among {', '.join(MODES)}")
    if given.here:
        run_here(given.modes[0], given)
        return
    modes = given.modes or [mode for mode in MODES if mode != "idle"]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for _ in range(1 if given.quick else given.rounds):
        for mode in modes:
            found[mode].append(run_apart(mode, given))
    show(rows_of(found), as_json=given.json)


if __name__ == "__main__":
    main()
