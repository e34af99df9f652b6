"""Publishes that outlive whoever asked for them: each a task of the engine's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress

from tierkv.errors import ShuttingDownError, TierKVError
from tierkv.gpu.protocol import Event
from tierkv.pd.handoff import Published
from tierkv.pd.stream import Stream
from tierkv.tasks import outlast

log = logging.getLogger("tierkv.engine")


class Publishing:
    """One prompt on its way out. stream: where it goes out while it is computed, None if it does
    not. end: gives the request back, once it is neither computed nor published any more."""

    def __init__(self, stream: Stream | None, end: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Published] = loop.create_future()
        self.outcome.add_done_callback(_retrieve)
        self._ended: asyncio.Future[None] = loop.create_future()
        self._stream = stream
        self._end = end
        self._is_computing = stream is not None
        self._is_publishing = True

    async def published(self) -> Published:
        """Cancelling it ends only the wait. Raises HandoffError, ShuttingDownError."""
        return await asyncio.shield(self.outcome)

    def computed(
        self, first_tokens: Sequence[int], after: Sequence[Event], sampling: Mapping[str, str]
    ) -> None:
        """The prompt is computed and committed; nothing but publishing uses the request now."""
        assert self._stream is not None, "a publish without a stream begins with that"
        self._stream.finish(first_tokens, after, sampling)
        self._is_computing = False
        self._end_if_done()

    async def given_up(self, reason: str) -> None:
        """The prompt will not be computed: tell who waits for it, and return when the request has
        been given back, however often that is cancelled."""
        assert self._stream is not None, "a publish without a stream is not given up"
        self._stream.fail(reason)
        self._is_computing = False
        self._end_if_done()
        await outlast({self._ended}, on_cancel=lambda: None)

    def task_ended(self, task: asyncio.Task[Published | TierKVError]) -> None:
        """Its task, that is."""
        self._is_publishing = False
        self._end_if_done()
        if task.cancelled():
            self.outcome.set_exception(ShuttingDownError("this node was stopped while publishing"))
        elif (unexpected := task.exception()) is not None:
            self.outcome.set_exception(unexpected)
        elif isinstance(result := task.result(), TierKVError):
            log.warning("a prompt was not published: %s", result)
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)

    def _end_if_done(self) -> None:
        if not self._is_computing and not self._is_publishing:
            self._end()
            self._ended.set_result(None)


class Publishings:
    """Those under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Published | TierKVError]] = set()

    def cancel(self) -> None:
        """Give all up; no ticket will exist for them."""
        for task in self._tasks:
            task.cancel()

    def start(
        self,
        tasks: asyncio.TaskGroup,
        work: Coroutine[None, None, Published],
        end: Callable[[], None],
        stream: Stream | None,
    ) -> Publishing:
        """Run `work` in a task of `tasks`, waited for or not; see Publishing for the others."""
        publishing = Publishing(stream, end)
        task = tasks.create_task(_expected(work), name="tierkv-publish")
        self._tasks.add(task)

        # Not in the task: one that is cancelled before its first step never runs its `finally`.
        def ended(task: asyncio.Task[Published | TierKVError]) -> None:
            self._tasks.discard(task)
            work.close()
            publishing.task_ended(task)

        task.add_done_callback(ended)
        return publishing


async def _expected(work: Coroutine[None, None, Published]) -> Published | TierKVError:
    """An expected failure is returned: it is for who waits, not for the engine's group."""
    try:
        return await work
    except TierKVError as error:
        return error


def _retrieve(outcome: asyncio.Future[Published]) -> None:
    """A failed publish nobody waits for any more is no news: its request has been given back."""
    with suppress(asyncio.CancelledError):
        outcome.exception()
