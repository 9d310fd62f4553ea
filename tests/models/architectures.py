"""Tiny random models of many architectures: what the engine runs, and what it must refuse by name.

Weights are scaled so that greedy output wanders over the vocabulary instead of repeating one token. Windows and
chunks are 8 positions, so that every test of more than a few tokens straddles one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCAB_SIZE = 64
WINDOW = 8
LIMIT = 256

_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
    "tie_word_embeddings": False,
    **_NO_IDS,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_GEMMA = {**_LLAMA, "head_dim": 8}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LIMIT,
    "tie_word_embeddings": False,
    **_NO_IDS,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_PHI3 = {**_LLAMA, "pad_token_id": 0}
_FALCON = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_NO_IDS}
_MPT = {
    **_NO_IDS,
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": LIMIT,
    "tie_word_embeddings": False,
}
_T5 = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}


@dataclass(frozen=True)
class Architecture:
    """A model type with a tiny config. `refused` is a piece of the reason it must be refused with."""

    name: str
    model_type: str
    options: dict[str, Any] = field(hash=False)
    refused: str = ""
    windowed: bool = False
    trees: bool = True  # False: runs with chains only

    def __str__(self) -> str:
        return self.name


SUPPORTED = [
    Architecture("llama", "llama", _LLAMA),
    Architecture("llama_mha_biases", "llama", {**_LLAMA, "num_key_value_heads": 4, "attention_bias": True}),
    Architecture("qwen2", "qwen2", _LLAMA),
    Architecture(
        "qwen2_window",
        "qwen2",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        windowed=True,
    ),
    Architecture("qwen3", "qwen3", {**_LLAMA, "head_dim": 12}),
    Architecture("mistral", "mistral", {**_LLAMA, "sliding_window": None}),
    Architecture("mistral_window", "mistral", {**_LLAMA, "sliding_window": WINDOW}, windowed=True),
    Architecture("gemma", "gemma", _GEMMA),
    Architecture("gemma2", "gemma2", {**_GEMMA, "sliding_window": WINDOW, "layer_types": _ALTERNATING}, windowed=True),
    Architecture(
        "gemma3", "gemma3_text", {**_GEMMA, "sliding_window": WINDOW, "layer_types": _ALTERNATING}, windowed=True
    ),
    Architecture("phi", "phi", _LLAMA),
    Architecture("phi3", "phi3", _PHI3),
    Architecture("phi3_window", "phi3", {**_PHI3, "sliding_window": WINDOW}, windowed=True),
    Architecture("gpt_neox", "gpt_neox", _LLAMA),
    Architecture("gpt2", "gpt2", _GPT2),
    Architecture("opt", "opt", {**_LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Architecture("olmo2", "olmo2", _LLAMA),
    Architecture("cohere", "cohere", _LLAMA),
    Architecture("stablelm", "stablelm", _LLAMA),
    Architecture("starcoder2", "starcoder2", {**_LLAMA, "sliding_window": WINDOW}, windowed=True),
    Architecture("smollm3", "smollm3", _PHI3),
    Architecture("granite", "granite", _LLAMA),
    Architecture("mixtral", "mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture("qwen3_moe", "qwen3_moe", {**_LLAMA, **_MOE, "num_experts": 4, "head_dim": 8}),
    Architecture(
        "gpt_oss",
        "gpt_oss",
        {
            **_GEMMA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
        },
        windowed=True,
    ),
    Architecture(
        "deepseek_v3",  # multi-head latent attention: keys are wider than values
        "deepseek_v3",
        {
            **_LLAMA,
            **_MOE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    Architecture(
        "llama4",
        "llama4_text",
        {
            **_GEMMA,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        windowed=True,
    ),
    # Attention of their own, which runs over our keys and values under a prepared mask.
    Architecture("gptj", "gptj", {**_GPT2, "rotary_dim": 4}),
    Architecture("codegen", "codegen", {**_GPT2, "rotary_dim": 4}),
    Architecture("falcon", "falcon", {**_FALCON, "alibi": False}),
    Architecture(
        "falcon_new_decoder",
        "falcon",
        {**_FALCON, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Architecture("falcon_mha", "falcon", {**_FALCON, "alibi": False, "multi_query": False, "bias": True}),
    Architecture(
        "gpt_neox_japanese",
        "gpt_neox_japanese",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_multiple_size": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": LIMIT,
            "tie_word_embeddings": False,
            **_NO_IDS,
        },
    ),
    Architecture("mpt", "mpt", _MPT, trees=False),  # its biases count slots
]

REFUSED = [
    Architecture("bloom", "bloom", {**_FALCON, "n_layer": 2, "n_head": 4}, "ALiBi"),
    Architecture("falcon_alibi", "falcon", {**_FALCON, "alibi": True}, "ALiBi"),
    Architecture(
        "mamba", "mamba", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, **_NO_IDS}, "state"
    ),
    Architecture(
        "jamba",
        "jamba",
        {**_PHI3, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        "state",
    ),
    Architecture(
        "gpt_neo",
        "gpt_neo",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": LIMIT,
            **_NO_IDS,
        },
        "attention",
    ),
    Architecture("phi3_longrope", "phi3", {**_PHI3, "rope_parameters": _ROPE_LONG}, "longrope"),
    Architecture(
        "llama_dynamic_rope",
        "llama",
        {**_LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "dynamic",
    ),
    Architecture("t5", "t5", _T5, "encoder-decoder"),
    Architecture(
        "gemma3n",
        "gemma3n_text",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "shared",
    ),
]


def named(name: str) -> Architecture:
    """Return a supported architecture."""
    return next(a for a in SUPPORTED if a.name == name)


def build(architecture: Architecture, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    """Return a new random model in eval mode; skips the test where this transformers has no such config."""
    torch.manual_seed(seed)
    try:
        config = AutoConfig.for_model(architecture.model_type, **{**architecture.options, **options})
    except (ValueError, KeyError) as error:
        pytest.skip(f"this transformers release has no {architecture.model_type}: {error}")
    factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, generator))
    if hasattr(model, "generation_config"):
        # What AutoConfig's defaults would declare; a random model has no such tokens.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    if architecture.model_type == "gemma2":
        model.set_attn_implementation("eager")  # older 5.x releases choose sdpa, which leaves the softcap out
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
    return model.to(dtype).requires_grad_(False)


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return weights that keep activations near 1, let the context decide, and make logits large and different."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() < 2:
        return noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    if "embed_out" in name or "lm_head" in name:
        return noise * 3.0 / math.sqrt(parameter.shape[-1])
    if "wpe" in name or "embed_positions" in name:
        return noise * 0.2
    if "embed" in name or "wte" in name:
        return noise * 0.7
    # Scores of about 2 and outputs that outweigh the residual stream: greedy output depends on far tokens.
    return noise * 1.8 / math.sqrt(parameter.shape[-1])


@cache
def model_of(architecture: Architecture, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model shared by all tests of the session; nobody may change it."""
    return build(architecture, dtype)
