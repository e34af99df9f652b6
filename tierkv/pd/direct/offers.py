"""Reads of blocks from other nodes' host tiers, by a list of the blocks that they offer.

A decode node reads blocks in this way. A block that does not arrive intact is fetched from storage,
in the same call.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np

from tierkv.cache.keys import StoredKey
from tierkv.cache.layout import Bytes1D
from tierkv.errors import ConfigError, StoreCorruptError, StoreUnavailableError, TransferError
from tierkv.gpu import process_memory
from tierkv.gpu.process_memory import NotPermittedError, RemotePiece
from tierkv.gpu.protocol import Ids
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.settings import DirectPath
from tierkv.pd.tickets import HandoffStats
from tierkv.storage.base import WorkerThreads
from tierkv.storage.codec import PayloadCodecs, PlainCodec
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.transfer.storage_io import StorageIO

# Mooncake's transfer engine reads another machine's memory over TCP. It needs no process on the
# other side to do anything, listens on two ports of its own, on every address of the machine, and
# has no authentication for reads and writes of registered memory: for private networks only.


class _Engine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that are used here.

    Each method except `get_rpc_port` returns 0 for success. A read blocks for 5 s if the peer does
    not answer.
    """

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, num_bytes: int) -> int: ...

    def unregister_memory(self, address: int) -> int: ...

    def batch_transfer_sync_read(
        self, peer: str, ours: list[int], theirs: list[int], lengths: list[int]
    ) -> int: ...


class _Package(Protocol):
    def TransferEngine(self) -> _Engine: ...  # noqa: N802


