"""The weights of a Llama-shaped model, from a GGUF file or a directory of safetensors.

The weights are returned in the arrangement in memory that the reference model requires.
"""

from __future__ import annotations

import fcntl
import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tierkv.errors import ConfigError
from tierkv.gguf_file import GGUFFile
from tierkv.gpu.room import require_room
from tierkv.model_tokenizer import read_json
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import PANEL, Floats, LayerWeights, Weights, in_panels

_MAX_POSITIONS = 131_072  # number of rows of the table of cosines and sines
_OF_GGUF = {  # fields of config.json, and their names in GGUF
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_scaling": "rope.scaling.type",
    "num_experts": "expert_count",
}
_TENSORS_OF_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. Its dimensions are known; its weights are read when `weights` is called.

    Attributes:
        path: the GGUF file, or the directory with the model.
        config: the model's dimensions, such as the number of layers. `config.weights` is a digest
            of the files.
    """

    path: Path
    config: ModelConfig
    _tensor: Callable[[str], Floats]
    _is_tied: bool

    def weights(self, shared: str = "") -> Weights:
        """Return the weights as float32, with the gains of RMSNorm multiplied into the matrices.

        Args:
            shared: a directory in which the processes of this machine share one file of the
                weights. The first process writes the file. "" stores the weights in memory of this
                process.

        Raises:
            ConfigError: a tensor is missing, has an unknown type or another size, there is no
                memory for the weights, or the directory cannot be written to.
        """
        return _shared(self, Path(shared)) if shared else self.read()

    def read(self) -> Weights:
        """Read the weights into this process's memory, as float32.

        RMSNorm's gains are multiplied into the matrices.

        Raises:
            ConfigError: a tensor is missing, has an unknown type or another size, or there is no
                memory for the weights.
        """
        c = self.config
        head = c.hidden * c.vocab_size
        layer = c.hidden * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.ffn)
        num_bytes = 4 * (2 * head + c.num_layers * layer)
        what = f"the model {self.path}"
        require_room(num_bytes, what, "the size of the model", is_filled_now=True)
        embedding = self._sized("model.embed_tokens", c.vocab_size, c.hidden)
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(c.num_layers))
        unembedding = embedding if self._is_tied else self._sized("lm_head", *embedding.shape)
        gain = self._sized("model.norm", c.hidden)
        return Weights(embedding, layers, _turned([unembedding], gain))

    def _layer(self, at: str) -> LayerWeights:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = [
            self._sized(at + "self_attn.q_proj", q, c.hidden),
            self._sized(at + "self_attn.k_proj", kv, c.hidden),
            self._sized(at + "self_attn.v_proj", kv, c.hidden),
        ]
        gate_up = [self._sized(f"{at}mlp.{name}_proj", c.ffn, c.hidden) for name in ("gate", "up")]
        return LayerWeights(
            qkv=_turned(qkv, self._sized(at + "input_layernorm", c.hidden)),
            qkv_bias=np.zeros(q + 2 * kv, np.float32),
            out=_turned([self._sized(at + "self_attn.o_proj", c.hidden, q)]),
            gate_up=_turned(gate_up, self._sized(at + "post_attention_layernorm", c.hidden)),
            down=_turned([self._sized(at + "mlp.down_proj", c.hidden, c.ffn)]),
        )

    def _sized(self, name: str, *shape: int) -> Floats:
        found = self._tensor(name)
        if found.shape != shape:
            raise ConfigError(
                f"{self.path}: tensor {name} has the shape {found.shape}, and the model's sizes "
                f"ask for {shape}"
            )
        return found


def _turned(parts: list[Floats], gain: Floats | None = None) -> Floats:
    """Join weights [out, in] to one matrix [in, sum of out], cut into column panels.

    `gain` [in] has the factors of an RMSNorm, which multiply the rows of the result.
    """
    joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return in_panels((joined if gain is None else joined * gain).T)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the sizes of a model, and check that the reference model can compute it.

    Args:
        path: a GGUF file, or a directory with `config.json` and `*.safetensors`.

    Raises:
        ConfigError: the model cannot be read, or is not Llama-shaped; the message names the part
            that is not supported.
    """
    if path.is_dir():
        return _of_directory(path)
    if path.exists() and path.suffix != ".gguf":
        raise ConfigError(
            f"{path} is no model: give a .gguf file, or a directory with config.json, "
            "*.safetensors and tokenizer.json"
        )
    return _of_gguf(GGUFFile(path))


def _of_gguf(file: GGUFFile) -> Checkpoint:
    kind = file.fields.get("general.architecture")
    about: dict[str, Any] = {
        name: value
        for name, of_gguf in _OF_GGUF.items()
        if (value := file.fields.get(f"{kind}.{of_gguf}")) is not None
    }
    if about.get("rope_scaling") == "none":
        del about["rope_scaling"]
    if "rope_freqs.weight" in file.tensors:
        about["rope_scaling"] = "rope_freqs"
    about["model_type"] = kind
    vocab_size = file.tensors.get("token_embd.weight", (0,))[0]
    config = _config(file.path, about, file.path.stem, _digest([file.path]), vocab_size)

    def tensor(name: str) -> Floats:
        of_gguf = name
        for theirs, ours in _TENSORS_OF_GGUF.items():
            of_gguf = of_gguf.replace(theirs, ours)
        found = file.tensor(of_gguf + ".weight")
        if name.endswith(("q_proj", "k_proj")):
            # llama.cpp keeps the two halves of a head's rotary pairs interleaved.
            pairs = found.reshape(-1, config.head_dim // 2, 2, found.shape[-1])
            return pairs.swapaxes(1, 2).reshape(found.shape)
        return found

    _refuse_biases(file.path, file.tensors)
    return Checkpoint(file.path, config, tensor, "output.weight" not in file.tensors)


def _of_directory(path: Path) -> Checkpoint:
    about = read_json(path / "config.json")
    if not about:
        raise ConfigError(f"{path} has no config.json: give the directory of a whole model")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path} has no *.safetensors: give the directory of a whole model")
    readers: dict[str, Callable[[], Floats]] = {}
    for file in files:
        readers |= _safetensors(file)
    _refuse_biases(path, readers)

    def tensor(name: str) -> Floats:
        try:
            return readers[name + ".weight"]()
        except KeyError as error:
            raise ConfigError(f"{path} has no tensor {name}.weight") from error

    vocab_size = int(about.get("vocab_size", 0))
    config = _config(path, about, path.resolve().name, _digest(files), vocab_size)
    return Checkpoint(path, config, tensor, "lm_head.weight" not in readers)


