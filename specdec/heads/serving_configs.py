"""The config.json of exported heads: the same facts in the words of speculators and of SGLang."""

from __future__ import annotations

from typing import Any

import torch

from specdec.heads.eagle import EagleConfig
from specdec.heads.target import HeadTarget

SPECULATORS_VERSION = "0.9.0"  # whose classes the layout is tested with


def speculators_config(
    config: EagleConfig, target: HeadTarget, target_name: str, dtype: torch.dtype, num_draft_tokens: int
) -> dict[str, Any]:
    """Return config.json for speculators and vLLM.

    Source: github.com/vllm-project/speculators, src/speculators/config.py and models/eagle3/config.py.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(getattr(target.config, "architectures", None) or ()),
            },
        },
        "transformer_layer_config": _layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,  # readers disagree about its default
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": None,  # the same
        # Counted as in hidden_states, where 0 is the embedding.
        "eagle_aux_hidden_state_layer_ids": [block + 1 for block in config.feature_layers],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": _name(dtype),
    }


def sglang_config(
    config: EagleConfig, target: HeadTarget, target_name: str, dtype: torch.dtype, num_draft_tokens: int
) -> dict[str, Any]:
    """Return config.json for SGLang and, of the same folder, vLLM.

    The two count blocks differently: SGLang's ids, in `eagle_config`, are of the blocks whose outputs are taken;
    vLLM's, outside it, of those behind.

    Source: github.com/sgl-project/sglang, python/sglang/srt/models/llama_eagle3.py; github.com/vllm-project/vllm,
    vllm/model_executor/models/llama_eagle3.py.
    """
    del target, target_name, num_draft_tokens  # the engine is told at its launch
    found = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        },
        "eagle_aux_hidden_state_layer_ids": [block + 1 for block in config.feature_layers],
        "norm_before_residual": False,
        "torch_dtype": _name(dtype),
    }
    for flag in ("fc_norm", "norm_output"):  # not known to every version, so not mentioned needlessly
        if getattr(config, flag):
            found[flag] = True
    if config.hidden_size != config.target_hidden_size:
        found["target_hidden_size"] = config.target_hidden_size
    return found


def _layer(config: EagleConfig) -> dict[str, Any]:
    """Return the decoder's part, in the fields of transformers' Llama, or Qwen3 where there are q/k norms."""
    rope = {"rope_type": "default", **config.rope_parameters}
    kind = "qwen3" if config.qk_norm else "llama"
    found = {
        "model_type": kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        # transformers 5 reads the first of these three, older readers the others.
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": _rope_scaling(rope),
    }
    if kind == "llama":
        found["mlp_bias"] = config.mlp_bias
    return found


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    scaled = rope.get("rope_type", "default") != "default"
    return {name: value for name, value in rope.items() if name != "rope_theta"} if scaled else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
