"""Every route of a node, in one list."""

from __future__ import annotations

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.route import Route
from tierkv.api.routes_events import EventRoutes
from tierkv.api.routes_handoff import HandoffRoutes
from tierkv.api.routes_life import LifeRoutes
from tierkv.api.routes_look import LookRoutes
from tierkv.api.routes_node import NodeRoutes
from tierkv.api.routes_openapi import OpenApiRoutes
from tierkv.api.routes_pins import PinRoutes
from tierkv.api.routes_prefetches import PrefetchRoutes
from tierkv.api.routes_quotas import QuotaRoutes
from tierkv.api.routes_requests import RequestRoutes
from tierkv.api.routes_status import StatusRoutes
from tierkv.api.routes_tickets import TicketRoutes
from tierkv.api.routes_work import WorkRoutes


def routes(node: Node, metrics: Metrics) -> list[Route]:
    """The table that the router, the OpenAPI document, metrics and the access check come from."""
    table = [
        *StatusRoutes(node, metrics).routes(),
        *RequestRoutes(node, metrics).routes(),
        *HandoffRoutes(node, metrics).routes(),
        *PrefetchRoutes(node, metrics).routes(),
        *PinRoutes(node, metrics).routes(),
        *TicketRoutes(node, metrics).routes(),
        *LookRoutes(node, metrics).routes(),
        *NodeRoutes(node, metrics).routes(),
        *LifeRoutes(node, metrics).routes(),
        *QuotaRoutes(node, metrics).routes(),
        *EventRoutes(node, metrics).routes(),
        *WorkRoutes(node, metrics).routes(),
    ]
    return [*table, *OpenApiRoutes(table).routes()]
