"""The routes that tell how a node is: probes, version, metrics, stats, verify, OpenAPI."""

from __future__ import annotations

import asyncio
from enum import Enum
from functools import cached_property

import msgspec
from aiohttp import web

import tierkv
from tierkv.api.node import Node
from tierkv.api.routes import Routes
from tierkv.api.types import (
    EXAMPLES,
    LiveAnswer,
    PartHealth,
    ReadyAnswer,
    VerifyAnswer,
    VersionAnswer,
)
from tierkv.errors import StoreUnavailableError
from tierkv.http import bodies
from tierkv.http.bodies import JSON
from tierkv.http.callers import Access
from tierkv.http.openapi import document
from tierkv.http.problems import NotReadyError
from tierkv.http.route import Route, routes_of
from tierkv.observe import Stats
from tierkv.transfer.tier import StoreState

_PING_DEADLINE_S = 1.0

Part = tuple["Health", str]


class Health(Enum):
    """What a probe sees of one dependency, or of the node as a whole."""

    OK = "ok"
    DEGRADED = "degraded"  # answers are right, but slower than they could be
    DOWN = "down"


async def health_of(node: Node) -> dict[str, Part]:
    """A store that is down only slows a node, since computing is a right answer too."""
    device = node.device
    parts = {
        "service": _of_service(node),
        "device": (Health.OK if device.failure is None else Health.DOWN, device.status),
    }
    ranks = node.service.ranks
    if ranks is not None:
        wrong = ranks.findings()
        state = Health.DEGRADED if wrong else Health.OK
        parts["ranks"] = state, "; ".join(wrong) or f"{len(ranks.devices)} ranks keep up"
    stores = node.service.storage_state() if node.has_started else ()
    if not stores:
        parts["storage"] = (Health.OK, "no storage tier")
    for store in stores:
        name = "storage" + (f" of {store.tenant}" if store.tenant else "")
        parts[name] = await _of_store(node, store)
    return parts


def _of_service(node: Node) -> Part:
    if not node.has_started:
        return Health.DOWN, "this node has not started yet"
    if node.is_draining:
        failure = node.service.failure
        why = "" if failure is None else f", since it has failed: {failure}"
        return Health.DOWN, f"this node is shutting down{why}"
    return Health.OK, "takes requests"


async def _of_store(node: Node, state: StoreState) -> Part:
    """A store that is left alone is not asked again: its breaker does that."""
    if state.is_left_alone:
        return Health.DEGRADED, (
            f"{state.part or state.url} is left alone ({state.circuit}) since it failed: "
            f"{state.reason}"
        )
    if state.write_refusal:
        return Health.DEGRADED, f"{state.url} takes no writes: {state.write_refusal}"
    store = node.service.store
    if state.tenant or store is None:
        return Health.OK, state.url
    try:
        async with asyncio.timeout(_PING_DEADLINE_S):
            await store.ping()
    except TimeoutError:
        return Health.DEGRADED, f"{state.url} does not answer"
    except StoreUnavailableError as error:
        return Health.DEGRADED, str(error)
    return Health.OK, state.url


class StatusRoutes(Routes):
    @Route("GET", "/livez", Access.PUBLIC, answer=LiveAnswer)
    async def live(self, _: web.BaseRequest) -> LiveAnswer:
        """Tell whether the process still turns.

        An answer at all is the point. How late the event loop was is told too."""
        heartbeat = self._node.heartbeat
        return LiveAnswer(
            status=Health.OK.value,
            heartbeat_age_s=heartbeat.age_s,
            worst_lag_s=heartbeat.worst_lag_s,
        )

    @Route("GET", "/readyz", Access.PUBLIC, answer=ReadyAnswer, query=(("verbose", bool),))
    @Route("GET", "/healthz", Access.PUBLIC, answer=ReadyAnswer, query=(("verbose", bool),))
    async def ready(self, request: web.BaseRequest) -> ReadyAnswer:
        """Tell whether the node takes requests: 200 ok or degraded, else 503."""
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

    @Route("GET", "/version", Access.PUBLIC, answer=VersionAnswer)
    async def version(self, _: web.BaseRequest) -> VersionAnswer:
        """Tell version, role, and what two nodes that share must have equal."""
        node = self._node
        return VersionAnswer(
            version=tierkv.__version__,
            name=node.name,
            role=node.settings.node.role.value,
            fingerprint=node.service.fingerprint.readable(),
            stored_under=node.service.stored_under(),
        )

    @Route("GET", "/metrics", Access.READ, content_type="text/plain")
    async def metrics(self, request: web.BaseRequest) -> web.Response:
        """Counters and gauges, for Prometheus."""
        self._node.check_started()
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers=bodies.headers_of(request, content_type))

    @Route("GET", "/v1/stats", Access.READ, answer=Stats)
    async def stats(self, _: web.BaseRequest) -> Stats:
        """Everything that is counted."""
        self._node.check_started()
        return self._node.service.stats()

    @Route("GET", "/v1/verify", Access.ADMIN, answer=VerifyAnswer)
    async def verify(self, _: web.BaseRequest) -> VerifyAnswer:
        """Recount blocks and leases; what is wrong with them, in words."""
        self._node.check_started()
        return VerifyAnswer(self._node.service.verify())


class OpenApiRoutes:
    """table: all other routes; its own is told of too."""

    def __init__(self, table: list[Route]) -> None:
        self._table = [*table, *routes_of(self)]

    @cached_property
    def _document(self) -> bytes:
        """Made when it is first asked for: it takes 50 ms, and few ask."""
        return msgspec.json.encode(document(self._table, EXAMPLES))

    @Route("GET", "/openapi.json", Access.READ, content_type=JSON)
    async def tell(self, request: web.BaseRequest) -> web.Response:
        """This document."""
        return web.Response(body=self._document, headers=bodies.headers_of(request, JSON))
