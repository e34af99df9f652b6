"""`tierkv config`: the settings that a node or gateway would use, and the source of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from tierkv.api.settings import NodeSettings, default_storage_url, masked, masked_url
from tierkv.cli.output import json_option, print_json
from tierkv.config import flat, load_traced, names_in, suggestion
from tierkv.errors import ConfigError
from tierkv.gateway.settings import GatewaySettings

_PREFIX = "TIERKV_"


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--of",
    "role",
    type=click.Choice(["node", "gateway"]),
    default="node",
    show_default=True,
    help="Print the settings of `tierkv serve` (node) or of `tierkv gateway` (gateway).",
)
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The config file to read, as for `tierkv serve` or `tierkv gateway`.",
)
@json_option
def config(names: tuple[str, ...], *, role: str, path: Path | None, as_json: bool) -> None:
    """Print the settings in force and the source of each.

    These are the settings that `tierkv serve` or `tierkv gateway` would use in this environment,
    with secrets masked. NAMES are settings or tables, such as cache or node.port; without NAMES,
    all settings are printed. GET /v1/config returns the settings of a running node.

    The command exits with 1 if a setting does not exist or has a wrong type. The error suggests a
    name for a misspelled one.
    """
    kinds: list[type[msgspec.Struct]] = [NodeSettings, GatewaySettings]
    kind, other_kind = kinds if role == "node" else reversed(kinds)
    settings, origins = load_traced(kind, path, os.environ, other_kind=other_kind)
    known = names_in(kind)
    values = {name: value for name, value in flat(masked(settings)).items() if name in known}
    if role == "node" and not values["storage.url"]:
        values["storage.url"] = masked_url(default_storage_url(os.environ))
    chosen = _chosen(names, known, values)
    _hint_unread_variables(os.environ, known)
    if as_json:
        rows = {
            name: {"value": values[name], "from": origins.get(name, "default")} for name in chosen
        }
        print_json({"settings": rows})
        return
    shown = {name: _readable(values[name]) for name in chosen}
    width = max(len(name) for name in chosen)
    most = max(len(value) for value in shown.values())
    for name, value in shown.items():
        click.echo(f"{name:{width}}  {value:{min(most, 40)}}  {origins.get(name, 'default')}")


def _chosen(names: Sequence[str], known: Sequence[str], values: Mapping[str, Any]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no setting {name}{suggestion(name, known)}")
    return [
        one
        for one in values
        if not names or any(one == name or one.startswith(f"{name}.") for name in names)
    ]


def _hint_unread_variables(environ: Mapping[str, str], known: Sequence[str]) -> None:
    variables = {f"{_PREFIX}{name.replace('.', '__')}".upper(): name for name in known}
    single = {variable.replace("__", "_"): variable for variable in variables}
    for variable in environ:
        meant = single.get(variable)
        if meant is not None and variable not in variables:
            click.echo(f"the variable {variable} has no effect: did you mean {meant}?", err=True)


def _readable(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or '""'
    return '""' if value == "" else str(value)
