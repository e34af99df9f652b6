"""All limits on the memory of this process, checked before host memory is allocated.

Without this check, the Linux kernel would kill the process, without a message, when memory runs
out.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path

import numpy as np

from tierkv.errors import ConfigError
from tierkv.gpu import numa

log = logging.getLogger(__name__)

HOST_TIER = "the host tier"
HOST_SETTING = "cache.host_blocks (an engine's host_bytes)"

_GIB = 1 << 30
_MIB = 1 << 20
_NO_LIMIT = 1 << 60  # cgroups of version 1 report about this number if there is no limit
_MAX_RESERVE_BYTES = 64 * _MIB  # for page tables (1/512 of the memory) and the process itself


class LimitKind(Enum):
    """The consequence for a process that uses more memory than a limit allows.

    PAGES: the kernel kills the process when it writes to new pages.
    MACHINE: the same, unless the machine can swap, or gets more memory at run time.
    ADDRESSES: the kernel refuses a new mapping, even if its pages exist already.
    LOCKED: some drivers refuse to pin memory.
    NONE: nothing, since tierkv does not use this kind of memory.
    """

    PAGES = "pages"
    MACHINE = "machine"
    ADDRESSES = "addresses"
    LOCKED = "locked"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on the memory of this process.

    Attributes:
        what: name of the limited memory, as `tierkv doctor` prints it.
        source: the file or call that reports the figures.
        kind: consequence of exceeding the limit.
        left_bytes: bytes that the process may still use; None if there is no limit.
        limit_bytes: the limit in bytes; None if there is no limit.
        remedy: the action that raises the limit.
    """

    what: str
    source: str
    kind: LimitKind
    left_bytes: int | None
    limit_bytes: int | None
    remedy: str

    @property
    def sentence(self) -> str:
        """The bytes that are left, the limit, and the source of the figures, as one phrase."""
        if self.left_bytes is None or self.limit_bytes is None:
            return "no limit"
        if self.limit_bytes == 0:
            return "none"
        return f"{size(self.left_bytes)} left of {size(self.limit_bytes)} ({self.source})"


def size(num_bytes: int) -> str:
    """Return a number of bytes as text, such as "2.00 GiB" or "600.0 MiB"."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB"


def require_room(
    num_bytes: int,
    what: str,
    setting: str,
    *,
    has_new_pages: bool = True,
    is_filled_now: bool = False,
) -> None:
    """Check that limits allow this process to allocate `num_bytes` more bytes.

    If only the machine's free memory is too small, the call logs a warning. Memory passed to
    `track` counts as used even before it is filled.

    Args:
        num_bytes: size of the mapping that is about to be made, in bytes.
        what: name of the memory in the error sentence, such as "the host tier".
        setting: name of the setting to lower, such as "cache.host_blocks".
        has_new_pages: False for a mapping of pages that exist already or are set aside: then only
            the limit on addresses is checked.
        is_filled_now: True for memory that is written at once: too little free memory of the
            machine is then an error.

    Raises:
        ConfigError: a limit leaves too few bytes. The sentence names the limit and the remedy.
    """
    for limit in memory_limits():
        is_about_pages = limit.kind in {LimitKind.PAGES, LimitKind.MACHINE}
        if limit.left_bytes is None or not (is_about_pages or limit.kind is LimitKind.ADDRESSES):
            continue
        left = limit.left_bytes
        needed = num_bytes
        if is_about_pages:
            if not has_new_pages:
                continue
            needed += min(num_bytes // 8, _MAX_RESERVE_BYTES)
            if needed > left - _tracked_bytes():
                left = max(left - _unfilled_bytes(), 0)
        if needed <= left:
            continue
        sentence = (
            f"{what} needs {size(num_bytes)} of memory, but this process can allocate "
            f"only {size(left)} more: {limit.what} is {size(limit.limit_bytes or 0)} "
            f"({limit.source}). {limit.remedy[:1].upper()}{limit.remedy[1:]}, or lower "
            f"{setting}"
        )
        if limit.kind is not LimitKind.MACHINE or is_filled_now:
            raise ConfigError(sentence)
        log.warning("%s", sentence)


def memory_limits() -> list[MemoryLimit]:
    """Return all kinds of limits on this process's memory, including those that are not set."""
    return [
        _cgroup_limit(),
        _available(),
        _address_space(),
        memlock(),
        _huge_pages(),
        _shared_memory_folder(),
    ]


