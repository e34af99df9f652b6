"""The aiohttp application of a gateway: completions, models, probes, metrics."""

from __future__ import annotations

import time

from aiohttp import web

import tierkv
from tierkv.api.types import PartHealth, ReadyAnswer
from tierkv.gateway.answers import failure_middleware
from tierkv.gateway.failures import GatewayShuttingDownError, NoNodesError, NoSuchModelError
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.nodes import NodeState
from tierkv.gateway.openai import Model, ModelList
from tierkv.gateway.routes_completions import CompletionRoutes
from tierkv.http import bodies
from tierkv.http.auth import Guard, auth_middleware
from tierkv.http.callers import Access
from tierkv.http.problems import add_headers
from tierkv.http.route import Route, register, routes_of


def make_app(gateway: Gateway, guard: Guard) -> web.Application:
    """The application over a gateway, which must be running when the first request comes.

    guard: knows who may call; it must be running too.
    """
    app = web.Application(
        middlewares=[failure_middleware, auth_middleware(guard)],
        client_max_size=gateway.settings.gateway.max_body_bytes,
    )
    register(
        [row for kind in (CompletionRoutes, ProbeRoutes) for row in routes_of(kind(gateway))], app
    )
    app.on_response_prepare.append(add_headers)
    return app


class ProbeRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    @Route("GET", "/v1/models", Access.READ)
    async def models(self, _: web.Request) -> ModelList:
        return ModelList(data=(self._model(),))

    @Route("GET", "/v1/models/{model:.+}", Access.READ)  # such names may have slashes
    async def model(self, request: web.Request) -> Model:
        asked, ours = request.match_info["model"], self._model()
        if asked != ours.id:
            raise NoSuchModelError(asked, ours.id)
        return ours

    def _model(self) -> Model:
        return Model(id=self._gateway.settings.gateway.model, created=self._started)

    @Route("GET", "/livez", Access.PUBLIC)
    async def live(self, _: web.Request) -> ReadyAnswer:
        """An answer at all is the point: the event loop turns."""
        return ReadyAnswer("ok")

    @Route("GET", "/readyz", Access.PUBLIC)
    async def ready(self, request: web.Request) -> ReadyAnswer:
        """200 as long as some node takes work; degraded if not all do, or one says that it is.
        ?verbose names each."""
        gateway = self._gateway
        if gateway.is_draining:
            raise GatewayShuttingDownError("this gateway is shutting down")
        states = gateway.states()
        if not any(state is NodeState.READY for state, _ in states.values()):
            raise NoNodesError("no node is ready")
        parts = {
            url: PartHealth("degraded" if word and state is NodeState.READY else state.value, word)
            for url, (state, word) in states.items()
        }
        is_whole = all(part.status == NodeState.READY.value for part in parts.values())
        is_verbose = bodies.is_set(request, "verbose")
        status = "ok" if is_whole else "degraded"
        return ReadyAnswer(status, parts if is_verbose else None)

    @Route("GET", "/version", Access.PUBLIC)
    async def version(self, _: web.Request) -> dict[str, str]:
        return {"version": tierkv.__version__, "role": "gateway"}

    @Route("GET", "/metrics", Access.READ)
    async def metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        body, content_type = self._gateway.backend.metrics.render(accept)
        return web.Response(body=body, headers={"Content-Type": content_type})
