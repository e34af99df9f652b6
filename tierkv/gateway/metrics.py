"""What Prometheus scrapes of a gateway. Every combination of labels is there from the start."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tierkv.api.metrics import gauge
from tierkv.gateway.admission import Admission
from tierkv.gateway.nodes import Nodes

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROUTES = ("handoff", "one_node", "resumed")
FAILURES = ("node_failed", "node_busy", "handoff_refused")
OUTCOMES = ("ok", "client_error", "server_error", "client_gone")


class GatewayMetrics:
    def __init__(self, nodes: Nodes, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(nodes, admission))
        self._requests = Counter(
            "tierkv_gateway_requests",
            "Completions asked for, by how they ended",
            ("outcome",),
            registry=self._registry,
        )
        self._tokens = Counter(
            "tierkv_gateway_tokens", "Tokens generated for callers", registry=self._registry
        )
        self._routed = Counter(
            "tierkv_gateway_routed",
            "Attempts: by hand-off, at one node alone, or going on after a node had failed",
            ("how",),
            registry=self._registry,
        )
        self._failed = Counter(
            "tierkv_gateway_failed_attempts",
            "Attempts at a node that came to nothing, by why",
            ("node", "why"),
            registry=self._registry,
        )
        self._hedges = Counter(
            "tierkv_gateway_hedges",
            "Prefills that were given to a second node, the first being slow",
            registry=self._registry,
        )
        self._first_token = Histogram(
            "tierkv_gateway_time_to_first_token_seconds",
            "From admission to a prompt's first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for how in ROUTES:
            self._routed.labels(how)
        for node in nodes.all:
            for why in FAILURES:
                self._failed.labels(node.url, why)

    def count_request(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def count_tokens(self, count: int) -> None:
        self._tokens.inc(count)

    def count_route(self, how: str) -> None:
        self._routed.labels(how).inc()

    def count_failure(self, url: str, why: str) -> None:
        self._failed.labels(url, why).inc()

    def count_hedge(self, count: int) -> None:
        self._hedges.inc(count)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text format that `accept` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _State(Collector):
    """Reads the gateway's own books when it is scraped; none of them is kept twice."""

    def __init__(self, nodes: Nodes, admission: Admission) -> None:
        self._nodes = nodes
        self._admission = admission

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        admission, nodes = self._admission, self._nodes.all
        yield gauge(
            "tierkv_gateway_prompts",
            "Prompts that run at the nodes or wait here",
            ("state",),
            {("running",): admission.num_running, ("waiting",): admission.num_waiting},
        )
        yield gauge(
            "tierkv_gateway_node_requests",
            "Requests at a node",
            ("node",),
            {(node.url,): node.running for node in nodes},
        )
        yield gauge(
            "tierkv_gateway_node_outstanding_tokens",
            "Tokens that a node is still to compute or generate",
            ("node",),
            {(node.url,): node.outstanding_tokens for node in nodes},
        )
        yield gauge(
            "tierkv_gateway_node_failures_in_a_row",
            "Failures since a node last worked",
            ("node",),
            {(node.url,): node.num_failures for node in nodes},
        )
