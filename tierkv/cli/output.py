"""Output of all commands: JSON on stdout, and progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

_SHOWN_AFTER_S = 1.0  # what is done by then needs no progress
_EVERY_S = 0.2
_CLEAR = "\r\x1b[K"  # back to the start of an empty line

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def print_json(answer: object) -> None:
    """Print one JSON value to stdout."""
    click.echo(json.dumps(answer, indent=2))


class Progressing:
    """The progress of a command, as text for a terminal.

    Args:
        doing: what the command does, such as "reading".
        unit: what `done` counts, such as "values"; "" to show no count.

    Attributes:
        done: number of units so far.
    """

    def __init__(self, doing: str, unit: str) -> None:
        self.done = 0
        self._doing = doing
        self._unit = unit

    def so_far(self, done: int) -> None:
        self.done = done

    def one_more(self) -> None:
        self.done += 1

    def __str__(self) -> str:
        return f"{self._doing} ({self.done} {self._unit})" if self._unit else self._doing


@contextmanager
def progress(doing: str, unit: str = "") -> Iterator[Progressing]:
    """Show progress on stderr if the body takes longer than a second and stderr is a terminal.

    The body must print nothing to stdout.

    Args:
        doing: what the command does, such as "reading".
        unit: what is counted, such as "values"; "" to show no count.

    Yields:
        The object in which the body counts.
    """
    state = Progressing(doing, unit)
    if not sys.stderr.isatty():
        yield state
        return
    over = threading.Event()
    shower = threading.Thread(target=_show, args=(state, over), daemon=True)
    shower.start()
    try:
        yield state
    finally:
        over.set()
        shower.join()


def _show(state: Progressing, over: threading.Event) -> None:
    if over.wait(_SHOWN_AFTER_S):
        return
    start = time.monotonic() - _SHOWN_AFTER_S
    while True:
        click.echo(f"{_CLEAR}{state} {time.monotonic() - start:.0f} s", err=True, nl=False)
        if over.wait(_EVERY_S):
            break
    click.echo(_CLEAR, err=True, nl=False)
