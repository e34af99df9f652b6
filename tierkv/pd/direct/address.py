"""The protocol by which a decode node asks for blocks in a prefill node's memory.

The decode node (claimer) asks the prefill node (producer) at which addresses in the producer's
memory the blocks of a ticket are. The ticket contains the address of the producer's server, the
name by which the server finds the ticket's blocks, and a secret that authenticates the messages.
The messages are sent over TCP, or over a Unix socket, where the kernel tells the producer the
claimer's user id.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TypeVar

import msgspec

from tierkv.errors import StoreCorruptError
from tierkv.gpu.protocol import SharedPlanes
from tierkv.storage import codec

T = TypeVar("T")

_VERSION = 1
_ASK, _ANSWER = b"TKVA", b"TKVD"
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 4 << 20
_MAC_BYTES = 16
NONCE_BYTES = 16
_MAX_PORT = 65_535
MAX_BLOCKS = 8192  # of one answer: under 1 MiB


class DirectAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a claimer asks a producer for the memory addresses of a ticket's blocks.

    Attributes:
        host: IP address of the producer's server.
        port: TCP port of the server.
        secret: key that authenticates the claimer's messages.
        offer: name by which the server finds the ticket's blocks.
        machine: identity of the producer's machine and user. Processes of the same identity can
            read each other's memory. "" if that is impossible.
        name: name of the Unix socket of the same server, for claimers on `machine`; "" for none.
        pid: id of the producer's process, for claimers on `machine` to read its host tier; 0 if
            they cannot.
        place: UUID of the GPU, or "cpu" if the device is the CPU, for claimers on `machine` to read
            its planes (device memory); "" if they cannot.
        engine: the producer's name in Mooncake's transfer engine; "" if that engine is not used.
    """

    host: str
    port: int
    secret: bytes
    offer: str = ""
    machine: str = ""
    name: str = ""
    pid: int = 0
    place: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.host)
        if not 0 < self.port <= _MAX_PORT:
            raise ValueError(f"{self.port} is not a port number")


class DirectAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A claimer's question: the memory addresses of blocks [first, stop) of a published prompt.

    The producer protects the blocks of its answer from eviction. A new question on the same
    connection ends this protection.

    Attributes:
        offer: name by which the producer finds the prompt's blocks; the ticket contains this name.
        first: index of the first block in the prompt.
        stop: index after the last block.
        machine: identity of the claimer's machine, to ask for blocks on the producer's device; ""
            to ask for blocks in its host tier.
    """

    offer: str
    first: int
    stop: int
    machine: str = ""


class DirectAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's answer to a claimer: the addresses of a prompt's blocks in its memory.

    The producer does not evict these blocks until the claimer's next question on the same
    connection. The protection ends earlier if the connection closes, or if the claimer asks nothing
    for some seconds.

    Attributes:
        blocks: indices in the prompt of the blocks that are in the host tier.
        addresses: address of each of these blocks in the producer's memory.
        headers: header of each of these blocks in the stored format, with the checksum of its
            bytes.
        planes: description of the producer's device memory; None if the claimer did not ask for it
            or may not read it.
        block_ids: ids in `planes` of consecutive blocks of the prompt, from the block `first` of
            the question on.
        was_held: True if no block of the previous answer on this connection has moved since, and
            the device works.
        failure: the reason why the producer has ended the publish without a ticket; "" if it has
            not.
    """

    blocks: tuple[int, ...] = ()
    addresses: tuple[int, ...] = ()
    headers: tuple[bytes, ...] = ()
    planes: SharedPlanes | None = None
    block_ids: tuple[int, ...] = ()
    was_held: bool = False
    failure: str = ""

    def __post_init__(self) -> None:
        if not len(self.blocks) == len(self.addresses) == len(self.headers):
            raise ValueError("an answer must have one address and one header per block")
        num_blocks = 0 if self.planes is None else self.planes.num_blocks
        if not all(0 <= block < num_blocks for block in self.block_ids):
            raise ValueError("an answer names blocks beyond the device's memory that it shows")


