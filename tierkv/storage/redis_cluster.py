"""A Redis cluster: each name's slot, each slot's master, and what to do when they move.

batch -> by slot -> node 1: connections, pipelined --.
                 -> node 2: connections, pipelined ---> replies in the batch's order
                 -> node 3: connections, pipelined --'
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

from tierkv.clock import Clock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis_bulk import finished
from tierkv.storage.redis_exchange import Failure, Request
from tierkv.storage.redis_node import NAMES_PER_COMMAND, Access, Lane, RedisNode, cut, expect
from tierkv.storage.redis_node import understood as checked
from tierkv.storage.redis_requests import question, question_each
from tierkv.storage.redis_router import Call
from tierkv.storage.redis_slots import redirection, slot_of
from tierkv.storage.redis_socket import Address
from tierkv.storage.redis_topology import Topology
from tierkv.storage.redis_url import RedisUrl
from tierkv.storage.resp import Refused, Reply, pack

# A slot that moves is asked for twice at most (MOVED, then ASK); the rest is for keys in between.
_MAX_ATTEMPTS = 8
_BETWEEN_ATTEMPTS_S = 0.02
_TRANSIENT = frozenset(
    # The last when it does not say where to: the table will.
    {"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "MOVED"}
)
_ASKING = memoryview(pack("ASKING"))


@dataclass(slots=True)
class _Attempt:
    """A call under way. target: where a redirection sent it, None for its slot's master."""

    call: Call
    result: Reply | Failure
    target: Address | None = None
    is_ask: bool = False


class ClusterRouter:
    """`Router` over a cluster's masters. Replicas are not read."""

    def __init__(self, url: RedisUrl, access: Access, clock: Clock) -> None:
        self._url = url
        self._topology = Topology(url, access, clock)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._topology.running()

    def nodes(self) -> Sequence[RedisNode]:
        return self._topology.nodes()

    async def ping(self) -> None:
        """Raises StoreUnavailableError unless every master answers, as known after a second look:
        while nobody asks for values, nothing else tells who has taken over."""
        try:
            await self._ping_all()
        except StoreUnavailableError:
            await self._topology.look()
            await self._ping_all()

    async def _ping_all(self) -> None:
        requests = [question("PING") for _ in self.nodes()]
        for node, request in zip(self.nodes(), requests, strict=True):
            node.lanes[Lane.QUESTION].begin([request])
        for outcome in await finished(requests):
            checked(outcome if isinstance(outcome, Failure) else outcome[0], ("PING",))

    async def carry_out(self, calls: Sequence[Call], lane: Lane) -> list[Reply | Failure]:
        attempts = [_Attempt(call, Failure(f"{self._url} has no such slot")) for call in calls]
        pending = attempts
        for round_number in range(_MAX_ATTEMPTS):
            pending = await self._try(pending, lane)
            if not pending:
                break
            if round_number:
                await asyncio.sleep(_BETWEEN_ATTEMPTS_S * round_number)
        return [attempt.result for attempt in attempts]

    async def count_leading(self, names: Sequence[str]) -> int:
        found = 0
        for part in cut(names, 4 * NAMES_PER_COMMAND):
            present = await self.each("EXISTS", part)
            leading = present.index(0) if 0 in present else len(part)
            found += leading
            if leading < len(part):
                break
        return found

    async def each(self, verb: str, names: Sequence[str], *more: int) -> list[int]:
        """As in `Router`: one pipelined request per node, in parallel.

        A variadic EXISTS would need all its names in one slot.
        """
        answers = [0] * len(names)
        requests: list[tuple[list[int], Request]] = []
        again: list[int] = []
        with ExitStack() as uses:
            for address, indexes in self._by_master(names).items():
                node = None if address is None else await self._topology.node(address, uses)
                if node is None:
                    again += indexes
                    continue
                request = question_each(verb, [names[index] for index in indexes], *more)
                node.lanes[Lane.QUESTION].begin([request])
                requests.append((indexes, request))
            outcomes = await finished([request for _, request in requests])
        for (indexes, _), outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._topology.doubt()
                raise StoreUnavailableError(outcome.reason)
            for index, reply in zip(indexes, outcome, strict=True):
                if isinstance(reply, int):
                    answers[index] = reply
                else:
                    again.append(index)
        calls = [
            Call(names[index], partial(question_each, verb, [names[index]], *more))
            for index in again
        ]
        for index, answer in zip(again, await self.carry_out(calls, Lane.QUESTION), strict=True):
            answers[index] = expect(int, checked(answer, (verb,)))
        return answers

    def _by_master(self, names: Sequence[str]) -> dict[Address | None, list[int]]:
        """Which names, by index, belong to which master; those of None to no known one."""
        table = self._topology.table
        # By identity first: hashing an address a thousand times would take half a millisecond.
        ranges: dict[int, tuple[Address | None, list[int]]] = {}
        for index, slot in enumerate(map(slot_of, names)):
            address = table[slot]
            ranges.setdefault(id(address), (address, []))[1].append(index)
        groups: dict[Address | None, list[int]] = {}
        for address, indexes in ranges.values():
            groups.setdefault(address, []).extend(indexes)
        return groups

    async def _try(self, attempts: Sequence[_Attempt], lane: Lane) -> list[_Attempt]:
        """Send each attempt where it belongs by what is known; returns those to be sent again."""
        sent: list[tuple[_Attempt, Address, Request]] = []
        again: list[_Attempt] = []
        topology = self._topology
        nodes: dict[Address, RedisNode | None] = {}
        with ExitStack() as uses:
            try:
                for attempt in attempts:
                    address = attempt.target or topology.table[slot_of(attempt.call.name)]
                    if address is not None and address not in nodes:
                        nodes[address] = await topology.node(address, uses)
                    node = None if address is None else nodes[address]
                    if address is None or node is None:
                        topology.doubt()
                        again.append(attempt)
                        continue
                    request = attempt.call.make()
                    if attempt.is_ask:
                        request.pieces = [_ASKING, *request.pieces]
                        request.num_replies += 1
                    sent.append((attempt, address, request))
                    node.lanes[lane].begin([request])
            finally:
                outcomes = await finished([request for _, _, request in sent])
        for (attempt, address, _), outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, Failure):
                topology.doubt()
                attempt.result = outcome
                continue
            attempt.result = outcome[-1]
            if isinstance(outcome[-1], Refused) and self._redirects(attempt, outcome[-1], address):
                again.append(attempt)
        return again

    def _redirects(self, attempt: _Attempt, refusal: Refused, answered_by: Address) -> bool:
        """Note where the attempt has to go; False if the refusal is about something else."""
        attempt.target, attempt.is_ask = None, False
        elsewhere = redirection(refusal, answered_by)
        if elsewhere is None:
            if refusal.code in _TRANSIENT:
                self._topology.doubt()
                return True
            return False
        if elsewhere.is_ask:
            attempt.target, attempt.is_ask = elsewhere.address, True
        else:
            self._topology.note(elsewhere.slot, elsewhere.address)
        return True
