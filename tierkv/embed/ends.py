"""What happens to embedded services when their process forks or exits."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class Ending(Protocol):
    def forked(self) -> None:
        """Called in a forked child: the loop's thread does not exist here."""

    def exiting(self) -> None:
        """Called when the interpreter is about to exit, before any thread pool has ended."""


_open: WeakSet[Ending] = WeakSet()


def watch(service: Ending) -> None:
    """Tell `service` of forks and of the exit until it is garbage or `unwatch`ed."""
    _open.add(service)


def unwatch(service: Ending) -> None:
    _open.discard(service)


def _on_fork() -> None:
    for service in list(_open):
        service.forked()
    _open.clear()


def _on_exit() -> None:
    for service in list(_open):
        service.exiting()


def _before_thread_pools_end(call: Callable[[], None]) -> None:
    """`atexit` comes too late: by then concurrent.futures has ended every pool of the process, and
    with them the lanes that the service needs to finish its copies. What it uses itself to be
    called early runs in reverse order of registration, so that we, who import it, come first."""
    early: Callable[[Callable[[], None]], object] | None = vars(threading).get("_register_atexit")
    (early or atexit.register)(call)


os.register_at_fork(after_in_child=_on_fork)
_before_thread_pools_end(_on_exit)
