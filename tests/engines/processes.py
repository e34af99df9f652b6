"""Engines as processes of their own, which a test asks over pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.embed.engine import until

_HERE = Path(__file__).parent


class EngineProcess:
    """A process that answers questions, a line of JSON each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

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


@contextmanager
def process(
    script: str,
    path: str,
    config: dict[str, object] | None,
    *more: str,
    in_process: bool = True,
    sockets: Path | None = None,
    num_blocks: int = 256,
    ends: int = 0,
) -> Iterator[EngineProcess]:
    """sockets: the directory for the ranks' socket. ends: with this status, and leaves nothing if
    it is 0."""
    threads = Path(sys.prefix).glob("lib/python*/site-packages/**/libiomp5.so")
    environment = os.environ | {
        "LD_PRELOAD": next((str(found) for found in threads), ""),
        "PYTHONPATH": str(_HERE.parent.parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "TEST_GPU_BLOCKS": str(num_blocks),
    }
    command = [sys.executable, str(_HERE / script), path, json.dumps(config), *more]
    before = set(os.listdir("/dev/shm"))
    own = str(sockets or tempfile.mkdtemp(prefix="tierkv-test-"))
    environment["TMPDIR"] = own
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as popen:
        try:
            yield EngineProcess(popen)
            assert popen.stdin is not None
            popen.stdin.close()
            assert popen.wait(60) == ends
        finally:
            popen.kill()
    until(lambda: not orphans(before), "shared memory is left behind")
    assert len(list(Path(own).glob("*.sock"))) == (1 if ends else 0)
    if sockets is None:
        shutil.rmtree(own)


def orphans(before: set[str]) -> set[str]:
    """Files of shared memory since then that no process has mapped; SGLang's tests may run, too."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(
                line.rsplit("/", 1)[1] for line in maps.read_text().splitlines() if "/shm/" in line
            )
    left = set(os.listdir("/dev/shm")) - before - mapped
    return {name for name in left if not name.startswith("sglang")}
