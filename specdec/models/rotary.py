"""Rotary position tables for modules of our own, by transformers' own rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.errors import CheckpointError

# Tables that depend on nothing but the position.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryTable:
    """Cosines and sign-folded sines by position, [n, D], grown as positions are asked for.

    Args:
        parameters: as in a transformers config: rope_theta, rope_type and what that type needs.
        head_dim: D.
        max_positions: of the model, which some types scale by.

    Raises:
        CheckpointError: the type is none that depends on the position alone, or lacks parameters.
    """

    def __init__(self, parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        kind = parameters.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise CheckpointError(f"rope_type={kind!r} is not supported in a head; allowed: {', '.join(ROPE_TYPES)}")
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(parameters),
            )
            with torch.device("cpu"):  # its table is computed even where a module is being made without memory
                self._rotary = LlamaRotaryEmbedding(config)
        except Exception as error:  # configs of transformers are checked by errors of several libraries
            raise CheckpointError(f"rope parameters {dict(parameters)} are incomplete or wrong: {error}") from error
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions: Tensor, dtype: torch.dtype, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [*positions.shape, D]; `last`: the largest position, where the caller knows it."""
        last = int(positions.max()) if last is None else last
        table = self._table
        if table is None or table[0].shape[0] <= last or table[0].dtype != dtype or table[0].device != positions.device:
            count = max(1024, 2 * (last + 1))
            # Never an inference tensor: a head that has drafted may be trained on.
            with torch.inference_mode(False), torch.no_grad():
                rotary = self._rotary.to(positions.device)
                where = torch.arange(count, device=positions.device)[None]
                cos, sin = rotary(torch.empty(1, dtype=dtype, device=positions.device), where)
            half = sin.shape[-1] // 2
            # rotate-half as a roll: the minus sign of its first half stands in the table.
            table = self._table = (cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1))
        return table[0][positions], table[1][positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., heads, D] turned by cos and sign-folded sin [..., D]."""
    return x * cos.unsqueeze(-2) + x.roll(x.shape[-1] // 2, -1) * sin.unsqueeze(-2)
