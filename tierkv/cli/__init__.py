"""The command `tierkv`. The module of a subcommand is imported when the subcommand is called."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, ClassVar, Self

import click

from tierkv import __version__
from tierkv.errors import TierKVError

_EPILOG = (
    "Exit codes: 0 success, 1 failure (the reason is one line on stderr), 2 wrong "
    "usage, 130 stopped by Ctrl-C."
)


class _Failure(click.ClickException):
    """An expected failure: one sentence on stderr, exit code 1."""

    def show(self, file: IO[str] | None = None) -> None:
        click.echo(f"error: {self.format_message()}", err=True, file=file)


class _WrongUsage(_Failure):
    """A command line that is wrong: one sentence on stderr, exit code 2."""

    exit_code = 2

    @classmethod
    def of(cls, error: click.UsageError) -> Self:
        help_at = error.ctx.command_path if error.ctx is not None else "tierkv"
        said = " ".join(error.format_message().split())
        return cls(f"{said.rstrip('.')}; see {help_at} --help")


class _InterruptedError(_Failure):
    exit_code = 130  # 128 and the number of SIGINT, as shells count


@contextmanager
def _errors_in_one_sentence() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise _WrongUsage.of(error) from error
    except TierKVError as error:
        raise _Failure(str(error)) from error
    except KeyboardInterrupt as error:
        raise _InterruptedError("stopped by Ctrl-C") from error
    except OSError as error:  # the output, even of `--help`, cannot be written: a full disk
        if error.errno == errno.EPIPE:
            raise  # Click exits without a message
        where = f": {error.filename}" if error.filename else ""
        click.echo(f"error: {error.strerror or error}{where}", err=True)
        with suppress(OSError, ValueError):  # or Python writes the rest at exit, and fails again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


class _Commands(click.Group):
    """A group of commands that imports the module of a command when the command is called.

    Attributes:
        later: for each command, its module and its line in the list of commands.
    """

    later: ClassVar = {
        "config": ("tierkv.cli.settings", "Print the settings in force and the source of each."),
        "demo": ("tierkv.demo.command", "Run a demonstration with real processes on this machine."),
        "doctor": ("tierkv.cli.doctor", "Measure this machine's GPUs, memory and store."),
        "explain": (
            "tierkv.cli.node",
            "Explain why the first missing block of a prompt is not cached.",
        ),
        "generate": ("tierkv.cli.node", "Generate text that follows a prompt."),
        "gateway": ("tierkv.cli.serving", "Run one OpenAI-compatible address in front of nodes."),
        "lookup": ("tierkv.cli.node", "Print in which tiers the tokens of a prompt are."),
        "serve": ("tierkv.cli.serving", "Run a node until SIGTERM or Ctrl-C."),
        "stats": ("tierkv.cli.node", "Print the counters of a node."),
        "status": ("tierkv.cli.status", "Print the health of nodes and gateways."),
        "storage": ("tierkv.cli.storage", "List, measure, verify or remove the values of a store."),
        "token": ("tierkv.cli.token", "Make, list and revoke the tokens of callers."),
        "verify": ("tierkv.cli.node", "Check a node's blocks and leases for consistency."),
    }

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:  # noqa: ANN401 - click's
        with _errors_in_one_sentence():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        with _errors_in_one_sentence():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        return sorted(self.later)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.later:
            return super().get_command(ctx, cmd_name)
        module, _ = self.later[cmd_name]
        gc.disable()  # imported objects stay, so collections only cost time: 7 % of a node's start
        try:
            command = getattr(importlib.import_module(module), cmd_name)
        finally:
            gc.enable()
        assert isinstance(command, click.Command), "the module holds a command of that name"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Not Click's own method, which would import all commands.
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.later[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_Commands, epilog=_EPILOG)
@click.version_option(__version__, prog_name="tierkv", message="%(prog)s %(version)s")
def main() -> None:
    """Keep the KV cache of LLM inference in three tiers: Device, Host and Storage.

    `tierkv demo` shows the tiers at work; `tierkv serve` runs a node.
    """
