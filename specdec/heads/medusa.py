"""Medusa heads: small residual blocks on the target's last hidden state, one per future token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.heads.config_checks import LARGEST, MOST_MODULES, check_flags, check_integers
from specdec.interfaces import FeatureSpec

_RANGES = {
    "hidden_size": (1, LARGEST),
    "vocab_size": (1, 2**31),
    "draft_vocab_size": (1, 2**31),
    "num_heads": (1, MOST_MODULES),
    "num_layers": (0, MOST_MODULES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """The shape of Medusa heads. Head i guesses the token i + 2 places behind the hidden state's own."""

    hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    num_heads: int
    num_layers: int = 1  # residual blocks per head
    own_heads: bool = False  # a projection per head; else all of them end in the target's lm_head
    block_bias: bool = True

    def __post_init__(self) -> None:
        check_integers(self, _RANGES)
        check_flags(self, ("own_heads", "block_bias"))

    @property
    def features(self) -> FeatureSpec:
        """What the heads want of the target's forwards."""
        return FeatureSpec(final_norm=True)


class _ResidualBlock(nn.Module):
    """x + SiLU(W x + b). Zero parameters make it the identity, which is how training begins."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """All heads of a checkpoint. With shared projections `lm_head` is the target's, set from outside.

    The blocks of a head are modules of their own. Published checkpoints of more than one block per head repeat a single
    one, which is the same once it is loaded into each of them.

    Source: Cai et al. 2024, arXiv 2401.10774 (Medusa).
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResidualBlock(config.hidden_size, config.block_bias) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        count = config.num_heads if config.own_heads else 0
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(count)
        )
        self.lm_head: Any = None  # [..., H] -> [..., Vd], where the heads have none of their own

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Return what each head's projection reads.

        Args:
            hidden: [..., H], behind the target's final norm.
            num_heads: only the first ones; None = all.

        Returns:
            [..., num_heads, H].
        """
        return torch.stack([blocks(hidden) for blocks in islice(self.blocks, num_heads)], dim=-2)

    def logits(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Return [..., num_heads, Vd] logits; arguments as of `forward`."""
        outputs = self(hidden, num_heads)
        if not self.config.own_heads:
            return self.lm_head(outputs)
        # Fewer outputs than heads where only the first are wanted.
        pairs = zip(outputs.unbind(dim=-2), self.lm_heads, strict=False)
        return torch.stack([head(output) for output, head in pairs], dim=-2)
