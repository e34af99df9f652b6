"""One prompt's answer: admitted, relayed, turned into text, ended by a stop text or by length."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Sequence

from tierkv.gateway import relay
from tierkv.gateway.gateway import Backend
from tierkv.gateway.openai import FinishReason
from tierkv.gateway.prompts import Job
from tierkv.gateway.relay import Delivery
from tierkv.tasks import expected, task_group


class StopFinder:
    """Feed it text in pieces, cut anywhere; the result does not depend on where.

    stops: texts that end the answer and are not part of it; none may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "checked where they came in"
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """What can be shown now: nothing after the first stop string that is complete."""
        if self.has_stopped:
            return ""
        if not self._stops:
            return text
        shown = []
        for character in text:
            self._held += character
            found = max(
                (stop for stop in self._stops if self._held.endswith(stop)), key=len, default=""
            )
            if found:
                self.has_stopped = True
                shown.append(self._held.removesuffix(found))
                self._held = ""
                break
            keep = self._longest_start()
            shown.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return "".join(shown)

    def rest(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )


Say = Callable[[str], Awaitable[None]]


class PromptAnswer:
    """num_tokens: generated ones, up to the one that completed a stop text. finish_reason is None
    until the end. min_tokens: no stop text begins before so many."""

    def __init__(
        self, job: Job, backend: Backend, stops: Sequence[str], *, min_tokens: int
    ) -> None:
        self.job = job
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._backend = backend
        self._stops = StopFinder(stops)
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def run(self, say: Say) -> None:
        """Call `say` with each piece of text. Raises GatewayError.

        A cancel, or an error of `say`, stops the nodes' work on this prompt.
        """
        async with self._backend.admission.slot():
            delivery = Delivery(self.job, self._backend)
            async with task_group() as tasks:
                task = tasks.create_task(expected(relay.run(delivery)), name="tierkv-relay")
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
            said = self._decoder.decode(bytes([token]))
            text.append(said if self.num_tokens <= self._min_tokens else self._stops.feed(said))
            if self._stops.has_stopped:
                break
        return "".join(text)
