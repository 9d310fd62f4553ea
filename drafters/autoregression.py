"""Drawing a chain of draft tokens one forward at a time. Shared by drafters that run a model; drafts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.interfaces import DraftRequest, Noise, NoiseKey, Stream, TokenTree
from specdec.sampling import probabilities
from specdec.tree import chain

Draw = tuple[Tensor, Tensor | None]  # tokens [n] int64, the distributions [n, V] they were drawn from
# (indices of the requests still drafting, their last tokens [n]) -> logits [n, V] after those tokens
Advance = Callable[[list[int], Tensor], Tensor]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Return [n, vocab_size] logits: padding ids of a wider draft head are cut, missing ones can never be drawn."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def draw(logits: Tensor, requests: Sequence[DraftRequest], rows: list[int], depth: int, noise: Noise) -> Draw:
    """Draw the token at `depth` + 1 after the root for requests `rows` from their own distributions."""
    sampling = [requests[i].sampling for i in rows]
    if all(s.greedy for s in sampling):
        return logits.to(torch.float32).argmax(dim=-1), None
    probs = probabilities(logits, sampling)
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    weights = probs
    broken = probs.sum(dim=-1).isnan()
    if bool(broken.any()):
        # Nothing can be drawn from NaN. The NaN row stays with the token, so the engine drops and counts the draft.
        weights = probs.masked_fill(broken[:, None], 1.0)
    return noise.choose(weights, NoiseKey(index, depth + 1, Stream.DRAFT)), probs


def draw_chain(requests: Sequence[DraftRequest], noise: Noise, advance: Advance, vocab_size: int) -> TokenTree:
    """Return chains drawn from a model's own distributions, which are kept as draft_probs.

    Args:
        requests: B requests, each with its own `max_draft_tokens`.
        noise: of this step.
        advance: runs the model on one more token of the requests still drafting.
        vocab_size: V of the target.

    Returns:
        TokenTree; greedy requests have point masses, as theirs are.
    """
    batch = len(requests)
    longest = max(r.max_draft_tokens for r in requests)
    roots = torch.tensor([r.root_token_id for r in requests], dtype=torch.int64)
    drafts = torch.zeros(batch, longest, dtype=torch.int64)
    draft_row = torch.full((batch, longest + 1), -1, dtype=torch.int64)
    kept: list[Tensor] = []
    num_kept = 0
    last = roots
    for depth in range(longest):
        rows = [i for i, r in enumerate(requests) if r.max_draft_tokens > depth]
        tokens, probs = draw(fit_vocabulary(advance(rows, last[rows]), vocab_size), requests, rows, depth, noise)
        tokens = tokens.cpu()
        drafts[rows, depth] = tokens
        last = last.clone()
        last[rows] = tokens
        if probs is None:
            continue
        sampled = [j for j, i in enumerate(rows) if not requests[i].sampling.greedy]
        kept.append(probs[sampled])
        for j in sampled:
            draft_row[rows[j], depth] = num_kept
            num_kept += 1
    num_draft = torch.tensor([r.max_draft_tokens for r in requests], dtype=torch.int64)
    if not kept:
        return chain(roots, drafts, num_draft)
    return chain(roots, drafts, num_draft, torch.cat(kept), draft_row)
