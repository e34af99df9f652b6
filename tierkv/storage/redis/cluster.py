"""A Redis cluster: each name's slot, each slot's master, and what to do when they move.

A refusal or a node that does not answer makes the table of slots doubtful; then a node is asked for
CLUSTER SLOTS, nodes that are new are joined, and those that left are left when they are idle.

batch -> by slot -> node 1: connections, pipelined --.
                 -> node 2: connections, pipelined ---> replies in the batch's order
                 -> node 3: connections, pipelined --'
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from tierkv.clock import Clock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis.control import ask_once
from tierkv.storage.redis.node import (
    NAMES_PER_COMMAND,
    KeyCommand,
    Purpose,
    RedisAccess,
    RedisNode,
    cut,
    expect,
    question,
    question_each,
    understood,
)
from tierkv.storage.redis.pool import FixedAddress, finished
from tierkv.storage.redis.resp import Refused, Reply, pack
from tierkv.storage.redis.url import RedisUrl
from tierkv.storage.redis.wire import Address, Unanswered, WireRequest, is_port, port_of
from tierkv.tasks import task_group

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

    call: KeyCommand
    result: Reply | Unanswered
    target: Address | None = None
    is_ask: bool = False


class ClusterRouter:
    """`Router` over a cluster's masters. Replicas are not read."""

    def __init__(self, url: RedisUrl, access: RedisAccess, clock: Clock) -> None:
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
            node.pools[Purpose.QUESTION].begin([request])
        for outcome in await finished(requests):
            understood(outcome if isinstance(outcome, Unanswered) else outcome[0], ("PING",))

    async def carry_out(
        self, calls: Sequence[KeyCommand], purpose: Purpose
    ) -> list[Reply | Unanswered]:
        attempts = [_Attempt(call, Unanswered(f"{self._url} has no such slot")) for call in calls]
        pending = attempts
        for round_number in range(_MAX_ATTEMPTS):
            pending = await self._try(pending, purpose)
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
        requests: list[tuple[list[int], WireRequest]] = []
        again: list[int] = []
        with ExitStack() as uses:
            for address, indexes in self._by_master(names).items():
                node = None if address is None else await self._topology.node(address, uses)
                if node is None:
                    again += indexes
                    continue
                request = question_each(verb, [names[index] for index in indexes], *more)
                node.pools[Purpose.QUESTION].begin([request])
                requests.append((indexes, request))
            outcomes = await finished([request for _, request in requests])
        for (indexes, _), outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Unanswered):
                self._topology.doubt()
                raise StoreUnavailableError(outcome.reason)
            for index, reply in zip(indexes, outcome, strict=True):
                if isinstance(reply, int):
                    answers[index] = reply
                else:
                    again.append(index)
        calls = [
            KeyCommand(names[index], partial(question_each, verb, [names[index]], *more))
            for index in again
        ]
        for index, answer in zip(again, await self.carry_out(calls, Purpose.QUESTION), strict=True):
            answers[index] = expect(int, understood(answer, (verb,)))
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

    async def _try(self, attempts: Sequence[_Attempt], purpose: Purpose) -> list[_Attempt]:
        """Send each attempt where it belongs by what is known; returns those to be sent again."""
        sent: list[tuple[_Attempt, Address, WireRequest]] = []
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
                    node.pools[purpose].begin([request])
            finally:
                outcomes = await finished([request for _, _, request in sent])
        for (attempt, address, _), outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, Unanswered):
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


NUM_SLOTS = 16_384
_REDIRECTION_WORDS = 3
# What a node says that is to name hosts (cluster-preferred-endpoint-type) and was told none.
_UNNAMED = "?"


def slot_of(name: str) -> int:
    """Names have no braces, so there is no hash tag to look for. 0.23 µs; a loop in Python: 37."""
    return binascii.crc_hqx(name.encode(), 0) % NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Redirection:
    """slot has moved to `address`, or (is_ask) is on its way there: ask there this once."""

    slot: int
    address: Address
    is_ask: bool


def redirection(refusal: Refused, answered_by: Address) -> Redirection | None:
    """What "MOVED 3999 127.0.0.1:6381" says; None if it is another refusal, or names no host: the
    table has one. Of a slot on its way no table tells; that is asked for at the same host."""
    words = refusal.message.split()
    if len(words) != _REDIRECTION_WORDS or words[0] not in {"MOVED", "ASK"}:
        return None
    host, _, port_text = words[2].rpartition(":")
    slot, port = _slot(words[1]), port_of(port_text)
    is_ask = words[0] == "ASK"
    if slot is None or port is None or (host == _UNNAMED and not is_ask):
        return None
    host = "" if host == _UNNAMED else host
    return Redirection(slot, Address(host or answered_by.host, port), is_ask=is_ask)


def _slot(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(NUM_SLOTS))
    return int(text) if is_number and int(text) < NUM_SLOTS else None


