"""Gets one prompt's tokens from the nodes, whatever happens to these on the way.

A node that dies in the middle is replaced by asking another one to generate from the prompt *and
the tokens delivered so far*: what comes next depends only on these, the seed and the position
(refmodel/sampling.py), so the answer is the one that the first node would have given, and no token
is generated twice. The published blocks make that cheap. For an engine whose sampling has other
state, one would have to generate again from the start and skip what has been delivered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.cache.tokens import pack
from tierkv.gateway.delivery import Delivery
from tierkv.gateway.failures import (
    AttemptError,
    HandoffRefusedError,
    OutOfTimeError,
)
from tierkv.gateway.handover import hand_over
from tierkv.gateway.nodes import BackendNode
from tierkv.gateway.routing import Held, choose_prefill
from tierkv.pd.ticket import ClaimProblem
from tierkv.tasks import deadline

# A decode node that holds all but so many tokens of a prompt computes them itself, as in the next
# turn of a conversation: about what a hand-off costs in calls and storage (reference model, CPU).
_FEW_TOKENS = 64
_INCOMPATIBLE = ClaimProblem.INCOMPATIBLE.value


async def run(delivery: Delivery) -> None:
    """Return when all tokens are there. Raises GatewayError."""
    can_hand_off = True

    def late() -> OutOfTimeError:
        told, wanted = len(delivery.tokens), delivery.job.max_tokens
        return OutOfTimeError(f"{told} of {wanted} tokens came in time")

    async with deadline(delivery.backend.settings.deadlines.request_s, late):
        while not delivery.is_done:
            try:
                await _attempt(delivery, can_hand_off=can_hand_off)
            except HandoffRefusedError as error:
                can_hand_off = False  # what one node has to do alone
                delivery.is_divided |= error.reason == _INCOMPATIBLE
            except AttemptError:
                await delivery.pause()


async def _attempt(delivery: Delivery, *, can_hand_off: bool) -> None:
    job = delivery.job
    who = _who_may_go_on(delivery)
    everybody = delivery.usable(who)
    if not everybody:
        delivery.spend(AttemptError("no node answers, or all of them are draining"))
        raise AttemptError("no node is left")
    prefilling = delivery.fresh([node for node in who if node.role.prefills])
    decoding = delivery.fresh([node for node in who if node.role.decodes])
    held = await delivery.backend.who_holds(job, everybody)
    alone: BackendNode | None
    if delivery.tokens:
        # Where nothing can be handed over, who has computed the prompt goes on, be it who it is.
        those = decoding if decoding and can_hand_off else everybody
        how, alone = "resumed", choose_prefill(those, job.num_tokens, held)
    elif job.max_tokens == 1 or not (can_hand_off and prefilling and decoding):
        how, alone = "one_node", choose_prefill(everybody, job.num_tokens, held)
    else:
        alone = _can_do_alone(prefilling, decoding, job.num_tokens, held)
        how = "handoff" if alone is None else "one_node"
    delivery.backend.metrics.count_route(how)
    if alone is None:
        await hand_over(delivery, held)
    else:
        await _generate(delivery, alone, held)


def _who_may_go_on(delivery: Delivery) -> list[BackendNode]:
    """All nodes; but where nodes turned out to be of different models, only who began: another
    one's tokens would make an answer that no node gives."""
    everybody = delivery.backend.nodes.all
    if delivery.is_divided and delivery.speakers:
        return [node for node in everybody if node in delivery.speakers]
    return everybody


def _can_do_alone(
    prefilling: Sequence[BackendNode],
    decoding: Sequence[BackendNode],
    num_tokens: int,
    held: Mapping[str, Held],
) -> BackendNode | None:
    """A node that decodes and need not be handed this prompt, if there is one."""
    if num_tokens > _FEW_TOKENS:
        knowing = [
            node for node in decoding if num_tokens - held.get(node.url, Held()).near <= _FEW_TOKENS
        ]
        least = min((node.running for node in decoding), default=0)
        knowing = [node for node in knowing if node.running <= least + 1]
        if knowing:
            return choose_prefill(knowing, num_tokens, held)
    best = choose_prefill(prefilling, num_tokens, held)
    return best if best.role.decodes else None


async def _generate(delivery: Delivery, node: BackendNode, held: Mapping[str, Held]) -> None:
    """Have one node go on from what has been delivered, and do all the rest."""
    job, offset = delivery.job, len(delivery.tokens)
    left = job.max_tokens - offset
    body = job.body(delivery.tokens) | {"request_id": delivery.next_id(), "max_tokens": left}
    near = held.get(node.url, Held()).near
    with node.working(max(job.num_tokens - near, 0) + left):
        done = await delivery.read(node, "/v1/generate", body, offset=offset)
    if not delivery.is_done:
        error = AttemptError(f"{node.url} ended its answer early")
        delivery.note(node, error)
        raise error
    delivery.learn(node, done, job.tokens + pack(delivery.tokens[:-1]))