class Channel:
    """One connection between claimer and producer, with messages authenticated by a shared secret.

    A message is refused if it is repeated, or was recorded on another connection.

    Args:
        reader: the receiving side of the stream.
        writer: the sending side.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._nonce = b""
        self._count = 0

    async def send_nonce(self) -> None:
        """Send the producer's first message: random bytes for later authentication codes."""
        self._nonce = os.urandom(NONCE_BYTES)
        self._writer.write(self._nonce)
        await self._writer.drain()

    async def receive_nonce(self) -> None:
        """Receive the producer's first message, the random bytes for later authentication codes."""
        self._nonce = await self._reader.readexactly(NONCE_BYTES)

    async def send_ask(self, ask: DirectAsk, secret: bytes) -> None:
        """Send the claimer's question for a ticket's blocks to the producer.

        Args:
            ask: the question.
            secret: secret for the ticket's blocks, from the `DirectAddress` in the ticket.
        """
        await self._send(codec.seal(_ASK, _VERSION, ask), secret)

    async def send_answer(self, answer: DirectAnswer, secret: bytes) -> None:
        """Send the producer's answer to the claimer, authenticated with `secret`.

        Args:
            answer: the answer.
            secret: secret for the ticket's blocks, the same as in the claimer's question.
        """
        await self._send(codec.seal(_ANSWER, _VERSION, answer), secret)

    async def next_ask(self, node_secret: bytes) -> DirectAsk:
        """Wait for the claimer's next question and return it.

        Args:
            node_secret: secret of the producer's process, from which the secret for each ticket's
                blocks is derived.

        Raises:
            StoreCorruptError: the question was not sent with the secret for the blocks that it
                names.
            OSError, EOFError: the stream has ended.
        """
        body, mac = await self._receive()
        ask = codec.unseal(_ASK, _VERSION, body, DirectAsk)
        self._check(body, mac, secret_of(node_secret, ask.offer))
        return ask

    async def answer(self, secret: bytes) -> DirectAnswer:
        """Wait for the producer's answer to the last question that was sent, and return it.

        Args:
            secret: the secret of the ticket's blocks, with which the question was sent.

        Raises:
            StoreCorruptError: the answer's authentication code was not made with `secret`.
            OSError, EOFError: the connection has ended.
        """
        body, mac = await self._receive()
        self._check(body, mac, secret)
        return codec.unseal(_ANSWER, _VERSION, body, DirectAnswer)

    @property
    def peer_uid(self) -> int | None:
        """The user id of the process at the other end of a Unix socket; None for TCP."""
        end: socket.socket | None = self._writer.get_extra_info("socket")
        return credentials(end)[1] if end is not None and end.family == socket.AF_UNIX else None

    def close(self) -> None:
        self._writer.close()

    async def _send(self, body: bytes, secret: bytes) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("this end of the connection is closed")
        mac = self._mac(body, secret)
        self._writer.write(_LENGTH.pack(len(body)) + mac + body)
        await self._writer.drain()

    async def _receive(self) -> tuple[bytes, bytes]:
        head = await self._reader.readexactly(_LENGTH.size + _MAC_BYTES)
        (length,) = _LENGTH.unpack_from(head)
        if length > _MAX_FRAME_BYTES:
            raise StoreCorruptError(f"a frame of {length} bytes exceeds the limit")
        return await self._reader.readexactly(length), head[_LENGTH.size :]

    def _check(self, body: bytes, mac: bytes, secret: bytes) -> None:
        if not hmac.compare_digest(mac, self._mac(body, secret)):
            raise StoreCorruptError("the message is not authenticated by the ticket's secret")

    def _mac(self, body: bytes, secret: bytes) -> bytes:
        text = self._nonce + self._count.to_bytes(8, "little") + body
        self._count += 1
        return hmac.digest(secret, text, "sha256")[:_MAC_BYTES]


def secret_of(node_secret: bytes, offer: str) -> bytes:
    """Return the secret, 16 bytes, with which a claimer may ask for the blocks of one ticket.

    The secret is written into the ticket. Only processes that can read the ticket can therefore ask
    for its blocks.

    Args:
        node_secret: secret of the producer's process, from which the result is derived.
        offer: name under which the producer offers the ticket's blocks.
    """
    return hmac.digest(node_secret, offer.encode(), "sha256")[:_MAC_BYTES]


def this_machine() -> str:
    """Return an id of this machine, pid namespace and user; "" if the system provides none.

    Only processes with the same id can read each other's memory.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}{namespace}{os.geteuid()}".encode()).hexdigest()[:32]


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def near_listener(backlog: int) -> socket.socket | None:
    """Return a listening Unix socket with a random name; None if the system has no such sockets.

    The socket is abstract: it has no file, and disappears with its process.
    """
    here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        here.settimeout(0)
        here.bind(f"\0tierkv-{os.urandom(16).hex()}")
        here.listen(backlog)
    except OSError:
        here.close()
        return None
    return here


def name_of(here: socket.socket) -> str:
    """Return the abstract name of a listening Unix socket, to which other processes connect."""
    name: bytes = here.getsockname()
    return name[1:].decode()


async def connect_near(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the listening socket with this name on the same machine.

    Raises:
        OSError: there is no such socket.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(0)
        await asyncio.get_running_loop().sock_connect(end, f"\0{name}")
        return await asyncio.open_unix_connection(sock=end)
    except BaseException:
        end.close()
        raise


def credentials(end: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process at the other end of a Unix socket."""
    pid, uid, gid = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid, gid
