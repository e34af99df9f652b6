"""The limits and speeds of this machine's GPUs and memory, with remedies, for `tierkv doctor`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from tierkv.cache.layout import Layout, Plane
from tierkv.errors import (
    ConfigError,
    DeviceFailedError,
    TransferError,
    how_to_install,
)
from tierkv.gpu import numa
from tierkv.gpu.driver import load_driver
from tierkv.gpu.room import LimitKind, MemoryLimit, memory_limits

if TYPE_CHECKING:
    from tierkv.gpu.cuda import Gpu  # needs CuPy

_GIB = 1 << 30
_PROBE_BYTES = 256 << 20
_GOOD_SHARE = 0.8  # of the raw speed: headers leave 85 to 90 % of it for data
_SILENT = "unknown on this machine"
_LOCKED_GIB = 1.0  # too little for any host tier


class Verdict(Enum):
    """The severity of a `Finding`, one line of the report of `tierkv doctor`."""

    OK = "ok"
    WARNING = "warning"  # works, slower than it could
    BAD = "bad"  # does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report of `tierkv doctor`.

    Attributes:
        what: the name of what was examined.
        value: the figure or state that was found.
        verdict: the judgement.
        remedy: an action that helps; "" if none is needed or known.
    """

    what: str
    value: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""


def machine_findings() -> list[Finding]:
    """Return findings about the operating system: memory limits, huge pages, NUMA."""
    findings = [_limit_finding(limit) for limit in memory_limits()]
    pages = numa.transparent_huge_pages()
    if pages == "never":
        remedy = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, which makes pinning faster"
        )
        findings.append(Finding("transparent huge pages", pages, Verdict.WARNING, remedy))
    else:
        findings.append(Finding("transparent huge pages", _SILENT if pages == "unknown" else pages))
    nodes = numa.numa_nodes()
    findings.append(Finding("NUMA nodes", str(nodes or _SILENT)))
    if nodes > 1:
        findings.append(_placement_finding())
    return findings


def _limit_finding(limit: MemoryLimit) -> Finding:
    left = limit.left_bytes
    if limit.kind is not LimitKind.LOCKED or left is None or left >= _LOCKED_GIB * _GIB:
        return Finding(limit.what, limit.sentence)
    return Finding(limit.what, limit.sentence, Verdict.WARNING, limit.remedy)


def _placement_finding() -> Finding:
    if numa.may_place():
        return Finding("NUMA placement", "allowed")
    remedy = (
        "allow mbind (--cap-add SYS_NICE for a container), since copies from another NUMA "
        "node's memory are slower"
    )
    return Finding("NUMA placement", "refused by the kernel", Verdict.WARNING, remedy)


def gpu_findings() -> list[Finding]:
    """Return findings about every GPU that this process sees, with measured speeds.

    If no GPU can be used, the only finding says why.
    """
    try:
        from tierkv.gpu.cuda import Gpu, num_gpus, versions  # noqa: PLC0415 - may be missing
    except ImportError as error:
        remedy = f"{how_to_install('cuda12')} (or cuda13, as the driver allows), or use cpu"
        return [Finding("CuPy", f"not usable: {error}", Verdict.BAD, remedy)]
    try:
        load_driver()
    except ConfigError as error:
        remedy = "install NVIDIA's driver (--gpus all for a container), or use cpu"
        return [Finding("CUDA", str(error), Verdict.BAD, remedy)]
    try:
        count = num_gpus()
    except ConfigError as error:
        remedy = (
            "check CUDA_VISIBLE_DEVICES and nvidia-smi; if the driver is older than "
            "CuPy's CUDA, update it, or install the extra cuda12"
        )
        return [Finding("CUDA", str(error), Verdict.BAD, remedy)]
    driver, runtime = versions()
    # Any two versions with the same major number are compatible.
    fits = driver // 1000 >= runtime // 1000
    findings = [
        Finding(
            "CUDA",
            f"driver {driver // 1000}.{driver % 1000 // 10}, "
            f"runtime {runtime // 1000}.{runtime % 1000 // 10}",
            Verdict.OK if fits else Verdict.BAD,
            "" if fits else "update the driver, or install the extra cuda12",
        ),
        _batch_finding(),
    ]
    for index in range(count):
        try:
            findings += _of_gpu(Gpu(index))
        except TransferError as error:
            remedy = "check nvidia-smi: the GPU is broken, or another process uses it exclusively"
            findings.append(Finding(f"GPU {index}", str(error), Verdict.BAD, remedy))
    return findings


