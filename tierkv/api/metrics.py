"""What Prometheus scrapes: what the node counts, read when asked for, and what is counted here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from tierkv.api.collector import NodeCollector
from tierkv.api.node import Node
from tierkv.errors import HandoffError
from tierkv.pd.ticket import ClaimProblem
from tierkv.refmodel.generation import Generation
from tierkv.service.session import LOAD_FAILED

OPERATIONS = ("generate", "prefill", "decode")
_STATUS_CLASSES = ("2xx", "4xx", "5xx")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """A registry of its own. Every combination of labels is there from the start, at 0."""

    def __init__(self, node: Node) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(node))
        self._http = Counter(
            "tierkv_http_requests",
            "Requests answered, by route and class of status",
            ("route", "status"),
            registry=self._registry,
        )
        self._first_token = Histogram(
            "tierkv_time_to_first_token_seconds",
            "From a request's arrival to the first token computed here",
            ("operation",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._queue = Histogram(
            "tierkv_queue_seconds",
            "From a request's arrival to its admission, its fetch from storage included",
            ("operation",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        lag = Histogram(
            "tierkv_event_loop_lag_seconds",
            "How late the event loop was for a timer that is due every 50 ms",
            buckets=_LAG_SECONDS,
            registry=self._registry,
        )
        busy = Histogram(
            "tierkv_event_loop_busy_seconds",
            "Of that lateness, in how much at most the loop's thread had a core and used it",
            buckets=_LAG_SECONDS,
            registry=self._registry,
        )

        def beat(late_s: float, busy_s: float) -> None:
            lag.observe(late_s)
            busy.observe(busy_s)

        node.heartbeat.on_beat = beat
        self._handoff = Counter(
            "tierkv_handoff_failures",
            "Prompts that could not be published or claimed, by reason",
            ("side", "reason"),
            registry=self._registry,
        )
        for operation in OPERATIONS:
            self._first_token.labels(operation)
            self._queue.labels(operation)
        for side in ("publish", "claim"):
            for reason in (*(problem.value for problem in ClaimProblem), LOAD_FAILED):
                self._handoff.labels(side, reason)

    def know_routes(self, routes: Iterable[str]) -> None:
        """Begin counting these at 0."""
        for route in routes:
            for status in _STATUS_CLASSES:
                self._http.labels(route, status)

    def count_answer(self, route: str, status: int) -> None:
        self._http.labels(route, f"{status // 100}xx").inc()

    def observe(self, operation: str, generation: Generation) -> None:
        self._first_token.labels(operation).observe(generation.first_token_s)
        self._queue.labels(operation).observe(generation.queue_s)

    @contextmanager
    def handing(self, side: str) -> Iterator[None]:
        """Counts why the body's hand-off failed, if it does."""
        try:
            yield
        except HandoffError as error:
            self._handoff.labels(side, error.reason).inc()
            raise

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text format that `accept` asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
