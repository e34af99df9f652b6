"""The routes about a node's state and life cycle, and those that feed its live page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from enum import Enum
from functools import cached_property

import msgspec
from aiohttp import web

import tierkv
from tierkv.api.metrics import Metrics, NodeCollector
from tierkv.api.node import Node, Routes, explained, principal_of, refused
from tierkv.api.settings import masked_url
from tierkv.api.types import (
    LifeAnswer,
    LiveAnswer,
    PartHealth,
    ReadyAnswer,
    SleepBody,
    VerifyAnswer,
    VersionAnswer,
    WakeBody,
)
from tierkv.cache.keys import Prompt
from tierkv.clock import is_skew, skew_in_words
from tierkv.errors import StoreUnavailableError
from tierkv.http import bodies
from tierkv.http.bodies import EVENT_STREAM, JSON
from tierkv.http.callers import Access
from tierkv.http.live import REFRESH_S, figures_of
from tierkv.http.problems import NotReadyError, UnknownIdError, WrongStateError
from tierkv.http.route import Route, document, in_path, routes_of
from tierkv.observe import Moment, Prefix, Stats, Timeline, prefixes
from tierkv.sched.explain import Explanation
from tierkv.tasks import deadline
from tierkv.transfer.tier import StoreState


class LifeRoutes(Routes):
    @Route("POST", "/v1/drain", Access.ADMIN, answer=LifeAnswer)
    async def drain(self, _: web.BaseRequest) -> LifeAnswer:
        """Reject new requests, and let running requests finish."""
        self._node.check_started()
        self._node.drain()
        return self._life()

    @Route("POST", "/v1/pause", Access.ADMIN, answer=LifeAnswer)
    async def pause(self, _: web.BaseRequest) -> LifeAnswer:
        """Let new requests wait until POST /v1/resume; running requests continue."""
        self._node.check_started()
        self._node.service.pause()
        return self._life()

    @Route("POST", "/v1/resume", Access.ADMIN, answer=LifeAnswer)
    async def resume(self, _: web.BaseRequest) -> LifeAnswer:
        """End a pause: start the waiting requests, and accept new ones."""
        self._node.check_started()
        if self._node.service.is_asleep:
            raise WrongStateError("the device sleeps: call POST /v1/wake first")
        self._node.service.unpause()
        return self._life()

    def _life(self) -> LifeAnswer:
        service = self._node.service
        return LifeAnswer(
            is_draining=self._node.is_draining,
            is_paused=service.scheduler.is_paused,
            is_asleep=service.is_asleep,
            running_requests=len(service.scheduler.running_requests),
            waiting_requests=service.scheduler.num_waiting,
        )

    @Route(
        "POST", "/v1/sleep", Access.ADMIN, body=SleepBody, answer=LifeAnswer, is_body_optional=True
    )
    async def sleep(self, request: web.BaseRequest) -> LifeAnswer:
        """Free the device's memory until POST /v1/wake; new requests wait."""
        async with self._node.work():
            body = await self._node.bodies.read_optional(request, SleepBody)

            def late() -> WrongStateError:
                running = len(self._node.service.scheduler.running_requests)
                return WrongStateError(
                    f"{running} requests or pins still held blocks after "
                    f"{body.deadline_s:g} s: wait longer, or remove the pins"
                )

            with refused():
                async with deadline(body.deadline_s, late):
                    await self._node.service.sleep(keeps_blocks=body.keep_blocks)
        return self._life()

    @Route(
        "POST", "/v1/wake", Access.ADMIN, body=WakeBody, answer=LifeAnswer, is_body_optional=True
    )
    async def wake(self, request: web.BaseRequest) -> LifeAnswer:
        """Allocate the device's memory again, and start the waiting requests."""
        async with self._node.work():
            body = await self._node.bodies.read_optional(request, WakeBody)
            with refused():
                await self._node.service.wake(body.device_blocks)
        return self._life()


_PING_DEADLINE_S = 1.0

Part = tuple["Health", str]


class Health(Enum):
    """The health of one part of a node, or of the node as a whole."""

    OK = "ok"
    DEGRADED = "degraded"  # answers are right, but slower than they could be
    DOWN = "down"


