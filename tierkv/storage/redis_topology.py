"""Which masters a Redis cluster has just now, and the connections to each.

Somebody doubts the table of slots (a refusal, a node that does not answer) -> a node is asked for
the table of now -> nodes that are new to it are joined, those that left it are left when idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from tierkv.clock import Clock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis_bulk import FixedAddress
from tierkv.storage.redis_connection import ask_once, connection_factory
from tierkv.storage.redis_node import Access, RedisNode
from tierkv.storage.redis_slots import masters, parse_slots
from tierkv.storage.redis_socket import Address
from tierkv.storage.redis_url import RedisUrl
from tierkv.tasks import task_group

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

    def __init__(self, url: RedisUrl, access: Access, clock: Clock) -> None:
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
            async with asyncio.timeout(self._access.settings.timeout_s):
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
