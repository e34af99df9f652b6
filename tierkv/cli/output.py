"""Output that all commands share: JSON on stdout, and progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

_CLEAR = "\r\x1b[K"  # back to the start of an empty line

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def print_json(answer: object) -> None:
    """Print one JSON value to stdout."""
    click.echo(json.dumps(answer, indent=2))


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Show on stderr the name of the work in the `with` block, and its seconds so far.

    The line appears after one second, and only on a terminal. The block must print nothing to
    stdout.

    Args:
        doing: name of the work, such as "reading".
    """
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    shower = threading.Thread(target=_show, args=(doing, over), daemon=True)
    shower.start()
    try:
        yield
    finally:
        over.set()
        shower.join()


def _show(doing: str, over: threading.Event) -> None:
    seconds = 0
    while not over.wait(1.0):
        seconds += 1
        click.echo(f"{_CLEAR}{doing} {seconds} s", err=True, nl=False)
    if seconds:
        click.echo(_CLEAR, err=True, nl=False)