async def health_of(node: Node) -> dict[str, Part]:
    """Return the health of each part of the node, with a sentence about it, by the part's name.

    A failed store makes a node "degraded" and not "down", because the node can compute instead of
    fetching.
    """
    device = node.device
    parts = {
        "service": _of_service(node),
        "device": (Health.OK if device.failure is None else Health.DOWN, device.status),
    }
    ranks = node.service.ranks
    if ranks is not None:
        wrong = ranks.findings()
        state = Health.DEGRADED if wrong else Health.OK
        parts["ranks"] = state, "; ".join(wrong) or f"all {len(ranks.devices)} ranks respond"
    stores = node.service.storage_state() if node.has_started else ()
    if not stores:
        parts["storage"] = (Health.OK, "no storage tier")
    for store in stores:
        name = "storage" + (f" of {store.tenant}" if store.tenant else "")
        parts[name] = await _of_store(node, store)
    return parts


def _of_service(node: Node) -> Part:
    if not node.has_started:
        return Health.DOWN, "this node is starting"
    if node.is_draining:
        failure = node.service.failure
        why = "" if failure is None else f" after a failure: {failure}"
        return Health.DOWN, f"this node is shutting down{why}"
    return Health.OK, "accepts requests"


async def _of_store(node: Node, state: StoreState) -> Part:
    """Return the health of a store, after a ping if it is the store that all tenants share.

    A store whose circuit breaker is open is not pinged, because the breaker sends its own probes.
    """
    if state.has_open_circuit:
        return Health.DEGRADED, (
            f"{state.part or state.url} is not used (circuit {state.circuit}), since "
            f"it failed: {state.reason}"
        )
    if state.write_refusal:
        return Health.DEGRADED, (f"{state.part or state.url} refuses writes: {state.write_refusal}")
    store = node.service.store
    skew_s = state.clock_skew_s
    detail = state.url
    if skew_s is not None and is_skew(skew_s):
        detail += f"; {skew_in_words(skew_s)}: set it by NTP"
    if state.tenant or store is None:
        return Health.OK, detail
    try:
        async with asyncio.timeout(_PING_DEADLINE_S):
            await store.ping()
    except TimeoutError:
        return Health.DEGRADED, f"{state.url} does not answer"
    except StoreUnavailableError as error:
        return Health.DEGRADED, str(error)
    return Health.OK, detail


class StatusRoutes(Routes):
    @Route("GET", "/livez", Access.PUBLIC, answer=LiveAnswer)
    async def live(self, _: web.BaseRequest) -> LiveAnswer:
        """Return the lag of the node's event loop; an answer shows that the loop runs."""
        heartbeat = self._node.heartbeat
        return LiveAnswer(
            status=Health.OK.value,
            heartbeat_age_s=heartbeat.age_s,
            worst_lag_s=heartbeat.worst_lag_s,
        )

    @Route("GET", "/readyz", Access.PUBLIC, answer=ReadyAnswer, query=(("verbose", bool),))
    async def ready(self, request: web.BaseRequest) -> ReadyAnswer:
        """Answer 200 (ok or degraded) while the node accepts requests, else 503."""
        health = await health_of(self._node)
        states = [state for state, _ in health.values()]
        parts = {name: PartHealth(state.value, detail) for name, (state, detail) in health.items()}
        is_verbose = bodies.is_set(request, "verbose")
        if Health.DOWN in states:
            raise NotReadyError(
                "; ".join(
                    f"{name}: {part.detail}"
                    for name, part in parts.items()
                    if is_verbose or part.status == Health.DOWN.value
                )
            )
        status = Health.DEGRADED if Health.DEGRADED in states else Health.OK
        return ReadyAnswer(status.value, parts if is_verbose else None)

    @Route("GET", "/healthz", Access.PUBLIC, answer=ReadyAnswer, query=(("verbose", bool),))
    async def healthy(self, request: web.BaseRequest) -> ReadyAnswer:
        """Answer 200 (ok or degraded) while the node accepts requests, else 503.

        GET /readyz gives the same answer.
        """
        return await self.ready(request)

    @Route("GET", "/version", Access.PUBLIC, answer=VersionAnswer)
    async def version(self, _: web.BaseRequest) -> VersionAnswer:
        """Return version and role, and the fields in which nodes must agree to share blocks."""
        node = self._node
        return VersionAnswer(
            version=tierkv.__version__,
            name=node.name,
            role=node.settings.node.role.value,
            fingerprint=node.service.fingerprint.readable(),
            stored_under=node.service.stored_under(),
            model=node.settings.node.model_name,
        )

    @Route("GET", "/metrics", Access.READ, content_type="text/plain")
    async def metrics(self, request: web.BaseRequest) -> web.Response:
        """Return the metrics in the text format of Prometheus."""
        self._node.check_started()
        accept = request.headers.get("Accept", "")
        body, content_type = await self._metrics.exposition.render(accept)
        return web.Response(body=body, headers=bodies.headers_of(request, content_type))

    @Route("GET", "/v1/stats", Access.READ, answer=Stats)
    async def stats(self, _: web.BaseRequest) -> Stats:
        """Return all counters of the node, by subject."""
        self._node.check_started()
        return self._node.service.stats()

    @Route("GET", "/v1/verify", Access.ADMIN, answer=VerifyAnswer)
    async def verify(self, _: web.BaseRequest) -> VerifyAnswer:
        """Check the bookkeeping of blocks and leases; return a sentence for each fault."""
        self._node.check_started()
        return VerifyAnswer(await self._node.verify())


