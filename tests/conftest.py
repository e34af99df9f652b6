"""For every test: uvloop, as in production, and no blocking call of tierkv's on the loop."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Iterator

# Its pytest plugin would import it at the end of a run, where the stack is so deep that CPython
# 3.11's parser fails ("AST constructor recursion depth mismatch").
import hypothesis
import pytest
import uvloop
from blockbuster import BlockBuster

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

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
    """A run that is told to end says what it has found so far, as one that is interrupted does."""
    if not hasattr(config, "workerinput"):  # pytest-xdist's, of a worker
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: object) -> None:
    """A test that reaches its time limit ends its worker: say so where the test is named."""
    config = sched.config  # type: ignore[attr-defined]
    limit_s = config.getoption("timeout") or config.getini("timeout")
    report.longrepr = (
        f"{report.longrepr}\n{crashitem} ended its worker, as a test does that reaches its time "
        f"limit, which is {limit_s} s unless it has one of its own; the others went on"
    )


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
        function.can_block_in("tierkv/refmodel/engine.py", "running")
        # Once, when a store of a kind that is not tierkv's own is opened.
        function.can_block_in("tierkv/storage/factory.py", "_brought")
    blockbuster.activate()
    try:
        yield
    finally:
        blockbuster.deactivate()