def _batch_finding() -> Finding:
    if load_driver().has_batch_copy:
        return Finding("batched copies", "yes")
    remedy = "update the driver to CUDA 12.8 or later, which submits copies 14 times faster"
    return Finding("batched copies", "no", Verdict.WARNING, remedy)


def _of_gpu(gpu: Gpu) -> list[Finding]:
    name = f"GPU {gpu.index}"
    free, total = gpu.memory_info()
    findings = [Finding(name, f"{gpu.model}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free")]
    if numa.numa_nodes() > 1:
        node = numa.numa_node_of(gpu.pci_bus_id)
        findings.append(Finding(f"{name} NUMA node", _SILENT if node is None else str(node)))
    measured, speeds = _measured(gpu, name)
    # Read after the copies, since an idle link may be slower to save power.
    link = numa.pcie_link(gpu.pci_bus_id)
    if link is None:
        findings.append(Finding(f"{name} PCIe link", _SILENT))
    else:
        is_full = link.width == link.max_width
        findings.append(
            Finding(
                f"{name} PCIe link",
                f"{link.speed:g} GT/s x{link.width} (of {link.max_speed:g} x{link.max_width}), "
                f"{link.raw_gb_per_s:.1f} GB/s on the wire",
                Verdict.OK if is_full else Verdict.WARNING,
                ""
                if is_full
                else "the card uses fewer PCIe lanes than it supports: check its slot",
            )
        )
    findings += measured
    for way, speed in speeds.items():
        findings.append(_speed_finding(f"{name} {way}", speed, link))
    return findings


def _speed_finding(what: str, speed: float, link: numa.PcieLink | None) -> Finding:
    if link is None:
        return Finding(what, f"{speed:.1f} GB/s")
    value = f"{speed:.1f} GB/s, {speed / link.raw_gb_per_s:.0%} of the wire"
    if speed >= _GOOD_SHARE * link.raw_gb_per_s:
        return Finding(what, value)
    remedy = "check for other traffic, the slot, and the IOMMU"
    return Finding(what, value, Verdict.WARNING, remedy)


def _measured(gpu: Gpu, name: str) -> tuple[list[Finding], dict[str, float]]:
    from tierkv.gpu.cuda_memory import DeviceMemory, timed_copies  # noqa: PLC0415 - CuPy is there
    from tierkv.gpu.pinned import PinnedSlots  # noqa: PLC0415

    probe = Layout(1, (Plane(0, "probe", "uint8", _PROBE_BYTES),))
    try:
        began = time.perf_counter()
        host = PinnedSlots(gpu, probe, 1)
        pinning = _PROBE_BYTES / _GIB / (time.perf_counter() - began)
    except ConfigError as error:
        return [Finding(f"{name} pinned memory", str(error), Verdict.BAD)], {}
    findings = [Finding(f"{name} pinning", f"{pinning:.1f} GiB/s (one chunk, one thread)")]
    try:
        memory = DeviceMemory(gpu, _PROBE_BYTES)
        speeds = timed_copies(gpu, memory.address, host.address, _PROBE_BYTES)
    except DeviceFailedError:
        raise
    except TransferError as error:
        remedy = f"free GPU memory: the measurement needs {_PROBE_BYTES / _GIB:.2f} GiB"
        return [*findings, Finding(f"{name} copies", str(error), Verdict.WARNING, remedy)], {}
    finally:
        host.close()
    return findings, speeds


_COPY_BYTES = 64 << 20


def copy_finding() -> Finding:
    """Measure how fast one thread copies host memory: the copy speed of the device "cpu"."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        took.append(time.perf_counter() - began)
    speed = _COPY_BYTES / min(took) / 1e9
    return Finding("memory copies", f"{speed:.1f} GB/s (one thread)")
