"""The package's kernels compile by NVRTC for every architecture we name, without a GPU."""

from __future__ import annotations

import ctypes
from importlib import resources
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

KERNELS = ("gather", "scatter", "within")


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


def compiled(source: bytes, *options: str) -> bytes:
    """The machine code. Raises AssertionError with the compiler's words."""
    library, program = nvrtc(), ctypes.c_void_p()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), source, b"a.cu", 0, None, None)
    given = [one.encode() for one in options]
    status = library.nvrtcCompileProgram(
        program, len(given), (ctypes.c_char_p * len(given))(*given)
    )
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_kernels_compile_for(arch: str) -> None:
    source = resources.files("tierkv.gpu").joinpath("csrc/planes.cu").read_bytes()
    code = compiled(source, f"--gpu-architecture={arch}", "-std=c++17")
    for kernel in KERNELS:
        assert kernel.encode() in code


@pytest.mark.slow
def test_the_benchmarks_kernels_compile() -> None:
    source = (Path(__file__).parents[2] / "benchmarks" / "gpu_decoder.cu").read_bytes()
    code = compiled(source, "--gpu-architecture=sm_90", "-std=c++17")
    for kernel in ("embed", "project", "attend", "add_mixed", "gate", "add_gated", "choose"):
        assert kernel.encode() in code
