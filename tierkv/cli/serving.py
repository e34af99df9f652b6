"""The commands that run a server: `tierkv serve` and `tierkv gateway`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import click

from tierkv.api.settings import NodeSettings
from tierkv.config import load
from tierkv.engines import ENGINE_NAMES
from tierkv.errors import ConfigError
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.process import log_to_stderr

_Decorator = Callable[[Any], Any]
EXTERNAL = "external"  # value of --engine for a node that computes nothing itself


def _all_of(*options: _Decorator) -> _Decorator:
    # Reversed, because the help lists options in the order in which decorators stand.
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


_auth_and_tls = _all_of(
    click.option(
        "--auth",
        "auth_file",
        metavar="FILE",
        help=(
            "The file of callers, made by `tierkv token`. Without it every caller may use "
            "every route."
        ),
    ),
    click.option("--tls-cert", metavar="FILE", help="Serve TLS with this certificate (PEM)."),
    click.option(
        "--tls-key", metavar="FILE", help="The certificate's key (PEM), if it is in another file."
    ),
    click.option(
        "--client-ca",
        metavar="FILE",
        help=(
            "Require clients to present a certificate signed by one of the authorities in "
            "this file (mutual TLS)."
        ),
    ),
)
_insecure_and_log_level = _all_of(
    click.option(
        "--insecure",
        is_flag=True,
        help=(
            "Listen on an address that other machines can reach, although callers are not "
            "authenticated. Only for a private network."
        ),
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Lowest level of the lines logged to stderr.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON."),
)
_SETTINGS = {  # table and key, for options with another name than their setting
    "auth_file": ("auth", "file"),
    "tls_cert": ("tls", "cert"),
    "tls_key": ("tls", "key"),
    "client_ca": ("tls", "client_ca"),
    "storage": ("storage", "url"),
    "dtype": ("transformers", "dtype"),
    "max_context": ("transformers", "max_context"),
}


def _settings_in(
    options: Mapping[str, object], *, table: str, insecure: bool
) -> Iterator[tuple[str, str, object]]:
    """Yield each given command-line option as a setting, in the form (table, key, value)."""
    if insecure:
        yield table, "allow_insecure_bind", True
    for name, value in options.items():
        # An option that was not given is None, False or (). Port 0 equals False, but is given.
        if not (value is None or value is False or value == ()):
            section, key = _SETTINGS.get(name, (table, name))
            yield section, key, value


def _address(port: int) -> _Decorator:
    return _all_of(
        click.option("--host", help="The address to listen on.  [default: 127.0.0.1]"),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            help=f"The port to listen on; 0 chooses a free port.  [default: {port}]",
        ),
    )


@click.command()
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode", "both"]),
    help=("The work of this node: compute prompts, generate from them, or both.  [default: both]"),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=(
        "The config file, TOML with the tables node, auth, tls, cache, handoff, storage, "
        "model and engine. Every setting has a default."
    ),
)
@_address(NodeSettings().node.port)
@click.option(
    "--device",
    help=(
        "The device tier: cuda is an NVIDIA GPU (cuda:1 is the second), cpu keeps it in "
        "RAM.  [default: cpu]"
    ),
)
@click.option(
    "--storage",
    metavar="URL",
    help=(
        "The storage tier, through which nodes hand prompts over: file:///DIRECTORY, "
        "redis://HOST:PORT/DB, memory:// or none.  [default: files in "
        "$XDG_CACHE_HOME/tierkv/store, or in ~/.cache/tierkv/store if the variable is not "
        "set]"
    ),
)
@click.option("--name", help="The name of this node in logs and tickets.")
@click.option(
    "--engine",
    type=click.Choice([*ENGINE_NAMES, EXTERNAL]),
    help=(
        "The engine of this node. With `external`, engines in other processes of this "
        "machine compute and share this node's host tier.  [default: reference]"
    ),
)
@click.option(
    "--model",
    metavar="PATH",
    help="The model to serve: a directory with config.json and weights, or a GGUF file.  "
    "[default: a tiny model of bytes that is built in]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="With --engine transformers: type of the model's weights and KV.  [default: auto, "
    "that of its files]",
)
@click.option(
    "--max-context",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="With --engine transformers: most tokens of prompt and answer.  [default: the "
    "model's own limit]",
)
@click.option(
    "--engine-socket",
    metavar="PATH",
    help=(
        "With --engine external: the Unix socket at which engines connect. The node "
        "answers HTTP after the first engine has described its blocks."
    ),
)
@_auth_and_tls
@click.option(
    "--unix-socket",
    metavar="PATH",
    help="Also listen on this Unix socket, to which only its owner can connect.",
)
@click.option("--no-tcp", is_flag=True, help="Listen on the Unix socket only.")
@_insecure_and_log_level
def serve(
    log_level: str,
    *,
    as_json: bool,
    insecure: bool,
    no_tcp: bool,
    engine: str | None,
    config: Path | None,
    **options: str | int | None,
) -> None:
    """Run a node until SIGTERM or Ctrl-C.

    The node prints one line with its URL to stdout when it is ready, and logs to stderr. Options
    override environment variables (TIERKV_NODE__PORT sets the key port of the table node), which
    override the config file.

    On SIGTERM the node reports at /readyz that it is not ready, refuses new requests, lets running
    requests finish within node.drain_grace_s, and exits with 0. On a second SIGTERM it does not
    wait. It exits with 1 if a store or a device hangs for longer than node.close_limit_s.
    """
    from tierkv.api.server import run  # noqa: PLC0415 - a gateway needs no node

    options["listens_tcp"] = "false" if no_tcp else None
    options["engine"] = None if engine == EXTERNAL else engine
    given = _settings_in(options, table="node", insecure=insecure)
    settings = load(NodeSettings, config, os.environ, given, other_kind=GatewaySettings)
    if (engine == EXTERNAL) != bool(settings.node.engine_socket):
        raise ConfigError(
            "--engine external needs --engine-socket PATH, the socket at which engines connect"
        )
    log_to_stderr(log_level.upper())

    def announce(url: str) -> None:
        _announce(settings.node.role.value, url, as_json=as_json)

    run(settings, announce)


@click.command()
@click.option(
    "--prefill",
    multiple=True,
    metavar="URL",
    help=(
        "A node that computes prompts: http://, https:// or unix:/PATH. Repeat the option "
        "for more nodes."
    ),
)
@click.option(
    "--decode",
    multiple=True,
    metavar="URL",
    help="A node that generates from the computed prompts.",
)
@click.option("--both", multiple=True, metavar="URL", help="A node that does both.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=(
        "The config file, TOML with the tables gateway, auth, tls, limits, deadlines and "
        "health. Every setting but the nodes has a default."
    ),
)
@_address(GatewaySettings().gateway.port)
@_auth_and_tls
@click.option(
    "--node-ca",
    metavar="FILE",
    help=(
        "The authority that signed the certificates of https nodes (PEM).  [default: the "
        "system's authorities]"
    ),
)
@click.option(
    "--node-cert",
    metavar="FILE",
    help="The certificate that the gateway presents to nodes that require one (PEM).",
)
@click.option(
    "--node-key", metavar="FILE", help="The certificate's key (PEM), if it is in another file."
)
@click.option(
    "--forward-authorization",
    is_flag=True,
    help=(
        "Pass each caller's Authorization header to the nodes. The nodes then decide what "
        "the caller may do and with which tenant's blocks."
    ),
)
@_insecure_and_log_level
def gateway(
    log_level: str,
    *,
    as_json: bool,
    insecure: bool,
    config: Path | None,
    **options: str | int | bool | tuple[str, ...] | None,
) -> None:
    """Run one OpenAI-compatible address in front of prefill and decode nodes.

    The gateway prints one line with its URL to stdout and logs to stderr. Options override
    environment variables (TIERKV_GATEWAY__DECODE sets the key decode of the table gateway, with
    several URLs separated by spaces), which override the config file. Set
    TIERKV_GATEWAY__NODE_TOKEN to the token for the nodes.

    If a node dies, another node continues its answers. On SIGTERM the gateway refuses new requests,
    lets streams end within gateway.drain_grace_s, and exits with 0.
    """
    from tierkv.gateway.server import run  # noqa: PLC0415 - a node needs no gateway

    log_to_stderr(log_level.upper())
    given = _settings_in(options, table="gateway", insecure=insecure)
    settings = load(GatewaySettings, config, os.environ, given, other_kind=NodeSettings)
    run(settings, lambda url: _announce("gateway", url, as_json=as_json))


def _announce(role: str, url: str, *, as_json: bool) -> None:
    ready = {"role": role, "url": url}
    click.echo(json.dumps(ready) if as_json else f"tierkv {role} listening on {url}")
