"""Checkpoints of random heads in every layout, written to a folder: their tensors, their config.json, a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.heads.eagle import EagleHead
from tests.heads.reference_heads import EPS, HEAD_DIM, HEADS, KV_HEADS, THETA
from tests.heads.small_heads import VOCAB_SIZE, WIDTH, small_target

Weights = dict[str, Tensor]
TARGET = small_target(torch.float64)
INNER, DRAFTED = 40, 24
TARGET_IDS = torch.arange(DRAFTED) * 2 + 1

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
}


def random(*shape: int) -> Tensor:
    """Return a random matrix of unit gain, or a vector around 1 as norms have it."""
    return torch.randn(*shape, dtype=torch.float64) * shape[-1] ** -0.5 + (len(shape) == 1)


def layer(name: str, width: int, *, biases: bool = False, qk_norm: bool = False) -> Weights:
    """Return attention and MLP of one decoder layer. width: of what q, k and v read."""
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    found = {f"{name}.self_attn.{p}_proj.weight": random(n, width) for p, n in sizes.items()}
    if biases:
        found |= {f"{name}.self_attn.{p}_proj.bias": random(n) for p, n in sizes.items()}
    if qk_norm:
        found |= {f"{name}.self_attn.{p}_norm.weight": random(HEAD_DIM) for p in "qk"}
    return found | {
        f"{name}.self_attn.o_proj.weight": random(WIDTH, HEADS * HEAD_DIM),
        f"{name}.post_attention_layernorm.weight": random(WIDTH),
        f"{name}.mlp.gate_proj.weight": random(INNER, WIDTH),
        f"{name}.mlp.up_proj.weight": random(INNER, WIDTH),
        f"{name}.mlp.down_proj.weight": random(WIDTH, INNER),
    }


def eagle1_weights(*, bias: bool = True, qkv_bias: bool = False) -> Weights:
    """Return an EAGLE-1 head under its published names, with its copy of the target's embedding."""
    torch.manual_seed(1)
    found = {"embed_tokens.weight": TARGET.embedding.weight.clone(), "fc.weight": random(WIDTH, 2 * WIDTH)}
    return found | ({"fc.bias": random(WIDTH)} if bias else {}) | layer("layers.0", WIDTH, biases=qkv_bias)


def eagle3_weights(
    *, drafted: int = DRAFTED, fc_norm: bool = False, input_norm: bool = False, **options: Any
) -> Weights:
    """Return an EAGLE-3 head under its published names."""
    torch.manual_seed(2)
    found = {"fc.weight": random(WIDTH, 3 * WIDTH), **layer("midlayer", 2 * WIDTH, **options)}
    found |= {name: random(WIDTH) for name in ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")}
    found |= {"norm.weight": random(WIDTH), "lm_head.weight": random(drafted, WIDTH)}
    if fc_norm:
        found |= {f"fc_norm.{i}.weight": random(WIDTH) for i in range(3)}
    if input_norm:
        found["input_norm.weight"] = random(3 * WIDTH)
    return found | (maps(TARGET_IDS) if drafted < VOCAB_SIZE else {})


def maps(target_ids: Tensor) -> Weights:
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    mask[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": mask}


def medusa_weights(num_heads: int = 3, num_layers: int = 2, *, bias: bool = True, projections: bool = True) -> Weights:
    """Return Medusa heads under their published names."""
    torch.manual_seed(3)
    found: Weights = {}
    for i in range(num_heads):
        for j in range(num_layers):
            found[f"{i}.{j}.linear.weight"] = random(WIDTH, WIDTH)
            if bias:
                found[f"{i}.{j}.linear.bias"] = random(WIDTH)
        if projections:
            found[f"{i}.{num_layers}.weight"] = random(VOCAB_SIZE, WIDTH)
    return found


def renamed(weights: Weights, *pairs: tuple[str, str], prefix: str = "") -> Weights:
    """Return the weights with beginnings of names replaced, and `prefix` before all."""
    found = {}
    for name, tensor in weights.items():
        for old, new in pairs:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        found[prefix + name] = tensor
    return found


def speculators(config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the config of a head in the layout of speculators."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
        "transformer_layer_config": LLAMA | {"attention_bias": False} | (config or {}),
        "draft_vocab_size": DRAFTED,
        "norm_before_residual": False,
        **options,
    }


def write(folder: Path, config: dict[str, Any], weights: Weights, file: str = "model.safetensors") -> Path:
    """Write a checkpoint folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / file)
    else:
        torch.save(weights, folder / file)
    return folder


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over one sequence, [T, heads, D], as the KV cache would."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
    mixed = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
    return mixed[0].transpose(0, 1)


def forward(module: EagleHead, features: Tensor, embedded: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits of one step over a sequence; features as in the reference."""
    hidden = module.fuse(features) if features.shape[-1] == module.config.num_features else features
    hidden = module(hidden, embedded, torch.arange(len(embedded)) + first, causal)
    return hidden, module.logits(hidden)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def same(left: Tensor, right: Tensor) -> None:
    """Compare up to the angles of positions, which transformers computes in float32."""
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