def parse_slots(reply: object, answered_by: Address) -> list[Address | None]:
    """The master of each slot, from the reply to CLUSTER SLOTS. Raises StoreUnavailableError."""
    table: list[Address | None] = [None] * NUM_SLOTS
    if not isinstance(reply, list):
        raise StoreUnavailableError(f"the node at {answered_by} is not part of a cluster")
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *more], *_] if is_port(port):
                address = Address(_host(host, more) or answered_by.host, port)
                if not 0 <= first <= last < NUM_SLOTS:
                    raise StoreUnavailableError(f"the node at {answered_by} has slots beyond all")
                table[first : last + 1] = [address] * (last - first + 1)
            case _:
                raise StoreUnavailableError(f"the node at {answered_by} answers {entry!r:.80}")
    if not any(table):
        # It was taken out of its cluster, or no cluster was made: others may know better.
        raise StoreUnavailableError(f"the node at {answered_by} knows of nobody who has slots")
    return table


def _host(told: object, more: Sequence[object]) -> str:
    """more: the node's id, and since Redis 7 its other addresses, such as [b"ip", b"10.0.0.7"]."""
    name = told.decode("utf-8", "replace") if isinstance(told, bytes) else ""
    match more:
        case [_, [*_, b"ip", bytes(ip)], *_] if name == _UNNAMED:
            return ip.decode("utf-8", "replace")
    return "" if name == _UNNAMED else name


def masters(table: Sequence[Address | None]) -> list[Address]:
    """Each address in the table once, in a fixed order."""
    found = {address for address in table if address is not None}
    return sorted(found, key=lambda address: (address.host, address.port))


_log = logging.getLogger(__name__)

# Least time between two looks at the topology, more than often enough while a master fails over;
# and most, while nobody says it.
_REFRESH_INTERVAL_S = 0.1
_LONGEST_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Member:
    """A node and the task that keeps it running. num_users: who has requests at it."""

    node: RedisNode
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)
    num_users: int = 0

    def release(self) -> None:
        self.num_users -= 1


class Topology:
    """table: the master of each slot, as far as is known. Replicas are not read."""

    def __init__(self, url: RedisUrl, access: RedisAccess, clock: Clock) -> None:
        self._url = url
        self._access = access
        self._clock = clock
        self.table: list[Address | None] = []
        self._members: dict[Address, _Member] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stale = asyncio.Event()
        self._looked = asyncio.Event()
        self._silent: dict[Address, float] = {}  # who did not say the topology, and when

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        table = await self._ask_for_table()
        async with task_group() as tasks:
            self._tasks = tasks
            await self._take(table)
            refresher = tasks.create_task(self._keep_fresh(), name="tierkv-redis-topology")
            try:
                yield
            finally:
                self._tasks = None
                refresher.cancel()
                for member in self._members.values():
                    member.is_left.set()
                self._members.clear()

    def nodes(self) -> Sequence[RedisNode]:
        """The masters, in a fixed order."""
        members = (self._members.get(address) for address in masters(self.table))
        return [member.node for member in members if member is not None]

    async def node(self, address: Address, uses: ExitStack) -> RedisNode | None:
        """The node at `address`, running until `uses` ends; None when leaving."""
        member = self._join(address)
        if member is None:
            return None
        member.num_users += 1
        uses.callback(member.release)
        await member.is_ready.wait()
        return member.node

    def note(self, slot: int, address: Address) -> None:
        """Believe that `slot` has moved to `address`, until the table says what else has."""
        self.table[slot] = address
        self.doubt()

    def doubt(self) -> None:
        """Look at the topology soon."""
        self._stale.set()

    async def look(self) -> None:
        """Return when the topology has been looked at, or nobody says it within a deadline."""
        self._looked.clear()
        self.doubt()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._access.pace.deadline_s(0)):
                await self._looked.wait()

    def _join(self, address: Address) -> _Member | None:
        member = self._members.get(address)
        if member is None and self._tasks is not None:
            url = f"redis://{address}"
            member = _Member(RedisNode(FixedAddress(address), self._access, self._clock, url=url))
            self._members[address] = member
            self._tasks.create_task(_keep(member), name=f"tierkv-redis-{address}")
        return member

    async def _take(self, table: list[Address | None]) -> None:
        """Use `table` from now on. Whoever lists sees masters that nobody has asked yet, too."""
        known = set(masters(table))
        for member in [self._join(address) for address in known]:
            if member is not None:
                await member.is_ready.wait()
        self.table = table
        for address in [address for address in self._members if address not in known]:
            if self._members[address].num_users:
                self._stale.set()  # one that a slot is just moving to or away from: look again
            else:
                self._members.pop(address).is_left.set()

    async def _keep_fresh(self) -> None:
        pause_s = _REFRESH_INTERVAL_S
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._take(await self._ask_for_table())
            except StoreUnavailableError as error:
                if pause_s == _REFRESH_INTERVAL_S:
                    _log.warning("the cluster's topology is not to be had: %s", error)
                pause_s = min(2 * pause_s, _LONGEST_INTERVAL_S)
                self._stale.set()
            else:
                pause_s = _REFRESH_INTERVAL_S
            self._looked.set()
            await asyncio.sleep(pause_s)

    async def _ask_for_table(self) -> list[Address | None]:
        """From the first node that answers; one that lately did not, which would cost its deadline
        again while the others know better, comes last. Raises StoreUnavailableError if none does.
        """
        failures = []
        known = dict.fromkeys((*self._members, *self._url.addresses))
        access = self._access
        deadline_s = access.settings.timeout_s / len(known)
        for address in sorted(known, key=lambda address: self._silent.get(address, 0.0)):
            connection = access.connection(address)
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
