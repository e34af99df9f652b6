"""Commands to a Redis cluster, each sent to the server of its hash slot, also after slots move.

A cluster divides names into 16,384 hash slots. Each slot is stored by one server, its master. If a
server refuses a command or does not answer, the table of slots is read again (CLUSTER SLOTS).
Connections to new servers are then opened, and idle connections to former ones closed.

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
from tierkv.storage.redis.control import ask_once, connection_factory
from tierkv.storage.redis.node import (
    NAMES_PER_COMMAND,
    KeyCommand,
    Purpose,
    RedisNode,
    check_reply,
    cut,
    expect,
    question,
    question_each,
)
from tierkv.storage.redis.pool import FixedAddress, RedisAccess, finished
from tierkv.storage.redis.resp import Refused, Reply, pack
from tierkv.storage.redis.url import RedisUrl
from tierkv.storage.redis.wire import Address, Unanswered, WireRequest, is_port, port_of
from tierkv.tasks import task_group

# A moving slot causes at most two redirections (MOVED, then ASK); more attempts are for _TRANSIENT.
_MAX_ATTEMPTS = 8
_BETWEEN_ATTEMPTS_S = 0.02
# A MOVED counts only if it names no host; the next table of slots has the host.
_TRANSIENT = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "MOVED"})
_ASKING = memoryview(pack("ASKING"))


@dataclass(slots=True)
class _Attempt:
    """A command that is sent until it has a final reply.

    Attributes:
        call: the command.
        result: the last reply, or the reason why there is none.
        target: the node that an ASK reply named; None for the master of the name's slot.
        is_ask: True if ASKING must precede the command, because the slot is still moving to
            `target`.
    """

    call: KeyCommand
    result: Reply | Unanswered
    target: Address | None = None
    is_ask: bool = False


class ClusterRouter:
    """A `Router` over the masters of a cluster. Replicas are not read.

    Args:
        url: some nodes of the cluster, and the login.
        access: settings, login and counters, shared by all servers.
        clock: this machine's clock.
    """

    def __init__(self, url: RedisUrl, access: RedisAccess, clock: Clock) -> None:
        self._url = url
        self._topology = Topology(url, access, clock)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._topology.running()

    def nodes(self) -> Sequence[RedisNode]:
        return self._topology.nodes()

    async def ping(self) -> None:
        """Check that every master answers.

        If a master does not answer, the call reads the cluster's hash slot table again, and asks
        all masters once more. While no values are read or written, only this call finds out that a
        replica has become master.

        Raises:
            StoreUnavailableError: a master did not answer the second time either.
        """
        try:
            await self._ping_all()
        except StoreUnavailableError:
            await self._topology.refresh()
            await self._ping_all()

    async def _ping_all(self) -> None:
        requests = [question("PING") for _ in self.nodes()]
        for node, request in zip(self.nodes(), requests, strict=True):
            node.pools[Purpose.QUESTION].begin([request])
        for outcome in await finished(requests):
            check_reply(outcome if isinstance(outcome, Unanswered) else outcome[0], ("PING",))

    async def carry_out(
        self, calls: Sequence[KeyCommand], purpose: Purpose
    ) -> list[Reply | Unanswered]:
        attempts = [
            _Attempt(
                call,
                Unanswered(
                    f"no master of {self._url} serves the slot of this value: check CLUSTER INFO"
                ),
            )
            for call in calls
        ]
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
        """Send the command `verb name more` for each name, and return the number in each reply.

        Each master gets one request with its commands; all masters work at the same time.

        Args:
            verb: for example EXISTS or PEXPIRE.
            names: the names.
            more: numbers that follow each name as further arguments, such as a time to live.

        Raises:
            StoreUnavailableError: a server did not answer.
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
                self._topology.mark_stale()
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
            answers[index] = expect(int, check_reply(answer, (verb,)))
        return answers

    def _by_master(self, names: Sequence[str]) -> dict[Address | None, list[int]]:
        table = self._topology.table
        # Addresses are grouped by identity first: hashing a thousand of them takes 0.5 ms.
        ranges: dict[int, tuple[Address | None, list[int]]] = {}
        for index, slot in enumerate(map(slot_of, names)):
            address = table[slot]
            ranges.setdefault(id(address), (address, []))[1].append(index)
        groups: dict[Address | None, list[int]] = {}
        for address, indexes in ranges.values():
            groups.setdefault(address, []).extend(indexes)
        return groups

    async def _try(self, attempts: Sequence[_Attempt], purpose: Purpose) -> list[_Attempt]:
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
                        topology.mark_stale()
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
                topology.mark_stale()
                attempt.result = outcome
                continue
            attempt.result = outcome[-1]
            if isinstance(outcome[-1], Refused) and self._redirects(attempt, outcome[-1], address):
                again.append(attempt)
        return again

    def _redirects(self, attempt: _Attempt, refusal: Refused, answered_by: Address) -> bool:
        attempt.target, attempt.is_ask = None, False
        elsewhere = redirection(refusal, answered_by)
        if elsewhere is None:
            if refusal.code in _TRANSIENT:
                self._topology.mark_stale()
                return True
            return False
        if elsewhere.is_ask:
            attempt.target, attempt.is_ask = elsewhere.address, True
        else:
            self._topology.note(elsewhere.slot, elsewhere.address)
        return True


