"""Messages between a scheduler's process and its workers' processes, over a Unix socket.

A worker is the process of one rank of the engine. Each message is `length u32 | record`; the record
is sealed by `storage.codec` (magic, version, checksum). A worker first sends `Hello`. The scheduler
answers with `SharedMemory` and the file descriptors of the host slots, or with `WorkerRefused`. The
last message is the worker's `Goodbye`. Plans of copies travel in the engine's own messages.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tierkv.cache.node import Ids
from tierkv.errors import ConfigError, StoreCorruptError, TransferError
from tierkv.pd.direct.address import credentials
from tierkv.storage.codec import seal, unseal

Kind = Literal["load", "offload"]

MAGIC = b"TKWK"
VERSION = 3
_LENGTH = struct.Struct("<I")
_MAX_RECORD = 64 << 20
_MAX_DESCRIPTORS = 64


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker's first message.

    Attributes:
        rank: number of the worker's rank.
        num_blocks: number of device blocks of the worker.
        layout_digest: digest of the layout of these blocks, or of the layouts of all KV cache
            groups.
        pid: id of the worker's process.
    """

    rank: int
    num_blocks: int
    layout_digest: bytes
    pid: int


class HostRegion(msgspec.Struct, frozen=True):
    """A file of host slots, and the range of bytes of each slot that one worker uses.

    Attributes:
        num_slots: number of slots in the file.
        block_bytes: bytes of a slot.
        start: first byte of the worker's range within each slot.
        stop: byte after the worker's range.
    """

    num_slots: int
    block_bytes: int
    start: int
    stop: int


class SharedMemory(msgspec.Struct, frozen=True, tag="memory"):
    """The scheduler's answer to an accepted worker: its host slots, with their file descriptors.

    Attributes:
        regions: the file of each KV cache group, in the order of the groups and of the descriptors.
        saves: True if the worker writes the slots; False if another rank with the same bytes does.
        has_life: True if one more descriptor follows. The worker keeps it open for as long as it
            may copy, so that other processes can find out when its copies are over.
    """

    regions: tuple[HostRegion, ...]
    saves: bool = True
    has_life: bool = False


