"""Every route of a node, in one list."""

from __future__ import annotations

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.route import Route
from tierkv.api.routes_status import StatusRoutes
from tierkv.api.routes_work import WorkRoutes


def routes(node: Node, metrics: Metrics) -> list[Route]:
    """The table that the router, the OpenAPI document, metrics and the access check come from."""
    return [
        *StatusRoutes(node, metrics).routes(),
        *WorkRoutes(node, metrics).routes(),
    ]
