"""What one prompt has got from the nodes so far, delivered once and in order, whatever they do."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from tierkv.client.sse import ServerEvent
from tierkv.gateway.backend import Backend
from tierkv.gateway.calls import UNREADABLE
from tierkv.gateway.failures import (
    AttemptError,
    HandoffRefusedError,
    NodeBusyError,
    NodeFailedError,
    NoNodesError,
    OverloadedError,
)
from tierkv.gateway.job import Job
from tierkv.gateway.nodes import BackendNode, usable
from tierkv.refmodel.config import VOCAB_SIZE

log = logging.getLogger("tierkv.gateway")

T = TypeVar("T")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Matched(msgspec.Struct):
    device: int
    host: int
    storage: int


class Done(msgspec.Struct):
    """The summary that ends a node's stream; times in seconds."""

    computed_tokens: int
    matched: _Matched
    queue_s: float
    time_to_first_token_s: float


class Delivery:
    """The tokens of one prompt, and which nodes have failed it. Owned by one `relay.run`."""

    def __init__(self, job: Job, backend: Backend) -> None:
        self.job = job
        self.backend = backend
        self.tokens: list[int] = []
        self.cached_tokens: int | None = None  # of the prompt, when a node first told
        self.is_claimed = False  # a decode node has begun to answer
        self.speakers: set[BackendNode] = set()  # whose tokens these are
        self.is_divided = False  # a node cannot use another's KV: may be of another model
        self._failed: set[BackendNode] = set()
        self.num_attempts = 0
        self._num_calls = 0
        self._nonce = secrets.token_hex(8)
        self._changed = asyncio.Event()
        self._started = asyncio.get_running_loop().time()

    # For who delivers

    async def news(self, sent: int) -> Sequence[int]:
        """Tokens from number `sent` on; none if something else has happened."""
        if len(self.tokens) == sent:
            self._changed.clear()
            await self._changed.wait()
        return self.tokens[sent:]

    async def pause(self) -> None:
        """Before trying again: longer with each attempt."""
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2.0**self.num_attempts, _LONGEST_PAUSE_S))

    def wake(self, _: object = None) -> None:
        self._changed.set()

    # For who gets them

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.job.max_tokens

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def next_id(self) -> str:
        """An id for one call, as no other has it: a node may still be ending an earlier one, and
        a caller may use its own id twice."""
        self._num_calls += 1
        return f"{self.job.request_id}.{self._nonce}.{self._num_calls}"

    def accept(self, node: BackendNode, offset: int, tokens: Sequence[int]) -> int:
        """Take tokens that follow the first `offset`; the offset after them.

        Raises NodeFailedError if they are none, or not those that came before from elsewhere.
        """
        if not all(0 <= token < VOCAB_SIZE for token in tokens):
            raise self._blame(node, "answers tokens that the model does not have")
        known = self.tokens[offset : offset + len(tokens)]
        if list(tokens[: len(known)]) != known:
            raise self._blame(node, "goes on otherwise than the node before it")
        new = tokens[len(known) :]
        if new:
            if not self.tokens:
                self.backend.metrics.observe_first_token(self.now() - self._started)
            self.speakers.add(node)
            self.tokens += new[: self.job.max_tokens - len(self.tokens)]
            self._changed.set()
        return offset + len(tokens)

    def _blame(self, node: BackendNode, what: str) -> NodeFailedError:
        node.has_failed(self.now())
        return NodeFailedError(f"{node.url} {what}")

    def note(self, node: BackendNode, error: AttemptError) -> None:
        """An attempt came to nothing. Raises GatewayError if it was the last."""
        # Who has computed the prompt and could not hand it over can go on with it.
        if not (isinstance(error, HandoffRefusedError) and node in self.speakers):
            self._failed.add(node)
        why = {NodeFailedError: "node_failed", NodeBusyError: "node_busy"}
        self.backend.metrics.count_failure(node.url, why.get(type(error), "handoff_refused"))
        self.spend(error)

    def spend(self, error: AttemptError) -> None:
        """Count an attempt. Raises GatewayError if it was the last."""
        self.num_attempts += 1
        log.warning("request %s, attempt %d: %s", self.job.request_id, self.num_attempts, error)
        if self.num_attempts >= self.backend.settings.limits.max_attempts:
            if isinstance(error, NodeBusyError):
                raise OverloadedError(f"all nodes are busy; the last said: {error}") from error
            raise NoNodesError(
                f"gave up after {self.num_attempts} attempts; the last: {error}"
            ) from error

    def fresh(self, nodes: Sequence[BackendNode]) -> list[BackendNode]:
        """Those to choose from that have not failed this prompt."""
        return usable(nodes, self.now(), self._failed)

    def usable(self, nodes: Sequence[BackendNode]) -> list[BackendNode]:
        """The fresh ones; when all have failed this prompt, all get another chance."""
        if not (left := self.fresh(nodes)):
            self._failed.clear()
            left = self.fresh(nodes)
        return left

    # Calls

    async def read(
        self, node: BackendNode, path: str, body: Mapping[str, object], *, offset: int
    ) -> Done:
        """Take all tokens of one streamed answer, the first of which is number `offset`.

        Raises AttemptError, which is noted, or GatewayError.
        """
        try:
            events = self.backend.calls.stream(node, path, self.job, body)
            async with aclosing(events):
                async for event in events:
                    if event.name == "tokens":
                        tokens = self._decode(node, event, _Tokens).tokens
                        offset = self.accept(node, offset, tokens)
                        self.is_claimed |= path == "/v1/decode"
                    elif event.name == "done":
                        return self._decode(node, event, Done)
            raise AssertionError("a stream ends with done or raises")
        except AttemptError as error:
            self.note(node, error)
            raise

    def _decode(self, node: BackendNode, event: ServerEvent, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(event.data, type=kind)
        except UNREADABLE as error:
            raise self._blame(node, f"answers nonsense: {error}") from error

    def learn(self, node: BackendNode, done: Done, tokens: bytes) -> None:
        """Note what an answer tells: what was cached, how fast the node is, what it holds now."""
        found = done.matched.device + done.matched.host + done.matched.storage
        if self.cached_tokens is None:
            self.cached_tokens = min(found, self.job.num_tokens)
        node.learn_rate(done.computed_tokens, done.time_to_first_token_s - done.queue_s)
        self.backend.remember(node, tokens)
