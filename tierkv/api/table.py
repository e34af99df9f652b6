"""Every route of a node, in one list."""

from __future__ import annotations

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.route import Route, routes_of
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

_KINDS = (
    *(StatusRoutes, RequestRoutes, HandoffRoutes, PrefetchRoutes, PinRoutes, TicketRoutes),
    *(LookRoutes, NodeRoutes, LifeRoutes, QuotaRoutes, EventRoutes, WorkRoutes),
)


def routes(node: Node, metrics: Metrics) -> list[Route]:
    """The table that the router, the OpenAPI document, metrics and the access check come from."""
    table = [row for kind in _KINDS for row in routes_of(kind(node, metrics))]
    return [*table, *routes_of(OpenApiRoutes(table))]
