"""Reads another machine's memory with Mooncake's transfer engine, over TCP.

It needs no process on the other side to do anything, listens on two ports of its own, and asks
nobody who reads or writes what was registered: for networks that only the operator uses. It would
listen on every address of the machine; a filter on its sockets lets only those come that came to
the given one.
"""

from __future__ import annotations

import ctypes
import importlib
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, cast

import numpy as np

from tierkv.cache.layout import Bytes1D
from tierkv.errors import ConfigError, TransferError
from tierkv.gpu.process_memory import RemotePiece

# Of the kernel's packet filter.
_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")  # what, where to go on if so, and if not, with what
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_HEADER = 0xFFF0_0000  # offsets from here on are in the IP header


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

        Raises ConfigError if the library is not there, does not start, or cannot be kept to it."""
        os.environ.setdefault("GLOG_minloglevel", "3")
        try:
            package = cast("_Package", importlib.import_module("mooncake.engine"))
        except ImportError as error:
            raise ConfigError(f"Mooncake's package cannot be loaded ({error})") from error
        self._engine: _Engine | None = package.TransferEngine()
        before = _sockets()
        if status := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigError(f"Mooncake's engine does not start on {host} ({status})")
        _keep_to(host, _sockets() - before)
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

    def read(self, peer: str, pieces: Sequence[RemotePiece]) -> None:
        """Read all `pieces`. Raises TransferError, with none of them written to."""
        if self._engine is None:
            raise TransferError("this node has no transfer engine any more")
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


def _sockets() -> set[tuple[int, str]]:
    """This process's sockets: number and name each, since numbers come again."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found.add((int(entry), name))
    return found


def _keep_to(host: str, sockets: set[tuple[int, str]]) -> None:
    """Let those of the sockets that listen take connections to `host` alone. Raises ConfigError."""
    program = _only_to(host)
    code = ctypes.create_string_buffer(program, len(program))
    length = len(program) // _INSTRUCTION.size
    option = struct.pack("@HP", length, ctypes.addressof(code))
    for number, _ in sockets:
        with socket.socket(fileno=os.dup(number)) as one:
            is_internet = one.family in {socket.AF_INET, socket.AF_INET6}
            if not is_internet or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            try:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
            except OSError as error:
                raise ConfigError(
                    f"Mooncake's engine listens on every address, and cannot be kept to {host} "
                    f"({error.strerror})"
                ) from error


def _only_to(host: str) -> bytes:
    """A program of the kernel's packet filter that drops what is not for `host`: the version of IP,
    then the words of the destination, each compared; the last two instructions take and drop."""
    address = ipaddress.ip_address(host)
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    first = 16 if len(words) == 1 else 24  # of the destination, in the header
    loads = [(_LOAD_WORD, first + 4 * at, word) for at, word in enumerate(words)]
    size = 5 + 2 * len(loads)
    program = [(_LOAD_BYTE, 0, 0, _HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    program.append((_JUMP_IF_EQUAL, 0, size - len(program) - 2, address.version))
    for load, offset, word in loads:
        program.append((load, 0, 0, _HEADER + offset))
        program.append((_JUMP_IF_EQUAL, 0, size - len(program) - 2, word))
    program += [(_RETURN, 0, 0, 0xFFFF_FFFF), (_RETURN, 0, 0, 0)]
    return b"".join(_INSTRUCTION.pack(*one) for one in program)
