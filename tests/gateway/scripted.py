"""Nodes that do as a test says, behind a real gateway: all over HTTP, in this process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from tierkv.api.types import TokenizeBody
from tierkv.cache.keys import count, unpack
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.server import listening
from tierkv.gateway.settings import (
    DeadlineSection,
    GatewaySection,
    GatewaySettings,
    HealthSection,
    LimitsSection,
)
from tierkv.http.settings import AuthSection
from tierkv.tokenizers import ByteTokenizer

Json = dict[str, Any]
CHATS = "/v1/chat/completions"


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    """What every scripted node says: each token depends on all before it."""
    known = list(prompt)
    for _ in range(count):
        known.append(97 + (sum(known) * 31 + len(known)) % 26)
    return known[len(prompt) :]


def text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


class ScriptedNode:
    """Answers as a node would, except for what a test sets.

    breaks_after: closes the connection after so many tokens of a stream, counted in `breaks_left`
    times. refusal: status and problem of every work call. is_held: work waits while it is set.
    near: tokens it claims to hold of any prompt. model: what it says that it computes, None for a
    node that does not say.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Json, Mapping[str, str]]] = []
        self.texts: list[bytes] = []  # that it was asked the tokens of
        self.cancelled = 0
        self.finished = 0
        self.running = 0
        self.most_running = 0
        self.breaks_after: int | None = None
        self.breaks_left = 1_000
        self.adds_tokens = 0  # to those that it was asked for
        self.holds_back = ""  # and says after the last token, or as it breaks
        self.refusal: tuple[int, Json] | None = None
        self.most_tokens = 1_000_000  # of a text that it turns into tokens
        self.raw: bytes | None = None  # what it says instead of events
        self.is_ready = True
        self.trouble = ""  # what it says of its store
        self.is_frozen = False  # as a machine that is gone: probes get no answer
        self.near = 0
        self.is_mute = False  # of what it has of a prompt
        self.model: str | None = "tierkv-ref-tiny"
        self.lies_from: int | None = None
        self.claims_nothing = False  # computes instead, as without a ticket
        self.hides_first_token = False  # publishes its ticket without an event of the token
        self.dies_unpublished = False  # after its first token, before its ticket
        self.stalls_after: int | None = None
        self._gate = asyncio.Event()
        self.is_held = False
        self.tickets: dict[str, asyncio.Event] = {}
        self.lingers = False  # after its last event, without ending the answer
        self.peers: set[object] = set()  # connections that work came over
        self.url = ""
        self.num_probes = 0

    @property
    def is_held(self) -> bool:
        return not self._gate.is_set()

    @is_held.setter
    def is_held(self, value: bool) -> None:
        (self._gate.clear if value else self._gate.set)()

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.calls]

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/lookup", self._lookup)
        app.router.add_post("/v1/tokenize", self._tokenize)
        for path in ("prefill", "decode", "generate"):
            app.router.add_post(f"/v1/{path}", self._work)
        return app

    async def _ready(self, _: web.Request) -> web.Response:
        self.num_probes += 1
        if self.is_frozen:
            await asyncio.Event().wait()
        store = {"status": "degraded" if self.trouble else "ok", "detail": self.trouble}
        body = {"status": store["status"], "parts": {"storage": store}}
        return web.json_response(body, status=200 if self.is_ready else 503)

    async def _version(self, _: web.Request) -> web.Response:
        if self.raw is not None:
            return web.Response(body=self.raw)
        if self.model is None:
            raise web.HTTPNotFound
        return web.json_response({"fingerprint": {"model": self.model}})

    async def _lookup(self, request: web.Request) -> web.Response:
        if self.is_mute:
            raise web.HTTPServiceUnavailable
        if self.raw is not None:
            return web.Response(body=self.raw)
        return web.json_response(
            {"device_tokens": self.near, "host_tokens": 0, "storage_tokens": None}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        """A token per byte, as the text of its tokens is."""
        if self.raw is not None:
            return web.Response(body=self.raw)
        body = msgspec.msgpack.decode(await request.read(), type=TokenizeBody)
        tokens = body.encoded(ByteTokenizer())
        if count(tokens) > self.most_tokens:
            problem = {"status": 422, "code": "request_too_large", "detail": "said by a test"}
            return web.json_response(problem, status=422)
        self.texts.append(unpack(tokens).astype(np.uint8).tobytes())
        return web.Response(body=msgspec.msgpack.encode({"tokens": tokens}))

    async def _work(self, request: web.Request) -> web.StreamResponse:
        body: Json = msgspec.msgpack.decode(await request.read())
        self.calls.append((request.path, body, request.headers.copy()))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            response = await self._answer(request, body)
            if self.lingers:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.finished += 1
        return response

    async def _answer(  # noqa: C901 - every fault that a test asks for
        self, request: web.Request, body: Json
    ) -> web.StreamResponse:
        await self._gate.wait()
        if self.refusal is not None:
            status, problem = self.refusal
            return web.json_response(
                {"status": status, "detail": "said by a test", **problem}, status=status
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.raw is not None:
            await response.prepare(request)
            await response.write(self.raw)
            return response
        prompt = np.frombuffer(body["tokens"], "<u4").tolist()
        if request.path == "/v1/decode":
            await self.tickets.setdefault(body["ticket_id"], asyncio.Event()).wait()
        count = 1 if request.path == "/v1/prefill" else body["max_tokens"] + self.adds_tokens
        tokens = answer_to(prompt, count)
        await response.prepare(request)
        for number, token in enumerate(tokens):
            if number == self.breaks_after and self.breaks_left:
                self.breaks_left -= 1
                await self._say_held_back(response)
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == self.stalls_after:
                await asyncio.Event().wait()
            said = token
            if self.lies_from is not None and number >= self.lies_from:
                said = 33
            if not (self.hides_first_token and request.path == "/v1/prefill"):
                is_of_ticket = request.path == "/v1/decode" and number == 0
                event = tokens_event(said, body, is_of_ticket=is_of_ticket)
                await _event(response, "tokens", event)
            await asyncio.sleep(0)
        await self._say_held_back(response)
        if self.dies_unpublished and request.path == "/v1/prefill":
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.path == "/v1/prefill":
            self.tickets.setdefault(body["ticket_id"], asyncio.Event()).set()
        await _event(
            response,
            "done",
            {
                "computed_tokens": len(prompt),
                "matched": {"device": self.near, "host": 0, "storage": 0},
                "queue_s": 0.0,
                "time_to_first_token_s": 0.1,
                "producer": None if self.claims_nothing else "p",
            },
        )
        return response

    async def _say_held_back(self, response: web.StreamResponse) -> None:
        if self.holds_back:
            event = {"tokens": [], "text": self.holds_back, "pieces": []}
            await _event(response, "tokens", event)


def script(nodes: Sequence[ScriptedNode], **how: Any) -> None:
    """Let nodes do so from now on; `how` has attributes of theirs."""
    for node in nodes:
        for name, value in how.items():
            setattr(node, name, value)


def tokens_event(token: int, body: Json, *, is_of_ticket: bool) -> Json:
    event: Json = {"tokens": [token], "text": chr(token), "pieces": [chr(token)]}
    if "logprobs" in body:
        event["logprobs"] = [None if is_of_ticket else logprobs_to(token)]
    return event


def logprobs_to(token: int) -> Json:
    """Return the log probabilities that scripted nodes send with `token`."""
    chosen, other = (
        {"token": one, "text": chr(one), "logprob": -one / 128} for one in (token, token + 1)
    )
    return {"chosen": chosen, "top": [chosen, other]}


async def _event(response: web.StreamResponse, name: str, data: Json) -> None:
    await response.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())


@dataclass
class Asked:
    """An answer of the gateway.

    body: unless it is streamed. events: its pieces, or its body. texts: all of each choice, by
    index.
    """

    status: int
    headers: Mapping[str, str]
    body: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reason: str | None = None
    error: Json = field(default_factory=dict)
    usage: Json = field(default_factory=dict)
    is_whole: bool = False

    @property
    def text(self) -> str:
        return self.texts[0]

    def take(self, event: Json) -> None:
        assert not self.is_whole
        self.events.append(event)
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            self.texts[choice["index"]] += said["content"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


class Caller:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def ask(self, body: Json, path: str = "/v1/completions", **headers: str) -> Asked:
        body = {"max_tokens": 8, "temperature": 0, **body}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            asked = Asked(response.status, response.headers.copy())
            if response.content_type != "text/event-stream":
                asked.body = await response.json(content_type=None)
                asked.take(asked.body)
                asked.is_whole = response.status == 200
                return asked
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    asked.is_whole = True
                elif line.strip():
                    asked.take(json.loads(line.removeprefix(b"data: ")))
        return asked

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()


@dataclass
class Stage:
    gateway: Gateway
    caller: Caller
    prefill: list[ScriptedNode]
    decode: list[ScriptedNode]
    both: list[ScriptedNode]

    @property
    def nodes(self) -> list[ScriptedNode]:
        return [*self.prefill, *self.decode, *self.both]


@asynccontextmanager
async def stage(
    prefill: int = 2,
    decode: int = 2,
    both: int = 0,
    *,
    limits: LimitsSection | None = None,
    deadlines: DeadlineSection | None = None,
    auth: AuthSection | None = None,
    health: HealthSection | None = None,
    models: Sequence[str] = (),
    **section: Any,
) -> AsyncIterator[Stage]:
    """A gateway in front of so many scripted nodes. They share tickets, as through storage.
    models: what they say that they compute, in order."""
    async with AsyncExitStack() as stack:
        nodes: dict[str, list[ScriptedNode]] = {}
        tickets: dict[str, asyncio.Event] = {}
        for role, count in (("prefill", prefill), ("decode", decode), ("both", both)):
            nodes[role] = [ScriptedNode() for _ in range(count)]
            for node in nodes[role]:
                node.tickets = tickets
                node.url = await stack.enter_async_context(serve(node.app()))
        for node, model in zip(chain(*nodes.values()), models, strict=False):
            node.model = model
        urls: dict[str, Any] = {role: tuple(n.url for n in some) for role, some in nodes.items()}
        front = in_front(
            GatewaySettings(
                gateway=GatewaySection(**urls, **section),
                auth=auth or AuthSection(),
                limits=limits or LimitsSection(),
                deadlines=deadlines or DeadlineSection(lookup_s=5.0),
                health=health or HealthSection(probe_interval_s=0.05, eject_s=0.05),
            )
        )
        gateway, caller = await stack.enter_async_context(front)
        yield Stage(gateway, caller, nodes["prefill"], nodes["decode"], nodes["both"])


@asynccontextmanager
async def in_front(settings: GatewaySettings) -> AsyncIterator[tuple[Gateway, Caller]]:
    """A gateway in front of the nodes that its settings name."""
    gateway = await asyncio.to_thread(Gateway, settings)  # it reads certificates
    opened = socket.create_server(("127.0.0.1", 0))
    async with (
        listening(gateway, opened) as url,
        gateway.running(),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session,
    ):
        yield gateway, Caller(url, session)


@asynccontextmanager
async def serve(app: web.Application) -> AsyncIterator[str]:
    """Answer on a free port, and yield the URL."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site.port}"
    finally:
        await runner.cleanup()
