"""Output of all commands: JSON on stdout, and progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

_SHOWN_AFTER_S = 1.0  # what is done by then needs no progress
_EVERY_S = 0.2

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


def print_json(answer: object) -> None:
    """Print one JSON value to stdout."""
    click.echo(json.dumps(answer, indent=2))


class Progressing:
    """Progress of a command. done: number of `unit` so far."""

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
    from rich.console import Console  # noqa: PLC0415 - only what takes long shows it
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout may be a pipe
        redirect_stderr=False,
    )
    with shown:
        task = shown.add_task(str(state), total=None)
        while not over.wait(_EVERY_S):
            shown.update(task, description=str(state))
