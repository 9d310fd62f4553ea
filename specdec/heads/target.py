"""What a head shares with its target, and how a head can tell that a target is its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import IncompatibleDrafterError
from specdec.models.runner import ModelRunner

_PROBE_ROWS = 8  # of the embedding, spread over the vocabulary
_PROBE_TOLERANCE = 0.02  # relative: half precision and other copies of the same weights stay inside


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The target as a head sees it."""

    name: str  # for messages and cards
    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding: Any  # the target's own module: token ids [T] -> [T, H]
    output_weight: Tensor | None  # [V, H] of the target's lm_head; None if it is no plain matrix
    dtype: torch.dtype
    device: torch.device
    config: Any  # the text config

    def output_rows(self, target_ids: Tensor) -> Tensor:
        """Return the rows of the target's lm_head for these tokens, [Vd, H].

        Raises:
            IncompatibleDrafterError: the target's lm_head is not a plain matrix.
        """
        if self.output_weight is None:
            raise IncompatibleDrafterError(
                f"this head ends in the target's lm_head, and that of {self.name} is not a plain Linear without bias "
                "(quantised, wrapped or offloaded); use a head with an lm_head of its own"
            )
        if torch.equal(target_ids.cpu(), torch.arange(self.output_weight.shape[0])):
            return self.output_weight
        return self.output_weight[target_ids.to(self.output_weight.device)]

    def probe(self) -> list[float]:
        """Return numbers that this target's embedding has and another one's has not: norms of a few of its rows."""
        with torch.no_grad():
            return probe_of(self.embedding(probe_ids(self.vocab_size).to(self.device)))

    def matches(self, probe: list[float]) -> bool:
        """Tell whether `probe` was taken of this target."""
        return same_probe(self.probe(), probe)


def probe_ids(vocab_size: int) -> Tensor:
    """Return the token ids whose rows a probe is taken of."""
    return torch.linspace(0, vocab_size - 1, _PROBE_ROWS).long()


def probe_of(rows: Tensor) -> list[float]:
    """Return the probe of an embedding from its rows of `probe_ids`, [n, H]."""
    return [round(float(norm), 5) for norm in rows.to(torch.float32).norm(dim=-1)]


def same_probe(one: list[float], other: list[float]) -> bool:
    """Tell whether two probes were taken of the same embedding."""
    return len(one) == len(other) and bool(
        torch.allclose(torch.tensor(one), torch.tensor(other), rtol=_PROBE_TOLERANCE, atol=1e-4)
    )


def head_target(runner: ModelRunner) -> HeadTarget:
    """Return the target of a runner as a head sees it."""
    model = runner.model
    config = runner.config.get_text_config()
    output = model.get_output_embeddings()
    plain = isinstance(getattr(output, "weight", None), Tensor) and getattr(output, "bias", None) is None
    weight = output.weight.detach() if plain and output.weight.dtype.is_floating_point else None
    if weight is not None and (weight.is_meta or weight.shape != (runner.vocab_size, config.hidden_size)):
        weight = None  # offloaded, or of another layout
    return HeadTarget(
        name=getattr(runner.config, "_name_or_path", "") or type(model).__name__,
        hidden_size=config.hidden_size,
        vocab_size=runner.vocab_size,
        num_layers=runner.program.num_layers,
        embedding=model.get_input_embeddings(),
        output_weight=weight,
        dtype=runner.dtype,
        device=runner.device,
        config=config,
    )
