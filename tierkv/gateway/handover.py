"""One prompt by way of two nodes: one computes and publishes it, the other claims it and goes on.

Both are asked at the same time, so that the second is waiting, or fetching already, while the
first computes. The ticket's name is ours: whoever publishes under it, and whoever claims it, any
node can be replaced by another one of its kind before the first token of the second node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping

from tierkv.cache.tokens import pack
from tierkv.gateway.delivery import Delivery
from tierkv.gateway.failures import AttemptError, GatewayError, HandoffRefusedError
from tierkv.gateway.nodes import BackendNode
from tierkv.gateway.routing import Held, choose_decode, choose_prefill, prefill_seconds
from tierkv.tasks import task_group

_TICKET_PART = 0.9  # of the time that a claim has for its first token
_LONGEST_CLAIM_S = 3600.0  # what a node takes

Failure = AttemptError | GatewayError


async def hand_over(delivery: Delivery, held: Mapping[str, Held]) -> None:
    """Get all tokens. Raises AttemptError, noted, or GatewayError; both calls have ended then."""
    ticket_id = delivery.next_id()
    async with task_group() as tasks:
        prefill = tasks.create_task(_outcome(_prefill(delivery, ticket_id, held)))
        decode = tasks.create_task(_outcome(_decode(delivery, ticket_id, held)))
        running = {prefill, decode}
        failure: Failure | None = None
        while running and failure is None and not decode.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            # A prefill that ends badly is no matter once its ticket was claimed.
            if prefill in done and not delivery.is_claimed:
                failure = prefill.result()
        if decode.done():
            failure = decode.result()
        for task in (prefill, decode):
            task.cancel()
    if failure is not None:
        raise failure


async def _outcome(work: Coroutine[None, None, None]) -> Failure | None:
    """Failures are returned: which of them matters is decided where both are seen."""
    try:
        await work
    except (AttemptError, GatewayError) as error:
        return error
    return None


# The prefill side


class _Prefills:
    """The prefill nodes of one prompt: each is asked at most once."""

    def __init__(self, delivery: Delivery, ticket_id: str, held: Mapping[str, Held]) -> None:
        self._delivery = delivery
        self._ticket_id = ticket_id
        self._held = held
        self._tried: set[BackendNode] = set()

    def next_node(self) -> BackendNode | None:
        nodes = self._delivery.fresh(self._delivery.backend.nodes.prefilling())
        untried = [node for node in nodes if node not in self._tried]
        if not untried:
            return None
        node = choose_prefill(untried, self._delivery.job.num_tokens, self._held)
        self._tried.add(node)
        return node

    def patience_s(self, node: BackendNode) -> float:
        """How long to wait for its first token before another node is asked too."""
        deadlines = self._delivery.backend.settings.deadlines
        held = self._held.get(node.url, Held())
        expected = prefill_seconds(node, self._delivery.job.num_tokens, held)
        return max(deadlines.hedge_s, deadlines.hedge_factor * expected)

    async def at(self, node: BackendNode) -> Failure | None:
        return await _outcome(_prefill_at(self._delivery, node, self._ticket_id, self._held))


async def _prefill(delivery: Delivery, ticket_id: str, held: Mapping[str, Held]) -> None:
    """Have some node publish the prompt; a slow one is joined, a failed one replaced."""
    prefills = _Prefills(delivery, ticket_id, held)
    if (node := prefills.next_node()) is None:
        raise AttemptError("no prefill node is left")
    patience: float | None = prefills.patience_s(node)
    failure: Failure | None = None
    async with task_group() as tasks:
        running = {tasks.create_task(prefills.at(node))}
        while running:
            done, running = await asyncio.wait(
                running, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            results = [task.result() for task in done]
            if None in results:
                for task in running:
                    task.cancel()
                return
            other = None
            if done:
                failure = results[0]
                if not running and _is_the_nodes(failure):
                    other = prefills.next_node()
            else:
                patience = None  # one helper is enough
                # With the first token there, only storage is slow, as it would be for another.
                other = None if delivery.tokens else prefills.next_node()
                delivery.backend.metrics.count_hedge(int(other is not None))
            if other is not None:
                running.add(tasks.create_task(prefills.at(other)))
    assert failure is not None, "the last one failed"
    raise failure


def _is_the_nodes(failure: Failure | None) -> bool:
    """Whether another node may do better."""
    return isinstance(failure, AttemptError) and not isinstance(failure, HandoffRefusedError)


async def _prefill_at(
    delivery: Delivery, node: BackendNode, ticket_id: str, held: Mapping[str, Held]
) -> None:
    job = delivery.job
    body = job.body() | {"request_id": delivery.next_id(), "ticket_id": ticket_id}
    # What storage has is on this node's way, too; only what is near need not be waited for.
    with node.working(max(job.num_tokens - held.get(node.url, Held()).near, 1)):
        done = await delivery.read(node, "/v1/prefill", body, offset=0)
    delivery.learn(node, done, job.tokens)


# The decode side


async def _decode(delivery: Delivery, ticket_id: str, held: Mapping[str, Held]) -> None:
    """Have some node claim the ticket; one that fails before its first token is replaced."""
    job, first_token_s = delivery.job, delivery.backend.settings.deadlines.first_token_s
    while True:
        nodes = delivery.fresh(delivery.backend.nodes.decoding())
        if not nodes:
            raise AttemptError("no decode node is left")
        node = choose_decode(nodes, held)
        body = job.body() | {
            "request_id": delivery.next_id(),
            "ticket_id": ticket_id,
            "max_tokens": job.max_tokens,
            "policy": "recompute",
            "deadline_s": min(_TICKET_PART * first_token_s, _LONGEST_CLAIM_S),
        }
        try:
            with node.working(job.max_tokens):
                done = await delivery.read(node, "/v1/decode", body, offset=0)
        except HandoffRefusedError:
            raise
        except AttemptError:
            if delivery.is_claimed:
                raise  # the rest is generated from what has been delivered
            await delivery.pause()
            continue
        delivery.learn(node, done, job.tokens + pack(delivery.tokens[:-1]))
        return
