"""`tierkv status` and `explain` beside real nodes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.nodes import process, run_to_end
from tests.latch import PATIENCE_S
from tests.redis_server import redis_server
from tierkv.cli.status import Seen, lines

TEXT = "Sixteen tokens here, and sixteen more of them, and a few."
NOBODY = "http://127.0.0.1:1"


async def test_status_tells_of_nodes_and_gateways_and_what_does_not_answer(tmp_path: Path) -> None:
    async with (
        process(tmp_path) as node,
        process(tmp_path, "--both", node.url, command="gateway") as gateway,
    ):
        await run_to_end(tmp_path, "generate", TEXT, "--url", node.url)
        status, out, err = await run_to_end(tmp_path, "status", node.url, gateway.url)
        assert (status, err) == (0, "")
        assert re.search(r"device .* \d+ of 2048 blocks", out)
        assert re.search(r"prompts +1 admitted, 57 tokens", out)
        assert f"gateway  {gateway.url}  ok" in out
        assert re.search(rf"{node.url} +ready", out)

        status, out, err = await run_to_end(tmp_path, "status", node.url, NOBODY, "--json")
        assert status == 1
        assert err == f"error: not ready: {NOBODY}\n"
        told, silent = json.loads(out)
        assert (told["health"], told["role"]) == ("ok", "both")
        assert told["totals"]["prompt tokens"] == len(TEXT)
        assert told["levels"]["host"] == {"used": 0, "capacity": 4096}
        assert (silent["health"], "Connection refused" in silent["detail"]) == ("no answer", True)


@pytest.mark.promise("`tierkv status` names problems and exits with 1.")
async def test_status_names_a_gateways_nodes_when_none_is_ready(tmp_path: Path) -> None:
    arguments = "--both", NOBODY, "--both", "http://127.0.0.1:2"
    async with process(tmp_path, *arguments, command="gateway") as gateway:
        status, out = 0, ""
        async with asyncio.timeout(PATIENCE_S):
            while out.count("is ejected (failed") < 2:  # its first probes are on their way
                status, out, _ = await run_to_end(tmp_path, "status", gateway.url)
        assert status == 1
        assert f"{NOBODY} is ejected (failed " in out
        assert "http://127.0.0.1:2 is ejected (failed " in out


@pytest.mark.promise("`tierkv status` names problems and exits with 1.")
async def test_status_names_what_is_not_well(tmp_path: Path) -> None:
    with redis_server() as server:
        async with process(tmp_path, "--storage", server.url) as node:
            server.kill()
            out = ""
            async with asyncio.timeout(PATIENCE_S):
                while "degraded" not in out:
                    await run_to_end(tmp_path, "generate", TEXT, "--url", node.url)
                    status, out, _ = await run_to_end(tmp_path, "status", node.url)
                    assert status == 0  # a node computes without its store
            assert f"{node.url}  degraded" in out
            assert re.search(r"storage +degraded: ", out)


def test_large_counts_are_readable() -> None:
    totals = {"requests": 12_345.0, "prompt tokens": 9.9e13, "loaded bytes": 1.5e9}
    rows = dict(lines(Seen("a", role="both", totals=totals)))
    assert rows["prompts"] == "12.3k admitted, 99T tokens"
    assert rows["moved"] == "1.5 GB loaded"


async def test_explain_says_what_of_a_file_is_missing_and_why(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT + " And what nobody has asked before.")
    async with process(tmp_path) as node:
        await run_to_end(tmp_path, "generate", TEXT, "--max-tokens", "1", "--url", node.url)
        status, out, _ = await run_to_end(tmp_path, "explain", prompt, "--url", node.url)
        assert status == 0
        assert re.search(r"device +blocks 0-2\n", out)
        assert re.search(r"partial +the first \d+ tokens of the next block\n", out)
        assert re.search(r"missing +from block 3 on: never stored", out)
        _, out, _ = await run_to_end(tmp_path, "explain", prompt, "--json", "--url", node.url)
        assert json.loads(out)["reason"] == "never stored"
    status, _, err = await run_to_end(tmp_path, "explain", tmp_path / "none")
    assert (status, err.count("\n")) == (1, 1)
    assert "cannot be read" in err


def test_what_takes_longer_than_a_second_says_so_to_a_person_only() -> None:
    script = (
        "import sys\nfrom tierkv.cli.output import progress\n"
        "with progress('looking'): sys.stdin.readline()\n"
        "print('done')"
    )
    parent, child = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=child,
    )
    os.close(child)
    shown = b""
    while b"looking 1 s" not in shown:
        shown += os.read(parent, 4096)
    out, _ = started.communicate(b"\n", timeout=200)
    os.close(parent)
    assert out == b"done\n"
    piped = subprocess.run(
        [sys.executable, "-c", script], input=b"\n", capture_output=True, check=True, timeout=200
    )
    assert (piped.stdout, piped.stderr) == (b"done\n", b"")