def _refuse_biases(path: Path, tensors: Mapping[str, object]) -> None:
    if bias := next((name for name in tensors if name.endswith(".bias")), None):
        raise ConfigError(f"{path}: the reference engine supports no biases, such as {bias}")


def _config(
    path: Path, about: Mapping[str, Any], name: str, weights: str, vocab_size: int
) -> ModelConfig:
    if (kind := about.get("model_type")) != "llama":
        raise ConfigError(
            f"{path}: the reference engine supports models of type llama, not {kind}: "
            "try --engine transformers"
        )
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        rope = {"rope_type": rope}
    unsupported = {
        "experts": about.get("num_experts"),
        "scaled rotary positions": rope.get("rope_type", rope.get("type", "default")) != "default",
        "an activation other than silu": about.get("hidden_act", "silu") != "silu",
        "rotary positions of a part of a head": about.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for what, is_there in unsupported.items():
        if is_there:
            raise ConfigError(
                f"{path}: the reference engine does not support {what}: try --engine transformers"
            )
    try:
        heads = about["num_attention_heads"]
        about = {
            "num_key_value_heads": heads, "head_dim": about["hidden_size"] // heads,
            **{name: value for name, value in about.items() if value is not None},
        }  # fmt: skip
        theta = rope.get("rope_theta") or about.get("rope_theta") or 10_000.0
        return ModelConfig(
            name=name,
            weights=weights,
            vocab_size=vocab_size,
            num_layers=int(about["num_hidden_layers"]),
            num_heads=int(heads),
            num_kv_heads=int(about["num_key_value_heads"]),
            head_dim=int(about["head_dim"]),
            hidden=int(about["hidden_size"]),
            ffn=int(about["intermediate_size"]),
            rope_theta=float(theta),
            norm_epsilon=float(about["rms_norm_eps"]),
            max_positions=min(int(about["max_position_embeddings"]), _MAX_POSITIONS),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{path}: the model's sizes cannot be read: {error!r}") from error


# The file has the format of safetensors: names, shapes and offsets as JSON, then bytes.

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_ALIGNMENT = 64


def _shared(checkpoint: Checkpoint, folder: Path) -> Weights:
    """Map weights from a file in `folder`, in memory shared by processes with this model."""
    file = folder / f"{checkpoint.config.weights}-{PANEL}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                part = file.with_suffix(".part")
                _write(part, _named(checkpoint.read()))
                part.replace(file)
    except OSError as error:
        raise ConfigError(f"engine.weights_dir {folder} cannot be used: {error}") from error
    tensors = {name: read() for name, read in _safetensors(file)}
    layers = (
        LayerWeights(
            **{field.name: tensors[f"{index}.{field.name}"] for field in fields(LayerWeights)}
        )
        for index in range(checkpoint.config.num_layers)
    )
    return Weights(tensors["embedding"], tuple(layers), tensors["unembedding"])


def _named(weights: Weights) -> dict[str, Floats]:
    found = {"embedding": weights.embedding, "unembedding": weights.unembedding}
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.{field.name}": getattr(layer, field.name) for field in fields(layer)}
    return found


def _write(file: Path, tensors: Mapping[str, Floats]) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": offsets}
        at = -(-offsets[1] // _ALIGNMENT) * _ALIGNMENT
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors.items():
            opened.seek(8 + len(raw) + header[name]["data_offsets"][0])
            opened.write(tensor.data)


def _safetensors(file: Path) -> Iterator[tuple[str, Callable[[], Floats]]]:
    try:
        with file.open("rb") as opened:
            whole = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        start = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:start])
        header.pop("__metadata__", None)
        for name, about in header.items():
            first, last = about["data_offsets"]
            yield name, _reader(file, name, about, memoryview(whole)[start + first : start + last])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error!r}") from error


def _reader(
    file: Path, name: str, about: Mapping[str, Any], raw: memoryview
) -> Callable[[], Floats]:
    dtype, shape = about["dtype"], tuple(about["shape"])

    def read() -> Floats:
        if dtype not in _FLOATS:
            known = ", ".join(_FLOATS)
            raise ConfigError(f"{file}: tensor {name} is {dtype}; the types {known} are supported")
        try:
            stored = np.frombuffer(raw, _FLOATS[dtype]).reshape(shape)
        except ValueError as error:
            raise ConfigError(f"{file}: tensor {name} is cut off: {error}") from error
        if dtype == "BF16":  # the upper half of a float32
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return stored.astype(np.float32, copy=False)

    return read


def _digest(files: list[Path]) -> str:
    hashed = xxhash.xxh3_128()
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(1 << 24):
                hashed.update(piece)
    return hashed.hexdigest()
