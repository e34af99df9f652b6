"""A gateway: its nodes, its limit of running prompts, its metrics, and its shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import tierkv
from tierkv.api.metrics import Exposition, gauge
from tierkv.cache.keys import pack
from tierkv.gateway.calls import NodeCalls, probing
from tierkv.gateway.failures import (
    AttemptError,
    GatewayShuttingDownError,
    NoSuchModelError,
    OverloadedError,
    TooManyWaitingError,
)
from tierkv.gateway.nodes import BackendNode, Nodes, NodeState
from tierkv.gateway.prompts import Job
from tierkv.gateway.routing import REMEMBERED_BYTES, CachedTokens, PrefixMemory
from tierkv.gateway.settings import GatewaySettings, LimitsSection
from tierkv.http.bodies import BodyReader
from tierkv.http.live import LiveFeed, figures_of
from tierkv.http.process import CallUnderWay, Heartbeat, Working


class Admission:
    """The limit of prompts that run at nodes at the same time.

    Further prompts wait, and start in the order of their arrival.

    Attributes:
        num_waiting: Number of prompts that wait to start.
        num_running: Number of prompts that run.

    Args:
        limits: Largest numbers of running and of waiting prompts, and the longest wait.
    """

    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_running)
        self.num_waiting = 0
        self.num_running = 0

    def check(self, num_prompts: int) -> None:
        """Check that `num_prompts` more prompts can run or wait.

        Raises:
            TooManyWaitingError: More prompts than allowed would wait.
        """
        free = self._limits.max_running - self.num_running - self.num_waiting
        if num_prompts > max(free, 0) + max(self._limits.max_queued - self.num_waiting, 0):
            raise TooManyWaitingError(
                f"{self.num_running} prompts run and {self.num_waiting} wait, the "
                "maximum: try again later"
            )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until one more prompt may run.

        The prompt counts as running until the `async with` block ends.

        Raises:
            OverloadedError: The prompt waited for `queue_timeout_s` seconds.
        """
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise OverloadedError(
                f"the prompt waited {self._limits.queue_timeout_s:g} s, and none of "
                "the running prompts ended: try again later"
            ) from error
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._slots.release()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROUTES = ("handoff", "one_node", "resumed")
FAILURES = ("node_failed", "node_busy", "handoff_refused", "without_ticket")
OUTCOMES = ("ok", "client_error", "server_error", "client_gone")
# The metrics that the live page shows.
_FIGURES = frozenset(
    f"tierkv_gateway_{name}"
    for name in ("requests", "tokens", "routed", "failed_attempts", "prompts")
)


