"""One prompt's answer: admitted, relayed, turned into text, ended by a stop text or by length."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Sequence

from tierkv.gateway import relay
from tierkv.gateway.backend import Backend
from tierkv.gateway.delivery import Delivery
from tierkv.gateway.failures import GatewayError
from tierkv.gateway.job import Job
from tierkv.gateway.openai import FinishReason
from tierkv.gateway.stops import StopFinder
from tierkv.tasks import task_group

Say = Callable[[str], Awaitable[None]]


class PromptAnswer:
    """num_tokens: generated ones, up to the one that completed a stop text. finish_reason is None
    until the end."""

    def __init__(self, job: Job, backend: Backend, stops: Sequence[str]) -> None:
        self.job = job
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._backend = backend
        self._stops = StopFinder(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def run(self, say: Say) -> None:
        """Call `say` with each piece of text. Raises GatewayError.

        A cancel, or an error of `say`, stops the nodes' work on this prompt.
        """
        async with self._backend.admission.slot():
            delivery = Delivery(self.job, self._backend)
            async with task_group() as tasks:
                task = tasks.create_task(_outcome(delivery), name="tierkv-relay")
                task.add_done_callback(delivery.wake)
                while not task.done() or self.num_tokens < len(delivery.tokens):
                    text = self._read(await delivery.news(self.num_tokens))
                    if text:
                        await say(text)
                    if self._stops.has_stopped:
                        break
                failure = task.result() if task.done() else None
                task.cancel()
            self.cached_tokens = delivery.cached_tokens or 0
            self._backend.metrics.count_tokens(self.num_tokens)
            if self._stops.has_stopped:
                self.finish_reason = "stop"
                return
            if failure is not None:
                raise failure
            if rest := self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.rest():
                await say(rest)
            self.finish_reason = "stop" if self._stops.has_stopped else "length"

    def _read(self, tokens: Sequence[int]) -> str:
        text = []
        for token in tokens:
            self.num_tokens += 1
            text.append(self._stops.feed(self._decoder.decode(bytes([token]))))
            if self._stops.has_stopped:
                break
        return "".join(text)


async def _outcome(delivery: Delivery) -> GatewayError | None:
    """A failure is returned: tokens that came before it are delivered first."""
    try:
        await relay.run(delivery)
    except GatewayError as error:
        return error
    return None
