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


def spread(probs: Tensor, vocab_size: int, draft_ids: Tensor | None) -> Tensor:
    """Return [n, V] of the target's tokens from [n, Vd] of the draft's, whose target ids are `draft_ids` [Vd]."""
    if draft_ids is None:
        return probs
    return probs.new_zeros(probs.shape[0], vocab_size).index_copy_(1, draft_ids.to(probs.device), probs)


def draw(
    logits: Tensor,
    requests: Sequence[DraftRequest],
    rows: list[int],
    depth: int,
    noise: Noise,
    vocab_size: int = 0,
    draft_ids: Tensor | None = None,
) -> Draw:
    """Draw the token at `depth` + 1 after the root for requests `rows` from their own distributions.

    With `draft_ids` the logits are [n, Vd], and what is returned is the target's, of `vocab_size` tokens.
    """
    sampling = [requests[i].sampling for i in rows]
    if all(s.greedy for s in sampling):
        best = logits.to(torch.float32).argmax(dim=-1)
        return (best if draft_ids is None else draft_ids.to(best.device)[best]), None
    probs = spread(probabilities(logits, sampling), vocab_size, draft_ids)
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    weights = probs
    broken = probs.sum(dim=-1).isnan()
    if bool(broken.any()):
        # Nothing can be drawn from NaN. The NaN row stays with the token, so the engine drops and counts the draft.
        weights = probs.masked_fill(broken[:, None], 1.0)
    return noise.choose(weights, NoiseKey(index, depth + 1, Stream.DRAFT)), probs


def draw_chain(
    requests: Sequence[DraftRequest],
    noise: Noise,
    advance: Advance,
    vocab_size: int,
    draft_ids: Tensor | None = None,
) -> TokenTree:
    """Return chains drawn from a model's own distributions, which are kept as draft_probs.

    Args:
        requests: B requests, each with its own `max_draft_tokens` and `min_confidence`.
        noise: of this step.
        advance: runs the model on one more token of the requests still drafting.
        vocab_size: V of the target.
        draft_ids: [Vd] int64, the target's id of each draft id, if the logits are over a vocabulary of their own.

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
    most = [r.max_draft_tokens for r in requests]
    for depth in range(longest):
        rows = [i for i, n in enumerate(most) if n > depth]
        if not rows:
            break
        logits = advance(rows, last[rows])
        if draft_ids is None:
            logits = fit_vocabulary(logits, vocab_size)
        drawn, probs = draw(logits, requests, rows, depth, noise, vocab_size, draft_ids)
        # The token that ends a chain stays in it. Whether there is a token behind a node may then depend on the path
        # to that node, never on what would stand behind it; the rule at each node is as exact as before.
        for j in _unsure(logits, probs, drawn, [requests[i] for i in rows]):
            most[rows[j]] = depth + 1
        tokens = drawn.cpu()
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
    longest = max(most)
    drafts, draft_row = drafts[:, :longest], draft_row[:, : longest + 1]
    num_draft = torch.tensor(most, dtype=torch.int64)
    if not kept:
        return chain(roots, drafts, num_draft)
    return chain(roots, drafts, num_draft, torch.cat(kept), draft_row)


def _unsure(logits: Tensor, probs: Tensor | None, tokens: Tensor, requests: Sequence[DraftRequest]) -> list[int]:
    """Return the rows whose drawn token the draft's own distribution gives less than the request's `min_confidence`.

    Args:
        logits: [n, V], or over a draft vocabulary, the tokens were drawn by.
        probs: [n, V] they were drawn from; None if all requests are greedy.
        tokens: [n] int64.
        requests: n of them. Greedy ones draw from a point mass; theirs is the softmax.
    """
    if not any(r.min_confidence for r in requests):
        return []
    confidence = torch.ones(len(requests), device=logits.device)
    if probs is not None:
        confidence = probs.gather(1, tokens[:, None])[:, 0]
    greedy = [j for j, r in enumerate(requests) if r.sampling.greedy]
    if greedy:  # their token is the likeliest
        confidence[greedy] = logits[greedy].to(torch.float32).softmax(dim=-1).amax(dim=-1)
    pairs = zip(confidence.tolist(), requests, strict=True)
    return [j for j, (value, request) in enumerate(pairs) if value < request.min_confidence]