class GatewayMetrics:
    """The metrics of a gateway. Every combination of labels is present from the start, at 0.

    Attributes:
        exposition: All metrics of the process, as GET /metrics returns them.

    Args:
        nodes: The nodes.
        admission: The running and waiting prompts.
    """

    def __init__(self, nodes: Nodes, admission: Admission) -> None:
        self.exposition = Exposition(_State(nodes, admission))
        registry = self.exposition.registry
        self.requests = Counter(
            "tierkv_gateway_requests",
            "Completions, by outcome",
            ("outcome",),
            registry=registry,
        )
        self.tokens = Counter(
            "tierkv_gateway_tokens", "Tokens generated for callers", registry=registry
        )
        self.routed = Counter(
            "tierkv_gateway_routed",
            "Attempts, by kind: hand-off, one node alone, or continuation after a node's failure",
            ("how",),
            registry=registry,
        )
        self.failed = Counter(
            "tierkv_gateway_failed_attempts",
            "Failed attempts at a node, and prompts computed again there, by reason",
            ("node", "why"),
            registry=registry,
        )
        self.first_token = Histogram(
            "tierkv_gateway_time_to_first_token_seconds",
            "Time from a prompt's admission to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.lag = Histogram(
            "tierkv_gateway_event_loop_lag_seconds",
            "Delay of the event loop for a timer that is due every 50 ms",
            buckets=_SECONDS,
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for how in ROUTES:
            self.routed.labels(how)
        for node in nodes.all:
            for why in FAILURES:
                self.failed.labels(node.url, why)

    def figures(self) -> dict[str, float]:
        """Return the metrics that the gateway's live page (at `/`) shows, by name with labels."""
        return figures_of(self.exposition.registry.collect(), _FIGURES)


class _State(Collector):
    """A Prometheus collector that reads the state of nodes and prompts at each scrape."""

    def __init__(self, nodes: Nodes, admission: Admission) -> None:
        self._nodes = nodes
        self._admission = admission

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        admission, nodes = self._admission, self._nodes.all
        now = asyncio.get_running_loop().time()
        yield gauge(
            "tierkv_gateway_build_info",
            "Version of this gateway",
            ("version",),
            {(tierkv.__version__,): 1},
        )
        yield gauge(
            "tierkv_gateway_node_state",
            "1 for the current state of a node",
            ("node", "role", "state"),
            {
                (node.url, node.role.value, state.value): int(node.state(now) is state)
                for node in nodes
                for state in NodeState
            },
        )
        yield gauge(
            "tierkv_gateway_prompts",
            "Prompts that run at nodes (running) or wait in the gateway (waiting)",
            ("state",),
            {("running",): admission.num_running, ("waiting",): admission.num_waiting},
        )
        yield gauge(
            "tierkv_gateway_node_requests",
            "Requests that run at a node",
            ("node",),
            {(node.url,): node.running for node in nodes},
        )
        yield gauge(
            "tierkv_gateway_node_outstanding_tokens",
            "Tokens that a node has not computed or generated yet",
            ("node",),
            {(node.url,): node.outstanding_tokens for node in nodes},
        )


_SHORT_PROMPT = 64  # tokens; a shorter prompt is not worth asking nodes about


class Backend:
    """The nodes behind the gateway, and the queue, HTTP client and metrics for all prompts.

    Use this object only inside its `running()`.

    Raises:
        ConfigError: The settings name no node, or a node's URL or a certificate cannot be used.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.beat = Heartbeat()
        self.nodes = Nodes(settings.gateway, settings.health)
        self.calls = NodeCalls(settings, self.nodes)
        self.memory = PrefixMemory()
        self.admission = Admission(settings.limits)
        self.bodies = BodyReader(settings.gateway)
        self.metrics = GatewayMetrics(self.nodes, self.admission)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.beat.on_beat = lambda late_s, _: self.metrics.lag.observe(late_s)
        async with (
            self.beat.running(),
            self.calls.running(),
            probing(self.nodes, self.calls, self.settings.health),
        ):
            yield

    async def cached_tokens_by_node(self, job: Job, nodes: Sequence[BackendNode]) -> CachedTokens:
        """Return the number of leading prompt tokens that each node has cached, by the node's URL.

        The nodes are asked if there are several of them and the prompt has at least 64 tokens.
        Otherwise, and for a node that does not answer in time, the number is an estimate from the
        prompts that the gateway has sent to the node before.

        Args:
            job: The job whose prompt is looked up.
            nodes: The nodes to choose from.
        """
        cached_by_url = self.memory.matched(
            job.tokens, {node.url: node.num_recoveries for node in nodes}
        )
        if len(nodes) > 1 and job.num_tokens >= _SHORT_PROMPT:
            async with asyncio.TaskGroup() as tasks:
                asked = {node.url: tasks.create_task(self._ask(node, job)) for node in nodes}
            answers = {url: task.result() for url, task in asked.items()}
            cached_by_url |= {url: answer for url, answer in answers.items() if answer is not None}
        return cached_by_url

    async def _ask(self, node: BackendNode, job: Job) -> int | None:
        try:
            return await self.calls.lookup(node, job)
        except AttemptError:
            return None

    def remember(self, node: BackendNode, tokens: bytes, after: Sequence[int]) -> None:
        """Remember that a node has cached a prompt and the generated tokens after it.

        Args:
            node: The node.
            tokens: The prompt's token ids, as little-endian int32 bytes.
            after: The generated tokens.
        """
        known = tokens if len(tokens) >= REMEMBERED_BYTES else tokens + pack(after)
        self.memory.remember(known, node.url, node.num_recoveries)


class Gateway:
    """All parts of a gateway except its HTTP server.

    Use it inside `running()`, from one event loop.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.backend = Backend(settings)
        self.live = LiveFeed()
        self.live.figures = self.backend.metrics.figures
        self.started_at = time.time()
        self.is_draining = False
        self._working = Working(
            lambda: GatewayShuttingDownError("this gateway was stopped before the end")
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.backend.running(), self.live.running():
            try:
                yield
            finally:
                self.drain()
                await self.idle(grace_s=0)

    def states(self) -> dict[str, tuple[NodeState, str]]:
        """Return the state of each node and an explanation for operators, by the node's URL.

        The explanation may be "".
        """
        now = asyncio.get_running_loop().time()
        return {
            node.url: (node.state(now), node.state_detail(now)) for node in self.backend.nodes.all
        }

    @property
    def model(self) -> str:
        """The name of the served model; "" until a node has reported it."""
        return self.settings.gateway.model or self.backend.nodes.model

    def check_model(self, name: str | None) -> None:
        """Check that a request names the served model.

        Args:
            name: The model's name in the request; None if the request names no model.

        Raises:
            NoSuchModelError: The request names another model.
        """
        if name is not None and self.model not in ("", name):
            raise NoSuchModelError(name, self.model)

    def work(self) -> CallUnderWay:
        """Return a context manager whose `with` block counts as a running prompt.

        A shutdown waits for running prompts.

        Raises:
            GatewayShuttingDownError: The gateway is shutting down, or a shutdown cancelled the
                `with` block.
        """
        if self.is_draining:
            raise GatewayShuttingDownError("this gateway is shutting down")
        return self._working.call()

    def drain(self) -> None:
        """Reject new requests and report not ready; running prompts continue."""
        self.is_draining = True

    def end_grace(self) -> None:
        """End the grace time of a shutdown: cancel all prompts that clients are waiting for.

        If a call of `idle` is waiting for these prompts, they are cancelled now. If not, the next
        call of `idle` cancels them at once.
        """
        self._working.end_grace()

    async def idle(self, *, grace_s: float) -> None:
        """Wait until no prompt runs.

        Prompts that still run are cancelled after `grace_s` seconds, or by `end_grace`.
        """
        await self._working.idle(grace_s=grace_s)
