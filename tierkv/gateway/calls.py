"""What the gateway asks its nodes, over pooled connections; every wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import NoReturn

import aiohttp
import msgspec

from tierkv.api.bodies import REQUEST_ID_HEADER
from tierkv.api.streaming import EVENT_STREAM
from tierkv.gateway.failures import (
    AttemptError,
    HandoffRefusedError,
    InvalidRequestError,
    NodeBusyError,
    NodeFailedError,
)
from tierkv.gateway.job import Job
from tierkv.gateway.nodes import BackendNode
from tierkv.gateway.routing import Held
from tierkv.gateway.settings import DeadlineSection, GatewaySection, HealthSection
from tierkv.gateway.sse import Event, EventReader

_MOST_ANSWER_BYTES = 1 << 20  # of an answer that is no stream
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY_CODES = ("out_of_blocks", "shutting_down", "not_ready", "too_many_requests")
_NOT_NOW_CODES = ("shutting_down", "not_ready", "wrong_role")
_RETRY_CODES = ("duplicate_request", "wrong_role", "body_timeout")


class _Problem(msgspec.Struct):
    """What of a node's problem the gateway looks at."""

    code: str
    detail: str = ""
    status: int = 0
    reason: str | None = None


class _LookupAnswer(msgspec.Struct):
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None


class NodeCalls:
    """Use it inside `running()`."""

    def __init__(
        self, section: GatewaySection, deadlines: DeadlineSection, health: HealthSection
    ) -> None:
        self._section = section
        self._deadlines = deadlines
        self._health = health

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._deadlines.connect_s)
        connector = aiohttp.TCPConnector(limit=0)  # admission bounds it
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._http:
            yield

    async def is_ready(self, node: BackendNode) -> bool:
        """Whether its probe is answered with 200. Raises AttemptError if it is not answered."""
        try:
            async with (
                asyncio.timeout(self._health.probe_timeout_s),
                self._http.get(node.url + "/readyz", headers=self._headers(None)) as response,
            ):
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AttemptError(f"{node.url} does not answer its probe") from error

    async def lookup(self, node: BackendNode, job: Job) -> Held:
        """What the node has of the prompt. Raises AttemptError; nobody is blamed for it."""
        body = msgspec.json.encode({"tokens": job.tokens})
        try:
            async with (
                asyncio.timeout(self._deadlines.lookup_s),
                self._http.post(
                    node.url + "/v1/lookup", data=body, headers=self._headers(job)
                ) as response,
            ):
                raw = await response.content.read(_MOST_ANSWER_BYTES)
                if response.status != HTTPStatus.OK:
                    raise AttemptError(f"{node.url} answered a lookup with {response.status}")
            found = msgspec.json.decode(raw, type=_LookupAnswer)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise AttemptError(f"{node.url} did not answer a lookup") from error
        return Held(found.device_tokens + found.host_tokens, found.storage_tokens or 0)

    async def stream(
        self, node: BackendNode, path: str, job: Job, body: Mapping[str, object]
    ) -> AsyncGenerator[Event, None]:
        """The events of a node's answer up to `done`, which is the last. Close it when done.

        Raises AttemptError if the node fails, is busy, or refuses a hand-off, and
        InvalidRequestError if the request can succeed at no node. What follows for the node's
        standing is noted.
        """
        now = asyncio.get_running_loop().time
        try:
            async with aclosing(self._events(node, path, job, body)) as events:
                async for event in events:
                    node.has_worked()
                    yield event
        except NodeFailedError:
            node.has_failed(now())
            raise

    async def _events(
        self, node: BackendNode, path: str, job: Job, body: Mapping[str, object]
    ) -> AsyncGenerator[Event, None]:
        try:
            async with node.within(self._deadlines.first_token_s):
                response = await self._http.post(
                    node.url + path, data=msgspec.json.encode(body), headers=self._headers(job)
                )
            async with response:
                await self._check(node, response)
                async with aclosing(self._read(node, response)) as events:
                    async for event in events:
                        yield event
        except TimeoutError as error:
            raise NodeFailedError(f"{node.url} says nothing any more") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NodeFailedError(f"{node.url} cannot be reached, or broke off: {error}") from error
        except ValueError as error:
            raise NodeFailedError(f"{node.url} answers nonsense: {error}") from error

    async def _check(self, node: BackendNode, response: aiohttp.ClientResponse) -> None:
        if response.status != HTTPStatus.OK:
            async with asyncio.timeout(self._deadlines.stall_s):
                raw = await response.content.read(_MOST_ANSWER_BYTES)
            self._refuse(node, raw, response.status)
        if response.content_type != EVENT_STREAM:
            raise NodeFailedError(f"{node.url} does not stream: is it a tierkv node?")

    async def _read(
        self, node: BackendNode, response: aiohttp.ClientResponse
    ) -> AsyncGenerator[Event, None]:
        reader = EventReader()
        while True:
            async with node.within(self._deadlines.stall_s):
                chunk = await response.content.readany()
            if not chunk:
                raise NodeFailedError(f"{node.url} broke off its answer")
            for event in reader.feed(chunk):
                if event.name == "error":
                    self._refuse(node, event.data, None)
                yield event
                if event.name == "done":
                    return

    def _refuse(self, node: BackendNode, raw: bytes, status: int | None) -> NoReturn:
        """Raise what a node's problem means for us."""
        try:
            problem = msgspec.json.decode(raw, type=_Problem)
        except ValueError as error:
            if status in _REFUSED:
                raise self._unauthorized(node, status or 0) from error
            raise NodeFailedError(f"{node.url} answered {status} without a problem") from error
        status = status or problem.status
        said = f"{node.url}: {problem.detail} ({problem.code})"
        if problem.code in _NOT_NOW_CODES:
            node.says_unready()  # until a probe says otherwise
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
                "the nodes do not accept this authorization", status=status, code="unauthorized"
            )
        return NodeFailedError(f"{node.url} does not accept the gateway's token")

    def _headers(self, job: Job | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if job is not None:
            headers[REQUEST_ID_HEADER] = job.request_id
        if job is not None and self._section.forward_authorization:
            if job.authorization is not None:
                headers["Authorization"] = job.authorization
        elif self._section.node_token:
            headers["Authorization"] = f"Bearer {self._section.node_token}"
        return headers
