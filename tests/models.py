"""Small models on disk, which tests write with the libraries that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
from safetensors import TensorSpec, serialize_file
from tokenizers import decoders, models, pre_tokenizers

Floats = npt.NDArray[np.float32]

BOS, EOS = "<|begin|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}{{ message['role'] }}\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("â", "Ĥ")]


def vocabulary() -> list[str]:
    """Return the texts of a byte-level BPE with two special tokens, by token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [BOS, EOS, *alphabet, *("".join(merge) for merge in MERGES)]


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """Write the tokenizer's files of a model's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = tokenizers.Tokenizer(
        models.BPE(vocab={text: at for at, text in enumerate(vocabulary())}, merges=MERGES)
    )
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in (BOS, EOS)])
    whole.save(str(folder / "tokenizer.json"))
    about = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": template}
    write_json(folder / "tokenizer_config.json", about)
    write_json(folder / "generation_config.json", {"eos_token_id": [1]})


def write_json(path: Path, what: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(what))


def add_tokenizer(writer: gguf.GGUFWriter, *, template: str | None = TEMPLATE) -> None:
    """Add the same tokenizer to a GGUF file."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3, 3, *[1] * (len(vocabulary()) - 2)])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if template is not None:
        writer.add_chat_template(template)


def close(writer: gguf.GGUFWriter) -> None:
    """Write all that was added to a GGUF file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Sizes:
    """The sizes of a small Llama; head_dim times num_heads is not hidden."""

    hidden: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 160
    vocab_size: int = 320
    theta: float = 5000.0
    epsilon: float = 1e-3
    max_positions: int = 512


SIZES = Sizes()


def llama_tensors(*, tied: bool, seed: int = 0) -> dict[str, Floats]:
    """Return random weights by their names in a directory, of a model that reads its context."""
    s, draw = SIZES, np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 3.0) -> Floats:
        found: Floats = (draw.standard_normal((rows, columns)) * gain / columns**0.5).astype(
            np.float32
        )
        return found

    def norm() -> Floats:
        gains: Floats = draw.uniform(0.5, 1.5, s.hidden).astype(np.float32)
        return gains

    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    found = {"model.embed_tokens": matrix(s.vocab_size, s.hidden, 9.0), "model.norm": norm()}
    for index in range(s.num_layers):
        at = f"model.layers.{index}."
        found |= {
            at + "input_layernorm": norm(),
            at + "self_attn.q_proj": matrix(q, s.hidden),
            at + "self_attn.k_proj": matrix(kv, s.hidden),
            at + "self_attn.v_proj": matrix(kv, s.hidden),
            at + "self_attn.o_proj": matrix(s.hidden, q),
            at + "post_attention_layernorm": norm(),
            at + "mlp.gate_proj": matrix(s.ffn, s.hidden),
            at + "mlp.up_proj": matrix(s.ffn, s.hidden),
            at + "mlp.down_proj": matrix(s.hidden, s.ffn),
        }
    if not tied:
        found["lm_head"] = matrix(s.vocab_size, s.hidden)
    return found


def llama_config(**changed: object) -> dict[str, object]:
    s = SIZES
    return {
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "rope_theta": s.theta,
        "rms_norm_eps": s.epsilon,
        "max_position_embeddings": s.max_positions,
        "vocab_size": s.vocab_size,
        "eos_token_id": 1,
        **changed,
    }


def write_llama(folder: Path, tensors: Mapping[str, Floats], dtype: str = "F32") -> Path:
    """Write a directory with two files of tensors, of type F32, F16 or BF16."""
    write_tokenizer(folder)
    write_json(folder / "config.json", llama_config())
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        held = {name: stored(tensors[name], dtype) for name in part}
        about = {
            f"{name}.weight": TensorSpec(
                dtype=FULL_NAMES[dtype],
                shape=array.shape,
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, array in held.items()
        }
        serialize_file(about, folder / f"model-{number}.safetensors", {"format": "pt"})
    return folder


FULL_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored(array: Floats, dtype: str) -> npt.NDArray[Any]:
    if dtype == "BF16":
        return (array.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return array.astype(FULL_NAMES[dtype])


def write_llama_gguf(
    path: Path, tensors: Mapping[str, Floats], kind: str = "F32", **fields: object
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, with matrices of type `kind`."""
    s, quantized = SIZES, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(s.max_positions)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.num_layers)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.num_heads)
    writer.add_head_count_kv(s.num_kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_rope_freq_base(s.theta)
    writer.add_layer_norm_rms_eps(s.epsilon)
    add_tokenizer(writer)
    for name, array in tensors.items():
        given = array
        if name.endswith(("q_proj", "k_proj")):  # the converter interleaves the halves of a head
            halves = array.reshape(-1, 2, s.head_dim // 2, array.shape[1])
            given = halves.swapaxes(1, 2).reshape(array.shape)
        ours = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, s.num_layers).get_name(name)
        assert ours is not None, "a tensor of a Llama"
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(ours + ".weight", given)
        else:
            data = gguf.quantize(given, quantized)
            writer.add_tensor(ours + ".weight", data, raw_dtype=quantized)
    for field, value in fields.items():
        writer.add_key_value(field.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    close(writer)
    return path


def llama_logits(tensors: Mapping[str, npt.NDArray[Any]], tokens: list[int]) -> npt.NDArray[Any]:
    """Return the logits of the last token, written once more as in the paper, in float64."""
    s = SIZES
    w = {name: array.astype(np.float64) for name, array in tensors.items()}

    def norm(rows: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        mean = (rows**2).mean(-1, keepdims=True)
        normed: npt.NDArray[Any] = rows / np.sqrt(mean + s.epsilon) * w[name]
        return normed

    def turned(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        pairs = s.theta ** -(np.arange(0, s.head_dim, 2) / s.head_dim)
        angles = np.arange(len(tokens))[:, None, None] * np.tile(pairs, 2)
        half = s.head_dim // 2
        other = np.concatenate([-rows[..., half:], rows[..., :half]], -1)
        found: npt.NDArray[Any] = rows * np.cos(angles) + other * np.sin(angles)
        return found

    x = w["model.embed_tokens"][tokens]
    sees = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for index in range(s.num_layers):
        at = f"model.layers.{index}."
        y = norm(x, at + "input_layernorm")
        q, k, v = (
            (y @ w[f"{at}self_attn.{name}_proj"].T).reshape(len(tokens), -1, s.head_dim)
            for name in "qkv"
        )
        group = s.num_heads // s.num_kv_heads
        q, k, v = turned(q), turned(k).repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / s.head_dim**0.5
        scores = np.exp(np.where(sees, scores, -np.inf) - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(tokens), -1) @ w[at + "self_attn.o_proj"].T
        y = norm(x, at + "post_attention_layernorm")
        gate, up = (y @ w[f"{at}mlp.{name}_proj"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj"].T
    head = w.get("lm_head", w["model.embed_tokens"])
    return norm(x[-1], "model.norm") @ head.T
