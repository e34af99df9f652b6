"""Models that are read from a path compute what their weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tests.models import (
    SIZES,
    Floats,
    llama_config,
    llama_logits,
    llama_tensors,
    stored,
    write_json,
    write_llama,
    write_llama_gguf,
)
from tests.refmodel.paged_run import PagedRun, arrays
from tierkv.errors import ConfigError
from tierkv.refmodel.checkpoint import open_checkpoint
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings, ReferenceSpec
from tierkv.refmodel.model import ReferenceModel
from tierkv.sched.settings import CacheSettings

TOKENS = np.random.default_rng(3).integers(0, SIZES.vocab_size, 300).tolist()


def model_at(path: Path, shared: str = "") -> ReferenceModel:
    checkpoint = open_checkpoint(path)
    return ReferenceModel(checkpoint.config, 16, weights=checkpoint.weights(shared))


def logits_at(path: Path) -> Floats:
    return PagedRun(model_at(path), len(TOKENS)).feed(TOKENS)


def as_float32(array: npt.NDArray[Any]) -> Floats:
    """Return what `tests.models.stored` rounded."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def as_stored(tensors: dict[str, Floats], kind: str) -> dict[str, Floats]:
    """Return the tensors as a GGUF file with matrices of type `kind` keeps them."""
    type_ = gguf.GGMLQuantizationType[kind]
    return {
        name: gguf.dequantize(gguf.quantize(array, type_), type_) if array.ndim > 1 else array
        for name, array in tensors.items()
    }


def close_to(found: Floats, expected: Floats) -> bool:
    return bool(np.abs(found - expected).max() < 1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_directory_computes_what_its_weights_say(kind: str, tied: bool, tmp_path: Path) -> None:
    tensors = llama_tensors(tied=tied)
    found = logits_at(write_llama(tmp_path, tensors, kind))
    rounded = {name: as_float32(stored(array, kind)) for name, array in tensors.items()}
    assert close_to(found, llama_logits(rounded, TOKENS))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_a_gguf_file_computes_what_its_weights_say(kind: str, tied: bool, tmp_path: Path) -> None:
    tensors = llama_tensors(tied=tied)
    found = logits_at(write_llama_gguf(tmp_path / "m.gguf", tensors, kind))
    assert close_to(found, llama_logits(as_stored(tensors, kind), TOKENS))
    if kind == "Q4_1":
        assert not close_to(found, llama_logits(tensors, TOKENS)), "the control"


def test_processes_share_weights_in_a_directory(tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "m.gguf", llama_tensors(tied=True), "Q8_0")
    own = list(arrays(open_checkpoint(path).weights()))
    first = list(arrays(open_checkpoint(path).weights(str(tmp_path / "shared"))))
    (file,) = (tmp_path / "shared").glob("*.safetensors")
    written = file.stat()
    second = list(arrays(open_checkpoint(path).weights(str(tmp_path / "shared"))))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    for found in (first, second):
        assert all(map(np.array_equal, found, own))
        assert not any(array.flags.writeable for array in found)


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", llama_tensors(tied=True))
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"engine\.weights_dir .*taken"):
        open_checkpoint(path).weights(str(tmp_path / "taken"))


def test_nodes_of_other_weights_or_sizes_have_another_fingerprint(tmp_path: Path) -> None:
    one = write_llama(tmp_path / "a" / "m", llama_tensors(tied=True))
    same = write_llama(tmp_path / "b" / "m", llama_tensors(tied=True))
    other = write_llama(tmp_path / "c" / "m", llama_tensors(tied=True, seed=1))
    turned = write_llama(tmp_path / "d" / "m", llama_tensors(tied=True))
    write_json(turned / "config.json", llama_config(rope_theta=1e6))

    def fingerprint(path: Path) -> object:
        settings = EngineSettings(), CacheSettings()
        return ReferenceSpec(ModelConfig(), *settings, str(path)).fingerprint("t")

    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) != fingerprint(turned)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "gemma3"}, "llama, not gemma3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled rotary positions"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "scaled rotary positions"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "scaled rotary positions"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"num_experts": 8}, "experts"),
        ({"hidden_size": None}, "sizes cannot be read"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"intermediate_size": 32}, "shape"),
    ],
)
def test_a_model_that_is_not_llama_shaped_is_refused_with_the_part(
    changed: dict[str, object], words: str, tmp_path: Path
) -> None:
    write_llama(tmp_path, llama_tensors(tied=True))
    write_json(tmp_path / "config.json", llama_config(**changed))
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(tmp_path).weights()


def test_a_gguf_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    tensors = llama_tensors(tied=True)
    scaled = write_llama_gguf(tmp_path / "s.gguf", tensors, llama__rope__scaling__type="yarn")
    with pytest.raises(ConfigError, match="scaled rotary positions"):
        open_checkpoint(scaled)
    plain = write_llama_gguf(tmp_path / "p.gguf", tensors, llama__rope__scaling__type="none")
    open_checkpoint(plain)
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="llama, not gemma3"):
        open_checkpoint(tmp_path / "g.gguf")


def test_biases_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path, llama_tensors(tied=True))
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes().replace(b"q_proj.weight", b"qqq_proj.bias"))
    with pytest.raises(ConfigError, match="biases"):
        open_checkpoint(tmp_path)


def test_a_missing_tensor_and_a_file_that_is_cut_off_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors(tied=True)
    del tensors["model.layers.1.mlp.up_proj"]
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        open_checkpoint(write_llama(tmp_path / "a", tensors)).weights()
    gone = write_llama_gguf(tmp_path / "m.gguf", tensors)
    with pytest.raises(ConfigError, match=r"no tensor blk\.1\.ffn_up"):
        open_checkpoint(gone).weights()
    whole = llama_tensors(tied=True)
    cut = write_llama_gguf(tmp_path / "cut.gguf", whole)
    cut.write_bytes(cut.read_bytes()[:-4096])
    with pytest.raises(ConfigError, match=r"cut\.gguf: tensor .* cannot be read"):
        open_checkpoint(cut).weights()
    write_llama(tmp_path / "b", whole)
    part = tmp_path / "b" / "model-1.safetensors"
    part.write_bytes(part.read_bytes()[:-4096])
    with pytest.raises(ConfigError, match=r"model-1\.safetensors: tensor .* is cut off"):
        open_checkpoint(tmp_path / "b").weights()


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    write_json(tmp_path / "config.json", llama_config())
    with pytest.raises(ConfigError, match=r"no .*safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="is no model"):
        open_checkpoint(tmp_path / "config.json")
    (tmp_path / "x.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        open_checkpoint(tmp_path)
