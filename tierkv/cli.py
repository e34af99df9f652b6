"""The command `tierkv`: all its commands, and `serve`. A command imports what it needs."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar

import click

from tierkv import __version__
from tierkv.cli_options import address, insecure_and_log_level, settings_in, who_may_call
from tierkv.errors import TierKVError

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
        "generate": ("tierkv.cli_node", "Generate text that follows a prompt."),
        "gateway": ("tierkv.cli_gateway", "One OpenAI-compatible address in front of nodes."),
        "lookup": ("tierkv.cli_node", "Tell in which tiers the tokens of a prompt are."),
        "stats": ("tierkv.cli_node", "Print what a node has counted."),
        "storage": ("tierkv.cli_storage", "Look into a store: list, measure, verify, remove."),
        "token": ("tierkv.cli_token", "Give callers tokens, and take them back."),
        "verify": ("tierkv.cli_node", "Let a node recount its blocks and leases."),
    }

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - click's
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # of what is written, by `--help` too: a full disk, say
            where = f": {error.filename}" if error.filename else ""
            click.echo(f"error: {error.strerror or error}{where}", err=True)
            with suppress(OSError, ValueError):  # what is left goes nowhere, or Python tries again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

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
    finish within node.drain_grace_s, and exits with 0. A second SIGTERM does not wait. It exits
    with 1 where a store or a device hangs for longer than node.close_limit_s.
    """
    from tierkv.api.server import run  # noqa: PLC0415
    from tierkv.api.settings import NodeSettings  # noqa: PLC0415
    from tierkv.config import load  # noqa: PLC0415
    from tierkv.http.process import log_to_stderr  # noqa: PLC0415

    options["listens_tcp"] = "false" if no_tcp else None
    given = settings_in(options, table="node", insecure=insecure)
    settings = load(NodeSettings, config, os.environ, given)
    log_to_stderr(log_level.upper())

    def announce(url: str) -> None:
        click.echo(f"tierkv {settings.node.role.value} listening on {url}")

    run(settings, announce)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"tierkv {__version__}")
