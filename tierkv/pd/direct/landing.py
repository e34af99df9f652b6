"""Copies of a claimed prompt's blocks from the producer's device to this node's device.

The copies bypass both host tiers:

    acquire device slots -> copy the producer's blocks
        -> check that the producer did not move or evict the blocks during the copies
        -> insert the blocks into the index
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier
from tierkv.errors import ConfigError, OutOfBlocksError, TransferError
from tierkv.gpu.protocol import Ids, PeerPlanes, Planes, SharedPlanes, Sharing
from tierkv.pd.tickets import HandoffStats
from tierkv.sched.events import CacheEventKind
from tierkv.sched.tiers import Tiers
from tierkv.storage.base import WorkerThreads
from tierkv.tasks import supervised

log = logging.getLogger(__name__)

CLOSE_UNUSED_S = 10.0
_ROOM_S = 2.0


class ShownPlanes:
    """The description of this node's planes (device memory), for processes that open them."""

    def __init__(self, sharing: Sharing, planes: Callable[[], Planes]) -> None:
        """Create the object. The planes are exported by `describe`, not here.

        Args:
            sharing: makes device memory readable for other processes.
            planes: returns this node's present planes; called by each `describe`.
        """
        self._sharing = sharing
        self._planes = planes
        self._owner = uuid4().hex
        self._described: tuple[Planes, SharedPlanes] | None = None

    def describe(self) -> SharedPlanes:
        """Return the data with which another process can open the planes that this node uses now.

        Raises:
            ConfigError: other processes cannot open these planes.
        """
        planes = self._planes()
        if self._described is None or self._described[0] is not planes:
            shared = SharedPlanes(
                owner=self._owner,
                name=uuid4().hex,
                place=self._sharing.place,
                num_blocks=planes.num_blocks,
                planes=self._sharing.share(planes),
            )
            self._described = (planes, shared)
        return self._described[1]


@dataclass(slots=True)
class _Open:
    name: str
    own: Planes
    peer: PeerPlanes
    used_at: float


class OpenPlanes:
    """Other nodes' planes (device memory) that this process has opened. Use it from one thread.

    While planes are open, the other node's memory is not freed, even if that node is dead or
    asleep.
    """

    def __init__(self, sharing: Sharing, planes: Callable[[], Planes]) -> None:
        """Create the object, without open planes; `copy` opens them.

        Args:
            sharing: opens planes of other processes.
            planes: returns this node's present planes, into which blocks are copied; called for
                each copy.
        """
        self._sharing = sharing
        self._planes = planes
        self._of: dict[str, _Open] = {}

    def copy(self, shared: SharedPlanes, source_ids: Ids, target_ids: Ids) -> None:
        """Copy blocks of another node to this one; open that node's planes if necessary.

        Args:
            shared: description of the other node's planes.
            source_ids: ids of the blocks in the other node's planes, int32 [n].
            target_ids: ids of the blocks in this node's planes, int32 [n].

        Raises:
            ConfigError: the planes cannot be opened here.
            TransferError: the copy failed.
        """
        self._opened(shared).copy(source_ids, target_ids)

    def _opened(self, shared: SharedPlanes) -> PeerPlanes:
        own = self._planes()
        found = self._of.get(shared.owner)
        if found is not None and (found.name != shared.name or found.own is not own):
            self.close(shared.owner)  # before opening new planes, which may have the same handles
            found = None
        if found is None:
            found = _Open(shared.name, own, self._sharing.open(own, shared), 0.0)
            self._of[shared.owner] = found
        found.used_at = time.monotonic()
        return found.peer

    @property
    def num_open(self) -> int:
        return len(self._of)

    def close(self, owner: str) -> None:
        found = self._of.pop(owner, None)
        if found is not None:
            found.peer.close()

    def close_unused(self, unused_s: float) -> None:
        """Close the planes from which no block was copied for `unused_s` seconds."""
        before = time.monotonic() - unused_s
        for owner in [owner for owner, one in self._of.items() if one.used_at <= before]:
            self.close(owner)


