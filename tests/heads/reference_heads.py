"""Medusa, EAGLE-1 and EAGLE-3 written down plainly, over weights under their published names.

Nothing here is shared with specdec: one sequence at a time, attention with an explicit causal mask, rotary angles in
complex numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

Weights = dict[str, Tensor]

HEADS, KV_HEADS, HEAD_DIM, THETA, EPS = 4, 2, 12, 500.0, 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def turn(x: Tensor, first: int) -> Tensor:
    """Turn pair (i, i + D/2) of [T, heads, D] by position / THETA^(2i/D)."""
    half = x.shape[-1] // 2
    speed = THETA ** (-torch.arange(half, dtype=x.dtype) * 2 / x.shape[-1])
    angle = (first + torch.arange(len(x), dtype=x.dtype))[:, None, None] * speed
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(x: Tensor, weights: Weights, name: str, first: int) -> Tensor:
    q, k, v = (
        linear(x, weights, f"{name}.{p}_proj").reshape(len(x), n, HEAD_DIM)
        for p, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    if f"{name}.q_norm.weight" in weights:
        q, k = norm(q, weights[f"{name}.q_norm.weight"]), norm(k, weights[f"{name}.k_norm.weight"])
    q, k = turn(q, first), turn(k, first)
    mixed = torch.empty_like(q)
    for head in range(HEADS):
        keys, values = k[:, head // (HEADS // KV_HEADS)], v[:, head // (HEADS // KV_HEADS)]
        for t in range(len(x)):
            scores = keys[: t + 1] @ q[t, head] / HEAD_DIM**0.5
            mixed[t, head] = scores.softmax(0) @ values[: t + 1]
    return linear(mixed.flatten(1), weights, f"{name}.o_proj")


def mlp(x: Tensor, weights: Weights, name: str) -> Tensor:
    gate = silu(linear(x, weights, f"{name}.gate_proj"))
    return linear(gate * linear(x, weights, f"{name}.up_proj"), weights, f"{name}.down_proj")


def eagle1(weights: Weights, features: Tensor, embedded: Tensor, first: int = 0) -> Tensor:
    """Return the next features [T, H]; logits are the target's lm_head of them."""
    x = linear(torch.cat([embedded, features], dim=-1), weights, "fc")
    x = x + attention(x, weights, "layers.0.self_attn", first)  # no norm before it
    return x + mlp(norm(x, weights["layers.0.post_attention_layernorm.weight"]), weights, "layers.0.mlp")


def eagle3(
    weights: Weights,
    features: Tensor,
    embedded: Tensor,
    *,
    first: int = 0,
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return hidden states [T, H] for the next step and logits [T, Vd]. features: [T, 3H], or [T, H] in later steps."""
    width = embedded.shape[-1]
    g = features
    if features.shape[-1] != width:
        if "input_norm.weight" in weights:
            g = norm(g, weights["input_norm.weight"])
        if "fc_norm.0.weight" in weights:
            g = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(g.chunk(3, -1))], -1)
        g = linear(g, weights, "fc")
    normed = norm(g, weights["midlayer.hidden_norm.weight"])
    x = torch.cat([norm(embedded, weights["midlayer.input_layernorm.weight"]), normed], dim=-1)
    h = (normed if norm_before_residual else g) + attention(x, weights, "midlayer.self_attn", first)
    h = h + mlp(norm(h, weights["midlayer.post_attention_layernorm.weight"]), weights, "midlayer.mlp")
    if "layers.1.input_layernorm.weight" in weights:  # an ordinary llama layer behind it
        h = h + attention(norm(h, weights["layers.1.input_layernorm.weight"]), weights, "layers.1.self_attn", first)
        h = h + mlp(norm(h, weights["layers.1.post_attention_layernorm.weight"]), weights, "layers.1.mlp")
    out = norm(h, weights["norm.weight"])
    return (out if norm_output else h), out @ weights["lm_head.weight"].T


def medusa(weights: Weights, num_heads: int, num_layers: int, hidden: Tensor, lm_head: Tensor) -> Tensor:
    """Return [T, num_heads, V] logits; a head without projection ends in the target's lm_head."""
    logits = []
    for i in range(num_heads):
        x = hidden
        for j in range(num_layers):
            x = x + silu(linear(x, weights, f"{i}.{j}.linear"))
        logits.append(x @ weights.get(f"{i}.{num_layers}.weight", lm_head).T)
    return torch.stack(logits, dim=1)
