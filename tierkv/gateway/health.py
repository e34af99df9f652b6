"""Asks every node whether it is ready, for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging

from tierkv.gateway.calls import NodeCalls
from tierkv.gateway.failures import AttemptError
from tierkv.gateway.nodes import BackendNode, Nodes, NodeState
from tierkv.gateway.settings import HealthSection

log = logging.getLogger("tierkv.gateway")


async def keep_probing(nodes: Nodes, calls: NodeCalls, settings: HealthSection) -> None:
    """Runs until it is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for node in nodes.all:
            probing = _probe(node, nodes, calls, settings)
            tasks.create_task(probing, name=f"tierkv-probe-{node.url}")


async def _probe(
    node: BackendNode, nodes: Nodes, calls: NodeCalls, settings: HealthSection
) -> None:
    now = asyncio.get_running_loop().time
    before: NodeState | None = None
    unanswered = 0
    while True:
        try:
            if await calls.is_ready(node):
                node.says_ready()
                if node.fingerprint is None:
                    await _ask_what_it_computes(node, nodes, calls)
            else:
                node.says_unready()
            unanswered = 0
        except AttemptError:
            node.has_failed(now())
            unanswered += 1
            if unanswered >= settings.gone_after_probes:
                node.is_gone(now(), silent_s=settings.probe_timeout_s)
        state = node.state(now())
        if state is not before:
            log.info("node %s (%s) is %s", node.url, node.role.value, state.value)
            before = state
        await asyncio.sleep(settings.probe_interval_s)


async def _ask_what_it_computes(node: BackendNode, nodes: Nodes, calls: NodeCalls) -> None:
    """A node of another model must not go on with an answer that one of ours has begun."""
    fingerprint = await calls.fingerprint(node)
    if fingerprint is None:
        return
    if differing := nodes.compare(node, fingerprint):
        log.error("node %s gets no work: it differs in %s", node.url, ", ".join(differing))
