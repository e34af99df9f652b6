"""The direct paths of one node: what it shows as a producer, and what it reads as a claimer."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec

from tierkv.cache.keys import Prompt
from tierkv.errors import ConfigError
from tierkv.gpu.protocol import HostSlots
from tierkv.pd.direct import memory
from tierkv.pd.direct.address import DirectAddress, this_machine
from tierkv.pd.direct.claimer import Claimer
from tierkv.pd.direct.engine import TransferEngine
from tierkv.pd.direct.offers import Offers
from tierkv.pd.direct.serve import DirectServer
from tierkv.pd.ledger import Ledger
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.stats import HandoffStats
from tierkv.sched.tiers import Tiers
from tierkv.storage.codec import Codec, PlainCodec
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.handoff")

_LOOPBACK = "127.0.0.1"
_ENGINE_START_S = 10.0


class Direct:
    """`offers` is where a claimer gets blocks from; inside `running()` also from producers.

    codecs: how a fingerprint's blocks are stored, None for a plain checksum. A ticket lies in the
    store, so whoever reads the store may read what the ticket opens: blocks that are signed or
    sealed against others there are not shown.
    """

    def __init__(
        self,
        tiers: Tiers,
        storage: StorageIO,
        slots: HostSlots,
        settings: HandoffSettings,
        *,
        codecs: Callable[[str], Codec] | None,
        stats: HandoffStats,
    ) -> None:
        self._tiers = tiers
        self._storage = storage
        self._slots = slots
        self._settings = settings
        self._codecs = codecs
        self._stats = stats
        self._machine = ""
        self._engine: TransferEngine | None = None
        self._server: DirectServer | None = None
        self._num_claims = 0
        self.offers = Offers(storage, slots, stats)

    @property
    def _is_on(self) -> bool:
        is_whole = self._storage.slices.size == 1
        return self._settings.direct is not DirectPath.OFF and is_whole

    @property
    def num_leases(self) -> int:
        """Held for claimers of other nodes, right now."""
        return 0 if self._server is None else self._server.num_leases

    def findings(self) -> list[str]:
        """What is left over although nobody claims."""
        left = 0 if self._num_claims else self.offers.num_offers
        return [f"nobody claims, but {left} blocks are offered by other nodes"] if left else []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if not self._is_on:
            yield
            return
        way, host = self._settings.direct, self._settings.direct_host
        if way is not DirectPath.NETWORK and memory.is_possible():
            self._machine = await asyncio.to_thread(this_machine)
            self.offers.may_read_memory = bool(self._machine)
        if way is not DirectPath.MEMORY and host:
            await self._start_engine(host)
        server = DirectServer(
            self._tiers,
            self._storage.slices,
            self._slots,
            host=host or _LOOPBACK,
            port=self._settings.direct_port,
            held_s=self._settings.direct_lease_s,
            on_blocks=self._count_shown,
        )
        try:
            async with self.offers.running(), server.running():
                self._server = server
                try:
                    yield
                finally:
                    self._server = None
        finally:
            if self._engine is not None:
                self.offers.engine = None
                self._engine.close()

    async def _start_engine(self, host: str) -> None:
        try:
            async with asyncio.timeout(_ENGINE_START_S):
                self._engine = await asyncio.to_thread(TransferEngine, host)
        except (ConfigError, TimeoutError) as error:
            log.warning("no direct hand-off over the network: %s", error)
            return
        self.offers.engine = self._engine
        log.warning(
            "the transfer engine (%s) listens on every address of this machine: once this node "
            "publishes, whoever reaches it can read and write the host tier",
            self._engine.name,
        )

    def _count_shown(self, num_blocks: int) -> None:
        self._stats.shown_blocks += num_blocks

    # The prefill node's side

    def offer(self, ticket_id: str, prompt: Prompt, ledger: Ledger) -> DirectAddress | None:
        """What to write into the prompt's ticket, and into its open one; None if this node shows
        nothing. Goes on until `ledger` lets go of what is held for the ticket."""
        server = self._server
        if server is None or not self._is_plain(prompt.space):
            return None
        if not (self._machine or self._engine):
            return None
        is_new = not server.is_offered(ticket_id)
        try:
            address = server.offer(ticket_id, prompt)
            if self._engine is not None:
                self._engine.show(self._slots.array)
        except ConfigError as error:
            log.warning("no direct hand-off: %s", error)
            return None
        if is_new:
            ledger.hold(ticket_id, lambda: server.forget(ticket_id))
        return msgspec.structs.replace(
            address,
            machine=self._machine,
            pid=os.getpid() if self._machine else 0,
            engine=self._engine.name if self._engine else "",
        )

    def _is_plain(self, space: str) -> bool:
        if self._codecs is None:
            return True
        return isinstance(self._codecs(space or self._storage.names.fingerprint), PlainCodec)

    @property
    def shows_blocks(self) -> bool:
        """Whether blocks that are published should be on the host for that."""
        return self._server is not None and bool(self._machine or self._engine)

    # The decode node's side

    @contextmanager
    def claimer(self, ticket_id: str) -> Iterator[Claimer]:
        """For one claim; at its end the producer lets go of what it held for it."""
        claimer = Claimer(ticket_id, self._tiers, self.offers, machine=self._machine)
        self._num_claims += 1
        try:
            yield claimer
        finally:
            self._num_claims -= 1
            claimer.close()
