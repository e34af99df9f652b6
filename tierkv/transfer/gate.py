"""The layer gate: lets the engine start on layer i as soon as that layer's bytes have arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future

from tierkv.errors import GateTimeoutError
from tierkv.gpu.protocol import Event, Stream
from tierkv.transfer.completion import EventPoller

Submission = Future[tuple[Event, ...]]  # one event per layer, known once the copy is submitted


class LayerGate:
    """All movements that a request waits for before it may read its blocks, layer by layer.

    Several movements can stand behind one gate: the request's own load, loads of the same blocks
    that other requests started, and a copy within the device. With none the gate is open.

    A gate keeps its events for as long as it lives: a late waiter gets the same answer as an
    early one. A failed movement fails the layer it broke at and every later one, each time.
    """

    def __init__(self, num_layers: int, submissions: Sequence[Submission], poller: EventPoller):
        self.num_layers = num_layers
        self._submissions = tuple(submissions)
        self._poller = poller

    def wait_on(self, stream: Stream, layer: int, timeout_s: float) -> None:
        """Let nothing submitted to `stream` after this run before `layer` is there.

        For an engine's thread, never the event loop's. Raises GateTimeoutError if the copy was
        not even submitted (or, on a CPU stream, not done) in time, or what made the load fail.
        """
        deadline = time.monotonic() + timeout_s
        for submission in self._submissions:
            try:
                events = _events(submission, max(deadline - time.monotonic(), 0.0))
            except TimeoutError as error:
                raise GateTimeoutError(f"layer {layer} was not on its way in time") from error
            stream.wait(events[layer], max(deadline - time.monotonic(), 0.0))

    def is_open(self, layer: int) -> bool:
        """Whether `layer` is there. Never blocks; raises what made its load fail."""
        for submission in self._submissions:
            if not submission.done() or not _events(submission, 0.0)[layer].is_done:
                return False
        return True

    async def layer(self, layer: int, timeout_s: float) -> None:
        """Return when `layer` is there. Raises GateTimeoutError, or what made its load fail."""
        try:
            async with asyncio.timeout(timeout_s):
                for submission in self._submissions:
                    events = await asyncio.shield(asyncio.wrap_future(submission))
                    await self._poller.done(events[layer])
        except TimeoutError as error:
            raise GateTimeoutError(f"layer {layer} did not arrive in {timeout_s:g} s") from error

    async def all_layers(self, timeout_s: float) -> None:
        await self.layer(self.num_layers - 1, timeout_s)


def _events(submission: Submission, timeout_s: float) -> tuple[Event, ...]:
    error = submission.exception(timeout_s)
    if error is not None:
        raise error.with_traceback(None)  # who asks often would else keep every answer
    return submission.result()


def submitted(events: tuple[Event, ...]) -> Submission:
    """A movement that is on its way already."""
    future: Submission = Future()
    future.set_result(events)
    return future
