"""A forward of our own over a Llama-like model's weights: the same arithmetic with a third of the calls.

Transformers spends about 0.2 ms per layer in Python; at one row on a CPU that is a third of the time. This
program is used only after its logits equalled the unmodified model's (`models/conformance.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.interfaces import FeatureSpec
from specdec.kv.attention import MOST_ROWS_ALONE
from specdec.kv.cache import KVCache
from specdec.kv.plan import MaskPattern, StepPlan, sliding_window
from specdec.models.matmul import LinearFunction

# Llama's block and its relatives': RMSNorm, rotary attention, gated SiLU. Each is compared at load anyway.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary tables that depend on nothing but the position.
ROPE_TYPES = ("default", "linear", "llama3")

Fuse = Callable[[str, Sequence[nn.Linear]], LinearFunction]  # role, layers over one input -> one product


@dataclass(slots=True)
class _Block:
    input_norm: Any
    qkv: LinearFunction
    q_norm: Any | None
    k_norm: Any | None
    output: LinearFunction
    mlp_norm: Any
    gate_up: LinearFunction
    down: LinearFunction
    pattern: MaskPattern | None
    scaling: float


def applies_to(model: Any) -> bool:
    """Tell whether `model` is built of the blocks this file knows."""
    config = getattr(model, "config", None)
    if config is None or config.model_type not in MODEL_TYPES or not hasattr(model, "lm_head"):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES or config.hidden_act != "silu":
        return False
    if {(type(p), p.device) for p in model.parameters()} != {(nn.Parameter, torch.device("cpu"))}:
        return False
    return all(_is_as_written(m) for m in model.modules())


def _is_as_written(module: nn.Module) -> bool:
    """Tell whether a module is torch's or transformers' own and runs nothing beside it.

    This file's forward reads weights and calls no Linear: an adapter, hook or quantised layer would be left out, and
    one of small effect would pass the comparison at load in half precision.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    harmless = all(getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)  # output recorders
    own = type(module).__module__.startswith(("transformers.", "torch.nn.modules."))
    return own and harmless and "forward" not in vars(module)


def _norm(module: Any, x: Tensor) -> Tensor:
    """Root mean square norm. In float32 the fused call; else the module, which has its own rules of casting."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
    out: Tensor = module(x)
    return out


# Beyond so many numbers torch cuts an elementwise function among threads anywhere, also in the middle of a row, and the
# last few numbers before a cut come out of other instructions than the rest.
_UNCUT = 2**15


def _product(linear: Any, x: Tensor, rounds_alike: bool) -> Tensor:
    """Return linear(x) for x [T, in]; with `rounds_alike` a row's bits do not depend on the others."""
    out: Tensor = linear.alike(x) if rounds_alike and hasattr(linear, "alike") else linear(x)
    return out


def _silu(x: Tensor, rounds_alike: bool) -> Tensor:
    if rounds_alike and x.numel() > _UNCUT and x.shape[0] <= MOST_ROWS_ALONE:
        return torch.cat([F.silu(row) for row in x.split(1)])
    return F.silu(x)


class LeanProgram:
    """The whole forward of a Llama-like model over our cache; see `HostedProgram` for the contract."""

    def __init__(self, model: Any, fuse: Fuse) -> None:
        config = model.config
        self.num_layers: int = config.num_hidden_layers
        self._embedding = model.model.embed_tokens
        self._final_norm = model.model.norm
        self._rotary = model.model.rotary_emb
        self._head = fuse("head", [model.lm_head])
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._table: tuple[Tensor, Tensor] | None = None  # cos and sign-folded sin, [positions, 1, D]
        self._blocks = [self._block(layer, i, config, fuse) for i, layer in enumerate(model.model.layers)]

    def first_layers(self, num_layers: int) -> LeanProgram:
        """Return the program of the first `num_layers` blocks, with the same final norm and head; shares everything."""
        other = copy.copy(self)
        other.num_layers, other._blocks = num_layers, self._blocks[:num_layers]
        return other

    @staticmethod
    def _block(layer: Any, index: int, config: Any, fuse: Fuse) -> _Block:
        attention, mlp = layer.self_attn, layer.mlp
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        windowed = window is not None and (kinds is None or kinds[index] == "sliding_attention")
        return _Block(
            input_norm=layer.input_layernorm,
            qkv=fuse("qkv", [attention.q_proj, attention.k_proj, attention.v_proj]),
            q_norm=getattr(attention, "q_norm", None),
            k_norm=getattr(attention, "k_norm", None),
            output=fuse("output", [attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm,
            gate_up=fuse("gate_up", [mlp.gate_proj, mlp.up_proj]),
            down=fuse("down", [mlp.down_proj]),
            pattern=sliding_window(window) if windowed and window is not None else None,
            scaling=attention.scaling,
        )

    def _rope(self, plan: StepPlan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rows, [T, 1, D]; sin carries the sign that rotate-half would give."""
        last = max(int(s.positions[-1]) if s.visible is None else int(s.positions.max()) for s in plan.segments)
        if self._table is None or self._table[0].shape[0] <= last:
            count = max(1024, 2 * (last + 1))
            positions = torch.arange(count)[None]
            cos, sin = self._rotary(torch.empty(1, dtype=dtype), positions)
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            self._table = (cos[0][:, None], signed[0][:, None])
        return self._table[0][plan.positions], self._table[1][plan.positions]

    def __call__(
        self, cache: KVCache, plan: StepPlan, token_ids: Tensor, logit_rows: Tensor | None, spec: FeatureSpec
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, V] of `logit_rows` (None = all rows) and features [T, F]."""
        hidden = self._embedding(token_ids)
        cos, sin = self._rope(plan, hidden.dtype)
        taken: dict[int, Tensor] = {}
        for index, block in enumerate(self._blocks):
            hidden = self._run_block(block, index, hidden, cos, sin, cache, plan)
            if index in spec.layers:
                taken[index] = hidden
        if logit_rows is not None and not spec.final_norm:
            hidden = hidden.index_select(0, logit_rows)
        normed = _norm(self._final_norm, hidden)
        features = [taken[layer] for layer in spec.layers]
        if spec.final_norm:
            features.append(normed)
            normed = normed if logit_rows is None else normed.index_select(0, logit_rows)
        return _product(self._head, normed, cache.rounds_alike), torch.cat(features, dim=-1) if features else None

    def _run_block(
        self, block: _Block, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, plan: StepPlan
    ) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        rows = hidden.shape[0]
        alike = cache.rounds_alike
        qkv = _product(block.qkv, _norm(block.input_norm, hidden), alike).view(rows, heads + 2 * kv_heads, -1)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if block.q_norm is not None and block.k_norm is not None:
            qk = torch.cat([block.q_norm(qk[:, :heads]), block.k_norm(qk[:, heads:])], dim=1)
        # rotate-half as a roll, with the minus sign folded into the table: the same products and sums.
        qk = qk * cos + qk.roll(qk.shape[-1] // 2, -1) * sin
        mixed = cache.attend(plan, index, qk[:, :heads], qk[:, heads:], v, scaling=block.scaling, pattern=block.pattern)
        hidden = hidden + _product(block.output, mixed.reshape(rows, -1), alike)
        gate_up = _product(block.gate_up, _norm(block.mlp_norm, hidden), alike)
        gate, up = gate_up.chunk(2, dim=-1)
        return hidden + _product(block.down, _silu(gate, alike) * up, alike)
