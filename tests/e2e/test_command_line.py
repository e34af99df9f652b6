"""Commands as people type them: what cannot work is one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tierkv.cli import main


def told(*arguments: str) -> Result:
    """What a command says that fails as expected."""
    found = CliRunner().invoke(main, arguments, prog_name="tierkv")
    assert found.exit_code == 1, found.output
    assert found.stdout == ""
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.strip().splitlines()) == 1
    return found


SERVE = ["serve", "--port", "0", "--storage", "memory://", "--device"]
HAS_CUPY = importlib.util.find_spec("cupy") is not None
WITHOUT_CUPY = pytest.mark.skipif(HAS_CUPY, reason="has CuPy")
NEEDS_CUPY = ["needs CuPy", "pip install", "tierkv doctor"]
KEY = ["storage", "verify", "file:///tmp", "--key-file", "/dev/zero"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param([*SERVE, "cuda"], NEEDS_CUPY, marks=WITHOUT_CUPY),
        pytest.param([*SERVE, "cuda:1"], NEEDS_CUPY, marks=WITHOUT_CUPY),
        ([*SERVE, "tpu"], ["'tpu'", "cpu, cuda or cuda:N"]),
        (["storage", "ls", "memory://"], ["inside one node"]),
        (["demo", "--prompt-file", "/dev/zero"], ["more than 100000 tokens"]),
        (["config", "--config", "/dev/zero"], ["more than 1048576 bytes"]),
        (KEY, ["a storage key must have 64 hex digits"]),
        (["generate", "x", "--max-tokens", str(1 << 64)], ["more than 64 bits"]),
        (["generate", "x", "--seed", str(1 << 64)], ["more than 64 bits"]),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_what_cannot_work_is_one_sentence_with_a_way_out(
    arguments: list[str], words: list[str]
) -> None:
    """/dev/zero is a file without an end."""
    said = told(*arguments).stderr
    for word in words:
        assert word in said


@pytest.mark.parametrize("command", ["ls", "du", "verify"])
def test_looking_into_a_directory_that_is_not_there_does_not_make_it(
    command: str, tmp_path: Path
) -> None:
    missing = tmp_path / "missing store"
    assert "there is no store at" in told("storage", command, missing.as_uri()).stderr
    assert not missing.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["storage", "ls", "--help"]])
def test_output_that_cannot_be_written_is_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tierkv", *arguments]
        buffers = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
        found = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
            check=False,
            env=buffers,
        )
    assert found.returncode == 1
    assert found.stderr == "error: No space left on device\n"


def test_a_prompt_of_standard_input_without_an_end_is_refused_after_the_limit() -> None:
    command = [sys.executable, "-m", "tierkv", "generate", "-"]
    with Path("/dev/zero").open("rb") as zeros:
        found = subprocess.run(
            command, stdin=zeros, capture_output=True, text=True, timeout=200, check=False
        )
    assert found.returncode == 1
    assert (
        found.stderr
        == f"error: the prompt has more than {16 << 20} bytes, the maximum: shorten it\n"
    )


@pytest.mark.promise("Ctrl-C ends a command with one sentence and status 130.")
def test_ctrl_c_ends_a_command_with_one_sentence_and_status_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-m", "tierkv", "stats", "--url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            silent.accept()[0].close()  # it has begun to ask
            asking, _ = silent.accept()
            with asking:
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (130, "", "error: stopped by Ctrl-C\n")


def test_ctrl_c_while_a_command_is_imported_is_the_same_sentence(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["tierkv"].partition(":")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {module} import {function}"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {function}()"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "error: stopped by Ctrl-C\n")
