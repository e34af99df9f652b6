"""Calls of the gateway to its nodes, and regular probes of each node.

A probe asks a node for its fingerprint and for its readiness (GET /readyz). Connections are pooled,
and each wait for a node has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import (
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from http import HTTPStatus
from typing import NoReturn
from urllib.parse import quote

import aiohttp
import msgspec

from tierkv.api.types import ReadyAnswer
from tierkv.cache.keys import pack
from tierkv.client.errors import CallError, NotANodeError
from tierkv.client.http import Body, Http, Reply
from tierkv.client.streams import Events, ServerEvent
from tierkv.errors import BadRequestError, ConfigError, TierKVError
from tierkv.gateway.failures import (
    AttemptError,
    HandoffRefusedError,
    InvalidRequestError,
    NodeBusyError,
    NodeFailedError,
)
from tierkv.gateway.nodes import BackendNode, Nodes, NodeState
from tierkv.gateway.prompts import Job
from tierkv.gateway.settings import GatewaySettings, HealthSection, node_tls
from tierkv.http.bodies import EVENT_STREAM, MSGPACK, REQUEST_ID_HEADER
from tierkv.tasks import supervised

UNREADABLE = (ValueError, RecursionError)  # errors of the decoder for malformed answers
_END_S = 0.2  # seconds from the last event to the end of the answer
_UNBOUNDED = 0  # connections to a node; `Admission` limits them
_NO_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY_CODES = (
    "out_of_blocks",
    "shutting_down",
    "not_ready",
    "too_much_in_work",
    "too_many_requests",
)
_NOT_NOW_CODES = ("shutting_down", "not_ready", "wrong_role")
_OK = "ok"
_MAX_TROUBLE = 1_000  # characters of a node's sentence about degraded parts
_RETRY_CODES = ("duplicate_request", "wrong_role", "body_timeout")


class _Problem(msgspec.Struct):
    """A node's error answer, as far as the gateway reads it.

    Attributes:
        code: stable code of the error.
        detail: a sentence about the error.
        status: HTTP status.
        reason: reason why a hand-off failed; None for other errors.
    """

    code: str
    detail: str = ""
    status: int = 0
    reason: str | None = None


class _LookupAnswer(msgspec.Struct):
    device_tokens: int
    host_tokens: int


class _TokenizeAnswer(msgspec.Struct):
    tokens: bytes


class _VersionAnswer(msgspec.Struct):
    fingerprint: dict[str, str]
    model: str = ""  # older nodes do not send it


class NodeCalls:
    """The gateway's calls to its nodes. Use it inside `running()`.

    Args:
        settings: Deadlines, and paths of the TLS certificates for calls to nodes. The constructor
            reads these files.
        nodes: The nodes.

    Raises:
        ConfigError: A URL or a certificate cannot be used.
    """

    def __init__(self, settings: GatewaySettings, nodes: Nodes) -> None:
        self._section = settings.gateway
        self._deadlines = settings.deadlines
        self._health = settings.health
        tls = node_tls(settings.gateway)
        self._pools = {
            node: Http(
                node.url,
                token=None,  # each call sets its own
                tls=tls,
                max_connections=_UNBOUNDED,
                connect_s=self._deadlines.connect_s,
            )
            for node in nodes.all
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for pool in self._pools.values():
                await stack.enter_async_context(pool.running())
            yield

    async def trouble(self, node: BackendNode) -> str | None:
        """Ask a node whether it is ready, and which of its parts (store, device ...) are degraded.

        Returns:
            A sentence about the degraded parts, "" if no part is degraded; None if the node is not
                ready.

        Raises:
            AttemptError: The node does not answer the probe.
        """
        reply = await self._probe(node, "/readyz?verbose")
        if reply.status != HTTPStatus.OK:
            return None
        try:
            parts = msgspec.json.decode(reply.raw, type=ReadyAnswer).parts or {}
        except UNREADABLE:
            return ""
        wrong = [f"{name}: {part.detail}" for name, part in parts.items() if part.status != _OK]
        return "; ".join(wrong)[:_MAX_TROUBLE]

    async def _probe(self, node: BackendNode, path: str) -> Reply:
        try:
            async with asyncio.timeout(self._health.probe_timeout_s):
                return await self._pools[node].ask("GET", path, None, self._headers(None))
        except TimeoutError as error:
            limit_s = self._health.probe_timeout_s
            raise AttemptError(f"{node.url} did not answer a probe within {limit_s:g} s") from error
        except TierKVError as error:
            raise AttemptError(str(error)) from error

    async def identity(self, node: BackendNode) -> tuple[dict[str, str] | None, str]:
        """Ask a node for its fingerprint (the fields that identify its KV) and its model's name.

        Returns:
            The fingerprint and the name; None and "" if the node does not report them.

        Raises:
            AttemptError: The node does not answer the probe.
        """
        reply = await self._probe(node, "/version")
        if reply.status != HTTPStatus.OK:
            return None, ""
        try:
            answer = msgspec.json.decode(reply.raw, type=_VersionAnswer)
        except UNREADABLE:
            return None, ""
        return answer.fingerprint, answer.model or answer.fingerprint.get("model", "")

    async def lookup(self, node: BackendNode, job: Job) -> int:
        """Return the number of a prompt's leading tokens that a node has on its device or host.

        Args:
            node: The node to ask.
            job: The job whose prompt is looked up.

        Raises:
            AttemptError: The node does not answer in time, or answers with an error. This does not
                count as a failure of the node.
        """
        body = job.body({})
        try:
            async with asyncio.timeout(self._deadlines.lookup_s):
                reply = await self._pools[node].ask("POST", "/v1/lookup", body, self._headers(job))
            if reply.status != HTTPStatus.OK:
                raise AttemptError(f"{node.url} answered a lookup with status {reply.status}")
            found = msgspec.json.decode(reply.raw, type=_LookupAnswer)
        except (CallError, ConfigError, TimeoutError, *UNREADABLE) as error:
            raise AttemptError(f"{node.url} did not answer a lookup") from error
        return found.device_tokens + found.host_tokens

    async def has_ticket(self, node: BackendNode, job: Job, ticket_id: str) -> bool:
        """Ask a node whether the ticket of a published prompt still exists in the store.

        Args:
            node: The node to ask.
            job: The job for which the prompt was published.
            ticket_id: Id of the ticket.

        Returns:
            False if the node answers that there is no such ticket; True otherwise, also if the node
                does not answer.
        """
        path = f"/v1/tickets/{quote(ticket_id, safe='')}"
        try:
            async with asyncio.timeout(self._health.probe_timeout_s):
                reply = await self._pools[node].ask("GET", path, None, self._headers(job))
        except (CallError, ConfigError, TimeoutError):
            return True
        return reply.status != HTTPStatus.NOT_FOUND

    async def tokenize(self, node: BackendNode, job: Job) -> bytes:
        """Let a node tokenize the text or messages of a job.

        Args:
            node: The node to ask.
            job: A job whose prompt is a text or messages.

        Returns:
            The token ids, as little-endian int32 bytes.

        Raises:
            AttemptError: The node is busy, or it failed. A failure is recorded in `node`.
            InvalidRequestError: The text or the messages are not valid at any node.
        """
        headers = {**self._headers(job), "Accept": MSGPACK}
        field = "prompt" if isinstance(job.prompt, str) else "messages"
        body = (msgspec.msgpack.encode({field: job.prompt}),)
        try:
            with self._translated(node):
                async with node.within(self._deadlines.stall_s):
                    reply = await self._pools[node].ask("POST", "/v1/tokenize", body, headers)
                tokens = self._tokens_in(node, reply)
        except NodeFailedError:
            node.note_failure(asyncio.get_running_loop().time())
            raise
        node.note_success()
        return tokens

    def _tokens_in(self, node: BackendNode, reply: Reply) -> bytes:
        if reply.status in _NO_ROUTE:
            raise NodeFailedError(f"{node.url} has no /v1/tokenize: update the node")
        if reply.status != HTTPStatus.OK:
            self._refuse(node, reply.raw, reply.status)
        try:
            return pack(msgspec.msgpack.decode(reply.raw, type=_TokenizeAnswer).tokens)
        except (BadRequestError, *UNREADABLE) as error:
            raise NodeFailedError(
                f"{node.url} sent an answer that cannot be read: {error}"
            ) from error

    async def stream(
        self, node: BackendNode, path: str, job: Job, body: Body
    ) -> AsyncGenerator[ServerEvent, None]:
        """Yield the events of a node's streamed answer; the last one is the event `done`.

        The caller must close the iterator if it stops earlier, so that the node stops generating.

        Args:
            node: The node to call.
            path: Path of the node's route.
            job: The job that the call is for.
            body: Body of the call, in msgpack.

        Raises:
            AttemptError: The node is busy, rejects a hand-off, or failed. A failure is recorded in
                `node`.
            InvalidRequestError: The request is not valid at any node.
        """
        now = asyncio.get_running_loop().time
        try:
            async with aclosing(self._events(node, path, job, body)) as events:
                async for event in events:
                    node.note_success()
                    yield event
        except NodeFailedError:
            node.note_failure(now())
            raise

    async def _events(
        self, node: BackendNode, path: str, job: Job, body: Body
    ) -> AsyncGenerator[ServerEvent, None]:
        with self._translated(node):
            async with AsyncExitStack() as stack:
                opening = self._pools[node].opened("POST", path, body, self._headers(job))
                async with node.within(self._deadlines.first_token_s):
                    response = await stack.enter_async_context(opening)
                await self._check(node, response)
                events = Events(node.url, response, gap_s=None)  # see `_next`
                while True:
                    event = await self._next(node, events)
                    if event.name == "done":
                        await _read_to_the_end(events)
                    yield event
                    if event.name == "done":
                        return

    @contextmanager
    def _translated(self, node: BackendNode) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise NodeFailedError(f"{node.url} stopped sending its answer") from error
        except NotANodeError as error:
            raise NodeFailedError(
                f"{node.url} sent an answer that cannot be read: {error}"
            ) from error
        except (CallError, ConfigError) as error:
            raise NodeFailedError(str(error)) from error

    async def _next(self, node: BackendNode, events: Events) -> ServerEvent:
        async with node.within(self._deadlines.stall_s):
            event = await events.next()
        if event is None:
            raise NodeFailedError(f"{node.url} closed the connection before the end of its answer")
        if event.name == "error":
            self._refuse(node, event.data, None)
        return event

    async def _check(self, node: BackendNode, response: aiohttp.ClientResponse) -> None:
        if response.status != HTTPStatus.OK:
            async with node.within(self._deadlines.stall_s):
                reply = await self._pools[node].whole(response)
            self._refuse(node, reply.raw, reply.status)
        if response.content_type != EVENT_STREAM:
            raise NodeFailedError(
                f"{node.url} did not answer with a stream: check that it is a tierkv node"
            )

    def _refuse(self, node: BackendNode, raw: bytes, status: int | None) -> NoReturn:
        """Raise the error that corresponds to a node's error answer.

        If the answer says that the node is not ready, exclude the node from requests first.
        `status` is None if the error answer is an event of a stream.
        """
        try:
            problem = msgspec.json.decode(raw, type=_Problem)
        except UNREADABLE as error:
            if status in _REFUSED:
                raise self._unauthorized(node, status or 0) from error
            raise NodeFailedError(
                f"{node.url} answered status {status} without an error description"
            ) from error
        status = status or problem.status
        said = f"{node.url}: {problem.detail} ({problem.code})"
        if problem.code in _NOT_NOW_CODES:
            node.mark_unready()  # until a probe says otherwise
        if status in _REFUSED:
            raise self._unauthorized(node, status)
        if problem.code in (*_BUSY_CODES, *_RETRY_CODES):
            raise NodeBusyError(said)
        if problem.reason is not None:
            raise HandoffRefusedError(problem.reason, said)
        if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise InvalidRequestError(problem.detail, status=status, code=problem.code)
        raise NodeFailedError(said)

    def _unauthorized(self, node: BackendNode, status: int) -> Exception:
        if self._section.forward_authorization:
            return InvalidRequestError(
                "the nodes refuse this Authorization header: check the token",
                status=status,
                code="unauthorized",
            )
        return NodeFailedError(f"{node.url} refuses the gateway's token: check gateway.node_token")

    def _headers(self, job: Job | None) -> dict[str, str]:
        headers = {"Content-Type": MSGPACK, "Accept": "*/*"}
        if job is not None:
            headers[REQUEST_ID_HEADER] = job.request_id
        if job is not None and self._section.forward_authorization:
            if job.authorization is not None:
                headers["Authorization"] = job.authorization
        elif self._section.node_token:
            headers["Authorization"] = f"Bearer {self._section.node_token}"
        return headers


async def _read_to_the_end(events: Events) -> None:
    """Read the rest of the response, so that its connection can be reused."""
    with suppress(CallError, TimeoutError):
        async with asyncio.timeout(_END_S):
            while await events.next() is not None:
                pass


log = logging.getLogger(__name__)


@asynccontextmanager
async def probing(nodes: Nodes, calls: NodeCalls, settings: HealthSection) -> AsyncIterator[None]:
    """Probe each node once, then probe the nodes regularly until the `async with` block ends.

    The first probes end before the block begins. A probe updates the state of its node.

    Args:
        nodes: The nodes.
        calls: Makes the calls to the nodes.
        settings: The interval of probes, and the settings for failed nodes.
    """
    probes = [_Probe(node, nodes, calls, settings) for node in nodes.all]
    async with asyncio.TaskGroup() as first:
        for probe in probes:
            first.create_task(probe.once())
    async with supervised({f"tierkv-probe-{probe.node.url}": probe.on for probe in probes}):
        yield


class _Probe:
    def __init__(
        self, node: BackendNode, nodes: Nodes, calls: NodeCalls, settings: HealthSection
    ) -> None:
        self.node = node
        self._nodes = nodes
        self._calls = calls
        self._settings = settings
        self._unanswered = 0  # in a row
        self._before: NodeState | None = None

    async def on(self) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_interval_s)
            await self.once()

    async def once(self) -> None:
        now, node = asyncio.get_running_loop().time, self.node
        try:
            # Each probe asks for the fingerprint first: a node restarted with another model
            # must not continue an answer of the other nodes.
            fingerprint, model = await self._calls.identity(node)
            trouble = await self._calls.trouble(node)
            self._nodes.compare(node, fingerprint, model)
            if trouble is None:
                node.mark_unready()
            else:
                node.mark_ready(trouble)
            self._unanswered = 0
        except AttemptError:
            node.note_failure(now())
            self._unanswered += 1
            if self._unanswered >= self._settings.gone_after_probes:
                node.cut_off_waits(now(), silent_s=self._settings.probe_timeout_s)
        self._log_state(node.state(now()))

    def _log_state(self, state: NodeState) -> None:
        if state is self._before:
            return
        self._before = state
        node = self.node
        log.info("node %s (%s) is %s", node.url, node.role.value, state.value)
        if state is NodeState.OTHER_MODEL:
            log.error(
                "node %s receives no requests, since it differs from the other nodes in %s",
                node.url,
                "; ".join(node.differs_in),
            )
