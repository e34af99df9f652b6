"""The direct paths of one node: what it shows as a producer, and what it reads as a claimer."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import msgspec

from tierkv.cache.keys import Prompt
from tierkv.cache.pool import Ids
from tierkv.errors import ConfigError
from tierkv.gpu import process_memory
from tierkv.gpu.process_memory import CPU_PLACE
from tierkv.gpu.protocol import HostSlots, Sharing
from tierkv.pd.direct.address import DirectAddress, this_machine
from tierkv.pd.direct.claimer import Claimer
from tierkv.pd.direct.landing import Landing, ShownPlanes
from tierkv.pd.direct.network import TransferEngine
from tierkv.pd.direct.offers import MemoryWay, NetworkWay, Offers, Speeds
from tierkv.pd.direct.producer import Answers, DirectServer
from tierkv.pd.ledger import HandoffStats, TicketLedger
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.sched.tiers import Tiers
from tierkv.storage.codec import Codec, PlainCodec
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.handoff")

_LOOPBACK = "127.0.0.1"
_ENGINE_START_S = 10.0


class Direct:
    """See PeerSource. `offers` is where this node's fetcher gets blocks from; inside `running()`
    also from producers.

    codecs: how a fingerprint's blocks are stored, None for a plain checksum. A ticket lies in the
    store, so whoever reads the store may read what the ticket opens: blocks that are signed or
    sealed against others there are not shown.
    take: see Scheduler.take_device.
    """

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        tiers: Tiers,
        storage: StorageIO,
        slots: HostSlots,
        settings: HandoffSettings,
        *,
        codecs: Callable[[str], Codec] | None,
        stats: HandoffStats,
        take: Callable[[Prompt, int], Ids],
    ) -> None:
        self._tiers = tiers
        self._take = take
        self._storage = storage
        self._slots = slots
        self._settings = settings
        self._codecs = codecs
        self._stats = stats
        self._machine = ""
        self._pid = 0  # of whose memory others may read
        self._planes: ShownPlanes | None = None
        self._place = ""
        self._landing: Landing | None = None
        self._engine: TransferEngine | None = None
        self._server: DirectServer | None = None
        self._num_claims = 0
        self.speeds = Speeds(is_named=settings.direct is not DirectPath.AUTO)
        self.offers = Offers(storage, stats, self.speeds)

    @property
    def _is_on(self) -> bool:
        is_whole = self._storage.slices.size == 1
        return self._settings.direct is not DirectPath.OFF and is_whole

    @property
    def num_leases(self) -> int:
        return 0 if self._server is None else self._server.num_leases

    @property
    def num_offered(self) -> int:
        return self.offers.num_offers

    def findings(self) -> list[str]:
        left = 0 if self._num_claims else self.num_offered
        return [f"nobody claims, but {left} blocks are offered by other nodes"] if left else []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if not self._is_on:
            yield
            return
        way, host = self._settings.direct, self._settings.direct_host
        async with AsyncExitStack() as stack:
            if way is not DirectPath.NETWORK:
                self._machine = await asyncio.to_thread(this_machine)
            if way in (DirectPath.AUTO, DirectPath.MEMORY) and process_memory.is_possible():
                self._pid = os.getpid() if self._machine else 0
                if self._machine:
                    self.offers.ways.append(MemoryWay())
            if way in (DirectPath.AUTO, DirectPath.DEVICE) and self._machine:
                await self._share_device(stack)
            if way in (DirectPath.AUTO, DirectPath.NETWORK) and host:
                await self._start_engine(host, stack)
            await stack.enter_async_context(self.offers.running())
            server = self._new_server(host)
            await stack.enter_async_context(server.running())
            self._server = server
            try:
                yield
            finally:
                self._server = None

    async def _share_device(self, stack: AsyncExitStack) -> None:
        sharing = self._tiers.mover.device.sharing
        is_asked_for = self._settings.direct is DirectPath.DEVICE
        # Between CPUs the path `memory` does as well.
        if sharing is None or (sharing.place == CPU_PLACE and not is_asked_for):
            if is_asked_for:
                log.warning("no direct hand-off from device to device: this one has no way to")
            return
        self._landing = Landing(self._tiers, sharing, self._stats, self.speeds, take=self._take)
        await stack.enter_async_context(self._landing.running())
        await self._show_planes(sharing)

    async def _show_planes(self, sharing: Sharing) -> None:
        planes = ShownPlanes(sharing, lambda: self._tiers.mover.planes)
        try:
            await asyncio.to_thread(planes.describe)
        except ConfigError as error:
            log.warning("the device's blocks are not shown: %s", error)
            return
        self._planes, self._place = planes, sharing.place

    async def _start_engine(self, host: str, stack: AsyncExitStack) -> None:
        try:
            async with asyncio.timeout(_ENGINE_START_S):
                self._engine = await asyncio.to_thread(TransferEngine, host)
        except (ConfigError, TimeoutError) as error:
            log.warning("no direct hand-off over the network: %s", error)
            return
        stack.callback(self._engine.close)
        self.offers.ways.append(NetworkWay(self._engine))
        log.warning(
            "the transfer engine listens on %s: once this node publishes, whoever reaches it there "
            "can read and write the host tier",
            self._engine.name,
        )

    def _new_server(self, host: str) -> DirectServer:
        held_s = self._settings.direct_lease_s
        answers = Answers(
            self._tiers,
            self._storage.slices,
            self._slots,
            machine=self._machine,
            planes=self._planes,
            held_s=held_s,
            on_blocks=self._count_shown,
        )
        port = self._settings.direct_port
        return DirectServer(answers, host=host or _LOOPBACK, port=port, held_s=held_s)

    def _count_shown(self, num_blocks: int) -> None:
        self._stats.shown_blocks += num_blocks

    # The prefill node's side

    @property
    def _shows_host(self) -> bool:
        return bool(self._pid) or self._engine is not None

    def offer(self, ticket_id: str, prompt: Prompt, ledger: TicketLedger) -> DirectAddress | None:
        server = self._server
        if server is None or not self._is_plain(prompt.space):
            return None
        if not (self._shows_host or self._planes):
            return None
        # Of the prompt too: an id may be another prompt's later, and nobody checks device bytes.
        offer = f"{self._tiers.prompt_keys(prompt)[-1].digest.hex()}:{ticket_id}"
        is_new = not server.is_offered(offer)
        try:
            address = server.offer(offer, prompt)
            if self._engine is not None:
                self._engine.show(self._slots.array)
        except ConfigError as error:
            log.warning("no direct hand-off: %s", error)
            return None
        if is_new:
            ledger.hold(ticket_id, lambda: server.forget(offer))
        return msgspec.structs.replace(
            address,
            machine=self._machine,
            pid=self._pid,
            place=self._place,
            engine=self._engine.name if self._engine else "",
        )

    def _is_plain(self, space: str) -> bool:
        if self._codecs is None:
            return True
        return isinstance(self._codecs(space or self._storage.names.fingerprint), PlainCodec)

    @property
    def wants_host_copies(self) -> bool:
        is_enough = self._planes is not None and self._engine is None
        return self._server is not None and self._shows_host and not is_enough

    # The decode node's side

    @contextmanager
    def supply(self, may_land: Callable[[], bool] = lambda: True) -> Iterator[Claimer]:
        claimer = Claimer(
            self._tiers,
            self.offers,
            self._landing,
            machine=self._machine,
            may_land=may_land,
        )
        self._num_claims += 1
        try:
            yield claimer
        finally:
            self._num_claims -= 1
            claimer.close()
