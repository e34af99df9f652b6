"""A model small enough for tests of whole engines."""

from __future__ import annotations

from pathlib import Path


def save_tiny_llama(path: Path, dtype: str, *, positions: int) -> str:
    """A Llama of three layers with random weights, saved at `path`; returns that as a string. Its
    greedy tokens depend on all of the prompt. dtype: the name of a torch dtype. positions: the
    longest prompt and answer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(str(path))
    return str(path)
