"""Hints between the processes that share a directory: files that come and go at once, seen by the
kernel's inotify.

    store/.notify/3f9c...e1.b12     told: made and removed at once; the name is topic and message

The event outlives the file, so nothing stays behind. A directory shared between machines tells only
those on the same machine; the others look.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import logging
import os
import struct
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path

from tierkv.storage.notify import LOOK, Listener, Topics, check_message
from tierkv.tasks import background

_log = logging.getLogger(__name__)

DIRECTORY = ".notify"
_EVENT = struct.Struct("iIII")
_CREATED, _OVERFLOW, _IGNORED = 0x100, 0x4000, 0x8000
_IN_CLOEXEC, _IN_NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_BUFFER_BYTES = 64 * 1024
_LEFT_BEHIND_S = 60.0
_TRY_AGAIN_S = 5.0
_TELL_S = 0.3
_THREADS = 3
_MOST_TELLING = 1024  # more at a time are lost: the disk hangs


class FileNotifier:
    """`Notifier` of the processes that have the directory `root` on one machine."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY
        self._topics = Topics()
        self._is_watching = False
        self._lost = asyncio.Event()
        self._has_warned = False
        self._threads: ThreadPoolExecutor | None = None
        self._num_telling = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        # Threads of its own: those that a disk holds for ever are nobody else's.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierkv-notify")
        try:
            async with background({"tierkv-file-notify": self._serve()}):
                yield
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def tell(self, topic: str, message: str = LOOK) -> None:
        path = self._directory / f"{_digest(topic)}.{check_message(message)}"
        # A hint that is lost, or is stuck with the disk, costs its reader a look.
        if self._threads is not None and self._num_telling < _MOST_TELLING:
            telling = asyncio.get_running_loop().run_in_executor(self._threads, _flash, path)
            self._num_telling += 1
            telling.add_done_callback(self._has_told)
            await asyncio.wait([telling], timeout=_TELL_S)

    def _has_told(self, telling: asyncio.Future[None]) -> None:
        self._num_telling -= 1
        if not telling.cancelled():
            telling.exception()  # seen: the hint is lost

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self._topics.listening(topic, is_live=self._is_watching)

    async def _serve(self) -> None:
        """Watch from the first listener on; a watch that is lost or refused is tried again."""
        while True:
            while not self._topics:
                self._topics.changed.clear()
                await self._topics.changed.wait()
            try:
                fd = await self._open()
            except OSError as error:
                self._warn(error)
            else:
                await self._follow(fd)
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _open(self) -> int:
        """As `_watch`; one that comes after a cancel is closed again. Raises OSError."""
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(self._threads, _watch, self._directory)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise

    async def _follow(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        self._lost.clear()
        loop.add_reader(fd, self._read, fd)
        try:
            self._is_watching = True
            self._topics.turn_all(is_live=True)
            await self._lost.wait()
        finally:
            self._is_watching = False
            loop.remove_reader(fd)
            os.close(fd)
            self._topics.turn_all(is_live=False)

    def _read(self, fd: int) -> None:
        try:
            events = os.read(fd, _BUFFER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._lost.set()
            return
        digests = {_digest(topic): topic for topic in self._topics.wanted}
        at = 0
        while at < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, at)
            name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _OVERFLOW:
                self._topics.turn_all(is_live=True)
            elif mask & _IGNORED:
                self._lost.set()
            elif mask & _CREATED:
                digest, _, message = name.decode("ascii", "replace").partition(".")
                if topic := digests.get(digest):
                    self._topics.hear(topic, message)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s cannot be watched (%s): tickets are polled", self._directory, error)


def _close_late(opening: asyncio.Future[int]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        os.close(opening.result())


def _digest(topic: str) -> str:
    return hashlib.sha256(topic.encode()).hexdigest()[:32]


def _flash(path: Path) -> None:
    """Make a file and remove it. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return  # nobody has ever listened here
    os.close(fd)
    with suppress(FileNotFoundError):  # another told the same at the same moment
        os.unlink(path)


def _watch(directory: Path) -> int:
    """A non-blocking descriptor of inotify that hears of files made in `directory`.

    Removes what processes left behind that died while telling. Raises OSError.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_BEHIND_S:
                    os.unlink(entry.path)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd: int = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    except AttributeError:
        raise OSError(errno.ENOSYS, "this system has no inotify") from None
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.inotify_add_watch(fd, os.fsencode(directory), _CREATED) < 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, os.strerror(code))
    return fd
