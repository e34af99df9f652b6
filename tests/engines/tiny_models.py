"""Models of random weights, small enough for tests of whole engines.

Greedy tokens depend on all of the prompt. Recurrent states last (`A_log` at -5), so that tokens
show a state that is zeroed or another prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_LASTING = -5.0
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


def save_tiny(kind: str, path: Path, dtype: str = "") -> str:
    """Save the model of this kind at `path`, and return the path as a string. dtype: the name of a
    torch dtype, where it is not to be the kind's own."""
    import torch

    torch.manual_seed(0)
    make, own = (STATES | _OTHERS)[kind]
    model = make()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(_LASTING)
    model.to(getattr(torch, dtype or own)).save_pretrained(str(path))
    return str(path)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_COMMON, num_hidden_layers=3, num_key_value_heads=2, head_dim=32)
    return LlamaForCausalLM(config)


def _gemma() -> Any:
    """Layers that attend in turn to a window of 64 tokens and to all."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def _qwen3_next() -> Any:
    """Three layers of gated delta nets and one of full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return Qwen3NextForCausalLM(config)


def _granite() -> Any:
    """Three Mamba2 layers and one of full attention, as in Granite 4."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_COMMON,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
        position_embedding_type="rope",
    )
    return GraniteMoeHybridForCausalLM(config)


def _nemotron() -> Any:
    """Mamba2, MLP and attention layers in turn, as in Nemotron-H."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_COMMON,
        num_hidden_layers=6,
        layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
        num_key_value_heads=4,
        head_dim=64,  # smaller ones make vLLM raise the block size, so that a state fits
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=32,
        expand=2,
    )
    return NemotronHForCausalLM(config)


def _falcon() -> Any:
    """Layers that are Mamba2 and attention at once, as in Falcon-H1."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **_COMMON,
        num_hidden_layers=3,
        num_key_value_heads=4,
        head_dim=32,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
    )
    return FalconH1ForCausalLM(config)


# How each is made, and the dtype in which it is saved and runs.
_OTHERS = {"llama": (_llama, "bfloat16"), "gemma": (_gemma, "bfloat16")}
# Those with recurrent states: answers of Mamba2 depend more on rounding than others, and vLLM
# asserts bfloat16 for gated delta nets.
STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_next": (_qwen3_next, "bfloat16"),
    "granite": (_granite, "float32"),
    "nemotron": (_nemotron, "bfloat16"),
    "falcon": (_falcon, "float32"),
}
