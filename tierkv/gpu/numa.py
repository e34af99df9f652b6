"""Facts about host memory near a GPU, from sysfs: NUMA node, PCIe link, huge pages.

The module also places memory on a NUMA node, by the system call mbind.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path("/")  # where /proc and /sys are
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: another node if this one is full
_MAX_NODES = 1024
HUGE_PAGE = 2 << 20  # bytes of one of the huge pages that a machine sets aside


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def read(path: Path) -> str | None:
    """Return the file's text without surrounding white space; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def numa_nodes() -> int:
    """Return the number of NUMA nodes; 0 if sysfs does not list them."""
    return len(list((ROOT / "sys/devices/system/node").glob("node[0-9]*")))


def numa_node_of(pci_bus_id: str) -> int | None:
    """Return the NUMA node of a GPU; None if it is unknown, or if the machine has only one node."""
    text = read(ROOT / "sys/bus/pci/devices" / pci_bus_id / "numa_node")
    if text is None or int(text) < 0 or numa_nodes() <= 1:
        return None
    return int(text)


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The PCIe link of a GPU.

    Attributes:
        speed: present speed, in GT/s per lane.
        width: number of lanes in use.
        max_speed: highest speed that the GPU supports, in GT/s per lane.
        max_width: number of lanes that the GPU supports.
    """

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def raw_gb_per_s(self) -> float:
        """The link's transfer rate in GB/s at its present speed, packet headers included.

        About 88 % of this rate is available for data.
        """
        return self.speed * self.width / 8 * (128 / 130)


def pcie_link(pci_bus_id: str) -> PcieLink | None:
    """Return the PCIe link of a GPU; None if sysfs does not describe it."""
    folder = ROOT / "sys/bus/pci/devices" / pci_bus_id
    texts = [
        read(folder / name)
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
    """Ask the kernel to place the pages of a new mapping on a NUMA node.

    If that node has no free memory, the kernel uses another.

    Args:
        address: address of the mapping, at the start of a page; no page may have been used yet.
        num_bytes: size of the mapping in bytes.
        node: number of the NUMA node.

    Returns:
        True if the kernel accepts the request.
    """
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


def may_place() -> bool:
    """Return whether the kernel lets this process choose NUMA nodes; some containers forbid it."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        here = ctypes.c_char.from_buffer(page)
        try:
            return prefer_node(ctypes.addressof(here), mmap.PAGESIZE, 0)
        finally:
            del here  # otherwise the page cannot be unmapped


def transparent_huge_pages() -> str:
    """Return the kernel's setting of transparent huge pages: always, madvise, never or unknown."""
    text = read(ROOT / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    _, _, rest = text.partition("[")
    return rest.partition("]")[0] or "unknown"


def free_huge_pages() -> int:
    """Return the number of unused huge pages of 2 MiB that the machine has set aside."""
    folder = ROOT / "sys/kernel/mm/hugepages/hugepages-2048kB"
    return int(read(folder / "free_hugepages") or 0)
