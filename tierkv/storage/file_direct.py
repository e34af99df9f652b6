"""Writing a value past the page cache, through an aligned buffer of the writing thread's own.

What was written is then not in memory, so reading it back soon costs five times as much, and on
the one disk measured it was hardly faster than buffered writes (0.9 to 1.0 GB/s): it is for a store
much larger than memory, whose writes should not push other pages out. Not the default.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Sequence

from tierkv.storage.buffers import flat
from tierkv.storage.protocol import Buffer

_ALIGNMENT = 4096
_CHUNK_BYTES = 4 << 20
# Smaller values are not worth a trip to the disk each.
MIN_BYTES = 256 << 10


class _OfThread(threading.local):
    view: memoryview | None = None


class DirectWriter:
    """Blocking, safe from several threads."""

    def __init__(self) -> None:
        self._buffers = _OfThread()
        self._is_possible = True

    def write(self, path: str, parts: Sequence[Buffer]) -> bytes | None:
        """Make the file `path` of `parts`, up to its last whole page; returns what is left of them.

        None if its file system cannot; nothing is left then. Raises OSError, having written a part.
        """
        if not self._is_possible:
            return None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
        fd = None
        try:
            fd = os.open(path, flags, 0o600)
            return self._write(fd, parts)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_possible = False  # such as old tmpfs, or sectors larger than our pieces
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return None
        finally:
            if fd is not None:
                os.close(fd)

    def _write(self, fd: int, parts: Sequence[Buffer]) -> bytes:
        buffer = self._buffer()
        filled, written = 0, 0
        for view in flat(parts):
            at = 0
            while at < len(view):
                taken = min(len(view) - at, _CHUNK_BYTES - filled)
                buffer[filled : filled + taken] = view[at : at + taken]
                filled += taken
                at += taken
                if filled == _CHUNK_BYTES:
                    written += _write_all(fd, buffer, written)
                    filled = 0
        whole = filled - filled % _ALIGNMENT
        _write_all(fd, buffer[:whole], written)
        return bytes(buffer[whole:filled])

    def _buffer(self) -> memoryview:
        if self._buffers.view is None:
            self._buffers.view = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
        return self._buffers.view


def _write_all(fd: int, aligned: memoryview, offset: int) -> int:
    done = 0
    while done < len(aligned):
        done += os.pwrite(fd, aligned[done:], offset + done)
    return done