class OpenApiRoutes:
    """The route of the OpenAPI document."""

    def __init__(self, table: list[Route]) -> None:
        self._table = [*table, *routes_of(self)]

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(self._table))

    @Route("GET", "/openapi.json", Access.READ, content_type=JSON)
    async def get(self, request: web.BaseRequest) -> web.Response:
        """Return this OpenAPI document."""
        return web.Response(body=self._document, headers=bodies.headers_of(request, JSON))


# The metrics that the live page shows.
_FIGURES = frozenset(
    f"tierkv_{name}"
    for name in (
        *("blocks", "tier_used_bytes", "tier_capacity_bytes"),
        *("lookup_tokens", "missed_tokens", "admitted_requests", "inflight_requests"),
        *("computed_tokens", "generated_tokens", "decisions", "transfer_bytes", "evictions"),
        *("forgotten_blocks", "skipped_offloads", "failed_transfers", "storage_errors"),
        *("integrity_failures", "handoffs", "estimated_seconds"),
        *("sessions", "session_turns", "kv_hints"),
    )
)
_MAX_DIGITS = 18  # of a request's number; Python rejects numbers with thousands of digits
_RUN_S = 0.0004  # pause per run of blocks read, 200 times its reading time


class NodeLiveRoutes(Routes):
    """The HTTP routes that feed the live page, the node's status page for browsers at `/`.

    These routes are not part of the API, and any version of tierkv may change them.

    Args:
        node: The node that the page shows.
        metrics: The node's metrics, in which answers and times are recorded.
    """

    def __init__(self, node: Node, metrics: Metrics) -> None:
        super().__init__(node, metrics)
        collector = NodeCollector(node)
        self._prefixes: list[Prefix] = []
        self._num_runs = 0
        self._state = b"{}"
        self._refreshed = 0
        node.live.figures = lambda: figures_of(collector.shown(), _FIGURES)
        node.live.refresh = self._refresh

    @Route("GET", "/live/stream", Access.READ, content_type=EVENT_STREAM)
    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Stream the node's metrics, and the recent requests and cached prefixes.

        A caller that is not an admin gets only the requests and prefixes of its own tenant. The
        stream begins with the metrics of the last minutes.
        """
        self._node.check_started()
        news = self._news(self._tenant_filter(request))
        return await self._node.live.stream(request, lambda: next(news))

    @Route("GET", "/live/requests/{number}/explain", Access.READ, answer=Explanation)
    async def explain(self, request: web.BaseRequest) -> Explanation:
        """Return the tier of each cached block of a recent request, and the reason for a miss."""
        async with self._node.call():
            return await explained(self._node, principal_of(request), self._past_prompt(request))

    def _past_prompt(self, request: web.BaseRequest) -> Prompt:
        number = in_path(request, "number")
        is_number = number.isdecimal() and len(number) <= _MAX_DIGITS
        one = self._node.service.timelines.find(int(number)) if is_number else None
        if one is None or not self._may_see(self._tenant_filter(request), one.space):
            raise UnknownIdError(
                "this request is not one of the recent requests that this node remembers"
            )
        if one.prompt is None:
            raise UnknownIdError(
                "the prompt of this request is no longer kept: only recent prompts are"
            )
        return one.prompt

    def _tenant_filter(self, request: web.BaseRequest) -> str | None:
        caller = principal_of(request)
        if caller.access >= Access.ADMIN:
            return None
        return caller.tenant or self._node.settings.cache.tenant

    def _may_see(self, tenant: str | None, space: str) -> bool:
        return tenant is None or self._node.service.tenant_of(space) == tenant

    def _news(self, tenant: str | None) -> Iterator[list[tuple[str, bytes]]]:
        """Yield lists of events for one viewer of the live page: changes since the list before.

        An event is a pair of name and JSON. With a `tenant`, other tenants' requests and prefixes
        are left out; None includes all.
        """
        timelines, version, refreshed = self._node.service.timelines, 0, 0
        while True:
            news = []
            if refreshed != self._refreshed:
                refreshed = self._refreshed
                news.append(("state", self._state))
                news.append(("prefixes", self._visible_prefixes(tenant)))
            if version != timelines.version:
                news.append(("requests", self._changed_requests(tenant, version)))
                version = timelines.version
            yield news

    def _changed_requests(self, tenant: str | None, version: int) -> bytes:
        wall = time.time() - asyncio.get_running_loop().time()
        changed = self._node.service.timelines.since(version)
        return msgspec.json.encode(
            [_request(one, wall) for one in changed if self._may_see(tenant, one.space)]
        )

    def _visible_prefixes(self, tenant: str | None) -> bytes:
        places = {-1: -1}
        visible: list[Prefix] = []
        for at, one in enumerate(self._prefixes):
            if self._may_see(tenant, one.space):
                places[at] = len(visible)
                visible.append(msgspec.structs.replace(one, parent=places[one.parent]))
        return msgspec.json.encode({"looked_at": self._num_runs, "runs": visible})

    async def _refresh(self) -> float:
        """Collect health, limits and cached prefixes; return the seconds until the next call."""
        node = self._node
        self._state = msgspec.json.encode(await self._state_now())
        self._prefixes, self._num_runs = await prefixes(node.service.index)
        self._refreshed += 1
        return max(REFRESH_S, self._num_runs * _RUN_S)

    async def _state_now(self) -> dict[str, object]:
        node, service, fingerprint = self._node, self._node.service, self._node.service.fingerprint
        health = await health_of(node)
        return {
            "kind": "node",
            "name": node.name,
            "role": node.settings.node.role.value,
            "version": tierkv.__version__,
            "model": fingerprint.model,
            "device": node.device.status,
            "block_tokens": fingerprint.layout.block_size,
            "block_bytes": fingerprint.layout.block_bytes,
            "started_at": node.started_at,
            "is_draining": node.is_draining,
            "is_paused": service.scheduler.is_paused,
            "is_asleep": service.is_asleep,
            "worst_lag_s": node.heartbeat.worst_lag_s,
            "health": [
                (part, state.value, masked_url(detail)) for part, (state, detail) in health.items()
            ],
            "stores": self._stores(),
        }


def _request(one: Timeline, wall: float) -> dict[str, object]:
    since = one.missed_since
    began = one.moments[Moment.BEGAN]
    return {
        "n": one.number,
        "id": one.request_id.removeprefix(f"{one.space}/"),
        "space": one.space,
        "tokens": one.prompt_tokens,
        "at": {moment.value: round(at + wall, 4) for moment, at in one.moments.items()},
        "found": msgspec.structs.astuple(one.matched),
        "missed": one.missed,
        "since": None
        if since is None
        else {"tier": since.tier, "s": round(began - since.at, 3), "detail": since.detail},
        "new": one.new_tokens,
        "problem": one.problem,
        "session": one.session_id,
    }
