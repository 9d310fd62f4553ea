"""What one batch teaches a distilled draft model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.heads.draft_vocabulary import DraftVocabulary
from specdec.models.taps import find_decoder
from specdec.train.batches import Batch, shifted
from specdec.train.distillation import soft_cross_entropy, target_rows
from specdec.train.guess_rows import GuessRows
from specdec.train.losses import StepLoss


class DraftModelStep(nn.Module):
    """A small causal LM learns the target's distribution behind every token of a response.

    Args:
        model: with the target's embedding and output head, both frozen.
        vocabulary: the tokens it may draft.
        target_weight: [Vd, H] rows of the target's lm_head that the draft vocabulary names.
        num_draft_tokens: chain length that `hits` are counted for.

    Source: Zhou et al. 2023, arXiv 2310.08461 (DistillSpec): distillation on the target's own responses.
    """

    def __init__(
        self, model: Any, vocabulary: DraftVocabulary, target_weight: Tensor, num_draft_tokens: int = 4
    ) -> None:
        super().__init__()
        self.target_weight: Tensor
        self.to_draft: Tensor
        self.model, self._num_draft_tokens = model, num_draft_tokens
        decoder = find_decoder(model, model.config.get_text_config().num_hidden_layers)
        self._decoder = decoder.__call__  # no module of its own: the model's parameters are named once
        self.progress = 0.0
        self.register_buffer("target_weight", target_weight, persistent=False)
        self.register_buffer("to_draft", vocabulary.draft_id_of, persistent=False)

    def forward(self, batch: Batch) -> StepLoss:
        """Return the loss; base column s is the draft whose first token is s + 2, behind token s + 1."""
        size = batch.token_ids.shape[1]
        columns = min(batch.response_columns + 1, size)
        rows = GuessRows(batch, columns)
        final = batch.features[..., batch.features.shape[-1] - self.target_weight.shape[1] :]
        probs = target_rows(final[rows.source], self.target_weight)
        hidden = self._decoder(
            input_ids=batch.token_ids,
            attention_mask=batch.is_token.to(torch.int64),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        number, where = rows.at(0)
        read = shifted(hidden, 1)[:, size - columns :][where].to(torch.float32)
        wanted = self.to_draft[rows.token_ids(0, where)]
        scale = (wanted >= 0).to(torch.float32)
        loss, guess = soft_cross_entropy(read, self.target_weight, probs[number], scale)
        first = torch.full((batch.token_ids.shape[0], columns), -1, dtype=torch.int8, device=hidden.device)
        first[where] = (guess == wanted).to(torch.int8)
        # Where all drafts before it were right, draft k stands on the text itself, k columns further on.
        hits = torch.stack([shifted(first, k, fill=-1) for k in range(self._num_draft_tokens)])
        hits = hits.masked_fill(first < 0, -1)  # no draft begins before the response
        return StepLoss(loss / max(len(number), 1), hits)
