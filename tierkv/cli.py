"""The command `tierkv`: starts nodes, and asks them things. A command imports what it needs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

import click

from tierkv import __version__
from tierkv.cli_options import address, insecure_and_log_level, who_may_call
from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.api.calls import Answer, Target
    from tierkv.api.settings import NodeSettings

_EPILOG = "Exit codes: 0 all went well, 1 it failed (one line on stderr says why), 2 wrong usage."


class _Failure(click.ClickException):
    """An expected failure: one sentence, exit code 1."""

    def show(self, file: IO[str] | None = None) -> None:
        click.echo(f"error: {self.format_message()}", err=True, file=file)


class _Commands(click.Group):
    """Expected errors become a sentence; what is heavy to import is imported when it is called."""

    later: ClassVar = {
        "demo": ("tierkv.demo.command", "Show the main job with real processes on this machine."),
        "doctor": ("tierkv.gpu.doctor", "Tell what this machine's GPUs and memory allow."),
        "gateway": ("tierkv.cli_gateway", "One OpenAI-compatible address in front of nodes."),
        "storage": ("tierkv.cli_storage", "Look into a store: list, measure, verify, remove."),
        "token": ("tierkv.cli_token", "Give callers tokens, and take them back."),
    }

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except TierKVError as error:
            raise _Failure(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.later])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.later:
            return super().get_command(ctx, cmd_name)
        module, _ = self.later[cmd_name]
        command = getattr(importlib.import_module(module), cmd_name)
        assert isinstance(command, click.Command), "the module holds a command of that name"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self.later:
                rows.append((name, self.later[name][1]))
            elif command := self.get_command(ctx, name):
                rows.append((name, command.get_short_help_str(80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_Commands, epilog=_EPILOG)
@click.version_option(__version__, prog_name="tierkv", message="%(prog)s %(version)s")
def main() -> None:
    """Keep the KV cache of LLM inference in three tiers: Device, Host and Storage.

    `tierkv demo` shows what it does; `tierkv serve` runs a node.
    """


@main.command()
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode", "both"]),
    help="Which half of the work this node takes.  [default: both]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings, as TOML with the tables node, auth, tls, cache, handoff, storage, model and "
    "engine. Everything has a default.",
)
@address(8100)
@click.option(
    "--device",
    help="Where the device tier is: cuda is an NVIDIA GPU (cuda:1 the second), cpu plays one in "
    "RAM.  [default: cpu]",
)
@click.option(
    "--storage",
    metavar="URL",
    help="The storage tier: file:///DIRECTORY, redis://HOST:PORT/DB, memory:// or none. Nodes "
    "hand prompts over through it.  [default: files in $XDG_CACHE_HOME/tierkv/store, which is "
    "~/.cache/tierkv/store if that is not set]",
)
@click.option("--name", help="What this node is called in logs and tickets.")
@who_may_call
@click.option(
    "--unix-socket", metavar="PATH", help="Listen on this socket too; only its owner may connect."
)
@click.option("--no-tcp", is_flag=True, help="Listen on the Unix socket only.")
@insecure_and_log_level
def serve(
    log_level: str,
    *,
    insecure: bool,
    no_tcp: bool,
    config: Path | None,
    **options: str | int | None,
) -> None:
    """Run a node until SIGTERM or Ctrl-C.

    Prints one line to stdout with the URL it listens on, once it answers there; the log goes to
    stderr. Options win over environment variables (TIERKV_NODE__PORT is the key port of table
    node), and these over the config file.

    On SIGTERM the node says at /readyz that it is not ready, takes no more work, lets what runs
    finish within node.drain_grace_s, and exits with 0. A second SIGTERM does not wait.
    """
    from tierkv.api.logs import log_to_stderr  # noqa: PLC0415
    from tierkv.api.server import run  # noqa: PLC0415

    settings = _settings(config, options, insecure=insecure, no_tcp=no_tcp)
    log_to_stderr(log_level.upper())

    def announce(url: str) -> None:
        click.echo(f"tierkv {settings.node.role.value} listening on {url}")

    run(settings, announce)


def _settings(
    config: Path | None,
    options: Mapping[str, str | int | None],
    *,
    insecure: bool,
    no_tcp: bool,
) -> NodeSettings:
    from msgspec.structs import replace  # noqa: PLC0415

    from tierkv.api.settings import NodeSettings, Role  # noqa: PLC0415
    from tierkv.config import load  # noqa: PLC0415

    settings = load(NodeSettings, config, os.environ)
    given: dict[str, object] = {key: value for key, value in options.items() if value is not None}
    storage = given.pop("storage", None)
    auth = {"file": given.pop("auth_file")} if "auth_file" in given else {}
    names = {"tls_cert": "cert", "tls_key": "key", "client_ca": "client_ca"}
    tls = {names[key]: given.pop(key) for key in list(given) if key in names}
    if "role" in given:
        given["role"] = Role(given["role"])
    if insecure:
        given["allow_insecure_bind"] = True
    if no_tcp:
        given["listens_tcp"] = False
    settings = replace(
        settings,
        node=replace(settings.node, **given),
        auth=replace(settings.auth, **auth),
        tls=replace(settings.tls, **tls),
    )
    if storage is not None:
        changed = dataclasses.replace(settings.storage, url=str(storage))
        settings = replace(settings, storage=changed)
    return settings


_Command = Callable[..., None]


def _node(command: _Command) -> _Command:
    """Options that say which node to ask, and as whom; the command gets them as `node`."""

    @click.option(
        "--url",
        default="http://127.0.0.1:8100",
        envvar="TIERKV_URL",
        show_default=True,
        show_envvar=True,
        help="The node to ask: http://, https:// or unix:/PATH. The variable TIERKV_TOKEN holds "
        "the token, if the node wants one.",
    )
    @click.option(
        "--ca",
        envvar="TIERKV_CA",
        show_envvar=True,
        metavar="FILE",
        help="For https: who signed the node's certificate (PEM).  [default: the system's]",
    )
    @click.option(
        "--cert",
        envvar="TIERKV_CERT",
        show_envvar=True,
        metavar="FILE",
        help="For a node that asks for one: your certificate and its key (PEM).",
    )
    @functools.wraps(command)
    def with_node(
        *args: object, url: str, ca: str | None, cert: str | None, **options: object
    ) -> None:
        from tierkv.api.calls import Target  # noqa: PLC0415

        # No option: `ps` shows those to everybody.
        token = os.environ.get("TIERKV_TOKEN") or None
        command(*args, node=Target(url, token=token, ca=ca, cert=cert), **options)

    return with_node


_as_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
_prompt = click.argument("prompt")


@main.command()
@_prompt
@_node
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="How many tokens to generate.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of sampling.")
@click.option("--no-cache", is_flag=True, help="Compute every token, and leave nothing cached.")
@_as_json
def generate(
    prompt: str, *, node: Target, no_cache: bool, as_json: bool, **sampling: float
) -> None:
    """Generate text that follows PROMPT.

    If PROMPT is "-", it is read from standard input.
    """
    body: Answer = {"prompt": _text(prompt), "use_cache": not no_cache, **sampling}
    answer = _ask(node, "/v1/generate", body)
    _print(answer, str(answer["text"]), as_json=as_json)


@main.command()
@_prompt
@_node
@_as_json
def lookup(prompt: str, *, node: Target, as_json: bool) -> None:
    """Tell in which tiers the tokens of PROMPT are.

    If PROMPT is "-", it is read from standard input.
    """
    answer = _ask(node, "/v1/lookup", {"prompt": _text(prompt)})
    lines = [f"{key.removesuffix('_tokens'):10} {answer[key]}" for key in answer if "tokens" in key]
    _print(answer, "\n".join(lines).replace("None", "no answer"), as_json=as_json)


@main.command()
@_node
@_as_json
def stats(*, node: Target, as_json: bool) -> None:
    """Print what a node has counted."""
    answer = _ask(node, "/v1/stats")
    _print(answer, "\n".join(_flat(answer)), as_json=as_json)


@main.command()
@_node
@_as_json
def verify(*, node: Target, as_json: bool) -> None:
    """Let a node recount its blocks and leases.

    Exits with 1 if anything is wrong.
    """
    answer = _ask(node, "/v1/verify")
    findings = answer["findings"]
    assert isinstance(findings, list), "the node's answer has a list of findings"
    _print(
        answer,
        "\n".join(str(finding) for finding in findings) or "nothing is wrong",
        as_json=as_json,
    )
    if findings:
        raise _Failure("the node's books are not in order")


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"tierkv {__version__}")


def _ask(node: Target, path: str, body: Answer | None = None) -> Answer:
    from tierkv.api.calls import ask  # noqa: PLC0415

    return asyncio.run(ask(node, path, body))


def _text(prompt: str) -> str:
    raw = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 (byte {error.start})") from error


def _print(answer: Answer, text: str, *, as_json: bool) -> None:
    click.echo(json.dumps(answer, indent=2) if as_json else text)


def _flat(answer: Answer, prefix: str = "") -> list[str]:
    lines = []
    for key, value in answer.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key} {value}")
    return lines
