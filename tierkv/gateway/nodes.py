"""The nodes behind the gateway: the health, model and load of each node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum

from tierkv.api.settings import Role
from tierkv.cache.keys import differences
from tierkv.errors import ConfigError
from tierkv.gateway.settings import GatewaySection, HealthSection, urls_of


class NodeState(Enum):
    """The state of a node, by which the gateway chooses the nodes that receive requests."""

    READY = "ready"
    UNREADY = "unready"  # it reports that it is starting or draining
    EJECTED = "ejected"  # it failed, and receives no requests for a while
    OTHER_MODEL = "other_model"  # its fingerprint is not that of most nodes


class BackendNode:
    """One node behind the gateway. All times are seconds of a monotonic clock.

    Attributes:
        url: URL of the node.
        role: Prefill, decode or both.
        outstanding_tokens: Number of tokens that the node must compute or generate for its running
            requests. The tokens of a request are subtracted when the request ends.
        running: Number of requests that run at the node.
        num_failures: Number of failures in a row, without a success between them.
        num_recoveries: Number of times that the node became ready again after failures. The blocks
            that the node had cached before a failure may be lost.
        fingerprint: Fields that identify the node's KV (model, layout ...), as the node reports
            them; None before its first report.
        model: Name of the node's model; "" before the node's first report.
        differs_in: One phrase for each field in which the node's fingerprint differs from the most
            frequent fingerprint of all nodes. The node receives requests only if this is empty.

    Args:
        url: URL of the node.
        role: Prefill, decode or both.
        settings: Settings of health checks, such as the time for which a failed node receives no
            requests.
    """

    def __init__(self, url: str, role: Role, settings: HealthSection) -> None:
        self.url = url
        self.role = role
        self.outstanding_tokens = 0
        self.running = 0
        self.num_failures = 0
        self.num_recoveries = 0
        self.fingerprint: dict[str, str] | None = None
        self.model = ""
        self.differs_in: tuple[str, ...] = ()
        self._settings = settings
        self._ejected_until = 0.0
        self._is_ready = False
        self._trouble = ""  # the node's sentence about degraded parts
        self._waits: dict[asyncio.Timeout, float] = {}  # with the time when each began

    def state(self, now: float) -> NodeState:
        """Return the node's state at the time `now`."""
        if self.differs_in:
            return NodeState.OTHER_MODEL
        if now < self._ejected_until:
            return NodeState.EJECTED
        return NodeState.READY if self._is_ready else NodeState.UNREADY

    def state_detail(self, now: float) -> str:
        """Return an explanation of the node's state at the time `now`, for operators; may be ""."""
        match self.state(now):
            case NodeState.OTHER_MODEL:
                return f"differs in {'; '.join(self.differs_in)}"
            case NodeState.EJECTED:
                return f"failed {self.num_failures} times in a row"
            case NodeState.UNREADY:
                return ""
            case NodeState.READY:
                return self._trouble

    def note_failure(self, now: float) -> None:
        """Record a failure at the time `now`; the node receives no requests for a while.

        This pause lasts `eject_s` seconds, doubled with each failure in a row, at most
        `max_eject_s`. A failure during the pause does not extend it.
        """
        self.num_failures += 1
        self._is_ready = True  # the failure replaces an earlier report of not ready
        longest = self._settings.max_eject_s
        # Requests that fail at the same time have one cause, and count once.
        if now >= self._ejected_until:
            doublings = min(self.num_failures - 1, 16)
            self._ejected_until = now + min(self._settings.eject_s * 2**doublings, longest)

    def note_success(self) -> None:
        """Reset the number of failures in a row; the node may receive requests again at once."""
        self.num_failures = 0
        self._ejected_until = 0.0

    def mark_ready(self, trouble: str = "") -> None:
        """Record that a probe found the node ready; the node may receive requests again at once.

        Args:
            trouble: The node's sentence about its degraded parts; "" if no part is degraded.
        """
        if self.num_failures:
            self.num_recoveries += 1
        self._is_ready = True
        self._trouble = trouble
        self._ejected_until = 0.0
        self.num_failures = 0

    def mark_unready(self) -> None:
        """Exclude the node from requests until a probe finds it ready."""
        self._is_ready = False

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Limit a `with` block that waits for the node's answer to `seconds` seconds.

        Raises:
            TimeoutError: The `with` block took longer, or `cut_off_waits` ended it.
        """
        async with asyncio.timeout(seconds) as scope:
            self._waits[scope] = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                del self._waits[scope]

    def cut_off_waits(self, now: float, *, silent_s: float) -> None:
        """End all waits for an answer of the node that have lasted at least `silent_s` seconds.

        The waiting code is inside `async with node.within(...)`, which raises TimeoutError. Call
        this when probes have found the node dead: a machine that has lost power does not close its
        connections.

        Args:
            now: The current time, in seconds of the event loop's clock.
            silent_s: Seconds; shorter waits continue.
        """
        for scope, since in self._waits.items():
            if now - since >= silent_s and not scope.expired():
                scope.reschedule(now)

    @contextmanager
    def working(self, tokens: int) -> Iterator[None]:
        """Count one request as running at the node while this context is entered.

        Args:
            tokens: Number of tokens that the node must compute or generate for the request.
        """
        self.running += 1
        self.outstanding_tokens += tokens
        try:
            yield
        finally:
            self.running -= 1
            self.outstanding_tokens -= tokens


class Nodes:
    """All nodes of a gateway.

    Attributes:
        all: The nodes.
        model: Name of the model that is served: the model of the fingerprint that most nodes have
            reported; "" before the first report.

    Args:
        section: URLs of the nodes by role.
        health: Settings of the probes of nodes, and of the time for which a failed node receives no
            requests.

    Raises:
        ConfigError: No node is given, a node is given twice, or a URL is malformed.
    """

    def __init__(self, section: GatewaySection, health: HealthSection) -> None:
        self.model = ""
        self.all = [
            BackendNode(url, role, health)
            for role, given in (
                (Role.PREFILL, section.prefill),
                (Role.DECODE, section.decode),
                (Role.BOTH, section.both),
            )
            for url in urls_of(given)
        ]
        if not self.all:
            raise ConfigError(
                "a gateway needs nodes: give --prefill URL and --decode URL, or --both URL"
            )
        urls = [node.url for node in self.all]
        if len(set(urls)) < len(urls):
            raise ConfigError(
                "the same node is given twice: give --both for a node that does prefill and decode"
            )

    def compare(self, node: BackendNode, fingerprint: dict[str, str] | None, model: str) -> None:
        """Record the fingerprint of `node`, and find out which nodes differ from the majority.

        Each node's fingerprint is compared with the most frequent one, and `differs_in` of the node
        is set to the differences. If several fingerprints are equally frequent, the one of the
        first node in the gateway's list counts.

        Args:
            node: The node.
            fingerprint: Fields that identify the node's KV; None if the node does not report them.
            model: Name of the node's model.
        """
        if (fingerprint, model) == (node.fingerprint, node.model):
            return
        node.fingerprint, node.model = fingerprint, model
        known = [one.fingerprint for one in self.all if one.fingerprint is not None]
        most = max(known, key=known.count, default={})  # the first of several
        self.model = next((one.model for one in self.all if one.fingerprint == most), "")
        for one in self.all:
            one.differs_in = () if one.fingerprint is None else differences(most, one.fingerprint)

    def prefilling(self) -> list[BackendNode]:
        """Return the nodes with the role prefill or both."""
        return [node for node in self.all if node.role.prefills]

    def decoding(self) -> list[BackendNode]:
        """Return the nodes with the role decode or both."""
        return [node for node in self.all if node.role.decodes]


def usable(
    nodes: Iterable[BackendNode], now: float, avoid: Iterable[BackendNode] = ()
) -> list[BackendNode]:
    """Return the nodes that may receive a request: all ready nodes, except those in `avoid`.

    If no node outside `avoid` is ready, the nodes that are excluded only because of recent failures
    are returned, because an attempt at such a node is better than rejecting the request.

    Args:
        nodes: The nodes.
        now: The time, in seconds of a monotonic clock.
        avoid: Nodes to leave out in any case.
    """
    left = [node for node in nodes if node not in set(avoid)]
    ready = [node for node in left if node.state(now) is NodeState.READY]
    return ready or [node for node in left if node.state(now) is NodeState.EJECTED]
