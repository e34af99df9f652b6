"""The aiohttp application of a node: its routes, and what goes around each of them."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.problems import problem_middleware
from tierkv.api.routes_status import StatusRoutes
from tierkv.api.routes_work import WorkRoutes

_NO_ROUTE = "none"


def make_app(node: Node) -> web.Application:
    """The application over a node, which must be running when the first request comes."""
    metrics = Metrics(node)
    app = web.Application(
        middlewares=[_counting(metrics), problem_middleware],
        client_max_size=node.settings.node.max_body_bytes,
    )
    WorkRoutes(node, metrics).add_to(app.router)
    StatusRoutes(node, metrics).add_to(app.router)
    metrics.know_routes([_NO_ROUTE, *(one.canonical for one in app.router.resources())])
    app.on_response_prepare.append(_name_no_versions)
    return app


def _counting(metrics: Metrics) -> Middleware:
    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        metrics.count_answer(resource.canonical if resource else _NO_ROUTE, response.status)
        return response

    return count


async def _name_no_versions(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "tierkv"
