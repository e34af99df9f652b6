"""Where a claimer can read a producer's host tier, as tickets say it, and what the two tell."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import struct
from pathlib import Path
from typing import TypeVar

import msgspec

from tierkv import wire
from tierkv.errors import StoreCorruptError

T = TypeVar("T")

_VERSION = 1
_ASK, _ANSWER = b"TKVA", b"TKVD"
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 4 << 20
_MAC_BYTES = 16
NONCE_BYTES = 16
MAX_BLOCKS = 8192  # of one answer: under 1 MiB


class DirectAddress(msgspec.Struct, frozen=True, kw_only=True):
    """host, port: where to ask for the ticket's blocks. secret: who has it may.

    machine, pid: whose memory can be read with this machine's own means, "" if nobody's.
    engine: what the transfer library calls the producer, "" if it does not run there.
    """

    host: str
    port: int
    secret: bytes
    machine: str = ""
    pid: int = 0
    engine: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first, stop) of the ticket's prompt. Ends what the last answer held."""

    ticket_id: str
    first: int
    stop: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that lie in the producer's host tier until the next question, the connection's end,
    or `held_s` seconds later.

    blocks: which. addresses: of their bytes, in the producer's memory. headers: of the stored
    format, each made from the bytes as they lie there.
    """

    blocks: tuple[int, ...] = ()
    addresses: tuple[int, ...] = ()
    headers: tuple[bytes, ...] = ()
    held_s: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.blocks) == len(self.addresses) == len(self.headers):
            raise ValueError("an answer has one address and one header per block")


class Channel:
    """One connection; each frame vouched for with the secret, so that only the two who have it are
    believed. A frame that is played again, or to another connection, is not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._nonce = b""
        self._count = 0

    async def greet(self) -> None:
        """The producer's first word."""
        self._nonce = os.urandom(NONCE_BYTES)
        self._writer.write(self._nonce)
        await self._writer.drain()

    async def be_greeted(self) -> None:
        self._nonce = await self._reader.readexactly(NONCE_BYTES)

    async def send_ask(self, ask: Ask, secret: bytes) -> None:
        await self._send(wire.seal(_ASK, _VERSION, ask), secret)

    async def send_answer(self, answer: Answer, secret: bytes) -> None:
        await self._send(wire.seal(_ANSWER, _VERSION, answer), secret)

    async def next_ask(self, node_secret: bytes) -> Ask:
        """Raises StoreCorruptError for what the ticket's secret does not vouch for, and what the
        stream raises when it ends."""
        body, mac = await self._receive()
        ask = wire.unseal(_ASK, _VERSION, body, Ask)
        self._check(body, mac, ticket_secret(node_secret, ask.ticket_id))
        return ask

    async def answer(self, secret: bytes) -> Answer:
        """Raises as `next_ask` does."""
        body, mac = await self._receive()
        self._check(body, mac, secret)
        return wire.unseal(_ANSWER, _VERSION, body, Answer)

    def close(self) -> None:
        self._writer.close()

    async def _send(self, body: bytes, secret: bytes) -> None:
        mac = self._mac(body, secret)
        self._writer.write(_LENGTH.pack(len(body)) + mac + body)
        await self._writer.drain()

    async def _receive(self) -> tuple[bytes, bytes]:
        head = await self._reader.readexactly(_LENGTH.size + _MAC_BYTES)
        (length,) = _LENGTH.unpack_from(head)
        if length > _MAX_FRAME_BYTES:
            raise StoreCorruptError(f"a frame of {length} bytes is too long")
        return await self._reader.readexactly(length), head[_LENGTH.size :]

    def _check(self, body: bytes, mac: bytes, secret: bytes) -> None:
        if not hmac.compare_digest(mac, self._mac(body, secret)):
            raise StoreCorruptError("the ticket's secret does not vouch for this")

    def _mac(self, body: bytes, secret: bytes) -> bytes:
        text = self._nonce + self._count.to_bytes(8, "little") + body
        self._count += 1
        return hmac.digest(secret, text, "sha256")[:_MAC_BYTES]


def ticket_secret(node_secret: bytes, ticket_id: str) -> bytes:
    return hmac.digest(node_secret, ticket_id.encode(), "sha256")[:_MAC_BYTES]


def this_machine() -> str:
    """Equal in two processes only if one can name the other by its pid and is the same user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}{namespace}{os.geteuid()}".encode()).hexdigest()[:32]
