"""Which of the target's tokens a head learns to draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.heads.draft_vocabulary import DraftVocabulary, whole_vocabulary
from specdec.train.store import Example


def count_tokens(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """Return [V] int64: how often each token stands in the responses."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += torch.bincount(example.token_ids[example.num_prompt_tokens :], minlength=vocab_size)
    return counts


def choose_vocabulary(
    counts: Tensor, size: int | None, always: Collection[int] = (), outside: Tensor | None = None
) -> DraftVocabulary:
    """Return the draft vocabulary of the `size` most frequent tokens.

    Args:
        counts: [V] int64 in the responses.
        size: Vd; None = the whole vocabulary.
        always: tokens that are in it in any case, such as EOS.
        outside: [V] counts in other text, taken at a tenth: they decide among tokens that the responses hardly know.

    Raises:
        ConfigError: the size is not positive, larger than the vocabulary or too small for `always`.
    """
    vocab_size = int(counts.shape[0])
    if size is None or size == vocab_size:
        return whole_vocabulary(vocab_size)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= vocab_size:
        raise ConfigError(f"draft_vocab_size={size!r}; allowed: 1 to the target's {vocab_size}, or None for all")
    if len(set(always)) > size:
        raise ConfigError(f"draft_vocab_size={size}, but {len(set(always))} tokens must be in it: {sorted(always)}")
    weights = counts.to(torch.float64)
    if outside is not None:
        weights = weights + 0.1 * outside
    # Ties go to the lower id, so that the same counts give the same vocabulary on every machine.
    weights = weights - torch.arange(vocab_size, dtype=torch.float64) * 1e-9
    weights[list(always)] = float("inf")
    return DraftVocabulary(weights.topk(size).indices.sort().values, vocab_size)


def coverage(counts: Tensor, vocabulary: DraftVocabulary) -> float:
    """Return the share of counted tokens that can be drafted: no acceptance is above it."""
    return float(counts[vocabulary.target_ids].sum() / counts.sum().clamp_min(1))
