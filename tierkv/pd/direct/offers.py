"""The decode node's side: which blocks other nodes show, and how to get them from there.

A block that does not come whole this way is fetched from storage, in the same call.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tierkv.cache.keys import StoredKey
from tierkv.errors import StoreCorruptError, StoreUnavailableError, TransferError
from tierkv.gpu import process_memory
from tierkv.gpu.process_memory import NotPermittedError, Piece
from tierkv.gpu.protocol import HostSlots, Ids
from tierkv.pd.direct.network import TransferEngine
from tierkv.pd.ledger import HandoffStats
from tierkv.storage.codec import PlainCodec
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.storage.threads import WorkerThreads
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.handoff")

_HIT = GetOutcome(GetStatus.HIT)
_PLAIN = PlainCodec()


@dataclass(slots=True, eq=False)
class Peer:
    """A producer, for one claim. pid: to read its memory on this machine; None: over the engine."""

    pid: int | None
    engine: str
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """One block at a peer: where its bytes are, and the header that they must fit."""

    peer: Peer
    address: int
    header: bytes


@dataclass(slots=True)
class _Read:
    at: int
    key: StoredKey
    slot: int
    offer: Offer
    is_whole: bool = False


class Offers:
    """What `Fetcher` gets blocks from: producers while they show them, else storage.

    engine: reads over the network; None if this node does not. Only for nodes whose blocks are one
    slice.
    """

    def __init__(self, storage: StorageIO, slots: HostSlots, stats: HandoffStats) -> None:
        self._storage = storage
        self._slots = slots
        self._stats = stats
        self._of: dict[bytes, list[Offer]] = {}
        self._threads = WorkerThreads("direct hand-off", 1)
        self.engine: TransferEngine | None = None
        self.may_read_memory = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._threads.running():
            yield

    @property
    def num_offers(self) -> int:
        return len(self._of)

    def add(self, digest: bytes, offer: Offer) -> None:
        self._of.setdefault(digest, []).append(offer)

    def remove(self, digest: bytes, offer: Offer) -> None:
        left = [one for one in self._of[digest] if one is not offer]
        if left:
            self._of[digest] = left
        else:
            del self._of[digest]

    # What the fetcher asks

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """How many of `keys`, from the first on, can be had. Storage is asked for those that
        nobody shows. Raises StoreUnavailableError as it does."""
        shown = 0
        for key in keys:
            if self._offer(key) is None:
                break
            shown += 1
        if shown == len(keys):
            return shown
        try:
            return shown + await self._storage.count_present(keys[shown:])
        except StoreUnavailableError:
            if not shown:
                raise
            return shown

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]:
        """As StorageIO.fetch. Damage at a producer is no damage of what is stored."""
        if not self._of:
            return await self._storage.fetch(keys, slot_ids)
        reads = [
            _Read(at, key, int(slot), offer)
            for at, (key, slot) in enumerate(zip(keys, slot_ids, strict=True))
            if (offer := self._offer(key)) is not None
        ]
        if reads:
            await self._read(reads)
        outcomes = [_HIT] * len(keys)
        came = {read.at for read in reads if read.is_whole}
        rest = [at for at in range(len(keys)) if at not in came]
        if rest:
            found = await self._storage.fetch([keys[at] for at in rest], slot_ids[rest])
            for at, outcome in zip(rest, found, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _offer(self, key: StoredKey) -> Offer | None:
        for offer in reversed(self._of.get(key.digest, ())):
            if not offer.peer.is_given_up:
                return offer
        return None

    async def _read(self, reads: Sequence[_Read]) -> None:
        """Read into the slots and check what came; `is_whole` says of which."""
        peers = {id(read.offer.peer): read.offer.peer for read in reads}
        for peer in peers.values():
            some = [read for read in reads if read.offer.peer is peer]
            try:
                await self._threads.run(partial(self._read_and_check, peer, some))
            except TransferError as error:
                peer.is_given_up = True
                self._stats.failed_direct_reads += 1
                if isinstance(error, NotPermittedError):
                    self.may_read_memory = False
                log.warning("a prompt is claimed from storage from here on: %s", error)
                continue
            whole = sum(read.is_whole for read in some)
            if peer.pid is not None:
                self._stats.memory_blocks += whole
            else:
                self._stats.network_blocks += whole
            if whole < len(some):
                self._stats.damaged_direct_blocks += len(some) - whole
                log.warning("%d blocks of a producer's host tier had changed", len(some) - whole)

    def _read_and_check(self, peer: Peer, reads: Sequence[_Read]) -> None:
        """In a thread."""
        part = self._storage.slices.parts[0]
        payloads = [part.payload(read.slot, read.key.num_tokens) for read in reads]
        pieces = [
            Piece(read.offer.address, int(payload.ctypes.data), payload.nbytes)
            for read, payload in zip(reads, payloads, strict=True)
        ]
        if peer.pid is not None:
            process_memory.read(peer.pid, pieces)
        elif self.engine is not None:
            self.engine.read(peer.engine, pieces)
        else:
            raise TransferError("this node has no transfer engine any more")
        for read, payload in zip(reads, payloads, strict=True):
            identity = self._storage.slices.identity(read.key, part.shard)
            try:
                _PLAIN.decode(read.offer.header, payload.data, identity)
            except StoreCorruptError:
                continue
            read.is_whole = True
