"""The documentation's site: it builds without a warning, tells every setting and route, and its
commands are those that there are. The quick start is run, command by command."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import runpy
import shlex
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

import click
import msgspec
import pytest

from tests.api.nodes import clean_environ
from tests.redis_server import free_port
from tierkv.api.settings import NodeSettings
from tierkv.cli import main
from tierkv.config import flat, names_in
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.problems import HANDOFF_STATUS
from tierkv.pd.tickets import HandoffProblem

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_START_S = 200.0


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    commands = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    folder = tmp_path_factory.mktemp("site")
    loaded = config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    commands.build(loaded)  # strict: a warning is an error
    return folder


def test_the_site_builds_without_a_warning_and_fetches_nothing_from_elsewhere(built: Path) -> None:
    pages = list(built.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", text)
        assert fetched == [], page


@pytest.mark.promise("Every setting and route is documented.")
def test_every_setting_and_every_route_is_told_with_its_meaning(built: Path) -> None:
    settings = (built / "reference" / "settings.html").read_text()
    for kind in (NodeSettings, GatewaySettings):
        defaults = flat(msgspec.to_builtins(kind()))
        for name in names_in(kind):
            if not isinstance(defaults.get(name), tuple | type(None)):  # nor a table
                assert f"<code>{name}</code>" in settings, name
    assert "<td></td>" not in settings, "a setting without a meaning"
    routes = (built / "reference" / "routes.html").read_text()
    for route in ("POST /v1/prefill", "GET /v1/verify", "DELETE /v1/pins/{id}"):
        assert f"<code>{route}</code>" in routes


def test_no_text_installs_another_project_of_the_package_index() -> None:
    """The distribution is tierkv-cache; what is to be installed is a checkout."""
    texts = [*PAGES, *(ROOT / "tierkv").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    texts += [*(ROOT / "deploy").rglob("*.yaml"), ROOT / "Dockerfile", ROOT / "CHANGELOG.md"]
    assert len(texts) > 180
    for text in texts:
        for line in text.read_text().splitlines():
            other = re.search(r"\binstall (?:-\S+ )*[\"']?tierkv(?![\w/-])|[\"'\s]tierkv\[", line)
            assert other is None, (text, line)


@pytest.mark.promise("Every documented command exists, and the quick start works.")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_documentation_is_one_that_there_is(page: Path) -> None:
    for block in code_blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?tierkv ((?!listening).+)", line)
            if found and "..." not in line and "[" not in line:
                words = shlex.split(found[1].partition(" > ")[0].partition(" | ")[0], comments=True)
                _check(main, words, line)


def _check(group: click.Group, words: list[str], line: str) -> None:
    with click.Context(group) as context:
        command = group.get_command(context, words[0])
    assert command is not None, line
    if isinstance(command, click.Group) and words[1:2] and not words[1].startswith("-"):
        _check(command, words[1:], line)
        return
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")} - {"--help"}
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert given <= known, line


def test_the_page_of_errors_has_the_status_and_reason_of_every_hand_off() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    for problem in HandoffProblem:
        status = HANDOFF_STATUS.get(problem.value, 502)
        row = next((r for r in text.splitlines() if f"`{problem.value}`" in r), None)
        assert row is not None, problem
        assert row.startswith(f"| {status} "), row


def test_every_error_sentence_is_on_the_site(built: Path) -> None:
    text = html.unescape((built / "reference" / "messages.html").read_text())
    for sentence in (
        "the config file … does not exist: correct the path",
        "the token is unknown here or has expired: make one with",
        "… failed and is not used until it answers a probe: …",
    ):
        assert sentence in text


def test_the_page_of_benchmarks_is_made_of_the_results() -> None:
    """`python scripts/benchmarks_page.py` makes it."""
    site = ROOT / "scripts" / "benchmarks_page.py"
    made = runpy.run_path(str(site))["page"]()
    assert (ROOT / "docs" / "benchmarks.md").read_text() == made
    assert made.count("\n## ") == len(list((ROOT / "docs" / "results").glob("*.json")))


@pytest.mark.promise("Every documented command exists, and the quick start works.")
async def test_the_quick_start_runs_as_it_is_written(tmp_path: Path) -> None:
    """All but the demo, which tests/e2e runs; other ports and another directory."""
    ports = {name: str(free_port()) for name in ("8100", "8101", "8000")}
    store = f"{tmp_path}/store"
    environ = clean_environ(tmp_path) | {"PATH": f"{Path(sys.executable).parent}:{os.defpath}"}
    blocks = code_blocks(ROOT / "docs" / "quickstart.md")
    assert blocks.pop(0) == "./scripts/demo\n"
    answers, servers, starting = list[str](), list[Process](), list[Process]()
    try:
        for block in blocks:
            text = block.replace("/tmp/tierkv-quickstart", store).replace(".venv/bin/", "")
            for written, free in ports.items():
                text = text.replace(written, free)
            if " serve " in text or " gateway " in text:
                starting.append(await _started(f"exec {text}", environ))
                servers.append(starting[-1])
                continue
            async with asyncio.timeout(_START_S):
                for server in starting:
                    assert server.stdout is not None
                    assert b"listening on" in await server.stdout.readline()
                starting.clear()
                answers.append(await _answer(text, environ))
    finally:
        for server in servers:
            server.send_signal(signal.SIGINT)
        async with asyncio.timeout(_START_S):
            assert [await server.wait() for server in servers] == [0, 0, 0]
    prefilled, decoded, looked, completed = answers
    assert json.loads(prefilled)["num_blocks"] == 3
    assert json.loads(decoded)["computed_tokens"] == 0
    assert looked.count("  ok\n") == 2
    assert re.search(r"^device +3[0-9] tokens$", looked, re.MULTILINE), looked
    assert json.loads(completed)["usage"]["completion_tokens"] == 20


async def _started(command: str, environ: dict[str, str]) -> Process:
    return await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, env=environ
    )


async def _answer(command: str, environ: dict[str, str]) -> str:
    """Its output; a gateway that has yet to see its nodes is asked again."""
    while True:
        child = await _started(f"set -e\n{command}", environ)
        out, _ = await child.communicate()
        assert child.returncode == 0
        if b'"no_nodes"' not in out:
            return out.decode()
