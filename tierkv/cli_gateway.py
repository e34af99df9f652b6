"""The command `tierkv gateway`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierkv.cli_options import address, insecure_and_log_level, settings_in, who_may_call
from tierkv.config import load
from tierkv.gateway.server import run
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.process import log_to_stderr


@click.command()
@click.option(
    "--prefill",
    multiple=True,
    metavar="URL",
    help="A node that computes prompts: http://, https:// or unix:/PATH. Give it again for more.",
)
@click.option("--decode", multiple=True, metavar="URL", help="A node that goes on from there.")
@click.option("--both", multiple=True, metavar="URL", help="A node that does both.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings, as TOML with the tables gateway, auth, tls, limits, deadlines and "
    "health. Everything but the nodes has a default.",
)
@address(8000)
@who_may_call
@click.option(
    "--node-ca",
    metavar="FILE",
    help="For https to the nodes: who signed their certificates (PEM).  [default: the system's]",
)
@click.option(
    "--node-cert",
    metavar="FILE",
    help="For nodes that ask for one: the gateway's certificate (PEM).",
)
@click.option("--node-key", metavar="FILE", help="Its key, if it is not in the same file.")
@click.option(
    "--forward-authorization",
    is_flag=True,
    help="Hand each caller's own Authorization header on to the nodes, which then decide who it "
    "is and whose blocks it works with.",
)
@insecure_and_log_level
def gateway(
    log_level: str,
    *,
    insecure: bool,
    config: Path | None,
    **options: str | int | bool | tuple[str, ...] | None,
) -> None:
    """Put one OpenAI-compatible address in front of prefill and decode nodes.

    Prints one line to stdout with the URL it listens on; the log goes to stderr. Options win over
    environment variables (TIERKV_GATEWAY__DECODE is the key decode of table gateway; several URLs
    with spaces between), and these over the config file. A bearer token for the nodes belongs into
    TIERKV_GATEWAY__NODE_TOKEN.

    A node that dies is replaced in the middle of an answer. On SIGTERM the gateway takes no more
    work, lets streams end within gateway.drain_grace_s, and exits with 0.
    """
    log_to_stderr(log_level.upper())
    given = settings_in(options, table="gateway", insecure=insecure)
    settings = load(GatewaySettings, config, os.environ, given)
    run(settings, lambda url: click.echo(f"tierkv gateway listening on {url}"))
