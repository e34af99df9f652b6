"""Which node gets a prompt: what it would still have to compute, and who waits there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierkv.gateway.nodes import BackendNode

# A token fetched from storage costs about this part of one that is computed. From the ratio of the
# reference model on CPUs (about 1/20) to a large model with one Redis server (about 1).
_FETCH_COST = 0.25
_CALL_COST_S = 0.002  # what any request costs a node beside its tokens; settles ties by load


@dataclass(frozen=True, slots=True)
class Held:
    """Leading prompt tokens that a node has at hand, and further ones that storage has."""

    near: int = 0
    stored: int = 0

    def cost(self, num_tokens: int) -> float:
        """In tokens to compute."""
        stored = min(self.stored, num_tokens - self.near)
        return num_tokens - self.near - stored + _FETCH_COST * stored


def prefill_seconds(node: BackendNode, num_tokens: int, held: Held) -> float:
    """How long a prompt given to this node now should take until its first token."""
    waiting = node.outstanding_tokens / node.rate + node.running * _CALL_COST_S
    return waiting + held.cost(num_tokens) / node.rate


def choose_prefill(
    nodes: Sequence[BackendNode], num_tokens: int, held: Mapping[str, Held]
) -> BackendNode:
    """The node that should be done first; `held` is by URL. Of equals, the one with less to do."""
    return min(
        nodes,
        key=lambda node: (
            prefill_seconds(node, num_tokens, held.get(node.url, Held())),
            node.running,
        ),
    )


def choose_decode(nodes: Sequence[BackendNode], held: Mapping[str, Held]) -> BackendNode:
    """The node with the fewest streams; of equals, the one with fewer tokens to generate, then
    the one that has more of the prompt at hand already and need not fetch it."""
    return min(
        nodes,
        key=lambda node: (
            node.running,
            node.outstanding_tokens,
            -held.get(node.url, Held()).near,
        ),
    )
