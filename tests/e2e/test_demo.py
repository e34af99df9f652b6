"""`tierkv demo` as its users run it: as a process, with good and bad input."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tierkv.cli import main

pytestmark = pytest.mark.timeout(600)
SLOW = pytest.mark.slow


def demo(*options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv", "demo", "--model", "tiny", *options],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "TIERKV_HANDOFF__DIRECT": "off"},  # for gateways, too
        timeout=550,
        check=False,
    )


def running_below(folder: Path) -> list[str]:
    """Command lines of all processes whose temporary directory is `folder`: a demo's and no
    others', whatever else runs on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # it has ended, or is none of ours
            if b"TMPDIR=" + os.fsencode(folder) in environ and line:
                found.append(line.decode())
    return found


@pytest.mark.promise("Every scene of the demo gives a single node's tokens.")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--prompt", "a b c " * 101], id="files"),
        pytest.param(["--prompt", "a b c " * 101, "--storage", "redis"], id="redis", marks=SLOW),
        pytest.param([], id="the document", marks=SLOW),
    ],
)
def test_all_scenes_are_identical_to_a_single_node(options: list[str], tmp_path: Path) -> None:
    done = demo("--json", "--max-tokens", "6", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scenes = json.loads(done.stdout)
    assert [scene["is_identical"] for scene in scenes] == [True] * 6
    hand_off, straight, device, host, stored, _ = (scene["matched"] for scene in scenes)
    assert "the other one went on" in scenes[5]["event"]
    prompt_tokens = scenes[0]["prompt_tokens"]
    assert (hand_off["storage"], hand_off["direct"]) == (prompt_tokens, 0)
    assert scenes[0]["moved"]["fetched"] > 100 * prompt_tokens  # all of their bytes
    direct = int(scenes[1]["event"].split()[0])
    assert direct > 0
    assert straight["direct"] == 16 * direct
    assert straight["storage"] == prompt_tokens - straight["direct"]
    assert scenes[1]["moved"]["fetched"] < scenes[0]["moved"]["fetched"] / 2
    assert scenes[0]["tail_tokens"] == prompt_tokens % 16 > 0
    assert device["device"] >= prompt_tokens
    assert host["host"] >= prompt_tokens
    assert stored["storage"] == prompt_tokens - 1


def test_wrong_input_gets_one_clear_sentence(tmp_path: Path) -> None:
    not_text = tmp_path / "not-text"
    not_text.write_bytes(b"abc\xff\xfe")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for options, words in (
        (["--prompt", ""], "empty"),
        (["--prompt-file", str(empty)], "empty"),
        (["--prompt-file", str(not_text)], "not valid UTF-8 (byte 3)"),
        (["--prompt-file", str(tmp_path / "missing")], "does not exist"),
        (["--prompt-file", str(tmp_path)], "cannot be read"),
        (["--prompt", "x", "--storage", "gopher://x"], "accepted"),
        (["--prompt", "x", "--storage", "memory://"], "cannot be shared"),
    ):
        check_one_sentence(options, words)
    both = ["--prompt", "x", "--prompt-file", "y"]
    assert CliRunner().invoke(main, ["demo", *both]).exit_code == 2
    assert demo(*both).returncode == 2  # as a process, too


@SLOW
def test_a_store_that_no_node_can_use_is_one_clear_sentence(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for url, words in (
        ("redis://127.0.0.1:1/0", "cannot be reached"),
        (f"file://{in_the_way}/store", "is a file, or lies below a file"),
    ):
        check_one_sentence(["--prompt", "x", "--storage", url], words)


def check_one_sentence(options: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["demo", "--model", "tiny", *options], prog_name="tierkv")
    assert done.exit_code == 1, (options, done)
    assert words in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr


@SLOW
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_nothing_is_left_running_when_the_demo_is_stopped(
    how: signal.Signals, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tierkv", "demo", "--model", "tiny", "--prompt", "a b c " * 101),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    while b"identical to a single node" not in (line := await process.stdout.readline()):
        assert line, "it ended before all three nodes were up and had worked"
    assert len(running_below(tmp_path)) == 6  # the demo and its nodes
    process.send_signal(how)
    await process.communicate()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}.get(how, 1)
    assert how is signal.SIGKILL or not await asyncio.to_thread(os.listdir, tmp_path)
    deadline = time.monotonic() + 30
    while left := running_below(tmp_path):  # killed outright, its nodes drain by themselves
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)
