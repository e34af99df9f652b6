"""The routes that tell: probes, version, metrics, stats, verify."""

from __future__ import annotations

from aiohttp import web

import tierkv
from tierkv.api import bodies
from tierkv.api.metrics import Metrics
from tierkv.api.node import Health, Node, NotReadyError
from tierkv.api.types import PartHealth, ReadyAnswer, VerifyAnswer, VersionAnswer


class StatusRoutes:
    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/livez", self.live)
        router.add_get("/readyz", self.ready)
        router.add_get("/healthz", self.ready)
        router.add_get("/version", self.version)
        router.add_get("/metrics", self.metrics)
        router.add_get("/v1/stats", self.stats)
        router.add_get("/v1/verify", self.verify)

    async def live(self, request: web.Request) -> web.Response:
        """An answer at all is the point: the event loop turns."""
        return bodies.answer(request, ReadyAnswer(Health.OK.value))

    async def ready(self, request: web.Request) -> web.Response:
        health = await self._node.health()
        states = [state for state, _ in health.values()]
        parts = {name: PartHealth(state.value, detail) for name, (state, detail) in health.items()}
        is_verbose = "verbose" in request.query
        if Health.DOWN in states:
            raise NotReadyError(
                "; ".join(
                    f"{name}: {part.detail}"
                    for name, part in parts.items()
                    if is_verbose or part.status == Health.DOWN.value
                )
            )
        status = Health.DEGRADED if Health.DEGRADED in states else Health.OK
        return bodies.answer(request, ReadyAnswer(status.value, parts if is_verbose else None))

    async def version(self, request: web.Request) -> web.Response:
        node = self._node
        return bodies.answer(
            request,
            VersionAnswer(
                version=tierkv.__version__,
                name=node.name,
                role=node.settings.node.role.value,
                fingerprint=node.service.fingerprint.readable(),
            ),
        )

    async def metrics(self, request: web.Request) -> web.Response:
        self._node.check_started()
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def stats(self, request: web.Request) -> web.Response:
        self._node.check_started()
        return bodies.answer(request, self._node.service.stats())

    async def verify(self, request: web.Request) -> web.Response:
        self._node.check_started()
        return bodies.answer(request, VerifyAnswer(self._node.service.verify()))
