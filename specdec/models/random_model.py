"""Models of known shapes with random weights, to measure and try machines on without a download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec.errors import ConfigError

_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Grouped queries in all. The wide weights of "tiny" make its greedy answers wander instead of repeating one token.
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
    },
    # Llama 3.2 1B and Llama 3.1 8B: AI@Meta 2024, arXiv 2407.21783
    "1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
_POSITIONS = 8192


def random_model(
    size: str, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> Any:
    """Return a Llama with random weights, in eval mode and without gradients. It has no EOS token and no tokenizer.

    Args:
        size: "tiny", "1b" or "8b".
        dtype: of the weights.
        device: where they are drawn; each device draws others.
        seed: of the weights.

    Raises:
        ConfigError: there is no such size.
    """
    if size not in _SHAPES:
        raise ConfigError(f"size={size!r}; allowed: {', '.join(map(repr, _SHAPES))}")
    config = LlamaConfig(max_position_embeddings=_POSITIONS, **_NO_IDS, **_SHAPES[size])
    place = torch.device(device)
    with torch.random.fork_rng([] if place.type == "cpu" else [place]), place:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)
