"""Asks every node whether it is ready and what it computes, for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.gateway.calls import NodeCalls
from tierkv.gateway.failures import AttemptError
from tierkv.gateway.nodes import BackendNode, Nodes, NodeState
from tierkv.gateway.settings import HealthSection
from tierkv.tasks import background

log = logging.getLogger("tierkv.gateway")


@asynccontextmanager
async def probing(nodes: Nodes, calls: NodeCalls, settings: HealthSection) -> AsyncIterator[None]:
    """Every node has been asked once when the body begins, and is asked on until it ends."""
    probes = [_Probe(node, nodes, calls, settings) for node in nodes.all]
    async with asyncio.TaskGroup() as first:
        for probe in probes:
            first.create_task(probe.once())
    async with background({f"tierkv-probe-{probe.node.url}": probe.on() for probe in probes}):
        yield


class _Probe:
    def __init__(
        self, node: BackendNode, nodes: Nodes, calls: NodeCalls, settings: HealthSection
    ) -> None:
        self.node = node
        self._nodes = nodes
        self._calls = calls
        self._settings = settings
        self._unanswered = 0  # in a row
        self._before: NodeState | None = None

    async def on(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.probe_interval_s)
            await self.once()

    async def once(self) -> None:
        now, node = asyncio.get_running_loop().time, self.node
        try:
            # What it computes comes first, each time: a node that was replaced by one of another
            # model must not go on with an answer that one of ours has begun.
            fingerprint = await self._calls.fingerprint(node)
            trouble = await self._calls.trouble(node)
            self._nodes.compare(node, fingerprint)
            if trouble is None:
                node.says_unready()
            else:
                node.says_ready(trouble)
            self._unanswered = 0
        except AttemptError:
            node.has_failed(now())
            self._unanswered += 1
            if self._unanswered >= self._settings.gone_after_probes:
                node.is_gone(now(), silent_s=self._settings.probe_timeout_s)
        self._tell(node.state(now()))

    def _tell(self, state: NodeState) -> None:
        if state is self._before:
            return
        self._before = state
        node = self.node
        log.info("node %s (%s) is %s", node.url, node.role.value, state.value)
        if state is NodeState.OTHER_MODEL:
            log.error(
                "node %s gets no work: it differs in %s", node.url, "; ".join(node.differs_in)
            )
