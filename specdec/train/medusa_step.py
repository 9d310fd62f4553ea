"""What one batch teaches Medusa heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.medusa import MedusaHeads
from specdec.train.batches import Batch
from specdec.train.distillation import soft_cross_entropy, target_rows
from specdec.train.guess_rows import GuessRows
from specdec.train.losses import StepLoss


class MedusaStep(nn.Module):
    """Every head learns the target's distribution so many places ahead, from the final norm's output alone.

    Args:
        heads: Medusa heads with the target's output rows, or their own.
        vocabulary: their draft vocabulary.
        target_weight: [Vd, H] rows of the target's lm_head that the draft vocabulary names.
        head_decay: weight of a head relative to the one before it.

    Source: Cai et al. 2024, arXiv 2401.10774, section 2.2.1 (Medusa-1); soft targets as in self-distillation there.
    """

    def __init__(
        self, heads: MedusaHeads, vocabulary: DraftVocabulary, target_weight: Tensor, head_decay: float = 0.8
    ) -> None:
        super().__init__()
        self.target_weight: Tensor
        self.to_draft: Tensor
        self.heads, self._decay = heads, head_decay
        self.progress = 0.0
        self.register_buffer("target_weight", target_weight, persistent=False)
        self.register_buffer("to_draft", vocabulary.draft_id_of, persistent=False)

    def forward(self, batch: Batch) -> StepLoss:
        """Return the loss; head i at base column s guesses token s + 2 + i."""
        config = self.heads.config
        size = batch.token_ids.shape[1]
        columns = min(batch.response_columns + 1, size)
        rows = GuessRows(batch, columns)
        final = batch.features[..., batch.features.shape[-1] - config.hidden_size :]
        probs = target_rows(final[rows.source], self.target_weight)
        outputs = self.heads(final[:, size - columns :].to(torch.float32))  # [B, R, heads, H]
        total, weight = outputs.new_zeros(()), 1.0
        shape = (config.num_heads, batch.token_ids.shape[0], columns)
        hits = torch.full(shape, -1, dtype=torch.int8, device=outputs.device)
        for head in range(config.num_heads):
            number, where = rows.at(head)
            wanted = self.to_draft[rows.token_ids(head, where)]
            scale = (wanted >= 0).to(torch.float32)
            read = outputs[:, :, head][where]
            loss, guess = soft_cross_entropy(read, self._output_weight(head), probs[number], scale)
            total = total + weight * loss
            weight *= self._decay
            hits[head][where] = (guess == wanted).to(torch.int8)
        return StepLoss(total / max(int((hits[0] >= 0).sum()), 1), hits)

    def _output_weight(self, head: int) -> Tensor:
        if self.heads.config.own_heads:
            own = self.heads.lm_heads[head].weight
            assert isinstance(own, Tensor), "a projection has a weight"
            return own
        shared: Tensor = self.heads.lm_head.weight
        return shared
