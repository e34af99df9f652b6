"""Connections between processes of one machine, of which the kernel says whose they are.

They are abstract Unix sockets: a name in the network namespace, no file, gone with its process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def listener(backlog: int) -> socket.socket | None:
    """Listens under a name that nobody can guess; None where there is no such thing."""
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
    """What `connect` takes."""
    name: bytes = here.getsockname()
    return name[1:].decode()


async def connect(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(0)
        await asyncio.get_running_loop().sock_connect(end, f"\0{name}")
        return await asyncio.open_unix_connection(sock=end)
    except BaseException:
        end.close()
        raise


def credentials(end: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of the process at the other end of a Unix socket."""
    pid, uid, gid = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid, gid


def uid_of_peer(writer: asyncio.StreamWriter) -> int | None:
    """The user that the process at the other end runs as; None if it may be on another machine."""
    end: socket.socket | None = writer.get_extra_info("socket")
    return credentials(end)[1] if end is not None and end.family == socket.AF_UNIX else None
