"""A Redis cluster: each name's slot, each slot's master, and what to do when they move.

batch -> by slot -> node 1: connections, pipelined --.
                 -> node 2: connections, pipelined ---> replies in the batch's order
                 -> node 3: connections, pipelined --'
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tierkv.clock import Clock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis_bulk import FixedAddress, finished
from tierkv.storage.redis_connection import ask_once, connection_factory
from tierkv.storage.redis_exchange import Failure, Request
from tierkv.storage.redis_node import NAMES_PER_COMMAND, Access, Lane, RedisNode, cut, expect
from tierkv.storage.redis_node import understood as checked
from tierkv.storage.redis_requests import pipeline
from tierkv.storage.redis_router import Call
from tierkv.storage.redis_slots import masters, parse_slots, redirection, slot_of
from tierkv.storage.redis_socket import Address
from tierkv.storage.redis_url import RedisUrl
from tierkv.storage.resp import Refused, Reply, pack, pack_each
from tierkv.tasks import task_group

_log = logging.getLogger(__name__)

# A slot that moves is asked for twice at most (MOVED, then ASK); the rest is for keys in between.
_MAX_ATTEMPTS = 8
_BETWEEN_ATTEMPTS_S = 0.02
# Least time between two looks at the topology, more than often enough while a master fails over.
_REFRESH_INTERVAL_S = 0.1
_TRANSIENT = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"})
_ASKING = memoryview(pack("ASKING"))


@dataclass(slots=True)
class _Member:
    """A node and the task that keeps it running."""

    node: RedisNode
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._access = access
        self._clock = clock
        self._table: list[Address | None] = []
        self._members: dict[Address, _Member] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stale = asyncio.Event()
        self._silent: dict[Address, float] = {}  # who did not say the topology, and when

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._table = await self._ask_for_table()
        async with task_group() as tasks:
            self._tasks = tasks
            refresher = tasks.create_task(self._keep_fresh(), name="tierkv-redis-topology")
            try:
                for address in masters(self._table):
                    await self._member(address)
                yield
            finally:
                self._tasks = None
                refresher.cancel()
                for member in self._members.values():
                    member.is_left.set()
                self._members.clear()

    def nodes(self) -> Sequence[RedisNode]:
        members = (self._members.get(address) for address in masters(self._table))
        return [member.node for member in members if member is not None]

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
            present = await self.present(part)
            leading = present.index(False) if False in present else len(part)
            found += leading
            if leading < len(part):
                break
        return found

    async def present(self, names: Sequence[str]) -> list[bool]:
        """Whether each name has a value: one pipelined request per node, in parallel.

        A variadic EXISTS would need all its names in one slot.
        """
        present = [False] * len(names)
        requests: list[tuple[list[int], Request]] = []
        again: list[int] = []
        for address, indexes in self._by_master(names).items():
            member = None if address is None else await self._member(address)
            if member is None:
                again += indexes
                continue
            request = pipeline(
                pack_each("EXISTS", [names[index] for index in indexes]), len(indexes)
            )
            member.node.lanes[Lane.QUESTION].begin([request])
            requests.append((indexes, request))
        outcomes = await finished([request for _, request in requests])
        for (indexes, _), outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._stale.set()
                raise StoreUnavailableError(outcome.reason)
            for index, reply in zip(indexes, outcome, strict=True):
                if reply == 1:
                    present[index] = True
                elif reply != 0:
                    again.append(index)
        calls = [_exists_call(names[index]) for index in again]
        for index, answer in zip(again, await self.carry_out(calls, Lane.QUESTION), strict=True):
            present[index] = expect(int, checked(answer, ("EXISTS",))) == 1
        return present

    def _by_master(self, names: Sequence[str]) -> dict[Address | None, list[int]]:
        """Which names, by index, belong to which master; those of None to no known one."""
        table = self._table
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
        try:
            for attempt in attempts:
                address = attempt.target or self._table[slot_of(attempt.call.name)]
                member = None if address is None else await self._member(address)
                if address is None or member is None:
                    self._stale.set()
                    again.append(attempt)
                    continue
                request = attempt.call.make()
                if attempt.is_ask:
                    request.pieces = [_ASKING, *request.pieces]
                    request.num_replies += 1
                sent.append((attempt, address, request))
                member.node.lanes[lane].begin([request])
        finally:
            outcomes = await finished([request for _, _, request in sent])
        for (attempt, address, _), outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._stale.set()
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
                self._stale.set()
                return True
            return False
        if elsewhere.is_ask:
            attempt.target, attempt.is_ask = elsewhere.address, True
        else:
            self._table[elsewhere.slot] = elsewhere.address
            self._stale.set()
        return True

    async def _member(self, address: Address) -> _Member | None:
        """The node at `address`, running; None when leaving."""
        member = self._members.get(address)
        if member is None:
            if self._tasks is None:
                return None
            url = f"redis://{address}"
            member = _Member(RedisNode(FixedAddress(address), self._access, self._clock, url=url))
            self._members[address] = member
            self._tasks.create_task(_keep(member), name=f"tierkv-redis-{address}")
        if not member.is_ready.is_set():
            await member.is_ready.wait()
        return member

    async def _keep_fresh(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                self._table = await self._ask_for_table()
            except StoreUnavailableError as error:
                _log.warning("the cluster's topology is not to be had: %s", error)
                self._stale.set()
            else:
                known = set(masters(self._table))
                for address in [address for address in self._members if address not in known]:
                    self._members.pop(address).is_left.set()
            await asyncio.sleep(_REFRESH_INTERVAL_S)

    async def _ask_for_table(self) -> list[Address | None]:
        """From the first node that answers; one that lately did not, which would cost its deadline
        again while the others know better, comes last. Raises StoreUnavailableError if none does.
        """
        failures = []
        known = dict.fromkeys((*self._members, *self._url.addresses))
        for address in sorted(known, key=lambda address: self._silent.get(address, 0.0)):
            deadline_s = self._access.settings.timeout_s
            connection = connection_factory(
                address,
                self._access.login,
                self._access.tls_files,
                connect_timeout_s=self._access.settings.connect_timeout_s,
            )
            command = ("CLUSTER", "SLOTS")
            try:
                reply = await ask_once(
                    connection, command, url=f"redis://{address}", deadline_s=deadline_s
                )
                table = parse_slots(reply, address)
                self._silent.pop(address, None)
                return table
            except StoreUnavailableError as error:
                failures.append(str(error))
                self._silent[address] = self._clock.monotonic()
        raise StoreUnavailableError("; ".join(dict.fromkeys(failures)))


async def _keep(member: _Member) -> None:
    async with member.node.running():
        member.is_ready.set()
        await member.is_left.wait()


def _exists_call(name: str) -> Call:
    wire = pack("EXISTS", name)
    return Call(name, lambda: pipeline(wire, 1))