class Landing:
    """The copies of blocks from other nodes' devices to this node's device.

    Another node's memory is opened for a copy, and closed when it was not used for CLOSE_UNUSED_S
    seconds.
    """

    def __init__(
        self,
        tiers: Tiers,
        sharing: Sharing,
        stats: HandoffStats,
        *,
        allocate: Callable[[Prompt, int], Ids],
    ) -> None:
        """Create the object. Blocks can be copied while its `running()` is entered.

        Args:
            tiers: the tiers of this node.
            sharing: opens the device memory of other processes.
            stats: counters of the node's hand-offs.
            allocate: function that returns device slots, int32 [n], for n blocks of a prompt.
        """
        self._tiers = tiers
        self._allocate_now = allocate
        self._stats = stats
        self._threads = WorkerThreads("direct hand-off", 1)
        self._planes = OpenPlanes(sharing, lambda: tiers.mover.planes)
        self._was_used = asyncio.Event()
        self._unreachable: set[str] = set()  # places with memory that cannot be read from here

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Allow copies from other nodes' memory inside the `async with`.

        On leaving it, wait for running copies, then unmap the other nodes' memory.
        """
        async with self._threads.running():
            try:
                async with supervised({"tierkv-landing": self._keep_closing}):
                    yield
            finally:
                await self._threads.run(lambda: self._planes.close_unused(0.0))

    async def _keep_closing(self) -> None:
        while True:
            await self._was_used.wait()
            self._was_used.clear()
            is_open = True
            while is_open:
                await asyncio.sleep(CLOSE_UNUSED_S)
                is_open = await self._threads.run(self._close_unused)

    def _close_unused(self) -> bool:
        self._planes.close_unused(CLOSE_UNUSED_S)
        return bool(self._planes.num_open)

    def can_reach(self, place: str) -> bool:
        """Return whether it is worth trying to open another process's device memory.

        Args:
            place: `DirectAddress.place` of the other process: the UUID of its GPU, or "cpu"; "" if
                it shares no device memory.

        Returns:
            False if `place` is "", or if an earlier attempt to open memory of the same `place` has
                failed.
        """
        return bool(place) and place not in self._unreachable

    async def land(
        self,
        prompt: Prompt,
        first: int,
        shared: SharedPlanes,
        source_ids: Ids,
        was_held: Callable[[], Awaitable[bool]],
    ) -> bool:
        """Copy blocks of `prompt` from the producer's device, and insert them into the index.

        A cancelled call raises at once. The copy then continues, and its slots are released at its
        end.

        Args:
            prompt: the prompt.
            first: index of the first block to copy; this device must have the blocks before it.
            shared: description of the producer's device memory.
            source_ids: ids of the blocks in the producer's device memory, int32 [n].
            was_held: asks the producer, after the copy, if it kept the blocks in place until then.

        Returns:
            True if the blocks are in this node's index. False if there was no room, or if the
                blocks could not be read or were not kept in place.
        """
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        work = self._land(prompt, first, shared, source_ids, was_held, outcome)
        self._tiers.work.start(work, "tierkv-land", space=prompt.space)
        return await asyncio.shield(outcome)

    async def _land(  # noqa: PLR0917 - `land`'s arguments, and where its result goes
        self,
        prompt: Prompt,
        first: int,
        shared: SharedPlanes,
        source_ids: Ids,
        was_held: Callable[[], Awaitable[bool]],
        outcome: asyncio.Future[bool],
    ) -> None:
        tiers, index = self._tiers, self._tiers.index
        match = index.match(prompt)
        path = index.hold(match.node, min(first, match.num_blocks))
        has_landed = False
        try:
            if match.device_blocks >= first:  # the blocks before `first` are still there
                slots = await self._allocate(prompt, len(source_ids))
                tiers.slots.lend(Tier.DEVICE, slots)
                left = slots
                try:
                    problem = await self._copy(shared, source_ids, slots)
                    has_landed = problem is None and await was_held()
                    if has_landed:
                        left = self._enter(path, prompt, slots)
                    else:
                        self._stats.failed_direct_reads += 1
                        log.warning(
                            "a prompt could not be read from its producer's device "
                            "and is read from storage: %s",
                            problem
                            or ("the producer ended, or released the blocks during the copy"),
                        )
                        await self._threads.run(lambda: self._planes.close(shared.owner))
                finally:
                    tiers.slots.unlend(Tier.DEVICE, slots)
                    tiers.slots.free(Tier.DEVICE, left)
        except (OutOfBlocksError, TimeoutError) as error:
            log.debug("this device has no room for blocks of a producer's device: %r", error)
        finally:
            index.release(path)
            tiers.work.capacity_changed()
            if not outcome.done():
                outcome.set_result(has_landed)

    async def _allocate(self, prompt: Prompt, count: int) -> Ids:
        """Return `count` device slots for blocks of the prompt.

        Wait up to 2 seconds, but only while offloads or evictions are freeing slots.
        """
        async with asyncio.timeout(_ROOM_S):
            while True:
                try:
                    return self._allocate_now(prompt, count)
                except OutOfBlocksError:
                    if not self._tiers.eviction.is_making_room(Tier.DEVICE):
                        raise
                await self._tiers.work.next_change()

    async def _copy(self, shared: SharedPlanes, source_ids: Ids, slots: Ids) -> str | None:
        """Copy the blocks into `slots`; return the problem, or None if all of them arrived."""
        self._was_used.set()
        try:
            await self._threads.run(lambda: self._planes.copy(shared, source_ids, slots))
        except ConfigError as error:
            self._unreachable.add(shared.place)
            return str(error)
        except TransferError as error:
            return str(error)
        return None

    def _enter(self, path: Lease, prompt: Prompt, slots: Ids) -> Ids:
        """Insert the blocks in `slots` into the index after those of `path`, and extend `path`.

        Return the slots whose blocks the index already has; the caller must free them.
        """
        tiers, index, first = self._tiers, self._tiers.index, path.num_blocks
        stop = first + len(slots)
        refused = index.insert(Tier.DEVICE, path, prompt, stop, slots)
        tiers.copies.note_stored(path.node, first, path.num_blocks, tiers.events.now())
        tiers.events.publish(CacheEventKind.LOADED, "device", path.node, first, path.num_blocks)
        self._stats.device_blocks += len(slots) - len(refused)
        return slots[list(refused)]
