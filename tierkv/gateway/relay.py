"""Generating the answer to one prompt at the nodes, even if nodes fail while they generate it.

The gateway has no tokenizer: nodes turn text into tokens, and tokens into text.

If a node fails in the middle of an answer, the gateway asks another node to generate from the
prompt and the tokens received so far. Every node chooses the same next token from the same tokens,
seed and position, so the answer is the one that the first node would have given. The second node
finds the blocks that the first node has published, and computes only the rest.

In a hand-off, a prefill node computes a prompt and publishes it under a ticket, and a decode node
claims the ticket and continues. The gateway calls both at the same time, so that the decode node
fetches blocks while the prefill node computes. The gateway chooses the ticket's id, so another
prefill node can publish under this id, and another decode node can claim it. The gateway replaces a
failed node in this way until it has received the decode node's first token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec

from tierkv.api.types import Logprobs
from tierkv.cache.keys import count
from tierkv.client.http import Body
from tierkv.client.streams import ServerEvent
from tierkv.errors import TierKVError
from tierkv.gateway.calls import UNREADABLE
from tierkv.gateway.failures import (
    AttemptError,
    HandoffRefusedError,
    InvalidRequestError,
    NodeBusyError,
    NodeFailedError,
    NoNodesError,
    OutOfTimeError,
    OverloadedError,
)
from tierkv.gateway.gateway import Backend
from tierkv.gateway.nodes import BackendNode, usable
from tierkv.gateway.openai import AnswerPiece, FinishReason, Placed
from tierkv.gateway.prompts import Job, empty, too_long
from tierkv.gateway.routing import CachedTokens, choose_decode, choose_prefill
from tierkv.pd.tickets import HandoffProblem
from tierkv.tasks import deadline, expected, task_group
from tierkv.tokenizers import StopFinder

Send = Callable[[AnswerPiece], Awaitable[None]]


class PromptAnswer:
    """The answer to one prompt.

    Attributes:
        job: The prompt and its sampling parameters. At the end of `run`, a prompt given as text or
            messages is replaced by its tokens.
        num_tokens: Number of generated tokens. The token that completes a stop text is the last one
            that counts.
        cached_tokens: Number of prompt tokens that were found in the cache; 0 before the end of
            `run`.
        finish_reason: Reason why the answer ended; None before its end.

    Args:
        job: The prompt and its sampling parameters.
        backend: The nodes.
        stops: Texts that end the answer.
        min_tokens: Number of tokens at the start of the answer in which stop texts are ignored.
    """

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
        self._num_characters = 0

    async def run(self, send: Send) -> None:
        """Generate the answer, and call `send` with each piece of it in order.

        If this call is cancelled or `send` raises, the nodes stop generating.

        Args:
            send: Sends a piece of the answer to the caller.

        Raises:
            GatewayError: The prompt could not be answered.
        """
        async with self._backend.admission.slot():
            delivery = Delivery(self.job, self._backend)
            async with task_group() as tasks:
                task = tasks.create_task(expected(run(delivery)), name="tierkv-relay")
                task.add_done_callback(delivery.wake)
                while not task.done() or self.num_tokens < len(delivery.tokens):
                    piece = self._read(delivery, await delivery.news(self.num_tokens))
                    if piece.text or piece.logprobs:
                        await send(piece)
                    if self._stops.has_stopped:
                        break
                failure = task.result() if task.done() else None
                task.cancel()
            self.job = delivery.job
            self.cached_tokens = delivery.cached_tokens or 0
            self._backend.metrics.tokens.inc(self.num_tokens)
            if self._stops.has_stopped:
                self.finish_reason = "stop"
                return
            if failure is not None:
                raise failure
            if rest := self._stops.feed(delivery.rest()) + self._stops.rest():
                await send(AnswerPiece(rest))
            has_stopped = self._stops.has_stopped or delivery.has_stopped
            self.finish_reason = "stop" if has_stopped else "length"

    def _read(self, delivery: Delivery, pieces: Sequence[str]) -> AnswerPiece:
        text: list[str] = []
        logprobs: list[Placed] = []
        for piece in pieces:
            if delivery.logprobs:
                logprobs.append((self._num_characters, delivery.logprobs[self.num_tokens]))
            self._num_characters += len(piece)
            self.num_tokens += 1
            text.append(piece if self.num_tokens <= self._min_tokens else self._stops.feed(piece))
            if self._stops.has_stopped:
                break
        return AnswerPiece("".join(text), logprobs)


log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class _Tokens(msgspec.Struct):
    """A node's event with new tokens of an answer.

    If `tokens` is empty, `text` is the end of the answer, from tokens that were sent before.
    """

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    text: str
    pieces: list[str]
    logprobs: list[Logprobs | None] | None = None


class _Matched(msgspec.Struct):
    device: int
    host: int
    storage: int
    direct: int = 0  # older nodes count these tokens in `storage`


class Done(msgspec.Struct):
    """The event that ends a node's stream, with the fields that the gateway reads.

    Attributes:
        matched: Number of prompt tokens that the node found on each tier.
        finish_reason: "stop" if the model ended the text, otherwise "length".
        producer: The node that published the claimed prompt; None if the decode node could not
            claim the prompt and computed it; "" if the call was not a claim.
    """

    matched: _Matched
    finish_reason: FinishReason = "length"  # older nodes do not send it
    producer: str | None = ""


class Delivery:
    """The tokens of one answer received so far, and the state of the attempts to get all of them.

    Attributes:
        job: The prompt and its sampling parameters.
        backend: The nodes.
        tokens: The tokens received so far.
        logprobs: Log probabilities of each received token; empty if the job asks for none.
        cached_tokens: Number of prompt tokens that were cached at the node whose stream was the
            first to end with the event `done`; None before this event.
        has_stopped: True once the model has ended the text.
        is_claimed: True once a decode node has sent tokens in answer to a claim, even if the node
            found no usable ticket and computed the prompt itself.
        contributing_nodes: Nodes that sent some of the received tokens.
        publisher: The node that published the prompt; None before the publish.
        has_incompatible_nodes: True once a node could not use another node's KV. The nodes may then
            have different models.
        num_attempts: Number of failed attempts.

    Args:
        job: The prompt and its sampling parameters.
        backend: The nodes.
    """

    def __init__(self, job: Job, backend: Backend) -> None:
        self.job = job
        self.backend = backend
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self._pieces: list[str] = []  # text of each token
        # The last event without tokens: the number of tokens before it, and its text.
        self._held_back = (0, "")
        self.cached_tokens: int | None = None
        self.has_stopped = False
        self.is_claimed = False
        self.contributing_nodes: set[BackendNode] = set()
        self.publisher: BackendNode | None = None
        self.has_incompatible_nodes = False
        self._failed: set[BackendNode] = set()
        self.num_attempts = 0
        self._num_calls = 0
        self._nonce = secrets.token_hex(8)
        self._changed = asyncio.Event()
        self._started = asyncio.get_running_loop().time()

    # For the task that delivers

    async def news(self, sent: int) -> Sequence[str]:
        """Wait until more than `sent` tokens have been received, or `wake` is called.

        Returns:
            The texts of the tokens after the first `sent` ones, one per token; empty if `wake` was
                called without a new token.
        """
        if len(self.tokens) == sent:
            self._changed.clear()
            await self._changed.wait()
        return self._pieces[sent:]

    def rest(self) -> str:
        """Return the text that a node had held back and sent after the last token; may be ""."""
        behind, text = self._held_back
        return text if behind == len(self.tokens) else ""

    async def pause(self) -> None:
        """Wait before the next attempt: 20 ms, doubled with each failed attempt up to 1 s."""
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2.0**self.num_attempts, _LONGEST_PAUSE_S))

    def wake(self, _: object = None) -> None:
        """End the wait for new tokens in `news`. The argument is ignored."""
        self._changed.set()

    # For the tasks that read nodes

    @property
    def is_done(self) -> bool:
        return self.has_stopped or len(self.tokens) >= self.job.max_tokens

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def next_id(self) -> str:
        """Return an id for one call to a node, different from the ids of all other calls."""
        self._num_calls += 1
        return f"{self.job.request_id}.{self._nonce}.{self._num_calls}"

    def accept(self, node: BackendNode, offset: int, received: _Tokens) -> int:
        """Append those tokens of an event that are new, until the answer has `max_tokens` tokens.

        Tokens that were already received, from this node or another one, must be the same.

        Args:
            node: The node that sent the event.
            offset: Position in the answer of the event's first token.
            received: The event.

        Returns:
            Position in the answer after the event's last token.

        Raises:
            NodeFailedError: The event's tokens differ from those received before, or a token has no
                text or no log probabilities. The failure is recorded in `node`.
            HandoffRefusedError: The job asks for log probabilities, and a decode node sent the
                ticket's first token before the prefill node did. Only the prefill node has the log
                probabilities of this token.
        """
        tokens, pieces = received.tokens, received.pieces
        if len(pieces) != len(tokens):
            raise self._node_error(node, "sent tokens without their texts")
        known = self.tokens[offset : offset + len(tokens)]
        if list(tokens[: len(known)]) != known:
            raise self._node_error(
                node, "continued the answer with other tokens than the node before it"
            )
        if not tokens:
            self._held_back = (offset, received.text)
        if len(known) < len(tokens):
            if not self.tokens:
                self.backend.metrics.first_token.observe(self.now() - self._started)
            self.contributing_nodes.add(node)
            stop = self.job.max_tokens - len(self.tokens) + len(known)
            if self.job.num_logprobs is not None:
                self.logprobs += self._whole_logprobs(node, received, len(known))[
                    : stop - len(known)
                ]
            self.tokens += tokens[len(known) : stop]
            self._pieces += pieces[len(known) : stop]
            self._changed.set()
        return offset + len(tokens)

    def _whole_logprobs(self, node: BackendNode, received: _Tokens, known: int) -> list[Logprobs]:
        found = (received.logprobs or [])[known:]
        if len(found) < len(received.tokens) - known:
            raise self._node_error(node, "sent tokens without their log probabilities")
        if None in found:
            raise HandoffRefusedError(
                HandoffProblem.INCOMPLETE.value,
                f"{node.url} gave a token of the ticket without its log probabilities",
            )
        return [one for one in found if one is not None]

    def _node_error(self, node: BackendNode, what: str) -> NodeFailedError:
        node.note_failure(self.now())
        return NodeFailedError(f"{node.url} {what}")

    def note(self, node: BackendNode, error: AttemptError) -> None:
        """Record a failed attempt at a node. Further attempts for this prompt avoid the node.

        If the hand-off failed at a node that has sent some of the tokens, the node is not avoided,
        because it can continue the answer by itself.

        Args:
            node: The node.
            error: The failure.

        Raises:
            GatewayError: No further attempt is allowed.
        """
        # A node that has computed the prompt but could not hand it over can continue the answer.
        if not (isinstance(error, HandoffRefusedError) and node in self.contributing_nodes):
            self._failed.add(node)
        why = {NodeFailedError: "node_failed", NodeBusyError: "node_busy"}
        reason = why.get(type(error), "handoff_refused")
        self.backend.metrics.failed.labels(node.url, reason).inc()
        self.spend(error)

    def note_no_ticket(self, node: BackendNode) -> None:
        """Count and log that a decode node computed the prompt itself, without a usable ticket."""
        self.backend.metrics.failed.labels(node.url, "without_ticket").inc()
        text = "request %s: %s could not use the ticket and computed the prompt itself"
        log.warning(text, self.job.request_id, node.url)

    async def check_ticket(self, ticket_id: str) -> None:
        """Check that the store still has a published ticket, by asking the node that published it.

        The call does nothing if no node has published the prompt yet. Without the check, a decode
        node would wait for a lost ticket until the deadline of its claim. Once a decode node has
        answered, the loss is no error.

        Args:
            ticket_id: Id of the ticket.

        Raises:
            HandoffRefusedError: The ticket is lost. The gateway counts this as a failed attempt to
                answer the prompt.
            GatewayError: The ticket is lost, and the gateway may not try again.
        """
        node = self.publisher
        if node is None or await self.backend.calls.has_ticket(node, self.job, ticket_id):
            return
        if not self.is_claimed:
            said = f"{node.url}: the published ticket has left the store"
            error = HandoffRefusedError(HandoffProblem.NOT_YET.value, said)
            self.note(node, error)
            raise error

    def spend(self, error: AttemptError) -> None:
        """Log a failed attempt to answer the prompt, and check that another attempt is allowed.

        Raises:
            GatewayError: the number of attempts has reached the limit `max_attempts`.
        """
        self.num_attempts += 1
        log.warning("request %s, attempt %d: %s", self.job.request_id, self.num_attempts, error)
        if self.num_attempts >= self.backend.settings.limits.max_attempts:
            if isinstance(error, NodeBusyError):
                raise OverloadedError(
                    f"all nodes are busy: try again later (the last node: {error})"
                ) from error
            raise NoNodesError(
                f"all {self.num_attempts} attempts failed (the last: {error})"
            ) from error

    def fresh(self, nodes: Sequence[BackendNode]) -> list[BackendNode]:
        """Return those of `nodes` that may receive requests and have not failed for this prompt."""
        return usable(nodes, self.now(), self._failed)

    def some_of(self, nodes: Sequence[BackendNode]) -> list[BackendNode]:
        """Return those of `nodes` to which the prompt can be sent next.

        Nodes that have failed for this prompt are left out. If only such nodes are available, all
        of them are tried again.

        Raises:
            AttemptError: No node is available. This counts as a failed attempt.
            GatewayError: No node is available, and no further attempt is allowed.
        """
        if not (left := self.fresh(nodes)):
            self._failed.clear()
            left = self.fresh(nodes)
        if not left:
            self.spend(
                AttemptError("no node answers, or all nodes are shutting down: check the nodes")
            )
            raise AttemptError("no node is available for another attempt")
        return left

    # Calls

    async def read(self, node: BackendNode, path: str, body: Body, *, offset: int) -> Done:
        """Call a node, and append the tokens of its streamed answer to the answer received so far.

        Args:
            node: The node to call.
            path: Path of the node's route.
            body: Body of the call, in msgpack.
            offset: Position in the answer of the first token that the node sends. Tokens that
                another node has sent before are not appended again.

        Returns:
            The event that ended the node's answer.

        Raises:
            AttemptError: The call has failed. The failure is recorded.
            GatewayError: The call has failed, and no further attempt is allowed.
        """
        try:
            events = self.backend.calls.stream(node, path, self.job, body)
            async with aclosing(events):
                async for event in events:
                    if event.name == "tokens":
                        offset = self.accept(node, offset, self._parse(node, event, _Tokens))
                        self.is_claimed |= path == "/v1/decode"
                    elif event.name == "done":
                        done = self._parse(node, event, Done)
                        self.has_stopped |= done.finish_reason == "stop"
                        return done
            raise AssertionError("a stream ends with done or raises")
        except AttemptError as error:
            self.note(node, error)
            raise

    def _parse(self, node: BackendNode, event: ServerEvent, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(event.data, type=kind)
        except UNREADABLE as error:
            raise self._node_error(node, f"sent an answer that cannot be read: {error}") from error

    def learn(self, node: BackendNode, done: Done, after: Sequence[int] = ()) -> None:
        """Record that a node finished its stream, and that the node has the prompt cached now.

        Args:
            node: The node.
            done: The event that ended the node's stream.
            after: Generated tokens that the node has cached after the prompt.
        """
        found = done.matched.device + done.matched.host
        found += done.matched.storage + done.matched.direct
        if self.cached_tokens is None:
            self.cached_tokens = min(found, self.job.num_tokens)
        self.backend.remember(node, self.job.tokens, after)


_TICKET_PART = 0.9  # share of the deadline of the first token that a claim may wait for its ticket
_LONGEST_CLAIM_S = 3600.0  # the most that a node accepts
_TICKET_CHECK_S = 2.0  # pause between checks that a published ticket still exists

Failure = TierKVError  # passed as a value: `hand_over` sees all failures and chooses one


async def hand_over(delivery: Delivery, cached_by_url: CachedTokens) -> None:
    """Get all tokens of an answer by a hand-off from a prefill node to a decode node.

    All calls to nodes have ended on return.

    Args:
        delivery: Receives the tokens.
        cached_by_url: Number of leading prompt tokens that each node has cached, by the node's URL.

    Raises:
        AttemptError: A call has failed. The failure is recorded.
        GatewayError: A call has failed, and no further attempt is allowed.
    """
    ticket_id = delivery.next_id()
    async with task_group() as tasks:
        prefill = tasks.create_task(expected(_prefill(delivery, ticket_id, cached_by_url)))
        decode = tasks.create_task(expected(_decode(delivery, ticket_id, cached_by_url)))
        running = {prefill, decode}
        failure: Failure | None = None
        while running and failure is None and not decode.done():
            pause_s = _TICKET_CHECK_S if prefill.done() and not delivery.is_claimed else None
            done, running = await asyncio.wait(
                running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
            # A failure of the prefill does not matter once its ticket was claimed.
            if prefill in done and not delivery.is_claimed:
                failure = prefill.result()
            elif not done and not delivery.is_claimed:
                failure = await expected(delivery.check_ticket(ticket_id))
        if decode.done():
            failure = decode.result()
        for task in (prefill, decode):
            task.cancel()
    if failure is not None:
        raise failure


# The prefill side


async def _prefill(delivery: Delivery, ticket_id: str, cached_by_url: CachedTokens) -> None:
    """Make one prefill node publish the prompt under `ticket_id`; try each usable node once."""
    failure = AttemptError("no prefill node is available")
    tried: set[BackendNode] = set()
    while True:
        nodes = delivery.fresh(delivery.backend.nodes.prefilling())
        if not (untried := [node for node in nodes if node not in tried]):
            raise failure
        node = choose_prefill(untried, delivery.job.num_tokens, cached_by_url)
        tried.add(node)
        try:
            await _prefill_at(delivery, node, ticket_id, cached_by_url)
        except HandoffRefusedError:
            raise  # any other node would fail in the same way
        except AttemptError as error:
            failure = error
        else:
            return


async def _prefill_at(
    delivery: Delivery, node: BackendNode, ticket_id: str, cached_by_url: CachedTokens
) -> None:
    job = delivery.job
    body = job.work({"request_id": delivery.next_id(), "ticket_id": ticket_id})
    # Tokens in storage take time, too; only tokens in the node's memory take none.
    with node.working(max(job.num_tokens - cached_by_url.get(node.url, 0), 1)):
        done = await delivery.read(node, "/v1/prefill", body, offset=0)
    delivery.publisher = node
    delivery.learn(node, done)


# The decode side


async def _decode(delivery: Delivery, ticket_id: str, cached_by_url: CachedTokens) -> None:
    """Make a decode node claim the ticket; try other nodes until one has sent a token."""
    job, first_token_s = delivery.job, delivery.backend.settings.deadlines.first_token_s
    while True:
        nodes = delivery.fresh(delivery.backend.nodes.decoding())
        if not nodes:
            raise AttemptError("no decode node is available")
        node = choose_decode(nodes, cached_by_url)
        asked = {
            "request_id": delivery.next_id(),
            "ticket_id": ticket_id,
            "max_tokens": job.max_tokens,
            "policy": "recompute",
            "deadline_s": min(_TICKET_PART * first_token_s, _LONGEST_CLAIM_S),
        }
        try:
            with node.working(job.max_tokens):
                done = await delivery.read(node, "/v1/decode", job.work(asked), offset=0)
        except HandoffRefusedError:
            raise
        except AttemptError:
            if delivery.is_claimed:
                raise  # the next attempt continues after the received tokens
            await delivery.pause()
            continue
        if done.producer is None:
            delivery.note_no_ticket(node)
        delivery.learn(node, done, delivery.tokens[:-1])
        return


# A decode node that lacks at most this many tokens of a prompt, as in the next turn of a
# conversation, computes them itself: a hand-off costs as much (reference model, CPU).
_FEW_TOKENS = 64
_TOO_LARGE = "request_too_large"
_INCOMPATIBLE = HandoffProblem.INCOMPATIBLE.value


async def run(delivery: Delivery) -> None:
    """Get all tokens of an answer, in as many attempts as the limits allow.

    Raises:
        GatewayError: No attempt or no time is left, or the request is not valid.
    """
    can_hand_off = True

    def late() -> OutOfTimeError:
        came, wanted = len(delivery.tokens), delivery.job.max_tokens
        return OutOfTimeError(f"only {came} of {wanted} tokens were generated before the deadline")

    async with deadline(delivery.backend.settings.deadlines.request_s, late):
        while not delivery.is_done:
            try:
                if not isinstance(delivery.job.prompt, bytes):
                    await _tokenize(delivery)
                await _attempt(delivery, can_hand_off=can_hand_off)
            except HandoffRefusedError as error:
                can_hand_off = False  # the next attempt uses one node for prefill and decode
                delivery.has_incompatible_nodes |= error.reason == _INCOMPATIBLE
            except AttemptError:
                await delivery.pause()


async def _tokenize(delivery: Delivery) -> None:
    most = delivery.backend.settings.gateway.max_prompt_tokens
    nodes = delivery.some_of(delivery.backend.nodes.all)
    node = min(nodes, key=lambda one: one.running)
    try:
        tokens = await delivery.backend.calls.tokenize(node, delivery.job)
    except AttemptError as error:
        delivery.note(node, error)
        raise
    except InvalidRequestError as error:
        raise too_long(most) if error.code == _TOO_LARGE else error from error
    if not tokens:
        raise empty()
    if count(tokens) > most:
        raise too_long(most)
    delivery.job = replace(delivery.job, prompt=tokens)


async def _attempt(delivery: Delivery, *, can_hand_off: bool) -> None:
    job = delivery.job
    nodes = _continuing_nodes(delivery)
    everybody = delivery.some_of(nodes)
    prefilling = delivery.fresh([node for node in nodes if node.role.prefills])
    decoding = delivery.fresh([node for node in nodes if node.role.decodes])
    cached_by_url = await delivery.backend.cached_tokens_by_node(job, everybody)
    alone: BackendNode | None
    if delivery.tokens:
        # Without a hand-off, the node that has computed the prompt continues, whatever its role.
        candidates = decoding if decoding and can_hand_off else everybody
        how, alone = "resumed", choose_prefill(candidates, job.num_tokens, cached_by_url)
    elif job.max_tokens == 1 or not (can_hand_off and prefilling and decoding):
        how, alone = "one_node", choose_prefill(everybody, job.num_tokens, cached_by_url)
    else:
        alone = _can_do_alone(prefilling, decoding, job.num_tokens, cached_by_url)
        how = "handoff" if alone is None else "one_node"
    delivery.backend.metrics.routed.labels(how).inc()
    if alone is None:
        await hand_over(delivery, cached_by_url)
    else:
        await _generate(delivery, alone, cached_by_url)


def _continuing_nodes(delivery: Delivery) -> list[BackendNode]:
    """Return the nodes that may generate the next tokens.

    If nodes may have different models, only nodes that sent some of the tokens may continue.
    """
    everybody = delivery.backend.nodes.all
    if delivery.has_incompatible_nodes and delivery.contributing_nodes:
        return [node for node in everybody if node in delivery.contributing_nodes]
    return everybody


def _can_do_alone(
    prefilling: Sequence[BackendNode],
    decoding: Sequence[BackendNode],
    num_tokens: int,
    cached_by_url: CachedTokens,
) -> BackendNode | None:
    """Return a node that should do both prefill and decode, or None for a hand-off."""
    if num_tokens > _FEW_TOKENS:
        knowing = [
            node for node in decoding if num_tokens - cached_by_url.get(node.url, 0) <= _FEW_TOKENS
        ]
        least = min((node.running for node in decoding), default=0)
        knowing = [node for node in knowing if node.running <= least + 1]
        if knowing:
            return choose_prefill(knowing, num_tokens, cached_by_url)
    best = choose_prefill(prefilling, num_tokens, cached_by_url)
    return best if best.role.decodes else None


async def _generate(delivery: Delivery, node: BackendNode, cached_by_url: CachedTokens) -> None:
    job, offset = delivery.job, len(delivery.tokens)
    left = job.max_tokens - offset
    asked = {"request_id": delivery.next_id(), "max_tokens": left, "answered_tokens": offset}
    body = job.work(asked, delivery.tokens)
    near = cached_by_url.get(node.url, 0)
    with node.working(max(job.num_tokens - near, 0) + left):
        done = await delivery.read(node, "/v1/generate", body, offset=offset)
    if not delivery.is_done:
        error = AttemptError(f"{node.url} ended its answer before the last token")
        delivery.note(node, error)
        raise error
    delivery.learn(node, done, delivery.tokens[:-1])
