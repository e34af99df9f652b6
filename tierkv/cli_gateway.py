"""The command `tierkv gateway`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from msgspec.structs import replace

from tierkv.api.logs import log_to_stderr
from tierkv.config import load
from tierkv.gateway.server import run
from tierkv.gateway.settings import GatewaySettings


@click.command()
@click.option("--prefill", multiple=True, metavar="URL", help="A node that computes prompts.")
@click.option("--decode", multiple=True, metavar="URL", help="A node that goes on from there.")
@click.option("--both", multiple=True, metavar="URL", help="A node that does both.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings, as TOML with the tables gateway, limits, deadlines and health. Everything "
    "but the nodes has a default.",
)
@click.option("--host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="The port to listen on; 0 takes a free one.  [default: 8000]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen on an address that other machines can reach, although no caller is asked who it "
    "is. For a private network only.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="How much goes to the log, on stderr.",
)
def gateway(  # noqa: PLR0913 - one for each option
    log_level: str,
    *,
    insecure: bool,
    config: Path | None,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    both: tuple[str, ...],
    host: str | None,
    port: int | None,
) -> None:
    """Put one OpenAI-compatible address in front of prefill and decode nodes.

    Prints one line to stdout with the URL it listens on; the log goes to stderr. Options win over
    environment variables (TIERKV_GATEWAY__DECODE is the key decode of table gateway; several URLs
    with spaces between), and these over the config file. A bearer token for the nodes belongs into
    TIERKV_GATEWAY__NODE_TOKEN.

    A node that dies is replaced in the middle of an answer. On SIGTERM the gateway takes no more
    work, lets streams end within gateway.drain_grace_s, and exits with 0.
    """
    settings = load(GatewaySettings, config, os.environ)
    given: dict[str, object] = {
        name: value
        for name, value in (
            ("prefill", prefill or None),
            ("decode", decode or None),
            ("both", both or None),
            ("host", host),
            ("port", port),
            ("allow_insecure_bind", insecure or None),
        )
        if value is not None
    }
    settings = replace(settings, gateway=replace(settings.gateway, **given))
    log_to_stderr(log_level.upper())
    run(settings, lambda url: click.echo(f"tierkv gateway listening on {url}"))
