"""Options of every command that listens: where, who may call, how much goes to the log; and which
settings they set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

Decorator = Callable[[Any], Any]
F = TypeVar("F")

_WHO_MAY_CALL: tuple[Decorator, ...] = (
    click.option(
        "--auth",
        "auth_file",
        metavar="FILE",
        help="Who may call, as `tierkv token` writes it. Without it nobody is asked who they are.",
    ),
    click.option("--tls-cert", metavar="FILE", help="Serve TLS with this certificate (PEM)."),
    click.option("--tls-key", metavar="FILE", help="Its key, if it is not in the same file."),
    click.option(
        "--client-ca",
        metavar="FILE",
        help="Clients must bring a certificate that one of these signed (mutual TLS).",
    ),
)
_LAST: tuple[Decorator, ...] = (
    click.option(
        "--insecure",
        is_flag=True,
        help="Listen on an address that other machines can reach, although no caller is asked who "
        "it is. For a private network only.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="How much goes to the log, on stderr.",
    ),
)
_SETTINGS = {  # of options that are called otherwise than their setting
    "auth_file": ("auth", "file"),
    "tls_cert": ("tls", "cert"),
    "tls_key": ("tls", "key"),
    "client_ca": ("tls", "client_ca"),
    "storage": ("storage", "url"),
}


def settings_in(
    options: Mapping[str, object], *, table: str, insecure: bool
) -> Iterator[tuple[str, str, object]]:
    """Of the options that were given, as `config.load` takes them. table: of most of them."""
    if insecure:
        yield table, "allow_insecure_bind", True
    for name, value in options.items():
        # What was not given is None, False or empty; port 0 is none of these.
        if not (value is None or value is False or value == ()):
            section, key = _SETTINGS.get(name, (table, name))
            yield section, key, value


def address(port: int) -> Decorator:
    """--host and --port, whose default is `port`."""
    host_and_port = (
        click.option("--host", help="The address to listen on.  [default: 127.0.0.1]"),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            help=f"The port to listen on; 0 takes a free one.  [default: {port}]",
        ),
    )
    return lambda command: _with(command, host_and_port)


def who_may_call(command: F) -> F:
    """--auth, --tls-cert, --tls-key, --client-ca."""
    return _with(command, _WHO_MAY_CALL)


def insecure_and_log_level(command: F) -> F:
    return _with(command, _LAST)


def _with(command: F, options: Sequence[Decorator]) -> F:
    for option in reversed(options):  # the help lists them in the order given
        command = option(command)
    return command
