"""Output of all commands as JSON."""

from __future__ import annotations

import json

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def print_json(answer: object) -> None:
    """Print one JSON value to stdout."""
    click.echo(json.dumps(answer, indent=2))
