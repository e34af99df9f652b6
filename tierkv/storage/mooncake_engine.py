"""Values read by Mooncake's transfer engine, which leaves a core to others while they come.

The store's client asks without a pause whether the bytes are there: each reading thread has a core
to itself, which the bytes need where cores are few. The engine below it, which the package offers
as well, is asked now and then: values of 2 MiB came 1.27 to 1.32 times as fast, checksums included,
for 0.44 of the processor time (loopback, 2 cores, package 0.3.13, 2026-11-23). The client's own
read sessions, which sleep too, took 1.3 times as long.

The package has no such way to write: where a value's memory is, it says when the value is there.
"""

from __future__ import annotations

import importlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import cast

from tierkv.storage.buffers import flat
from tierkv.storage.mooncake_client import Engine, EnginePackage, Replica
from tierkv.storage.mooncake_memory import pointer
from tierkv.storage.protocol import GetItem, GetOutcome, GetStatus

# On their way at a time for one call: two for each connection to a provider, so that none waits for
# us, and few enough for a frozen one to keep a call for two halts.
_MAX_PIECES = 32
# Of the pauses 0.05, 0.2 and 0.5 ms the longer ones were as fast, and took less processor time.
_PAUSE_S = 0.0003
_LONG_S = 0.05  # for a piece: 16 of 2 MiB took 16 ms
_COMPLETED, _FAILED = 1, -1
_FORCE_TCP = "MC_FORCE_TCP"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is: in the memory of which provider, at which of its addresses."""

    endpoint: str
    address: int
    num_bytes: int


class EngineReads:
    """Blocking, safe from several threads.

    halt_s: how long a provider may move no byte, after which the engine gives a piece up.
    """

    def __init__(self, engine: Engine, *, halt_s: float) -> None:
        self._engine = engine
        self._halt_s = halt_s
        self._lock = Lock()
        self._met: dict[str, _Probe] = {}  # the providers, by endpoint

    def read(self, wanted: Sequence[tuple[Place, GetItem]]) -> list[GetOutcome | None]:
        """HIT for each that is in its buffers, whole, with its digest; None for one that is not.

        wanted: each as long as its place. Nothing is written to their buffers after the return.
        """
        met = self._meet({place.endpoint for place, _ in wanted})
        return _Read(self._engine, self._halt_s, wanted, met).outcomes()

    def _meet(self, endpoints: set[str]) -> set[str]:
        """Those of the providers that have ever answered. To meet one that is frozen takes the
        engine 60 s, and it meets one at a time; a probe takes as long, but nobody waits for it."""
        with self._lock:
            for endpoint in endpoints - self._met.keys():
                self._met[endpoint] = _Probe(self._engine, endpoint)
            probes = {endpoint: self._met[endpoint] for endpoint in endpoints}
        give_up_at = time.monotonic() + self._halt_s
        answering = {one for one, probe in probes.items() if probe.answers_until(give_up_at)}
        with self._lock:
            for endpoint in endpoints - answering:  # one that hangs is what others wait for, too
                if probes[endpoint].has_ended and self._met.get(endpoint) is probes[endpoint]:
                    del self._met[endpoint]
        return answering


class _Probe:
    def __init__(self, engine: Engine, endpoint: str) -> None:
        self._status = _FAILED
        self._ended = Event()

        def probe() -> None:
            try:
                self._status = engine.send_probe(endpoint)
            finally:
                self._ended.set()

        # No executor: the process would wait for the thread at its end.
        Thread(target=probe, name="tierkv-mooncake-probe", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def answers_until(self, give_up_at: float) -> bool:
        return self._ended.wait(max(0.0, give_up_at - time.monotonic())) and self._status == 0


@dataclass(frozen=True, slots=True)
class _Piece:
    value: int  # which of the values
    endpoint: str
    address: int  # of the provider
    into: memoryview


@dataclass(frozen=True, slots=True)
class _Transfer:
    piece: _Piece
    serial: int  # the engine's
    since: float


class _Read:
    """One call. Of a provider that has been silent for `halt_s` it asks for nothing more.

    met: providers that have ever answered; of others it asks for nothing at all.
    """

    def __init__(
        self,
        engine: Engine,
        halt_s: float,
        wanted: Sequence[tuple[Place, GetItem]],
        met: set[str],
    ) -> None:
        self._engine = engine
        self._halt_s = halt_s
        self._items = [item for _, item in wanted]
        pieces = [_pieces(at, place, item) for at, (place, item) in enumerate(wanted)]
        self._num_left = [len(some) for some in pieces]
        self._waiting = deque(piece for some in pieces for piece in some)
        self._coming: list[_Transfer] = []
        self._lost: set[int] = set()
        self._silent = {place.endpoint for place, _ in wanted} - met
        self._outcomes: list[GetOutcome | None] = [None] * len(wanted)

    def outcomes(self) -> list[GetOutcome | None]:
        while self._waiting or self._coming:
            while self._waiting and len(self._coming) < _MAX_PIECES:
                self._ask_for(self._waiting.popleft())
            before = len(self._coming)
            self._coming = self._still_coming()
            if before == len(self._coming):
                time.sleep(_PAUSE_S)
        return self._outcomes

    def _still_coming(self) -> list[_Transfer]:
        """Looks at the oldest first, and at none behind one that is on its way: each look gives the
        interpreter away, and with a busy loop it is long in coming back. One that takes long does
        not hide others."""
        left = []
        for at, transfer in enumerate(self._coming):
            if self._has_ended(transfer):
                continue
            left.append(transfer)
            if time.monotonic() - transfer.since < _LONG_S:
                return left + self._coming[at + 1 :]
        return left

    def _ask_for(self, piece: _Piece) -> None:
        if piece.value in self._lost:
            return
        serial = 0
        if piece.endpoint not in self._silent:
            # One piece each: it tells of the first piece of a transfer only.
            serial = self._engine.batch_transfer_async_read(
                piece.endpoint, [pointer(piece.into)], [piece.address], [len(piece.into)]
            )
        if serial:
            self._coming.append(_Transfer(piece, serial, time.monotonic()))
        else:
            self._lost.add(piece.value)

    def _has_ended(self, transfer: _Transfer) -> bool:
        piece = transfer.piece
        status = self._engine.transfer_check_status(transfer.serial)
        if status == _COMPLETED:
            self._num_left[piece.value] -= 1
            if not self._num_left[piece.value]:
                self._outcomes[piece.value] = _hit(self._items[piece.value])
        elif status == _FAILED:
            self._lost.add(piece.value)
            if time.monotonic() - transfer.since >= self._halt_s:
                self._silent.add(piece.endpoint)
        return status in {_COMPLETED, _FAILED}


def _pieces(value: int, place: Place, item: GetItem) -> list[_Piece]:
    address, pieces = place.address, []
    for view in flat(item.into):
        pieces.append(_Piece(value, place.endpoint, address, view))
        address += len(view)
    return pieces


def _hit(item: GetItem) -> GetOutcome:
    """With its digest, which is made while others come."""
    digest = item.digest() if item.digest is not None else None
    if digest is not None:
        for view in flat(item.into):
            digest.update(view)
    return GetOutcome(GetStatus.HIT, digest=digest)


def place_of(replicas: Sequence[Replica]) -> Place | None:
    """Of the first one in a provider's memory; None if there is none."""
    for replica in replicas:
        if replica.is_memory_replica():
            found = replica.get_memory_descriptor().buffer_descriptor
            return Place(found.transport_endpoint, found.buffer_address, found.size)
    return None


def open_engine(local_host: str) -> Engine | None:
    """Over TCP; None if the package has none that works."""
    try:
        package = cast("EnginePackage", importlib.import_module("mooncake.engine"))
    except ImportError:
        return None
    engine = package.TransferEngine()
    # It takes a network card for RDMA where it finds one, and then reaches no provider over TCP.
    before = os.environ.get(_FORCE_TCP)
    os.environ[_FORCE_TCP] = "1"
    try:
        status = engine.initialize(local_host, "P2PHANDSHAKE", "tcp", "")
    finally:  # of others in this process, who may want the card
        if before is None:
            del os.environ[_FORCE_TCP]
        else:
            os.environ[_FORCE_TCP] = before
    return None if status else engine
