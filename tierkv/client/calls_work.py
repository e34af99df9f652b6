"""Calls that let a node's own model work, and the question what of a prompt is cached."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from msgspec.structs import replace

from tierkv.api.types import (
    DecodeAnswer,
    DecodeBody,
    GenerateAnswer,
    GenerateBody,
    LookupAnswer,
    LookupBody,
    PrefillAnswer,
    PrefillBody,
)
from tierkv.client import routes
from tierkv.client.calls import Calls, Question, named
from tierkv.client.streams import Stream
from tierkv.sched.explain import Explanation


class WorkCalls(Calls):
    """timeout_s: of this call, where the client's own is not right."""

    async def generate(
        self, body: GenerateBody, *, timeout_s: float | None = None
    ) -> GenerateAnswer:
        body = named(replace(body, stream=False))
        return await self._call(routes.GENERATE, Question(body=body), timeout_s=timeout_s)

    async def prefill(self, body: PrefillBody, *, timeout_s: float | None = None) -> PrefillAnswer:
        """Compute and publish a prompt. Raises HandoffError if it cannot be published."""
        body = named(replace(body, stream=False))
        return await self._call(routes.PREFILL, Question(body=body), timeout_s=timeout_s)

    async def decode(self, body: DecodeBody, *, timeout_s: float | None = None) -> DecodeAnswer:
        """Claim a published prompt and go on. Raises HandoffError if it cannot be claimed."""
        body = named(replace(body, stream=False))
        return await self._call(routes.DECODE, Question(body=body), timeout_s=timeout_s)

    async def lookup(self, body: LookupBody) -> LookupAnswer:
        """Tell in which tiers a prompt's leading tokens are."""
        return await self._call(routes.LOOKUP, Question(body=body))

    async def explain(self, body: LookupBody) -> Explanation:
        """Tell where each of a prompt's blocks is, what is missing first, and why."""
        return await self._call(routes.EXPLAIN, Question(body=body))

    # As they are generated: async with client.stream_generate(body) as stream: async for ... in it

    def stream_generate(
        self, body: GenerateBody
    ) -> AbstractAsyncContextManager[Stream[GenerateAnswer]]:
        return self._stream(routes.GENERATE, replace(body, stream=True))

    def stream_prefill(
        self, body: PrefillBody
    ) -> AbstractAsyncContextManager[Stream[PrefillAnswer]]:
        """The first token comes as soon as it is computed, the answer when all is published."""
        return self._stream(routes.PREFILL, replace(body, stream=True))

    def stream_decode(self, body: DecodeBody) -> AbstractAsyncContextManager[Stream[DecodeAnswer]]:
        return self._stream(routes.DECODE, replace(body, stream=True))
