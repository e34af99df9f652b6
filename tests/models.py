"""Small models on disk, which tests write with the libraries that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

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
    folder.mkdir(exist_ok=True)
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
