"""Reads another machine's memory with Mooncake's transfer engine, over TCP.

It needs no process on the other side to do anything, listens on two ports of its own, and asks
nobody who reads or writes what was registered: for networks that only the operator uses.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from tierkv.cache.layout import Bytes1D
from tierkv.errors import ConfigError, TransferError
from tierkv.gpu.process_memory import Piece


class _Engine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Reads block: for 5 s if the peer hangs."""

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
    """One per node. Used from one thread at a time.

    Bytes land in memory of its own first: a read that was given up may still write there, and
    never where a block came another way meanwhile.
    """

    def __init__(self, host: str) -> None:
        """host: the address that other nodes reach this one at. Blocks for some milliseconds.

        Raises ConfigError if the library is not there or does not start."""
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
        """Let other nodes read `memory` until `close`; once is enough. Raises ConfigError."""
        assert self._engine is not None, "it is not closed"
        address = int(memory.ctypes.data)
        if address in self._shown:
            return
        if status := self._engine.register_memory(address, memory.nbytes):
            raise ConfigError(f"Mooncake's engine cannot show the host tier ({status})")
        self._shown.append(address)

    def read(self, peer: str, pieces: Sequence[Piece]) -> None:
        """Read all `pieces`. Raises TransferError, with none of them written to."""
        assert self._engine is not None, "it is not closed"
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
        """Nobody reads what was shown after this."""
        if self._engine is not None:
            for address in self._shown:
                self._engine.unregister_memory(address)
            self._engine = None