def memlock() -> MemoryLimit:
    """Return the limit on memory that this process may lock."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    remedy = "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)"
    return MemoryLimit("memlock limit", "ulimit -l", LimitKind.LOCKED, limit, limit, remedy)


def _address_space() -> MemoryLimit:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = left = None
    if soft != resource.RLIM_INFINITY:
        pages = (numa.read(numa.ROOT / "proc/self/statm") or "0").split()[0]
        limit, left = soft, max(soft - int(pages) * mmap.PAGESIZE, 0)
    remedy = "raise the limit (ulimit -v unlimited, LimitAS=infinity)"
    return MemoryLimit("address space", "ulimit -v", LimitKind.ADDRESSES, left, limit, remedy)


def _available() -> MemoryLimit:
    values = {}
    for line in (numa.read(numa.ROOT / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return MemoryLimit(
        "memory of this machine",
        "MemAvailable in /proc/meminfo",
        LimitKind.MACHINE,
        values.get("MemAvailable"),
        values.get("MemTotal"),
        "stop other processes",
    )


def _huge_pages() -> MemoryLimit:
    folder = numa.ROOT / "sys/kernel/mm/hugepages/hugepages-2048kB"
    total = int(numa.read(folder / "nr_hugepages") or 0) * numa.HUGE_PAGE
    return MemoryLimit(
        "huge pages set aside",
        "/proc/sys/vm/nr_hugepages",
        LimitKind.NONE,
        numa.free_huge_pages() * numa.HUGE_PAGE,
        total,
        "sysctl vm.nr_hugepages",
    )


def _shared_memory_folder() -> MemoryLimit:
    """Return the limit on files in /dev/shm, where engines (not tierkv) share memory."""
    left = limit = None
    try:
        found = os.statvfs(numa.ROOT / "dev/shm")
    except OSError:
        pass
    else:
        left, limit = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return MemoryLimit(
        "/dev/shm, for engines", "statvfs", LimitKind.NONE, left, limit, "raise it (--shm-size)"
    )


def _cgroup_limit() -> MemoryLimit:
    # Pages of the file cache do not count as used: the kernel frees them first.
    rooms = chain.from_iterable(
        version.rooms(folder) for version in _CGROUP_VERSIONS for folder in version.folders()
    )
    least = min(rooms, default=None)
    left, limit, source = (None, None, "") if least is None else least
    remedy = (
        "raise that limit (docker --memory, Kubernetes resources.limits.memory, systemd MemoryMax)"
    )
    return MemoryLimit("memory of this container", source, LimitKind.PAGES, left, limit, remedy)


@dataclass(frozen=True, slots=True)
class _CgroupVersion:
    """The files in which one version of cgroups reports memory.

    Attributes:
        controller: name of the controller in /proc/self/cgroup; "" for version 2.
        base: folder of all cgroups.
        limits: names of files with limits; above a limit the kernel reclaims memory or kills
            processes.
        used: name of the file with the used bytes.
        dropped: entries of memory.stat whose bytes the kernel can free at any time, so that they do
            not count as used.
    """

    controller: str
    base: str
    limits: tuple[str, ...]
    used: str
    dropped: tuple[str, ...]

    def folders(self) -> list[Path]:
        # In a container the cgroup may be the base, even if /proc/self/cgroup names another.
        base = numa.ROOT / self.base
        folders = [base]
        for line in (numa.read(numa.ROOT / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if self.controller in controllers.split(",") and ".." not in path:
                parts = Path(path.strip("/")).parts
                folders += [base.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        return folders

    def rooms(self, folder: Path) -> Iterator[tuple[int, int, str]]:
        used = numa.read(folder / self.used)
        for name in self.limits:
            limit = numa.read(folder / name)
            if limit is None or used is None or limit == "max" or int(limit) >= _NO_LIMIT:
                continue
            lines = (numa.read(folder / "memory.stat") or "").splitlines()
            entries = (line.split() for line in lines)
            dropped = sum(int(count) for entry, count in entries if entry in self.dropped)
            left = max(int(limit) - max(int(used) - dropped, 0), 0)
            yield left, int(limit), str("/" / (folder / name).relative_to(numa.ROOT))


_V2_LIMITS = ("memory.max", "memory.high")
_V2_DROPPED = ("active_file", "inactive_file", "slab_reclaimable")
_CGROUP_VERSIONS = (
    _CgroupVersion("", "sys/fs/cgroup", _V2_LIMITS, "memory.current", _V2_DROPPED),
    _CgroupVersion("", "sys/fs/cgroup/unified", _V2_LIMITS, "memory.current", _V2_DROPPED),
    _CgroupVersion(
        "memory",
        "sys/fs/cgroup/memory",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)

# Address and number of bytes of tracked memory, by the id of its owner.
_tracked: dict[int, tuple[int, int]] = {}


def track(owner: object, address: int, num_bytes: int) -> None:
    """Count a range of mapped memory as used, until `owner` is deleted.

    The kernel counts a page only after the first write to it. `require_room`, which checks the free
    memory before an allocation, therefore counts tracked memory in full.

    Args:
        owner: the object whose deletion unmaps the memory; it must support weak references.
        address: address of the first byte.
        num_bytes: size of the memory in bytes.
    """
    _tracked[id(owner)] = (address, num_bytes)
    weakref.finalize(owner, _tracked.pop, id(owner), None).atexit = False


def _tracked_bytes() -> int:
    return sum(num_bytes for _, num_bytes in list(_tracked.values()))


def _unfilled_bytes() -> int:
    unfilled = 0
    for address, num_bytes in list(_tracked.values()):
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        num_pages = -(-(address + num_bytes - start) // mmap.PAGESIZE)
        present = np.zeros(num_pages, np.uint8)
        status: int = numa.libc().mincore(
            ctypes.c_void_p(start),
            ctypes.c_size_t(num_pages * mmap.PAGESIZE),
            ctypes.c_void_p(present.ctypes.data),
        )
        if status == 0:
            unfilled += int(np.count_nonzero(present & 1 == 0)) * mmap.PAGESIZE
    return unfilled