class TransferEngine:
    """Mooncake's transfer engine of this node. Use it from one thread at a time.

    Bytes arrive in a buffer and are copied from there to their target. A failed read may still
    write to the buffer later, but never to a target.

    Attributes:
        name: this node's name for the engines of other nodes.
    """

    def __init__(self, host: str) -> None:
        """Start Mooncake's transfer engine, which takes some milliseconds.

        Args:
            host: IP address at which other nodes reach this one.

        Raises:
            ConfigError: Mooncake's Python package cannot be loaded, or its engine does not start.
        """
        os.environ.setdefault("GLOG_minloglevel", "3")
        try:
            package = cast("_Package", importlib.import_module("mooncake.engine"))
        except ImportError as error:
            raise ConfigError(f"Mooncake's package cannot be loaded ({error})") from error
        self._engine: _Engine | None = package.TransferEngine()
        if status := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigError(f"Mooncake's engine does not start on {host} ({status})")
        self.name = f"{host}:{self._engine.get_rpc_port()}"
        self._landing: Bytes1D = np.empty(0, np.uint8)
        self._given_up: list[Bytes1D] = []  # a late byte may still be written to these
        self._shown: list[int] = []

    def show(self, memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        """Let other nodes read and write `memory` until `close`.

        A repeated call with the same memory does nothing.

        Raises:
            ConfigError: the engine cannot register the memory.
        """
        assert self._engine is not None, "it is not closed"
        address = int(memory.ctypes.data)
        if address in self._shown:
            return
        if status := self._engine.register_memory(address, memory.nbytes):
            raise ConfigError(f"Mooncake's engine cannot register the host tier ({status})")
        self._shown.append(address)

    def read(self, peer: str, pieces: Sequence[RemotePiece]) -> None:
        """Read memory of another node.

        Args:
            peer: name of the other node's transfer engine.
            pieces: ranges of the other node's memory, each with the address to which it is copied.

        Raises:
            TransferError: the read failed; none of the targets was written.
        """
        if self._engine is None:
            raise TransferError("this node's transfer engine is closed")
        total = sum(piece.num_bytes for piece in pieces)
        if len(self._landing) < total:
            self._landing = np.empty(total, np.uint8)
        landing = self._landing
        starts = np.cumsum([0, *[piece.num_bytes for piece in pieces]])[:-1].tolist()
        base = int(landing.ctypes.data)
        status = self._engine.batch_transfer_sync_read(
            peer,
            [base + start for start in starts],
            [piece.theirs for piece in pieces],
            [piece.num_bytes for piece in pieces],
        )
        if status:
            self._given_up.append(landing)
            self._landing = np.empty(0, np.uint8)
            raise TransferError(f"Mooncake's engine could not read from {peer} ({status})")
        for start, piece in zip(starts, pieces, strict=True):
            ctypes.memmove(piece.ours, base + start, piece.num_bytes)

    def close(self) -> None:
        """Stop the access of other nodes to this node's memory."""
        if self._engine is not None:
            for address in self._shown:
                self._engine.unregister_memory(address)
            self._engine = None


log = logging.getLogger(__name__)

_HIT = GetOutcome(GetStatus.HIT, is_direct=True)
_ABSENT = GetOutcome(GetStatus.MISS)
_PLAIN = PlainCodec(PayloadCodecs())  # bytes are read from memory as they are


Read = Callable[[Sequence[RemotePiece]], None]  # reads one producer's host tier, in a thread


@dataclass(slots=True, eq=False)
class Peer:
    """A producer from whose host tier a claim reads blocks.

    Attributes:
        path: MEMORY if the producer runs on this machine, otherwise NETWORK.
        read: reads ranges of the producer's memory; raises TransferError if not all bytes arrived,
            and NotPermittedError if reading is forbidden.
        is_given_up: True after a failed read; the producer's blocks are then fetched from storage.
    """

    path: DirectPath
    read: Read
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """One block in a producer's host tier.

    Attributes:
        peer: the producer.
        address: address of the block's bytes in the producer's memory.
        header: the block's header in the stored format, with the checksum that its bytes must have.
    """

    peer: Peer
    address: int
    header: bytes


@dataclass(frozen=True, slots=True)
class _Read:
    at: int
    key: StoredKey
    slot: int
    offer: Offer


class Offers:
    """Reads blocks from the host memory of nodes that offer them, otherwise from storage.

    Use this only on nodes without tensor parallelism, because such nodes store each block as one
    value.

    Args:
        storage: the storage tier.
        stats: counts of the node's hand-offs.

    Attributes:
        reads_memory: True while this process can probably read the memory of other processes of
            this machine; False once the kernel has forbidden a read.
        engine: Mooncake's transfer engine, which reads from nodes on other machines; None while it
            does not run.
    """

    def __init__(self, storage: StorageIO, stats: HandoffStats) -> None:
        self._storage = storage
        self._stats = stats
        self._of: dict[bytes, list[Offer]] = {}
        self._threads = WorkerThreads("direct hand-off", 1)
        self.reads_memory = False
        self.engine: TransferEngine | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with self._threads.running():
                yield
        finally:
            self.reads_memory, self.engine = False, None

    @property
    def num_offers(self) -> int:
        return len(self._of)

    def peer(self, address: DirectAddress, *, is_near: bool) -> Peer | None:
        """Return the producer at an address, for reads of its host tier.

        Args:
            address: address in the producer's ticket.
            is_near: True if the producer runs on this machine.

        Returns:
            The producer; None if this node cannot read its host tier.
        """
        engine = self.engine
        if self.reads_memory and is_near and address.pid:
            return Peer(DirectPath.MEMORY, lambda pieces: process_memory.read(address.pid, pieces))
        if engine is not None and address.engine:
            return Peer(DirectPath.NETWORK, lambda pieces: engine.read(address.engine, pieces))
        return None

    def add(self, digest: bytes, offer: Offer) -> None:
        """Record that a producer has a block in its host tier, so that fetches read it from there.

        Args:
            digest: `StoredKey.digest` of the block.
            offer: the producer, and the block's address and header.
        """
        self._of.setdefault(digest, []).append(offer)

    def remove(self, digest: bytes, offer: Offer) -> None:
        """Withdraw the offer to read a block from a producer's host tier.

        Args:
            digest: `StoredKey.digest` of the block.
            offer: the same object that was passed to `add`.
        """
        left = [one for one in self._of[digest] if one is not offer]
        if left:
            self._of[digest] = left
        else:
            del self._of[digest]

    # Called by the fetcher

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """Return the number of `keys` before the first one that neither a producer nor storage has.

        Storage is asked only for the first key that no producer offers, and for the keys after it.

        Raises:
            StoreUnavailableError: the store does not answer, and no producer offers the first key.
        """
        shown = next((i for i, key in enumerate(keys) if self._offer(key) is None), len(keys))
        if shown == len(keys):
            return shown
        try:
            return shown + await self._storage.count_present(keys[shown:])
        except StoreUnavailableError:
            if not shown:
                raise
            return shown

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]:
        """Read blocks into host slots, from producers that offer them, otherwise from storage.

        A block that does not arrive intact from a producer is read from storage. Its outcome is
        then that of storage.

        Args:
            keys: keys of the blocks.
            slot_ids: host slot of each block, int32 [n].

        Returns:
            The outcome of each block, in the order of `keys`.
        """
        if not self._of:
            return await self._storage.fetch(keys, slot_ids)
        outcomes = [_ABSENT] * len(keys)
        reads = [
            _Read(at, key, int(slot), offer)
            for at, (key, slot) in enumerate(zip(keys, slot_ids, strict=True))
            if (offer := self._offer(key)) is not None
        ]
        await self._read(reads, outcomes)
        rest = [at for at, outcome in enumerate(outcomes) if outcome.status is not GetStatus.HIT]
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

    async def _read(self, reads: Sequence[_Read], outcomes: list[GetOutcome]) -> None:
        for peer in dict.fromkeys(read.offer.peer for read in reads):
            some = [read for read in reads if read.offer.peer is peer]
            try:
                whole = await self._threads.run(partial(self._read_and_check, peer, some))
            except TransferError as error:
                peer.is_given_up = True
                self._stats.failed_direct_reads += 1
                if isinstance(error, NotPermittedError):
                    self.reads_memory = False
                log.warning(
                    "the producer's host tier could not be read, so the rest of the "
                    "prompt is read from storage: %s",
                    error,
                )
                continue
            if peer.path is DirectPath.MEMORY:
                self._stats.memory_blocks += len(whole)
            else:
                self._stats.network_blocks += len(whole)
            for at in whole:
                outcomes[at] = _HIT
            if len(whole) < len(some):
                self._stats.damaged_direct_blocks += len(some) - len(whole)
                log.warning(
                    "%d blocks of a producer's host tier had been replaced and are "
                    "read from storage",
                    len(some) - len(whole),
                )

    def _read_and_check(self, peer: Peer, reads: Sequence[_Read]) -> list[int]:
        """Read blocks from the producer's memory into host slots, and check them.

        The result contains the field `at` of each read whose block arrived intact. The call blocks
        its thread.
        """
        part = self._storage.slices.parts[0]
        payloads = [part.payload(read.slot, read.key.num_tokens) for read in reads]
        peer.read(
            [
                RemotePiece(read.offer.address, int(payload.ctypes.data), payload.nbytes)
                for read, payload in zip(reads, payloads, strict=True)
            ]
        )
        whole = []
        for read, payload in zip(reads, payloads, strict=True):
            identity = self._storage.slices.identity(read.key, part.shard)
            with suppress(StoreCorruptError):
                _PLAIN.decode(read.offer.header, payload.data, identity)
                whole.append(read.at)
        return whole
