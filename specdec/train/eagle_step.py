"""What one batch teaches an EAGLE-3 head."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.errors import ConfigError
from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.heads.eagle import EagleHead
from specdec.train.batches import Batch, shifted
from specdec.train.distillation import soft_cross_entropy, target_rows
from specdec.train.guess_rows import GuessRows
from specdec.train.losses import StepLoss
from specdec.train.test_time_attention import TestTimeAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTraining:
    """How an EAGLE-3 head is trained."""

    steps: int = 3  # of the training-time test
    step_decay: float = 0.8  # weight of a step relative to the one before it
    first_steps: int = 1  # of the test during the first `first_share` of training: cheap, and the first token first
    first_share: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.first_steps <= self.steps:
            raise ConfigError(f"first_steps={self.first_steps}; allowed: 1 to steps={self.steps}")

    def steps_at(self, progress: float) -> int:
        """Return the number of steps at `progress` (0 to 1) through training."""
        return self.first_steps if progress < self.first_share else self.steps


class EagleStep(nn.Module):
    """Runs the training-time test of a batch through the head's own forward.

    Args:
        head: an EAGLE-3 head with the target's embedding and output rows.
        vocabulary: its draft vocabulary.
        target_weight: [Vd, H_t] rows of the target's lm_head that the draft vocabulary names.
        training: how.

    Source: Li et al. 2025, arXiv 2503.01840.
    """

    def __init__(
        self, head: EagleHead, vocabulary: DraftVocabulary, target_weight: Tensor, training: EagleTraining
    ) -> None:
        super().__init__()
        self.target_weight: Tensor
        self.to_draft: Tensor
        self.feature_scale: Tensor
        self.head, self.training_config = head, training
        self.progress = 0.0  # set by the loop
        self.register_buffer("target_weight", target_weight, persistent=False)
        self.register_buffer("to_draft", vocabulary.draft_id_of, persistent=False)
        # Hidden states differ in scale by an order of magnitude between blocks and channels; `fold_scale` puts this
        # factor into fc.weight when the head is saved.
        self.register_buffer("feature_scale", torch.ones(head.config.num_features))

    def forward(self, batch: Batch, steps: int | None = None) -> StepLoss:
        """Return the loss of a batch and how often each step's first choice is the next token of the text.

        Row t of step j has seen tokens up to t + 1 + j and guesses token t + 2 + j. Rows count where that token can be
        drafted; the paper's code asks this of the target's first choice, which under greedy decoding is the same.
        """
        head, config = self.head, self.training_config
        steps = steps or (config.steps_at(self.progress) if self.training else config.steps)
        width = head.config.num_features
        size = batch.token_ids.shape[1]
        # One column more than the responses have: the first response token is the root of a draft.
        columns = min(batch.response_columns + 1, size)
        attend = TestTimeAttention(batch.is_token, columns)
        rows = GuessRows(batch, columns)
        probs = target_rows(batch.features[..., width:][rows.source], self.target_weight)
        features = batch.features[..., :width].to(torch.float32) * self.feature_scale
        hidden = head.fuse(features).to(torch.float32)  # the residual stream is not for half precision
        positions = batch.positions
        total, weight = hidden.new_zeros(()), 1.0
        hits = torch.full((steps, batch.token_ids.shape[0], columns), -1, dtype=torch.int8, device=positions.device)
        for step in range(steps):
            if step == 1:
                hidden, positions = hidden[:, size - columns :], positions[:, size - columns :]
            embedded = head.embed_tokens(shifted(batch.token_ids, 1 + step)[:, size - hidden.shape[1] :])
            hidden = head(hidden, embedded.to(hidden.dtype), positions + step, attend)
            number, where = rows.at(step)
            seen = hidden[:, hidden.shape[1] - columns :][where]
            read = seen if head.norm is None or head.config.norm_output else head.norm(seen)
            wanted = self.to_draft[rows.token_ids(step, where)]
            # Where the text went on with a token that cannot be drafted, the rest of the distribution is mostly noise.
            scale = (wanted >= 0).to(torch.float32)
            loss, guess = soft_cross_entropy(read, self._output_weight(), probs[number], scale)
            total = total + weight * loss
            weight *= config.step_decay
            hits[step][where] = (guess == wanted).to(torch.int8)
        return StepLoss(total / max(int((hits[0] >= 0).sum()), 1), hits)

    def _output_weight(self) -> Tensor:
        weight: Tensor = self.head.lm_head.weight
        return weight

    def trained_head(self) -> EagleHead:
        """Return a copy of the head that takes features as they come: `feature_scale` is folded into fc.weight."""
        head = copy.deepcopy(self.head)
        with torch.no_grad():
            head.fc.weight.mul_(self.feature_scale)
        return head