NUM_SLOTS = 16_384
_REDIRECTION_WORDS = 3
# The host that a node names if cluster-preferred-endpoint-type asks for a name and none is set.
_UNNAMED = "?"


def slot_of(name: str) -> int:
    """Return the hash slot of `name`, 0 to 16,383.

    Hash tags are not considered, because a valid name contains no braces.
    """
    return binascii.crc_hqx(name.encode(), 0) % NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Redirection:
    """A MOVED or ASK reply: another node has the hash slot of the command.

    Attributes:
        slot: number of the slot, 0 to 16,383.
        address: the node to ask.
        is_ask: True for ASK: the slot is still moving, so only this one command goes to `address`.
            False for MOVED: all commands go there from now on.
    """

    slot: int
    address: Address
    is_ask: bool


def redirection(refusal: Refused, answered_by: Address) -> Redirection | None:
    """Return the redirection in a refusal such as "MOVED 3999 127.0.0.1:6381".

    Args:
        refusal: the error reply.
        answered_by: the node that sent the reply. An empty host in the reply means the host of this
            node, and so does the unknown host "?" in an ASK.

    Returns:
        The redirection. None if the refusal is another error, or a MOVED with the host "?", after
            which CLUSTER SLOTS has to be asked for the host.
    """
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
    """Return the master of each hash slot; None for a slot without a master.

    Args:
        reply: the reply to CLUSTER SLOTS.
        answered_by: the node that sent it. An entry without a host means the host of this node.

    Raises:
        StoreUnavailableError: the reply is not a table of slots, or no slot has a master.
    """
    table: list[Address | None] = [None] * NUM_SLOTS
    if not isinstance(reply, list):
        raise StoreUnavailableError(
            f"the server at {answered_by} is not part of a cluster: use redis:// for it"
        )
    for entry in reply:
        match entry:
            case [int(first), int(last), [host, int(port), *more], *_] if is_port(port):
                address = Address(_host(host, more) or answered_by.host, port)
                if not 0 <= first <= last < NUM_SLOTS:
                    raise StoreUnavailableError(
                        f"the server at {answered_by} reports slots {first} to {last}, "
                        f"beyond {NUM_SLOTS - 1}"
                    )
                table[first : last + 1] = [address] * (last - first + 1)
            case _:
                raise StoreUnavailableError(
                    f"the server at {answered_by} sent an unexpected answer to CLUSTER "
                    f"SLOTS: {entry!r:.80}"
                )
    if not any(table):
        # The node was removed from its cluster, or there is no cluster yet: ask another node.
        raise StoreUnavailableError(
            f"the server at {answered_by} knows no master with slots: check CLUSTER INFO there"
        )
    return table


def _host(host: object, more: Sequence[object]) -> str:
    """Return a server's host from CLUSTER SLOTS; "" for the host of the server that answered.

    `more` is the remainder of the server's list in the answer, which may contain its IP address.
    """
    name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
    match more:
        case [_, [*_, b"ip", bytes(ip)], *_] if name == _UNNAMED:
            return ip.decode("utf-8", "replace")
    return "" if name == _UNNAMED else name


def masters(table: Sequence[Address | None]) -> list[Address]:
    """Return each server in the cluster's hash slot table once, sorted by host and port.

    Args:
        table: the address of the server of each hash slot; None if the slot has none.
    """
    found = {address for address in table if address is not None}
    return sorted(found, key=lambda address: (address.host, address.port))


_log = logging.getLogger(__name__)

