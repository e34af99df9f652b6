"""The package's kernels compile by NVRTC for every architecture we name, without a GPU."""

from __future__ import annotations

import ctypes
from importlib import resources
from importlib.metadata import PackageNotFoundError, files

import pytest

KERNELS = ("gather", "scatter", "within", "tell_sums")


def nvrtc() -> ctypes.CDLL:
    """NVRTC from its wheel."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            found = files(package) or []
        except PackageNotFoundError:
            continue
        for file in found:
            if file.name.startswith("libnvrtc.so"):
                return ctypes.CDLL(str(file.locate()))
    pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12)")


@pytest.mark.parametrize("defines", [(), ("-DTAKES_SUMS",)], ids=["plain", "with-sums"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_for(arch: str, defines: tuple[str, ...]) -> None:
    library = nvrtc()
    source = resources.files("tierkv.gpu").joinpath("csrc/planes.cu").read_bytes()
    program = ctypes.c_void_p()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), source, b"planes.cu", 0, None, None
    )
    given = [one.encode() for one in (f"--gpu-architecture={arch}", "-std=c++17", *defines)]
    options = (ctypes.c_char_p * len(given))(*given)
    status = library.nvrtcCompileProgram(program, len(given), options)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    for kernel in KERNELS:
        assert kernel.encode() in code.raw
