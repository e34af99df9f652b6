"""Engines as processes of their own, which a test asks over pipes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

_ROOT = Path(__file__).parents[2]


def needs(*modules: str) -> None:
    """Skip all tests of a file where one of these modules is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(
                f"{name} is not installed (./scripts/test --engines)", allow_module_level=True
            )


def take_stdout() -> TextIO:
    """In an engine's process: the pipe to the test. Engines print to stdout, now stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, answer: Callable[[Any], object]) -> None:
    """In an engine's process: say that it is ready, and answer the questions of the test."""
    answers.write("ready\n")
    answers.writelines(json.dumps(answer(json.loads(line))) + "\n" for line in sys.stdin)


class EngineProcess:
    """A process that answers questions, a line of JSON each."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(60)}; what it said is above"
        return line

    def answer(self, question: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def end(self) -> int:
        """Its exit status, since there are no more questions."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

    def kill(self) -> None:
        with self.process:
            self.process.kill()


def vllm_environment() -> dict[str, str]:
    """Of a vLLM on a processor, which finds this checkout and asks nobody for models."""
    threads = Path(sys.prefix).glob("lib/python*/site-packages/**/libiomp5.so")
    return os.environ | {
        "LD_PRELOAD": next((str(found) for found in threads), ""),
        "PYTHONPATH": str(_ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def third_level(url: str, **more: object) -> dict[str, object]:
    """SGLang's extra config for a tierkv store, as in docs/sglang.md."""
    return {
        "backend_name": "tierkv",
        "module_path": "tierkv.adapters.sglang",
        "class_name": "TierKVHiCache",
        "interface_v1": 1,
        "store": url,
    } | more


def orphans(before: set[str]) -> set[str]:
    """Files of shared memory since then that no process has mapped; SGLang's tests may run, too."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(
                line.rsplit("/", 1)[1] for line in maps.read_text().splitlines() if "/shm/" in line
            )
    left = set(os.listdir("/dev/shm")) - before - mapped
    return {name for name in left if not name.startswith("sgl")}
