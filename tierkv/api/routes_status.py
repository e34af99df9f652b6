"""The routes that tell: probes, version, metrics, stats, verify."""

from __future__ import annotations

from aiohttp import web

import tierkv
from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.health import Health, health_of
from tierkv.api.refusals import NotReadyError
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes
from tierkv.api.types import LiveAnswer, PartHealth, ReadyAnswer, VerifyAnswer, VersionAnswer
from tierkv.observe import Stats


class StatusRoutes(Routes):
    @Route("GET", "/livez", Access.PUBLIC, answer=LiveAnswer)
    async def live(self, _: web.Request) -> LiveAnswer:
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
    async def ready(self, request: web.Request) -> ReadyAnswer:
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
    async def version(self, _: web.Request) -> VersionAnswer:
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
    async def metrics(self, request: web.Request) -> web.Response:
        """Counters and gauges, for Prometheus."""
        self._node.check_started()
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    @Route("GET", "/v1/stats", Access.READ, answer=Stats)
    async def stats(self, _: web.Request) -> Stats:
        """Everything that is counted."""
        self._node.check_started()
        return self._node.service.stats()

    @Route("GET", "/v1/verify", Access.ADMIN, answer=VerifyAnswer)
    async def verify(self, _: web.Request) -> VerifyAnswer:
        """Recount blocks and leases; what is wrong with them, in words."""
        self._node.check_started()
        return VerifyAnswer(self._node.service.verify())
