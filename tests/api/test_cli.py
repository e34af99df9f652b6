"""The command line: its help, its exit codes, its client commands, and how it authenticates."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import tierkv
from tests.api.guarded import Authority, Callers, guarded
from tests.api.nodes import process, run_to_end
from tests.redis_server import free_port
from tierkv.cli import main
from tierkv.http.callers import RoleName
from tierkv.http.settings import TlsSection

ROOT = Path(tierkv.__file__).parents[1]
COMMANDS = main.list_commands(click.Context(main))


def test_help_lists_every_command_with_a_sentence() -> None:
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in shown.output
    assert "Exit codes: 0" in shown.output


@pytest.mark.promise("Every command and option has help.")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_option_of_it_has_help(command: str) -> None:
    with click.Context(main) as context:
        found = main.get_command(context, command)
    assert found is not None
    parts = found.commands.items() if isinstance(found, click.Group) else ()
    for path, one in (((), found), *(((name,), part) for name, part in parts)):
        assert one.help
        for option in one.params:
            if isinstance(option, click.Option):
                assert option.help, option.name
        shown = CliRunner().invoke(main, [command, *path, "--help"])
        assert shown.exit_code == 0
        assert max(len(line) for line in shown.output.splitlines()) <= 80


@pytest.mark.promise("Every command answers in JSON on request.")
def test_every_command_answers_in_json_if_asked() -> None:
    silent = []
    with click.Context(main) as context:
        for name in COMMANDS:
            command = main.get_command(context, name)
            parts = command.commands.values() if isinstance(command, click.Group) else [command]
            for part in parts:
                assert part is not None
                if all(option.name != "as_json" for option in part.params):
                    silent.append(name)
    assert not silent


def test_help_does_not_wait_for_heavy_imports() -> None:
    code = (
        "import sys\nfrom tierkv.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'aiohttp', 'numpy', 'uvloop', 'redis'}\n"
        "print(*heavy & sys.modules.keys(), 'end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "end"


@pytest.mark.promise("Wrong usage of a command gives one error sentence.")
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--role", "king"],
        ["serve", "--port", "70000"],
        ["serve", "--prot", "1"],
        ["nothing"],
        ["generate"],
        ["generate", "a", "--max-tokens", "0"],
        ["token", "new", "--file", "a", "--name", "a", "--role", "read", "--expires", "9999999d"],
    ],
)
def test_wrong_usage_is_one_sentence_and_exits_with_2(arguments: list[str]) -> None:
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2
    [line] = found.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(" --help")


async def test_an_option_completes_what_the_environment_began(tmp_path: Path) -> None:
    """A key of the environment needs a certificate, which may be an option's."""
    given = ("--port", "0", "--storage", "none", "--tls-cert", "missing.pem")
    _, _, err = await run_to_end(tmp_path, "serve", *given, TIERKV_TLS__KEY="key.pem")
    assert "missing.pem or its key cannot be used" in err


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"tierkv {tierkv.__version__}\n"


async def test_client_commands_ask_a_node(tmp_path: Path) -> None:
    async with process(tmp_path) as node:
        asked = {"TIERKV_URL": node.url}
        status, out, err = await run_to_end(tmp_path, "generate", "hello", **asked)
        assert (status, err) == (0, "")
        assert len(out.rstrip("\n")) > 0
        status, out, _ = await run_to_end(tmp_path, "generate", "hello", "--json", **asked)
        assert status == 0
        assert json.loads(out)["matched"]["device"] == 4
        status, out, _ = await run_to_end(tmp_path, "lookup", "hello", "--json", "--url", node.url)
        assert json.loads(out)["num_tokens"] == 5
        status, out, _ = await run_to_end(tmp_path, "lookup", "hello", **asked)
        assert [line.split() for line in out.splitlines()] == [
            ["prompt", "5", "tokens"],
            ["device", "5", "tokens"],
            ["host", "0", "tokens"],
            ["storage", "0", "tokens"],
        ]
        status, out, _ = await run_to_end(tmp_path, "stats", **asked)
        assert "requests.admitted_requests 2\n" in out
        status, out, _ = await run_to_end(tmp_path, "verify", **asked)
        assert (status, out) == (0, "no fault found\n")
        status, out, err = await run_to_end(tmp_path, "generate", "", **asked)
        assert (status, out) == (1, "")
        assert re.fullmatch(
            r"error: the prompt is empty: give at least one token \(bad_request, request \w+\)\n",
            err,
        )


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "ftp://a"])
async def test_no_node_at_the_url_is_one_sentence(url: str, tmp_path: Path) -> None:
    asked = url.format(port=free_port())
    status, out, err = await run_to_end(tmp_path, "stats", "--url", asked)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


async def test_https_to_a_node_without_tls_says_which_url_it_may_be(tmp_path: Path) -> None:
    async with process(tmp_path) as node:
        asked = node.url.replace("http://", "https://")
        status, out, err = await run_to_end(tmp_path, "stats", "--url", asked)
    assert (status, out) == (1, "")
    assert err == (
        f"error: no node answers at {asked}: "
        "it does not use TLS: use http:// instead of https:// in its URL\n"
    )


# As a caller


async def test_commands_bring_the_token_of_the_environment(
    callers: Callers, tmp_path: Path
) -> None:
    token = await callers.token(RoleName.READ)
    async with guarded(callers) as on:
        url = ("--url", on.url)
        status, out, err = await run_to_end(tmp_path, "stats", *url)
        assert (status, out) == (1, "")
        assert "unauthenticated" in err
        assert "set the variable TIERKV_TOKEN to the token" in err
        assert err.count("\n") == 1
        status, out, err = await run_to_end(tmp_path, "stats", *url, "--json", TIERKV_TOKEN=token)
        assert (status, err) == (0, "")
        assert json.loads(out)["running_requests"] == 0
        status, _, err = await run_to_end(tmp_path, "verify", *url, TIERKV_TOKEN=token)
        assert status == 1
        assert "forbidden" in err
        assert token not in err


async def test_commands_speak_tls_and_over_the_socket(tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    tls = TlsSection(cert=str(await asyncio.to_thread(authority.issue, "node")))
    path = tmp_path / "node.sock"
    async with guarded(None, tls=tls, unix_socket=path) as on:
        url = ("--url", on.url)
        assert (await run_to_end(tmp_path, "verify", *url, "--ca", authority.path))[0] == 0
        status, _, err = await run_to_end(tmp_path, "verify", *url)
        assert status == 1
        assert "certificate" in err
        assert err.count("\n") == 1
        status, _, err = await run_to_end(tmp_path, "verify", *url, "--ca", tmp_path / "none")
        assert (status, err.count("\n")) == (1, 1)
        assert (await run_to_end(tmp_path, "verify", "--url", f"unix:{path}"))[0] == 0
