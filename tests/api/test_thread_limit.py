"""A process that may start no further thread serves on; one that may not begin says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.api.nodes import Process, planted, process, run_to_end
from tests.latch import finish
from tests.redis_server import redis_server

# As the kernel refuses at a limit of pids; as root none of RLIMIT_NPROC counts.
PLANTED = """
import pathlib, threading

start = threading.Thread.start
num_started = 0

def refuses(self):
    global num_started
    num_started += 1
    if num_started > {most} or pathlib.Path({now!r}).exists():
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = refuses
"""


def num_threads(node: Process) -> int:
    return len(os.listdir(f"/proc/{node.process.pid}/task"))


@pytest.mark.promise("A node at its thread limit serves on or ends with one sentence.")
async def test_a_node_at_its_limit_of_threads_serves_on(tmp_path: Path) -> None:
    now = tmp_path / "now"  # whose existence is the limit
    environ = planted(tmp_path, PLANTED.format(now=str(now), most=10_000))
    with redis_server() as server:
        url = f"layered:file://{tmp_path}/values|{server.url}"
        async with process(tmp_path, "--storage", url, **environ) as node:
            before = num_threads(node)
            now.touch()
            for number in range(3):
                prompt = f"{number} What a node at its limit still does. " * 40
                body = {"prompt": prompt, "ticket_id": f"t{number}"}
                for path in ("/v1/prefill", "/v1/decode", "/v1/generate"):
                    sent = body if path != "/v1/generate" else {"prompt": prompt}
                    assert (await node.client.post(path, sent)).status == 200
            for path in ("/readyz?verbose", "/metrics", "/v1/stats", "/"):
                assert (await node.client.get(path)).status == 200
            long = {"prompt": "A body that is read in a thread. " * 8_000}
            assert (await node.client.post("/v1/lookup", long)).status == 200
            another = {"url": f"file://{tmp_path}/others"}
            refused = await node.client.ask("PUT", "/v1/tiers/storage", json=another)
            assert refused.status >= 400
            assert "raise the limit" in refused.body["detail"]
            assert (await node.client.get("/readyz")).status == 200
            assert num_threads(node) <= before
            node.terminate()
            assert await node.ended() == 0


@pytest.mark.promise("A node at its thread limit serves on or ends with one sentence.")
@pytest.mark.parametrize("most", [0, 14])
async def test_a_node_that_may_not_start_its_threads_ends_with_a_sentence(
    most: int, tmp_path: Path
) -> None:
    environ = planted(tmp_path, PLANTED.format(now=str(tmp_path / "now"), most=most))
    status, _, err = await finish(run_to_end(tmp_path, "serve", "--port", "0", **environ))
    assert status == 1
    [said] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "raise the limit of processes and threads" in said
    assert "Traceback" not in err
