"""The nodes behind the gateway: the state of each, and the tokens that it still has to compute."""

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
    """The state of a node, which decides whether it receives requests."""

    READY = "ready"
    UNREADY = "unready"  # its probe says that it takes no work: it starts or drains
    EJECTED = "ejected"  # it failed, and gets no work for a while
    OTHER_MODEL = "other_model"  # its answers are not those of the other nodes


class BackendNode:
    """One node behind the gateway. Times are seconds of a monotonic clock.

    Attributes:
        url: URL of the node.
        role: Prefill, decode or both.
        outstanding_tokens: Prompt tokens to compute and tokens to generate, of requests that run at
            the node.
        running: Number of requests that run at the node.
        num_failures: Number of failures since the last success.
        lives: Number of times that the node came back after failures; blocks that it cached before
            may be lost.
        fingerprint: The fields that decide the node's KV, as it says itself; None until it does.
        model: Name of the node's model.
        differs_in: Fields of the fingerprint that differ from most other nodes.

    Args:
        url: URL of the node.
        role: Prefill, decode or both.
        settings: Times without requests after failures.
    """

    def __init__(self, url: str, role: Role, settings: HealthSection) -> None:
        self.url = url
        self.role = role
        self.outstanding_tokens = 0
        self.running = 0
        self.num_failures = 0  # in a row
        self.lives = 0  # returns after failures; blocks cached before a failure may be lost
        self.fingerprint: dict[str, str] | None = None  # what it computes, as it says itself
        self.model = ""  # its name, which does not count in comparisons
        self.differs_in: tuple[str, ...] = ()  # fields of it, from what most others compute
        self._settings = settings
        self._ejected_until = 0.0
        self._is_ready = False  # until it has said so
        self._trouble = ""  # what it says is wrong with it, ready as it is
        self._waits: dict[asyncio.Timeout, float] = {}  # with the time when each began

    def state(self, now: float) -> NodeState:
        """Return the node's state at the time `now`."""
        if self.differs_in:
            return NodeState.OTHER_MODEL
        if now < self._ejected_until:
            return NodeState.EJECTED
        return NodeState.READY if self._is_ready else NodeState.UNREADY

    def word(self, now: float) -> str:
        """Return the reason of the node's state at `now`, for an operator; "" without one."""
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
        """Send no requests to the node for a time, twice as long after each consecutive failure."""
        self.num_failures += 1
        self._is_ready = True  # what it said before counts no more
        longest = self._settings.max_eject_s
        # Failures of work that ran beside each other are one death, not many.
        if now >= self._ejected_until:
            doublings = min(self.num_failures - 1, 16)
            self._ejected_until = now + min(self._settings.eject_s * 2**doublings, longest)

    def note_success(self) -> None:
        """Reset the count of failures, and send requests to the node again."""
        self.num_failures = 0
        self._ejected_until = 0.0

    def mark_ready(self, trouble: str = "") -> None:
        """Record that the node has answered a probe as ready.

        Args:
            trouble: The node's own sentence about degraded parts; "" without any.
        """
        if self.num_failures:
            self.lives += 1
        self._is_ready = True
        self._trouble = trouble
        self._ejected_until = 0.0
        self.num_failures = 0

    def mark_unready(self) -> None:
        """Send no requests to the node until a probe finds it ready."""
        self._is_ready = False

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Limit the body, which waits for the node, to some seconds.

        Args:
            seconds: The limit.

        Raises:
            TimeoutError: The body took longer, or `cut_off_waits` has ended it.
        """
        async with asyncio.timeout(seconds) as scope:
            self._waits[scope] = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                del self._waits[scope]

    def cut_off_waits(self, now: float, *, silent_s: float) -> None:
        """End all bodies of `within` that have waited long, after probes found the node dead.

        A dead machine does not close its connections.

        Args:
            now: The time.
            silent_s: Seconds that a body must have waited.
        """
        for scope, since in self._waits.items():
            if now - since >= silent_s and not scope.expired():
                scope.reschedule(now)

    @contextmanager
    def working(self, tokens: int) -> Iterator[None]:
        """Count a request as running at the node while the body runs.

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
        model: Name of the model that most nodes have; "" until a node has answered with it.

    Args:
        section: URLs of the nodes by role.
        health: Times without requests after failures.

    Raises:
        ConfigError: There is no node, or one is named twice.
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
        """Record the fingerprint of `node`, and compare it with those of the other nodes.

        A node receives no requests while its fingerprint differs from the most frequent one. Of
        equally frequent ones, the one of the first node counts.

        Args:
            node: The node.
            fingerprint: Its fingerprint; None if it has none.
            model: The name of its model.
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
        """Return the nodes whose role includes prefill."""
        return [node for node in self.all if node.role.prefills]

    def decoding(self) -> list[BackendNode]:
        """Return the nodes whose role includes decode."""
        return [node for node in self.all if node.role.decodes]


def usable(
    nodes: Iterable[BackendNode], now: float, avoid: Iterable[BackendNode] = ()
) -> list[BackendNode]:
    """Return the nodes that may get a request: the ready ones, without those in `avoid`.

    Without a ready node, these are the nodes that have failed lately, since a failed attempt costs
    less than a refused caller.

    Args:
        nodes: The nodes.
        now: The time, in seconds of a monotonic clock.
        avoid: Nodes to leave out.
    """
    left = [node for node in nodes if node not in set(avoid)]
    ready = [node for node in left if node.state(now) is NodeState.READY]
    return ready or [node for node in left if node.state(now) is NodeState.EJECTED]