class WorkerRefused(msgspec.Struct, frozen=True, tag="not_taken"):
    """The scheduler's answer to a worker that it does not accept; the worker does not try again.

    Attributes:
        reason: the reason, as a sentence.
    """

    reason: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """A worker's last message, sent when all of its copies have ended and it begins no more.

    Attributes:
        finished: (number, problem) of each ended plan that the engine's own messages have not
            reported; the problem is None if the plan succeeded.
    """

    finished: tuple[tuple[int, str | None], ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """A list of copies in one direction between host slots and device blocks.

    The scheduler sends a plan to the worker of each rank, in the messages that the engine itself
    exchanges between these processes.

    Attributes:
        number: number of the plan, at least 0. A worker reports with this number that its copies
            have ended.
        kind: "load" (host to device) or "offload" (device to host).
        source: ids of the slots or blocks to read, little-endian int32, one for each copy.
        target: ids of the slots or blocks to write, little-endian int32, one for each copy.
        groups: number of copies of each KV cache group, in the order of the groups; () if there is
            one group.
    """

    number: int
    kind: Kind
    source: bytes
    target: bytes
    groups: tuple[int, ...] = ()

    def slots(self) -> tuple[Ids, Ids]:
        """Return the ids of what is read and of what is written, int32 [n] each."""
        source, target = np.frombuffer(self.source, "<i4"), np.frombuffer(self.target, "<i4")
        return source.astype(np.int32), target.astype(np.int32)

    def parts(self) -> list[tuple[int, Ids, Ids]]:
        """Return (group's number, source ids, target ids) for each KV cache group with copies."""
        source, target = self.slots()
        if not self.groups:
            return [(0, source, target)]
        found, at = [], 0
        for group, count in enumerate(self.groups):
            if count:
                found.append((group, source[at : at + count], target[at : at + count]))
            at += count
        return found


Record = Hello | SharedMemory | WorkerRefused | Goodbye


class LinkClosedError(TransferError):
    """The other process has closed its end of the connection, or has ended."""


class Link:
    """One end of a Unix socket connection between two processes, such as scheduler and worker.

    Several threads may send; only one thread may receive.

    Args:
        end: the connected Unix socket, which `close` closes.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """Return the id of the process at the other end, as the kernel reports it."""
        return credentials(self._socket)[0]

    def send(self, record: bytes | Record, *, descriptors: Sequence[int] = ()) -> None:
        """Send a record; block while the other end reads nothing.

        Args:
            record: the record, or its bytes as `seal` has encoded them, with a checksum.
            descriptors: file descriptors to send with the record.

        Raises:
            LinkClosedError: the other end has closed the connection.
        """
        value = record if isinstance(record, bytes) else seal(MAGIC, VERSION, record)
        data = memoryview(_LENGTH.pack(len(value)) + value)
        try:
            with self._sending:
                if descriptors:
                    data = data[socket.send_fds(self._socket, [data], descriptors) :]
                # Even an empty send fails if the other end has read everything and closed.
                if data:
                    self._socket.sendall(data)
        except OSError as error:
            raise LinkClosedError(
                f"the other process does not read its messages: {error}"
            ) from error

    def receive(self) -> list[bytes]:
        """Wait for bytes, then return the messages that have arrived completely.

        Returns:
            The sealed messages, to be decoded by `read`. [] if none is complete, or no bytes came
                within the link's time limit.

        Raises:
            LinkClosedError: the other end has closed the connection.
        """
        try:
            chunk = self._socket.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError as error:
            raise LinkClosedError(
                f"the connection to the other process was lost: {error}"
            ) from error
        if not chunk:
            raise LinkClosedError("the other process closed the connection, or died")
        self._received += chunk
        return self._whole_records()

    def receive_memory(self) -> tuple[SharedMemory, list[int]]:
        """Wait until the scheduler answers this worker's first message with its shared host memory.

        Returns:
            A description of the memory, and its file descriptors, which the caller must close.

        Raises:
            ConfigError: the scheduler refuses the worker.
            StoreCorruptError: the answer cannot be read.
            LinkClosedError: the scheduler has ended.
        """
        record, descriptors = self.receive_descriptors()
        try:
            return _memory(record, len(descriptors)), descriptors
        except BaseException:
            close_all(descriptors)
            raise

    def receive_descriptors(self) -> tuple[bytes, list[int]]:
        """Wait for the scheduler's next message, and for the file descriptors sent with it.

        Returns:
            The message (encoded, with a header), and the descriptors, which the caller must close.

        Raises:
            LinkClosedError: the connection to the scheduler has ended.
        """
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, _MAX_DESCRIPTORS)
        except OSError as error:
            raise LinkClosedError(f"the connection to the scheduler was lost: {error}") from error
        self._received += chunk
        records = self._whole_records(max_records=1)
        if not records:
            close_all(descriptors)
            raise LinkClosedError("the scheduler closed the connection before it was ready")
        return records[0], descriptors

    def _whole_records(self, max_records: int | None = None) -> list[bytes]:
        records: list[bytes] = []
        while len(self._received) >= _LENGTH.size and len(records) != max_records:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MAX_RECORD:
                raise LinkClosedError(
                    f"a record of {length} bytes exceeds the limit: the connection is damaged"
                )
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            records.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return records

    def stop_receiving(self) -> None:
        """Make `receive` raise LinkClosedError in every thread; sending stays possible."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with suppress(OSError):  # the other end has closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read(value: bytes) -> Record:
    """Decode a message between the scheduler and a worker.

    Raises:
        StoreCorruptError: `value` is damaged, or of another version.
    """
    return unseal(MAGIC, VERSION, value, Record)  # type: ignore[arg-type]


def _memory(record: bytes, num_descriptors: int) -> SharedMemory:
    found = read(record)
    if isinstance(found, WorkerRefused):
        raise ConfigError(found.reason)
    if (
        not isinstance(found, SharedMemory)
        or num_descriptors != len(found.regions) + found.has_life
    ):
        raise StoreCorruptError(
            "the scheduler's first record must describe its memory: run the same version "
            "of tierkv in all ranks"
        )
    return found


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def listen(path: str) -> socket.socket:
    """Return a socket that listens at `path`, to which only processes of this user can connect.

    Raises:
        ConfigError: another process listens there already, or the path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"the scheduler cannot listen for workers at {path}: {error}") from error
    return listener


def remove_left_over(paths: Iterable[str | Path]) -> None:
    """Remove the socket files among `paths` at which no process listens any more."""
    for path in paths:
        with suppress(OSError):  # another process has removed it, or it is another user's
            if _is_left_over(path):
                os.unlink(path)


def _is_left_over(path: str | Path) -> bool:
    """Return whether `path` is a socket file at which no process listens.

    The probe is a datagram socket, which cannot connect to a stream socket and so disturbs no
    listener.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return stat.S_ISSOCK(os.stat(path).st_mode)
        except OSError:
            return False
    return False


def receive_hello(end: socket.socket, timeout_s: float) -> tuple[Link, Hello]:
    """Wait for the hello of a worker that has connected.

    Args:
        end: the accepted socket; closed if the call raises.
        timeout_s: seconds to wait for the hello.

    Returns:
        The link to the worker, and the worker's hello.

    Raises:
        LinkClosedError: the other process belongs to another user, or has ended.
        StoreCorruptError: no message came in time, or the first message is not a hello.
    """
    link = Link(end)
    try:
        end.settimeout(timeout_s)
        hello = _hello(link, credentials(end)[1])
        end.settimeout(None)
    except BaseException:
        link.close()
        raise
    return link, hello


def _hello(link: Link, uid: int) -> Hello:
    if uid != os.geteuid():
        raise LinkClosedError(
            f"it comes from a process of user id {uid}, and this user id is {os.geteuid()}"
        )
    records = link.receive()
    hello = read(records[0]) if records else None
    if not isinstance(hello, Hello):
        raise StoreCorruptError("a worker must send its greeting first and at once")
    return hello


def connect(path: str, timeout_s: float | None = None) -> Link:
    """Connect to the scheduler that listens at `path`.

    Args:
        path: path of the Unix socket.
        timeout_s: seconds that each operation of the link may take; None for no limit.

    Returns:
        The link.

    Raises:
        ConfigError: no process listens at `path`.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    end.settimeout(timeout_s)
    try:
        end.connect(path)
    except OSError as error:
        end.close()
        raise ConfigError(f"no scheduler listens at {path}: {error}") from error
    return Link(end)
