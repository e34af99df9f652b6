"""Which memory is near a GPU, and what this machine allows to pin: sysfs, mbind, limits."""

from __future__ import annotations

import ctypes
import platform
import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SYS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # take it there if there is room, elsewhere otherwise
_MAX_NODES = 1024


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def numa_nodes() -> int:
    return max(len(list((_SYS / "devices/system/node").glob("node[0-9]*"))), 1)


def numa_node_of(pci_bus_id: str) -> int | None:
    """The NUMA node of a GPU; None where the machine does not say, or has but one."""
    text = _read(_SYS / "bus/pci/devices" / pci_bus_id / "numa_node")
    if text is None or int(text) < 0 or numa_nodes() == 1:
        return None
    return int(text)


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Speed in GT/s and lanes: what the link runs at, and what the device could."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def raw_gb_per_s(self) -> float:
        """Bytes on the wire, encoding aside (128b/130b from PCIe 3 on); data gets about 88 %."""
        return self.speed * self.width / 8 * (128 / 130)


def pcie_link(pci_bus_id: str) -> PcieLink | None:
    folder = _SYS / "bus/pci/devices" / pci_bus_id
    texts = [
        _read(folder / name)
        for name in (
            "current_link_speed",
            "current_link_width",
            "max_link_speed",
            "max_link_width",
        )
    ]
    try:
        speed, width, max_speed, max_width = (
            float((text or "").split()[0].removesuffix("GT/s")) for text in texts
        )
    except (ValueError, IndexError):
        return None
    return PcieLink(speed, int(width), max_speed, int(max_width))


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Let the pages of a mapping that has none yet come from `node`; whether the kernel agreed."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    status: int = libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(_MAX_NODES),
        ctypes.c_uint(0),
    )
    return status == 0


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cgroup_room() -> int | None:
    """Bytes that this process's memory cgroup has left; None if there is no limit."""
    for maximum, current in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _read(Path(maximum)), _read(Path(current))
        if limit is not None and used is not None and limit != "max" and int(limit) < 1 << 60:
            return max(int(limit) - int(used), 0)
    return None


def transparent_huge_pages() -> str:
    """ "always", "madvise", "never", or "unknown"."""
    text = _read(_SYS / "kernel/mm/transparent_hugepage/enabled") or ""
    _, _, rest = text.partition("[")
    return rest.partition("]")[0] or "unknown"


def memory_available() -> int | None:
    """Bytes that the machine has free for use, None if it does not say."""
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
