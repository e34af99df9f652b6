"""Tokens as server-sent events: each as soon as it is there, then a summary or a problem.

    event: tokens      data: {"tokens": [104, 101], "text": "he"}
    event: done        data: what the route answers without `stream`
    event: error       data: a problem, as the body of an error answer would be

The head of the answer is sent with the first event, so what fails before the first token is an
ordinary error answer with its own status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from tierkv.api.problems import log_if_unexpected, problem_of
from tierkv.api.sse import open_stream, write
from tierkv.refmodel.generation import OnTokens
from tierkv.refmodel.text import decode
from tierkv.tasks import task_group

Work = Callable[[OnTokens], Awaitable[msgspec.Struct]]


class TokensEvent(msgspec.Struct, frozen=True):
    """Tokens that follow those of the events before."""

    tokens: Sequence[int]
    text: str


class _Feed:
    """What a generation has told so far, and what of it has been sent. It holds no more than
    the request's max_tokens, and a slow reader does not slow the model."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._changed = asyncio.Event()

    def tell(self, tokens: Sequence[int]) -> None:
        # A run that begins again tells the same tokens again: the same, so only new ones count.
        self._tokens += tokens[len(self._tokens) :]
        self._changed.set()

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def wake(self, _: object) -> None:
        self._changed.set()

    async def news(self, sent: int) -> list[int]:
        """Tokens from number `sent` on; none if something else has happened."""
        if len(self._tokens) == sent:
            self._changed.clear()
            await self._changed.wait()
        return self._tokens[sent:]


async def stream(request: web.Request, work: Work) -> web.StreamResponse:
    """Run `work` and answer with its tokens. Raises its TierKVError if it fails before the first.

    A cancel, which is what a client that goes away causes, cancels `work`.
    """
    feed = _Feed()
    response: web.StreamResponse | None = None
    sent = 0
    async with task_group() as tasks:
        task = tasks.create_task(_outcome(work, feed.tell), name="tierkv-stream")
        task.add_done_callback(feed.wake)
        while not task.done() or sent < feed.num_tokens:
            new = await feed.news(sent)
            if new:
                response = response or await open_stream(request)
                news = msgspec.json.encode(TokensEvent(new, decode(new)))
                await _tell(response, "tokens", news)
                sent += len(new)
    outcome = task.result()
    if isinstance(outcome, Exception):
        if response is None:
            raise outcome
        log_if_unexpected(request, outcome)
        await _tell(response, "error", msgspec.json.encode(problem_of(request, outcome)))
    else:
        response = response or await open_stream(request)
        await _tell(response, "done", msgspec.json.encode(outcome))
    await response.write_eof()
    return response


async def _outcome(work: Work, on_tokens: OnTokens) -> msgspec.Struct | Exception:
    """Failures are returned: they are for the client, whose stream has its own way to end."""
    try:
        return await work(on_tokens)
    except Exception as error:  # noqa: BLE001 - what nobody expected is logged
        return error


async def _tell(response: web.StreamResponse, event: str, data: bytes) -> None:
    await write(response, b"event: %b\ndata: %b\n\n" % (event.encode(), data))
