"""EAGLE heads: one small decoder over the target's hidden states and its token embeddings.

Training and inference call the same `forward`; what differs is the attention they hand in: the KV cache's when
drafting, that of the training-time test when training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import CheckpointError
from specdec.heads.config_checks import LARGEST, MOST_MODULES, check_flags, check_integers, check_positive
from specdec.interfaces import FeatureSpec
from specdec.models.rotary import RotaryTable, rotate

# layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D] -> [T, heads, D]; positions are in q and k already
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}

_RANGES = {
    **dict.fromkeys(("hidden_size", "target_hidden_size", "intermediate_size"), (1, LARGEST)),
    **dict.fromkeys(("num_heads", "num_kv_heads"), (1, 2**16)),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "max_positions"), (1, 2**31)),
    "head_dim": (1, 2**14),
    "num_layers": (1, MOST_MODULES),
}
_FLAGS = (
    "attention_bias", "output_bias", "mlp_bias", "qk_norm", "fc_bias", "fc_norm", "norm_before_fc",
    "norm_before_residual", "norm_output",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The shape of an EAGLE head.

    `generation` 1 is EAGLE-1 and EAGLE-2 (the same weights): the target's normed last hidden state, no norms around.
    3 is EAGLE-3: hidden states of several blocks through `fc`, a norm on either input, `norm` before the head.
    """

    generation: int
    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    feature_layers: tuple[int, ...] = ()  # blocks whose outputs are fused, 0 = the first; EAGLE-1 has none
    num_layers: int = 1
    norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    max_positions: int = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    fc_norm: bool = False  # a norm on each fused hidden state
    norm_before_fc: bool = False  # one norm on all of them together
    norm_before_residual: bool = False  # the residual starts behind hidden_norm, not before it
    norm_output: bool = False  # the next step is fed the normed hidden state

    def __post_init__(self) -> None:
        if type(self.generation) is not int or self.generation not in (1, 3):
            raise CheckpointError(f"generation={self.generation}; allowed: 1 (EAGLE-1 and EAGLE-2), 3 (EAGLE-3)")
        check_integers(self, _RANGES)
        check_flags(self, _FLAGS)
        check_positive("norm_eps", self.norm_eps)
        self._check_rope()
        layers = self.feature_layers
        if not isinstance(layers, tuple) or any(type(layer) is not int for layer in layers):
            raise CheckpointError(f"feature_layers={layers!r}; allowed: a list of integers")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in _ACTIVATIONS:
            raise CheckpointError(f"hidden_act={self.hidden_act!r}; allowed: {', '.join(_ACTIVATIONS)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} KV heads")
        if self.fc_norm and self.norm_before_fc:
            raise CheckpointError("fc_norm and norm_before_fc exclude each other")
        if self.generation == 3 and not self.feature_layers:
            raise CheckpointError("an EAGLE-3 head fuses hidden states of blocks; feature_layers is empty")
        if self.generation == 1 and (self.feature_layers or self.hidden_size != self.target_hidden_size):
            raise CheckpointError("an EAGLE-1 head works on the target's last hidden state, in the target's width")

    def _check_rope(self) -> None:
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim={self.head_dim}; allowed: an even number, whose halves are rotated")
        if not isinstance(self.rope_parameters, Mapping):
            raise CheckpointError(f"rope_parameters={self.rope_parameters!r}; allowed: an object")
        check_positive("rope_theta", self.rope_parameters.get("rope_theta", 10000.0))

    @property
    def features(self) -> FeatureSpec:
        """What the head wants of the target's forwards."""
        return FeatureSpec(self.feature_layers, final_norm=self.generation == 1)

    @property
    def num_features(self) -> int:
        """F: the width of a feature row."""
        return max(len(self.feature_layers), 1) * self.target_hidden_size


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(width, heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, eps=config.norm_eps) if config.qk_norm else None
        self._dim = dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self._dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(mixed.flatten(-2))


class _Mlp(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self._act = _ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """A decoder layer. The first one of EAGLE-3 attends over the embedding and the hidden state side by side."""

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        first = index == 0
        self._fuses = first and config.generation == 3
        self._residual_is_normed = config.norm_before_residual
        width = config.hidden_size
        norms = not first or config.generation == 3  # EAGLE-1's only layer has no norm before its attention
        self.input_layernorm = nn.RMSNorm(width, eps=config.norm_eps) if norms else None
        self.hidden_norm = nn.RMSNorm(width, eps=config.norm_eps) if self._fuses else None
        self.self_attn = _Attention(config, 2 * width if self._fuses else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config.norm_eps)
        self.mlp = _Mlp(config)

    def forward(
        self, hidden: Tensor, embedded: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend, layer: int
    ) -> Tensor:
        x = residual = hidden
        if self.hidden_norm is not None and self.input_layernorm is not None and embedded is not None:
            normed = self.hidden_norm(hidden)
            residual = normed if self._residual_is_normed else hidden
            x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        elif self.input_layernorm is not None:
            x = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(x, cos, sin, attend, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head.

    The embedding and, where a checkpoint has none, the output rows are the target's own: `embed_tokens` and `lm_head`
    are set from outside and, when `shares_embedding` or `shares_lm_head`, not part of what is saved.

    Source: Li et al. 2024, arXiv 2401.15077 (EAGLE); Li et al. 2024, arXiv 2406.16858 (EAGLE-2); Li et al. 2025,
    arXiv 2503.01840 (EAGLE-3).
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.norm_eps
        if config.generation == 3:
            self.fc = nn.Linear(config.num_features, width, bias=config.fc_bias)
            self.norm: nn.RMSNorm | None = nn.RMSNorm(width, eps=eps)
        else:
            self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
            self.norm = None
        self.input_norm = nn.RMSNorm(config.num_features, eps=eps) if config.norm_before_fc else None
        count = len(config.feature_layers) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(count))
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_layers))
        self.embed_tokens: Any = None  # token ids [T] -> [T, H]
        self.lm_head: Any = None  # [T, H] -> [T, Vd]
        self.shares_embedding = self.shares_lm_head = True
        self._rotary = RotaryTable(config.rope_parameters, config.head_dim, config.max_positions)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the hidden states [T, H] that true features [T, F] stand for."""
        if self.config.generation == 1:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        elif self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Attend, last: int | None = None
    ) -> Tensor:
        """Return the hidden states that the next step is fed with and `logits` reads.

        Args:
            hidden: [T, H] from `fuse`, or from this function one step earlier; row i belongs to the position of ...
            embedded: [T, H] ... the token before which it was computed: feature i goes with token i + 1.
            positions: [T] int64 of the hidden states' own positions.
            attend: attention over what came before.
            last: the largest position, where it is known.
        """
        cos, sin = self._rotary(positions, hidden.dtype, last)
        if self.config.generation == 1:
            hidden = self.fc(torch.cat([embedded, hidden], dim=-1))
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedded, cos, sin, attend, index)
        if self.config.norm_output and self.norm is not None:
            hidden = self.norm(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, Vd] logits of the token behind the next one, over the draft vocabulary."""
        if self.norm is not None and not self.config.norm_output:
            hidden = self.norm(hidden)
        return self.lm_head(hidden)
