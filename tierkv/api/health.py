"""How a node is, as its probe sees it: each part with a state and a word on it."""

from __future__ import annotations

import asyncio
from enum import Enum

from tierkv.api.node import Node
from tierkv.errors import StoreUnavailableError
from tierkv.transfer.tier import StoreState

_PING_DEADLINE_S = 1.0

Part = tuple["Health", str]


class Health(Enum):
    """What a probe sees of one dependency, or of the node as a whole."""

    OK = "ok"
    DEGRADED = "degraded"  # answers are right, but slower than they could be
    DOWN = "down"


async def health_of(node: Node) -> dict[str, Part]:
    """A store that is down only slows a node, since computing is a right answer too."""
    device = node.device
    parts = {
        "service": _of_service(node),
        "device": (Health.OK if device.failure is None else Health.DOWN, device.status),
    }
    ranks = node.service.ranks
    if ranks is not None:
        wrong = ranks.findings()
        state = Health.DEGRADED if wrong else Health.OK
        parts["ranks"] = state, "; ".join(wrong) or f"{len(ranks.devices)} ranks keep up"
    stores = node.service.storage_state() if node.has_started else ()
    if not stores:
        parts["storage"] = (Health.OK, "no storage tier")
    for store in stores:
        name = "storage" + (f" of {store.tenant}" if store.tenant else "")
        parts[name] = await _of_store(node, store)
    return parts


def _of_service(node: Node) -> Part:
    if not node.has_started:
        return Health.DOWN, "this node has not started yet"
    if node.is_draining:
        return Health.DOWN, "this node is shutting down"
    return Health.OK, "takes requests"


async def _of_store(node: Node, state: StoreState) -> Part:
    """A store that is left alone is not asked again: its breaker does that."""
    if state.is_degraded:
        return Health.DEGRADED, (
            f"{state.part or state.url} is left alone ({state.circuit}) since it failed: "
            f"{state.reason}"
        )
    store = node.service.store
    if state.tenant or store is None:
        return Health.OK, state.url
    try:
        async with asyncio.timeout(_PING_DEADLINE_S):
            await store.ping()
    except TimeoutError:
        return Health.DEGRADED, f"{state.url} does not answer"
    except StoreUnavailableError as error:
        return Health.DEGRADED, str(error)
    return Health.OK, state.url
