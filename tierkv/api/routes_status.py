"""The routes that tell: probes, version, metrics, stats, verify."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

import tierkv
from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.health import Health, health_of
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.refusals import NotReadyError
from tierkv.api.route import Route
from tierkv.api.types import LiveAnswer, PartHealth, ReadyAnswer, VerifyAnswer, VersionAnswer
from tierkv.observe import Stats


def _ready(path: str, handler: Handler) -> Route:
    return Route(
        method="GET",
        path=path,
        handler=handler,
        access=Access.PUBLIC,
        summary="Tell whether the node takes requests: 200 ok or degraded, else 503.",
        answer=ReadyAnswer,
        query=(("verbose", bool),),
    )


class StatusRoutes:
    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/livez",
                handler=self.live,
                access=Access.PUBLIC,
                summary="Tell whether the process still turns.",
                answer=LiveAnswer,
            ),
            _ready("/readyz", self.ready),
            _ready("/healthz", self.ready),
            Route(
                method="GET",
                path="/version",
                handler=self.version,
                access=Access.PUBLIC,
                summary="Tell version, role, and what two nodes that share must have equal.",
                answer=VersionAnswer,
            ),
            Route(
                method="GET",
                path="/metrics",
                handler=self.metrics,
                access=Access.READ,
                summary="Counters and gauges, for Prometheus.",
                content_type="text/plain",  # or OpenMetrics, for who asks for that
            ),
            Route(
                method="GET",
                path="/v1/stats",
                handler=self.stats,
                access=Access.READ,
                summary="Everything that is counted.",
                answer=Stats,
            ),
            Route(
                method="GET",
                path="/v1/verify",
                handler=self.verify,
                access=Access.ADMIN,
                summary="Recount blocks and leases; what is wrong with them, in words.",
                answer=VerifyAnswer,
            ),
        ]

    async def live(self, request: web.Request) -> web.Response:
        """An answer at all is the point: the event loop turns. How late it was is told too."""
        heartbeat = self._node.heartbeat
        return bodies.answer(
            request,
            LiveAnswer(
                status=Health.OK.value,
                heartbeat_age_s=heartbeat.age_s,
                worst_lag_s=heartbeat.worst_lag_s,
            ),
        )

    async def ready(self, request: web.Request) -> web.Response:
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
                stored_under=node.service.stored_under(),
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
