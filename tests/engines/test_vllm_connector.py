"""vLLM itself with tierkv's connector: the same tokens and bytes as without, whatever happens.

`./scripts/test --engines` runs these. Each engine is a process of its own that is driven step by
step, with a small model of random weights whose greedy tokens tell one prompt from another. Swapped
blocks cannot be seen in tokens (keys carry their positions), so blocks are compared as bytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis

__all__ = ["empty_redis", "model", "module_redis"]

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (./scripts/test --engines)", allow_module_level=True)

from tests.engines.test_vllm import model, prompt

pytestmark = [pytest.mark.timeout(600)]

_HERE = Path(__file__).parent
_BLOCK = 32
Prompt = list[int]
Requests = list[dict[str, Any]]


def transfer(store: str = "", role: str = "kv_both", **more: object) -> dict[str, object]:
    """vLLM's configuration, as in docs/engines.md."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.adapters.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "host_bytes": 64 << 20} | more,
    }


class Engine:
    """See connector_process.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine ended; what it said is above"
        return line

    def send(self, do: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | fields) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **fields: object) -> Any:
        self.send(do, **fields)
        return json.loads(self.line())

    def generate(self, requests: Requests, **more: object) -> dict[str, Any]:
        """By request, its greedy tokens, how many of its own came from a cache, and more."""
        answers = self.ask("generate", requests=requests, **more)["answers"]
        assert isinstance(answers, dict)
        return answers

    def tokens(self, prompts: Sequence[Prompt], name: str = "r", **more: object) -> list[Prompt]:
        answers = self.generate(named(prompts, name, **more))
        return [answers[f"{name}{at}"]["tokens"] for at in range(len(prompts))]

    def cached(self, prompts: Sequence[Prompt], name: str = "r", **more: object) -> list[int]:
        answers = self.generate(named(prompts, name, **more))
        return [answers[f"{name}{at}"]["cached"] for at in range(len(prompts))]

    def rests(self) -> None:
        """Nothing runs: every block is vLLM's again, and tierkv's books are right."""
        assert self.ask("at_rest") == {"taken": 0, "requests": 0, "findings": []}


def named(prompts: Sequence[Prompt], name: str = "r", **more: object) -> Requests:
    return [{"id": f"{name}{at}", "tokens": one} | more for at, one in enumerate(prompts)]


@contextmanager
def starting(
    path: str, config: dict[str, object] | None = None, **arguments: object
) -> Iterator[Engine]:
    """An engine that need not be ready yet, so that several can start at once."""
    threads = Path(sys.prefix).glob("lib/python*/site-packages/**/libiomp5.so")
    environment = os.environ | {
        "LD_PRELOAD": next((str(found) for found in threads), ""),
        "PYTHONPATH": str(_HERE.parent.parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(_HERE / "connector_process.py"), path, json.dumps(config),
               json.dumps(arguments)]  # fmt: skip
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Engine(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert set(os.listdir("/dev/shm")) <= before, "shared memory is left behind"


@contextmanager
def engine(
    path: str, config: dict[str, object] | None = None, **arguments: object
) -> Iterator[Engine]:
    with starting(path, config, **arguments) as running:
        assert running.line() == "ready\n"
        yield running


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Engine]:
    """vLLM without tierkv, for what is right."""
    with engine(model, None) as running:
        yield running


# Tails of 8, none, block - 1 and 1; three that share 128 tokens.
_LENGTHS = [200, 6 * _BLOCK, 6 * _BLOCK - 1, 6 * _BLOCK + 1]
PROMPTS = [prompt(n, length) for n, length in enumerate(_LENGTHS)] + [
    prompt(50, 4 * _BLOCK) + prompt(60 + n, 40) for n in range(3)
]


def test_a_prefix_comes_through_redis_into_a_fresh_process(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    right = alone.tokens(PROMPTS)
    with engine(model, transfer(empty_redis.url)) as first:
        assert first.tokens(PROMPTS) == right
        bytes_of = [first.ask("blocks", tokens=one) for one in PROMPTS]
        first.rests()
    names = empty_redis.execute("KEYS", "*")
    assert isinstance(names, list)
    assert names
    assert all(int(str(empty_redis.execute("TTL", name))) > 0 for name in names)
    with engine(model, transfer(empty_redis.url)) as second:
        answers = second.generate(named(PROMPTS))
        assert [answers[f"r{at}"]["tokens"] for at in range(len(PROMPTS))] == right
        # All of it, the last, partial block included; but for the one whose last block the answer
        # has filled, which is stored as that.
        assert [answers[f"r{at}"]["cached"] for at in range(4)] == [200, 192, 160, 193]
        assert [second.ask("blocks", tokens=one) for one in PROMPTS] == bytes_of
        second.rests()
