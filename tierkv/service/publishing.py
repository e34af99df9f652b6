"""Publishes that outlive whoever asked for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierkv.errors import ShuttingDownError, TierKVError
from tierkv.pd.handoff import Published, PublishStream
from tierkv.tasks import expected, task_group

log = logging.getLogger("tierkv.handoff")


@dataclass(slots=True, eq=False)
class Publishing:
    """One prompt on its way out under one ticket.

    stream: where it goes out while it is computed; None once all of it is computed.
    refused: why the task was cancelled, if it was.
    """

    task: asyncio.Task[Published | TierKVError]
    stream: PublishStream | None = None
    refused: TierKVError | None = None

    @property
    def has_failed(self) -> bool:
        if not self.task.done():
            return False
        return self.task.cancelled() or isinstance(self.task.result(), TierKVError)

    async def published(self) -> Published:
        """The outcome; a cancel ends the wait alone. Raises HandoffError, StoreUnavailableError,
        DuplicateRequestError, or why it was given up."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise self.refused or ShuttingDownError("this node was stopped while publishing")
        outcome = self.task.result()
        if isinstance(outcome, TierKVError):
            raise outcome
        return outcome

    def give_up(self, why: TierKVError) -> None:
        """There will be no ticket; who waits for the outcome gets `why`."""
        self.refused = self.refused or why
        self.task.cancel()


class Publishings:
    """The publishes under way, each in a task of its own. Leaving `running` waits for them."""

    def __init__(self) -> None:
        self._open: set[Publishing] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with task_group() as self._tasks:
            yield

    def start(
        self, work: Coroutine[None, None, Published], stream: PublishStream | None = None
    ) -> Publishing:
        """Run `work`, waited for or not. An expected failure is its outcome, not the service's."""
        task = self._tasks.create_task(_outcome(work), name="tierkv-publish")
        publishing = Publishing(task, stream)
        self._open.add(publishing)

        # Not in the task: one that is cancelled before its first step never runs its `finally`.
        def ended(_: asyncio.Task[Published | TierKVError]) -> None:
            self._open.discard(publishing)
            work.close()

        task.add_done_callback(ended)
        return publishing

    def give_up(self) -> None:
        """Give all up; no ticket will exist for them."""
        for publishing in list(self._open):
            publishing.give_up(ShuttingDownError("this node was stopped while publishing"))


async def _outcome(work: Coroutine[None, None, Published]) -> Published | TierKVError:
    outcome = await expected(work)
    if isinstance(outcome, TierKVError):
        log.warning("a prompt was not published: %s", outcome)
    return outcome