# Seconds between two reads of the table of slots, and the longest pause while no node answers.
_REFRESH_INTERVAL_S = 0.1
_LONGEST_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Member:
    """A `RedisNode` of the cluster, and the task that keeps it running.

    Attributes:
        is_ready: set when the node is running.
        is_left: set to end the task and close the node.
        num_users: number of calls that use the node now.
    """

    node: RedisNode
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)
    num_users: int = 0

    def release(self) -> None:
        self.num_users -= 1


class Topology:
    """The masters of a cluster and their hash slots, kept up to date by a task.

    Args:
        url: some nodes of the cluster, which are asked for the table of slots.
        access: settings, login and counters, shared by all servers.
        clock: this machine's clock.

    Attributes:
        table: the master of each hash slot; None for a slot without a known master.
    """

    def __init__(self, url: RedisUrl, access: RedisAccess, clock: Clock) -> None:
        self._url = url
        self._access = access
        self._clock = clock
        self.table: list[Address | None] = []
        self._members: dict[Address, _Member] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stale = asyncio.Event()
        self._refreshed = asyncio.Event()
        self._silent: dict[Address, float] = {}  # nodes, and when they did not answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        table = await self._ask_for_table()
        async with task_group() as tasks:
            self._tasks = tasks
            await self._use_table(table)
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
        """Return the masters, sorted by host and port."""
        members = (self._members.get(address) for address in masters(self.table))
        return [member.node for member in members if member is not None]

    async def node(self, address: Address, uses: ExitStack) -> RedisNode | None:
        """Return the running node at `address`; None while the cluster is being closed.

        Args:
            address: address of a master.
            uses: the node keeps running until this stack is closed.
        """
        member = self._join(address)
        if member is None:
            return None
        member.num_users += 1
        uses.callback(member.release)
        await member.is_ready.wait()
        return member.node

    def note(self, slot: int, address: Address) -> None:
        """Record that a Redis hash slot has moved to another node.

        The whole assignment of slots to nodes is then read again in the background.

        Args:
            slot: number of the hash slot, 0 to 16,383.
            address: the node to which later commands for the slot are sent.
        """
        self.table[slot] = address
        self.mark_stale()

    def mark_stale(self) -> None:
        """Request a refresh of the Redis hash slot table, which a background task carries out."""
        self._stale.set()

    async def refresh(self) -> None:
        """Request a new read of the cluster's slot table, and wait until the read has ended.

        The wait ends without an error if the read takes longer than the deadline of one request.
        """
        self._refreshed.clear()
        self.mark_stale()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._access.settings.deadline_s(0)):
                await self._refreshed.wait()

    def _join(self, address: Address) -> _Member | None:
        member = self._members.get(address)
        if member is None and self._tasks is not None:
            url = f"redis://{address}"
            member = _Member(RedisNode(FixedAddress(address), self._access, self._clock, url=url))
            self._members[address] = member
            self._tasks.create_task(_keep(member), name=f"tierkv-redis-{address}")
        return member

    async def _use_table(self, table: list[Address | None]) -> None:
        """Use a new table of hash slots: connect to new servers, and close servers that it lacks.

        A server that still has users stays open, and the table is read again.
        """
        known = set(masters(table))
        for member in [self._join(address) for address in known]:
            if member is not None:
                await member.is_ready.wait()
        self.table = table
        for address in [address for address in self._members if address not in known]:
            if self._members[address].num_users:
                self._stale.set()  # a slot may be moving to or from this node: read the table again
            else:
                self._members.pop(address).is_left.set()

    async def _keep_fresh(self) -> None:
        pause_s = _REFRESH_INTERVAL_S
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._use_table(await self._ask_for_table())
            except StoreUnavailableError as error:
                if pause_s == _REFRESH_INTERVAL_S:
                    _log.warning("no server of the cluster returns its table of slots: %s", error)
                pause_s = min(2 * pause_s, _LONGEST_INTERVAL_S)
                self._stale.set()
            else:
                pause_s = _REFRESH_INTERVAL_S
            self._refreshed.set()
            await asyncio.sleep(pause_s)

    async def _ask_for_table(self) -> list[Address | None]:
        failures = []
        known = dict.fromkeys((*self._members, *self._url.addresses))
        access = self._access
        deadline_s = access.settings.timeout_s / len(known)
        for address in sorted(known, key=lambda address: self._silent.get(address, 0.0)):
            connection = connection_factory(address, access)
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
