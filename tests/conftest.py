"""For every test: uvloop, as in production, and no blocking call of tierkv's on the loop."""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import inspect
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Its pytest plugin would import it at the end of a run, where the stack is so deep that CPython
# 3.11's parser fails ("AST constructor recursion depth mismatch").
import hypothesis
import pytest
import pytest_timeout
import uvloop
from blockbuster import BlockBuster

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

_LIMITS = pytest.StashKey[list[Path]]()  # where workers leave word of who reached a time limit

# The same examples in every run, however slow its machine is: a run fails for what was changed, and
# not by chance. New examples are looked for with `--hypothesis-profile=default`.
hypothesis.settings.register_profile(
    "same-each-time",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same-each-time")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, LoopFactory]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_configure(config: pytest.Config) -> None:
    """A run that is told to end says what it has found so far, as one that is interrupted does.
    A test that presses Ctrl-C is one in the background, too."""
    if not hasattr(config, "workerinput"):  # pytest-xdist's, of a worker
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As of whatever a shell's script starts with "&", and so of every command of a test.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's: tell a worker where to leave word if it is ended."""
    node.workerinput["limits"] = tempfile.mkdtemp(prefix="tierkv-limits-")
    node.config.add_cleanup(partial(shutil.rmtree, node.workerinput["limits"]))
    node.config.stash.setdefault(_LIMITS, []).append(Path(node.workerinput["limits"]))


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """A test that reaches its time limit ends its worker: say so where the test is named."""
    reached = [folder / _file_of(crashitem) for folder in sched.config.stash.get(_LIMITS, [])]
    told = [file.read_text() for file in reached if file.exists()]
    report.longrepr = "\n".join([*(told or [str(report.longrepr)]), "the others went on"])


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """pytest-timeout's, for its method "thread": who ends a process first says which test did."""
    timer = threading.Timer(settings.timeout, _end_at_limit, (item, settings))
    timer.name, timer.daemon = f"limit of {item.nodeid}", True
    item.cancel_timeout = timer.cancel  # type: ignore[attr-defined]  # pytest-timeout calls it
    timer.start()
    return True


def _end_at_limit(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
    if not settings.disable_debugger_detection and pytest_timeout.is_debugging():
        return
    try:
        capture = item.config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture(item)
        worker = getattr(item.config, "workerinput", None)
        file = Path(worker["limits"] if worker else tempfile.mkdtemp()) / _file_of(item.nodeid)
        told = f"this test reached its time limit of {settings.timeout:g} s"
        with file.open("w") as written:
            print(told, *capture.read_global_capture(), sep="\n", file=written, flush=True)
            faulthandler.dump_traceback(written)
        if worker is None:  # what ends here cannot be torn down: what has been found is told
            terminal = item.config.pluginmanager.getplugin("terminalreporter")
            found = file.read_text()
            shutil.rmtree(file.parent)
            terminal.pytest_runtest_logreport(
                pytest.TestReport(item.nodeid, item.location, {}, "failed", found, "call")
            )
            terminal.summary_failures()
            terminal.short_test_summary()
            terminal.summary_stats()
            terminal.write_line(f"{item.nodeid}: {told}; no test after it was run")
    finally:
        sys.stdout.flush()
        os._exit(1)


def _file_of(nodeid: str) -> str:
    return hashlib.sha256(nodeid.encode()).hexdigest()


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """A blocking call on the loop's thread, with tierkv on the stack, raises BlockingError."""
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    blockbuster = BlockBuster(scanned_modules=["tierkv"])
    for function in blockbuster.functions.values():
        # At shutdown, waiting for the device beats freeing memory in flight.
        function.can_block_in("tierkv/transfer/mover.py", "running")
        function.can_block_in("tierkv/gpu/cpu.py", "close")
        # Tests allocate host slots on the loop, a service in a thread; the kernel's own files
        # are read in microseconds.
        function.can_block_in("tierkv/gpu/room.py", "memory_limits")
        function.can_block_in("tierkv/refmodel/engine.py", "running")
        function.can_block_in("tierkv/hf/engine.py", "running")
        # Once, when a store of a kind that is not tierkv's own is opened.
        function.can_block_in("tierkv/storage/factory.py", "_installed_kind")
    blockbuster.activate()
    try:
        yield
    finally:
        blockbuster.deactivate()
