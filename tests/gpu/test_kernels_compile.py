"""The package's kernels compile by NVRTC for every architecture we name, without a GPU."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    ("file", "arch", "kernels"),
    [
        ("tierkv/gpu/csrc/planes.cu", "sm_80", "gather scatter within"),
        ("tierkv/gpu/csrc/planes.cu", "sm_100", "gather scatter within"),
        pytest.param(
            "benchmarks/gpu_decoder.cu",
            "sm_90",
            "embed project attend add_mixed gate add_gated choose",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kernels_compile(file: str, arch: str, kernels: str) -> None:
    source = (ROOT / file).read_bytes()
    code = compiled(source, f"--gpu-architecture={arch}", "-std=c++17")
    for kernel in kernels.split():
        assert kernel.encode() in code
