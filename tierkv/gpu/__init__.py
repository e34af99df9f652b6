"""Memory, streams and copies of a GPU or of the CPU.

`open_device` opens a device; the module `protocol` describes its methods.
"""

from __future__ import annotations

from tierkv.errors import ConfigError, how_to_install
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device

_CUDA_REMEDY = "Run `tierkv doctor` to see what is missing, or use the device cpu"


def open_device(name: str) -> Device:
    """Open the device `cpu`, `cuda` (the first GPU), or `cuda:N` (the GPU with index N).

    Raises:
        ConfigError: the name is none of these, or CuPy, the driver or the GPU is missing. The text
            names the remedy.
    """
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return CpuDevice()
    if kind == "cuda" and (not index or index.isdecimal()):
        return _open_cuda(int(index or 0))
    raise ConfigError(f"there is no device {name!r}: use cpu, cuda or cuda:N")


def _open_cuda(index: int) -> Device:
    try:
        from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - may be missing
    except ImportError as error:
        raise ConfigError(
            f"the device cuda needs CuPy, which cannot be imported ({error}): "
            f"{how_to_install('cuda12')}, or cuda13 for a newer driver. {_CUDA_REMEDY}"
        ) from error
    try:
        return CudaDevice(index)
    except ConfigError as error:
        raise ConfigError(f"{error}. {_CUDA_REMEDY}") from error
